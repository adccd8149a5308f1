"""Whose fault an exception is.

Agents raise whatever their libraries raise. This decides, without importing any of them, which of
those are the model's own doing (budget or context spent), which are the engine's (it did not answer,
or answered 5xx), and which are the agent's. Wrapped exceptions and exception groups are looked into.
Whoever raised owns it: what a grader's own model does, a judge that overflows its context, is the grader's.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from afield.errors import InfrastructureFailure, PolicyFailure, RolloutFailure, TaskFailure, VerifierFailure
from afield.types import Failure, Reason

POLICY_CODES = {"budget_exhausted": Reason.BUDGET, "context_length_exceeded": Reason.CONTEXT}
# What frameworks raise when a model talks or goes on until it is cut off, by name: none is imported here.
POLICY_ERRORS = frozenset(
    {"GraphRecursionError", "LengthFinishReasonError", "MaxTokensReachedException", "MaxTurnsExceeded"}
)
RETRYABLE_STATUS = frozenset({408, 429})
MESSAGE_CHARS = 4_000
TRACEBACK_CHARS = 20_000


@contextmanager
def attributed(default: type[RolloutFailure] = TaskFailure) -> Iterator[None]:
    """Turns whatever the block raises, SystemExit too, into the RolloutFailure that says whose it is."""
    try:
        yield
    except RolloutFailure:
        raise
    except BaseException as error:
        failure = attribute(error, default)
        failure.stands_for = error
        raise failure from error


def attribute(error: BaseException, default: type[RolloutFailure] = TaskFailure) -> RolloutFailure:
    said = describe(error)
    for seen in _inside(error):
        if isinstance(seen, RolloutFailure):
            return type(seen)(said, seen.reason)
        if default is VerifierFailure:  # the policy does not run in a grader: none of it is its doing
            continue
        for code in _codes(seen):
            if code in POLICY_CODES:
                return PolicyFailure(said, POLICY_CODES[code])
        if type(seen).__name__ in POLICY_ERRORS:
            return PolicyFailure(said, Reason.BUDGET)
        if _from_engine(seen):
            return InfrastructureFailure(f"the model did not answer: {said}", Reason.ENGINE)
    return default(said, Reason.RAISED)


def describe(error: BaseException) -> str:
    """Its type and message, even when its `__str__` is broken."""
    return _cut("".join(traceback.format_exception_only(type(error), error)).strip(), MESSAGE_CHARS)


def storable(failure: Failure) -> Failure:
    """The same failure in a size and an encoding that can be stored."""
    return structs.replace(
        failure,
        message=clean(_cut(failure.message, MESSAGE_CHARS)),
        traceback=clean(_cut(failure.traceback, TRACEBACK_CHARS)),
    )


def clean(text: str) -> str:
    """Without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cut(text: str, chars: int) -> str:
    """Its beginning and its end: a traceback needs both."""
    half = chars // 2
    return text if len(text) <= chars else f"{text[:half]}\n...\n{text[-half:]}"


def _inside(error: BaseException) -> Iterator[BaseException]:
    """The exception, then those it groups, then those it was raised from, each once."""
    pending, seen = [error], set[int]()
    while pending:
        one = pending.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            pending.extend(one.exceptions)
        implicit = None if one.__suppress_context__ else one.__context__
        pending.extend(e for e in (one.__cause__, implicit) if e is not None)


def _codes(error: BaseException) -> list[str]:
    """The codes an API error carries, wherever its client library puts them."""
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, Mapping) else None
    places = [
        (getattr(error, "code", None), getattr(error, "type", None)),
        *((m.get("code"), m.get("type")) for m in (body, inner) if isinstance(m, Mapping)),
    ]
    return [code for pair in places for code in pair if isinstance(code, str)]


def _asked_a_gateway(error: BaseException) -> bool:
    """A connection that broke in the middle of an answer: to the model, or to some tool's own service?"""
    try:
        url = str(getattr(error, "request").url)  # noqa: B009
    except (AttributeError, RuntimeError):  # httpx raises when a request was never attached
        return False
    return ("/s/" in url or "/k/" in url) and "/v1/" in url


def _from_engine(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"APIConnectionError", "APITimeoutError"}:
        return True
    if "TransportError" in names:
        return _asked_a_gateway(error)
    if "APIError" not in names:
        return False
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    # An APIError without a status is an error event in the middle of a stream.
    return not isinstance(status, int) or status >= 500 or status in RETRYABLE_STATUS
