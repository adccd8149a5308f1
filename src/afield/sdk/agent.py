"""The `agent` decorator, and what a decorated function is to the rest of afield.

A decorated function stays the plain function it was. Its entry says how it is called: with the task
alone or with the whole payload, and with a Context when it takes a second parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from msgspec import Struct

from afield.errors import UsageError
from afield.sdk.context import Context
from afield.sdk.result import Aggregate, check_aggregate
from afield.wire import ROLLOUT_FIELD, Invocation

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__afield_entry__"


class AgentEntry(Struct, frozen=True, kw_only=True):
    """How an agent's function is called. `whole`: with the payload as it came, `_rollout` included."""

    fn: Callable[..., Any]
    whole: bool
    takes_context: bool
    aggregate: Aggregate = None

    def call(self, payload: dict[str, Any], invocation: Invocation) -> Any:
        """The function's result, or an awaitable of it."""
        if not self.whole:
            payload = {k: v for k, v in payload.items() if k != ROLLOUT_FIELD}
        return self.fn(payload, Context.of(invocation)) if self.takes_context else self.fn(payload)


@overload
def agent(fn: F, /) -> F: ...


@overload
def agent(*, aggregate: Aggregate = None) -> Callable[[F], F]: ...


def agent(fn: Callable[..., Any] | None = None, /, *, aggregate: Aggregate = None) -> Any:
    """Makes `fn(task)` or `fn(task, rollout)`, sync or async, an agent; what it returns is its reward."""
    check_aggregate(aggregate)
    if fn is None:
        return lambda fn: mark(fn, entry_of(fn, whole=False, aggregate=aggregate))
    return mark(fn, entry_of(fn, whole=False, aggregate=aggregate))


def mark(fn: F, entry: AgentEntry) -> F:
    setattr(fn, MARK, entry)
    return fn


def entry_of(fn: object, *, whole: bool = False, aggregate: Aggregate = None) -> AgentEntry:
    """The entry of a decorated function, or the one a plain callable gets."""
    if isinstance(marked := getattr(fn, MARK, None), AgentEntry):
        return marked
    if not callable(fn):
        raise UsageError(f"an agent is a function, not {fn!r}")
    return AgentEntry(fn=fn, whole=whole, takes_context=_takes_context(fn), aggregate=aggregate)


def _takes_context(fn: Callable[..., Any]) -> bool:
    name = getattr(fn, "__name__", repr(fn))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(fn).parameters.values())
    positional = [p for p in parameters if p.kind in kinds]
    required = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) > 2 or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise UsageError(
            f"agent {name} needs {', '.join(p.name for p in required)};"
            " an agent takes (task) or (task, rollout)"
        )
    if not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(f"agent {name} takes no parameter; an agent takes (task) or (task, rollout)")
    # A second parameter with a default is the author's own, unless its name says otherwise.
    return len(positional) > 1 and (positional[1] in required or positional[1].name in ("rollout", "context"))
