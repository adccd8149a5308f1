"""Attempt deadlines: which one has passed, and the failure that follows.

No function does I/O; times are arguments.
"""

from __future__ import annotations

from msgspec import Struct

from afield.interfaces import SessionState
from afield.settings.rollouts import Deadlines
from afield.types import Failure, FailureKind, Reason


class Progress(Struct):
    """Times of an attempt, in seconds of the event loop's clock."""

    rollout_started_at: float
    """Start of the rollout, including earlier attempts."""
    launched_at: float | None = None
    """Time at which the agent accepted its payload; None before."""
    completed_at: float | None = None
    """Time at which the session was first seen completed; None before."""
    ended_at: float | None = None
    """Time at which the agent, or later its verifier, ended without a failure; None before."""
    grading: bool = False
    """Whether a verifier grades the submission."""
    queued_s: float = 0.0
    """Seconds that its calls waited for an engine, summed over calls."""
    reported_queued_s: float = 0.0
    """Last value that the gateway reported; it restarts from 0 with the gateway."""

    def update_queue_time(self, state: SessionState) -> None:
        more = state.waited_s - self.reported_queued_s
        self.queued_s += more if more >= 0 else state.waited_s
        self.reported_queued_s = state.waited_s

    def ran_s(self, now: float, attempt_timeout_s: float) -> float:
        """Seconds since the launch, minus at most `attempt_timeout_s` of queue time."""
        began = now if self.launched_at is None else self.launched_at
        return now - began - min(self.queued_s, attempt_timeout_s)


def overdue_failure(
    deadlines: Deadlines, progress: Progress, state: SessionState | None, now: float, *, lives: bool = False
) -> Failure | None:
    """Return the failure of an attempt that is past a deadline; None while it may continue.

    `state` is None if the gateway does not answer. `lives` means that the runtime reports the attempt as
    running, so missing heartbeats are ignored.
    """
    if _exceeded(deadlines.rollout_timeout_s, progress.rollout_started_at, now):
        return _timeout(f"the rollout has lived for {deadlines.rollout_timeout_s:g} s with all its attempts")
    if progress.launched_at is None:
        return None
    if progress.grading:
        return _grading_failure(deadlines, progress, now)
    if _exceeded(deadlines.upload_timeout_s, progress.ended_at, now):
        late_s = f"{deadlines.upload_timeout_s:g} s (upload_timeout_s)"
        message = f"the agent ended without an outcome; none came within {late_s}"
        if progress.completed_at is not None:
            message += (
                "; its session is completed, so the gateway may have it:"
                " with --deliver gateway it must write to where the collector looks (--outcomes)"
            )
        return Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, message)
    if progress.ran_s(now, deadlines.attempt_timeout_s) > deadlines.attempt_timeout_s:
        return _attempt_timeout(deadlines, progress, state)
    return _session_failure(deadlines, progress, state, now, lives) if state else None


def heartbeat_lost(deadlines: Deadlines, progress: Progress, state: SessionState | None) -> bool:
    """Whether an agent that sent heartbeats has stopped sending them."""
    if state is None or state.in_flight or progress.grading:
        return False
    if progress.completed_at is not None or progress.ended_at is not None:
        return False
    return state.unseen_s is not None and state.unseen_s > deadlines.heartbeat_timeout_s


def _grading_failure(deadlines: Deadlines, progress: Progress, now: float) -> Failure | None:
    """Check the deadlines while a verifier grades; `VerifierRunner` limits each single verifier."""
    if _exceeded(deadlines.upload_timeout_s, progress.ended_at, now):
        message = (
            f"the verdict that the gateway has was not in the store after {deadlines.upload_timeout_s:g} s"
        )
        return Failure(FailureKind.INFRASTRUCTURE, Reason.UPLOAD, message)
    if progress.ran_s(now, deadlines.attempt_timeout_s) > deadlines.attempt_timeout_s:
        message = (
            f"no verdict within {deadlines.attempt_timeout_s:g} s of the launch; the agent had handed in"
        )
        return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, message)
    return None


def _session_failure(
    deadlines: Deadlines, progress: Progress, state: SessionState, now: float, lives: bool
) -> Failure | None:
    """Check the deadlines that depend on the session's state."""
    if _exceeded(deadlines.verifier_timeout_s, progress.completed_at, now):
        return _timeout(f"no outcome in {deadlines.verifier_timeout_s:g} s after the session was completed")
    if progress.completed_at is not None or state.in_flight:
        return None
    if heartbeat_lost(deadlines, progress, state) and not lives:
        message = f"no heartbeat or model call from the agent for {state.unseen_s or 0.0:.0f} s"
        return Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, message)
    if not state.calls and _exceeded(deadlines.first_call_timeout_s, progress.launched_at, now):
        return _timeout(f"no model call in the first {deadlines.first_call_timeout_s:g} s")
    if state.calls and deadlines.idle_timeout_s is not None and state.idle_s > deadlines.idle_timeout_s:
        return _timeout(
            f"no model call for {state.idle_s:.0f} s; idle_timeout_s is {deadlines.idle_timeout_s:g}"
        )
    return None


def _attempt_timeout(deadlines: Deadlines, progress: Progress, state: SessionState | None) -> Failure:
    late = f"no outcome within {deadlines.attempt_timeout_s:g} s; "
    if progress.queued_s > deadlines.attempt_timeout_s:
        stood = f"its calls waited for an engine for {progress.queued_s:.0f} s"
        return _timeout(f"{late}{stood}; add engines, or lower concurrency")
    if state is None:
        return _timeout(late + "the gateway has no state of the session")
    if state.calls and state.idle_s <= deadlines.active_window_s:
        message = f"the model was still being called ({state.calls} calls)"
        return Failure(FailureKind.POLICY, Reason.TIMEOUT, late + message)
    if not state.calls:
        return _timeout(late + "the model was never called")
    return _timeout(late + f"the last model call was {state.idle_s:.0f} s ago")


def _timeout(message: str) -> Failure:
    return Failure(FailureKind.INFRASTRUCTURE, Reason.TIMEOUT, message)


def _exceeded(limit: float | None, since: float | None, now: float) -> bool:
    return limit is not None and since is not None and now - since > limit
