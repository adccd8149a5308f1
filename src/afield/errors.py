"""What can go wrong, and whose it is.

    AfieldError
    |-- UsageError          bad input from a person: names the value and the remedy; commands exit with 2
    |   `-- DamagedFile     a file of a run that cannot be read as what it is
    |-- WireError           bytes that are not what they claim to be; names the field
    |-- Conflict            a second, different answer where the first one stands
    |-- Missing             nothing is known under this id
    |-- Unavailable         a part that should be there does not answer
    |   `-- Outage          it answers nobody, for longer than patience: the run ends, and can be resumed
    |-- Throttled           a part asks for fewer calls; the limiter slows down, no rollout pays for it
    |-- Fruitless           rollout after rollout without a reward: going on would only burn time
    `-- RolloutFailure      a failed rollout, which is data: `.failure` says whose fault it is
        |-- PolicyFailure           the model's own doing: trained, never retried
        |-- TaskFailure             the task is broken, or the agent's code raised
        |-- VerifierFailure         the grader crashed, or gave no finite number
        `-- InfrastructureFailure   launch, process, machine, engine or upload; never a reward

Kinds in `RETRIED` are tried again within their budget; `conduct` alone does that.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar, cast

from afield.types import Failure, FailureKind, Reason


class AfieldError(Exception):
    """Base of everything afield raises on purpose."""


class UsageError(AfieldError):
    """Bad input from a person. The message names the value and what to do."""


class DamagedFile(UsageError):
    """A file of a run that cannot be read as what it is."""


class WireError(AfieldError):
    """Bytes that are not what they claim to be."""


class Conflict(AfieldError):
    """The first answer stands; this one differs."""


class NotFound(AfieldError):
    """Nothing is known under this id."""


class Unavailable(AfieldError):
    """A part that should be there does not answer."""


class Outage(Unavailable):
    """A part of the run answers nobody, for longer than patience allows: no rollout's own trouble."""


class RateLimited(AfieldError):
    """Too many calls for the other side. `retry_after_s` is what it asked for, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRewards(AfieldError):
    """Rollout after rollout without a reward: going on would only burn time."""


class RolloutFailure(AfieldError):
    kind: ClassVar[FailureKind]
    stands_for: BaseException | None = None  # of foreign code; its traceback is told, not how it got here

    def __init__(self, message: str, reason: Reason = Reason.RAISED) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def failure(self) -> Failure:
        told = self.stands_for or self
        text = "".join(traceback.format_exception(told)) if told.__traceback__ else ""
        return Failure(self.kind, self.reason, str(self), text)


class PolicyFailure(RolloutFailure):
    kind = FailureKind.POLICY


class TaskFailure(RolloutFailure):
    kind = FailureKind.TASK


class VerifierFailure(RolloutFailure):
    kind = FailureKind.VERIFIER


class InfrastructureFailure(RolloutFailure):
    kind = FailureKind.INFRASTRUCTURE


RETRIED = frozenset({FailureKind.TASK, FailureKind.VERIFIER, FailureKind.INFRASTRUCTURE})


def root_cause(error: BaseException) -> BaseException:
    """What went wrong first, for errors that came out of a group of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


@contextmanager
def boundary(kind: FailureKind, reason: Reason, report: Callable[[Failure], None]) -> Generator[None]:
    """Where foreign code is called. Whatever it raises is attributed once and reported as data.

    A `RolloutFailure` keeps the kind it was raised with; anything else becomes `kind`.
    """
    try:
        yield
    except RolloutFailure as error:
        report(error.failure)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        report(Failure(kind, reason, message, traceback.format_exc()))
