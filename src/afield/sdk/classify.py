"""Classification of an agent's exceptions: policy, infrastructure, task or verifier failure.

1. Without importing client libraries, it tells the policy's failures (budget or context exhausted) from the
   engine's (no response, or 5xx) and the agent's own.
2. Causes and exception groups are searched too.
3. An exception in a grader is the grader's: a judge model that overflows its context is not the policy.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from afield.errors import InfrastructureFailure, PolicyFailure, RolloutFailure, TaskFailure, VerifierFailure
from afield.types import Failure, Reason

POLICY_CODES = {"budget_exhausted": Reason.BUDGET, "context_length_exceeded": Reason.CONTEXT}
# Exceptions of frameworks when a model reaches a token or turn limit, by name, since none is imported.
POLICY_ERRORS = frozenset(
    {"GraphRecursionError", "LengthFinishReasonError", "MaxTokensReachedException", "MaxTurnsExceeded"}
)
RETRYABLE_STATUS = frozenset({408, 429})
MESSAGE_CHARS = 4_000
TRACEBACK_CHARS = 20_000


@contextmanager
def attributed(default: type[RolloutFailure] = TaskFailure) -> Iterator[None]:
    """Turn any exception of the block, SystemExit too, into the RolloutFailure of its kind."""
    try:
        yield
    except RolloutFailure:
        raise
    except BaseException as error:
        failure = attribute(error, default)
        failure.stands_for = error
        raise failure from error


def attribute(error: BaseException, default: type[RolloutFailure] = TaskFailure) -> RolloutFailure:
    """The RolloutFailure that an exception counts as; `default` if it is the code's own."""
    message = describe(error)
    for inner in _inside(error):
        if isinstance(inner, RolloutFailure):
            return type(inner)(message, inner.reason)
        if default is VerifierFailure:  # the policy does not run in a grader
            continue
        for code in _codes(inner):
            if code in POLICY_CODES:
                return PolicyFailure(message, POLICY_CODES[code])
        if type(inner).__name__ in POLICY_ERRORS:
            return PolicyFailure(message, Reason.BUDGET)
        if _from_engine(inner):
            return InfrastructureFailure(f"the model did not respond: {message}", Reason.ENGINE)
    return default(message, Reason.RAISED)


def describe(error: BaseException) -> str:
    """Type and message of an exception, even if its `__str__` raises."""
    return _cut("".join(traceback.format_exception_only(type(error), error)).strip(), MESSAGE_CHARS)


def storable(failure: Failure) -> Failure:
    """The failure with texts cut to a storable size and valid UTF-8."""
    return structs.replace(
        failure,
        message=clean(_cut(failure.message, MESSAGE_CHARS)),
        traceback=clean(_cut(failure.traceback, TRACEBACK_CHARS)),
    )


def clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _cut(text: str, chars: int) -> str:
    """Beginning and end of a long text."""
    half = chars // 2
    return text if len(text) <= chars else f"{text[:half]}\n...\n{text[-half:]}"


def _inside(error: BaseException) -> Iterator[BaseException]:
    """The exception, those it groups, and its causes, each once."""
    pending, seen = [error], set[int]()
    while pending:
        exception = pending.pop(0)
        if id(exception) in seen:
            continue
        seen.add(id(exception))
        yield exception
        if isinstance(exception, BaseExceptionGroup):
            pending.extend(exception.exceptions)
        implicit = None if exception.__suppress_context__ else exception.__context__
        pending.extend(e for e in (exception.__cause__, implicit) if e is not None)


def _codes(error: BaseException) -> list[str]:
    """Error codes of an API error, from the attributes that client libraries use."""
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, Mapping) else None
    candidates = [
        (getattr(error, "code", None), getattr(error, "type", None)),
        *((m.get("code"), m.get("type")) for m in (body, inner) if isinstance(m, Mapping)),
    ]
    return [code for pair in candidates for code in pair if isinstance(code, str)]


def _is_gateway_request(error: BaseException) -> bool:
    """Whether a broken connection was to the gateway, not to a tool's service."""
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
        return _is_gateway_request(error)
    if "APIError" not in names:
        return False
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    # An APIError without a status is an error event within a stream.
    return not isinstance(status, int) or status >= 500 or status in RETRYABLE_STATUS
