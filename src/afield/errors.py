"""Exception hierarchy of afield.

    AfieldError
    |-- UsageError              wrong input from a user; commands exit with 2
    |   `-- DamagedFile         a file of a run cannot be read
    |-- WireError               a document that crossed a process boundary is malformed
    |-- Conflict                a different value was stored first
    |-- NotFound                unknown id
    |-- Unavailable             a component does not answer; worth a retry
    |   `-- Outage              a component is down for `unavailable_timeout_s`: the run ends, resumable
    |-- RateLimited             a component refuses calls for now; does not use up retries
    |-- NoRewards               several steps without a single reward
    `-- RolloutFailure          one rollout failed; `.failure` has it as data
        |-- PolicyFailure           caused by the model: trained, never retried
        |-- TaskFailure             the task is broken, or the agent's code raised
        |-- VerifierFailure         the verifier crashed, or gave no finite reward
        `-- InfrastructureFailure   launch, process, machine, engine or upload failed

Failures of the kinds in `RETRIED` are retried by `orchestrator.rollout`, within their retry budget.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ClassVar, cast

from afield.types import Failure, FailureKind, Reason


class AfieldError(Exception):
    """Base class of all exceptions that afield raises."""


class UsageError(AfieldError):
    """Wrong input from a user. The message names the value and the remedy."""


class DamagedFile(UsageError):
    """A file of a run cannot be read: its content is not in the expected format."""


class WireError(AfieldError):
    """A payload, outcome or commit is malformed. The message names the field."""


class Conflict(AfieldError):
    """A different value was stored under this id first, and stays."""


class NotFound(AfieldError):
    """The id is unknown."""


class Unavailable(AfieldError):
    """A gateway, engine, store or process does not answer. A retry may succeed."""


class Outage(Unavailable):
    """A component is unavailable for `unavailable_timeout_s`. The run ends and can be resumed."""


class RateLimited(AfieldError):
    """A component refuses calls for now because there are too many."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds to wait before the next call; None if the component gave no time."""


class NoRewards(AfieldError):
    """Several steps in a row had no reward at all; the run ends."""


class RolloutFailure(AfieldError):
    """A rollout failed. Subclasses name the component that caused it."""

    kind: ClassVar[FailureKind]
    stands_for: BaseException | None = None
    """The exception of the agent's or verifier's code; its traceback is reported instead of this one's."""

    def __init__(self, message: str, reason: Reason = Reason.RAISED) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def failure(self) -> Failure:
        """The failure as data, with its traceback."""
        cause = self.stands_for or self
        text = "".join(traceback.format_exception(cause)) if cause.__traceback__ else ""
        return Failure(self.kind, self.reason, str(self), text)


class PolicyFailure(RolloutFailure):
    """The model caused it: budget, context or time ran out. It is trained and never retried."""

    kind = FailureKind.POLICY


class TaskFailure(RolloutFailure):
    """The task is broken, or the agent's code raised."""

    kind = FailureKind.TASK


class VerifierFailure(RolloutFailure):
    """The verifier crashed, or gave no finite reward."""

    kind = FailureKind.VERIFIER


class InfrastructureFailure(RolloutFailure):
    """Launch, process, machine, engine or upload failed. It never becomes a reward."""

    kind = FailureKind.INFRASTRUCTURE


RETRIED = frozenset({FailureKind.TASK, FailureKind.VERIFIER, FailureKind.INFRASTRUCTURE})
"""Failure kinds that are retried. Policy failures are trained instead."""


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


@contextmanager
def boundary(kind: FailureKind, reason: Reason, report: Callable[[Failure], None]) -> Generator[None]:
    """Run user code and report its exceptions as a Failure.

    A `RolloutFailure` keeps its own kind; any other exception becomes `kind` and `reason`.
    """
    try:
        yield
    except RolloutFailure as error:
        report(error.failure)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        report(Failure(kind, reason, message, traceback.format_exc()))
