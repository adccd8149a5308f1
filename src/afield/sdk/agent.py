"""The `@afield.agent` decorator and the `Context` that agents get.

The decorated function stays callable as before. It gets the task, and a Context if it has a second parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self, TypeVar, overload

from msgspec import Struct

from afield.errors import UsageError
from afield.sdk.results import Aggregate, check_aggregate
from afield.types import Sampling
from afield.wire import ROLLOUT_FIELD, Invocation

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__afield_entry__"


class Context(Struct, frozen=True, kw_only=True):
    """Rollout as the agent sees it: ids, and the address of its model."""

    base_url: str
    """Base URL of the model for Anthropic and Gemini clients."""
    openai_base_url: str
    """Base URL of the model for OpenAI clients."""
    api_key: str
    """Key of this rollout's session, for every client."""
    model_id: str
    """Model name to send with requests."""
    session_id: str
    """Id of this attempt's session on the gateway."""
    rollout_id: str
    """Id of the rollout; retries keep it."""
    attempt: int
    """Number of this attempt, counted from 1."""
    group_id: str
    """Id of the group of rollouts of the same task."""
    input_id: str
    """Id of the task."""
    exp_id: str
    """Id of the experiment (run)."""
    args: dict[str, Any] = {}
    """Arguments of the agent, the same for all tasks: the run's `agent_args`."""
    sampling: Sampling | None = None
    """Sampling parameters that the gateway applies to model calls."""
    seed: int | None = None
    """Seed for the agent's own random choices.

    A retry after an infrastructure failure has the same seed: otherwise short rollouts, which break less
    often, would replace long ones.
    """

    traceparent: str = ""
    """W3C trace context of this attempt: parent of the agent's own spans. Empty without traces."""

    @property
    def request_headers(self) -> dict[str, str]:
        """Headers of the invocation that AgentCore passes on, as in its own context; empty elsewhere."""
        return {}

    @classmethod
    def of(cls, invocation: Invocation) -> Self:
        return cls(**{name: getattr(invocation, name) for name in cls.__struct_fields__})

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "api_key")
        return f"Context({', '.join(fields)}, api_key='***')"


class AgentEntry(Struct, frozen=True, kw_only=True):
    """How an agent's function is called."""

    fn: Callable[..., Any]
    """The function, sync or async."""
    whole_payload: bool
    """Whether it gets the payload with its `_rollout` field instead of the task alone."""
    takes_context: bool
    """Whether it gets a Context as second argument."""
    aggregate: Aggregate = None
    """Aggregation of several rewards."""
    context: type[Context] = Context
    """Class of the second argument."""

    def call(self, payload: dict[str, Any], invocation: Invocation) -> Any:
        """The function's result, or an awaitable of it."""
        if not self.whole_payload:
            payload = {k: v for k, v in payload.items() if k != ROLLOUT_FIELD}
        return self.fn(payload, self.context.of(invocation)) if self.takes_context else self.fn(payload)


@overload
def agent(fn: F, /) -> F: ...


@overload
def agent(*, aggregate: Aggregate = None) -> Callable[[F], F]: ...


def agent(fn: Callable[..., Any] | None = None, /, *, aggregate: Aggregate = None) -> Any:
    """Make `fn(task)` or `fn(task, rollout)`, sync or async, an agent that returns its reward.

    `aggregate` combines several rewards: "mean", "sum", "min", "max", a function, or weights by name.
    """
    check_aggregate(aggregate)
    if fn is None:
        return lambda fn: mark(fn, entry_of(fn, whole_payload=False, aggregate=aggregate))
    return mark(fn, entry_of(fn, whole_payload=False, aggregate=aggregate))


def mark(fn: F, entry: AgentEntry) -> F:
    setattr(fn, MARK, entry)
    return fn


def entry_of(fn: object, *, whole_payload: bool = False, aggregate: Aggregate = None) -> AgentEntry:
    """The entry of a decorated function, or a new one for a plain callable."""
    if isinstance(marked := getattr(fn, MARK, None), AgentEntry):
        return marked
    if not callable(fn):
        raise UsageError(f"an agent must be a function, not {fn!r}")
    return AgentEntry(
        fn=fn, whole_payload=whole_payload, takes_context=_takes_context(fn), aggregate=aggregate
    )


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
            f"agent {name} requires the parameters {', '.join(p.name for p in required)};"
            " an agent takes (task) or (task, rollout)"
        )
    if not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(f"agent {name} has no parameter; an agent takes (task) or (task, rollout)")
    # An optional second parameter is the author's own unless it is named rollout or context.
    return len(positional) > 1 and (positional[1] in required or positional[1].name in ("rollout", "context"))
