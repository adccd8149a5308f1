"""How long each part of an attempt may take, and what it means when one takes longer (pure)."""

from __future__ import annotations

from msgspec import Struct

from afield.interfaces import SessionState
from afield.settings.rollouts import Deadlines
from afield.types import Failure, FailureKind, Reason


class Progress(Struct):
    """Where an attempt stands, by the collector's clock."""

    rollout_started_at: float  # its rollout
    launched_at: float | None = None
    completed_at: float | None = None  # when its session was first seen completed
    ended_at: float | None = None  # when its agent, or then its verifier, had ended, and nothing was wrong
    grading: bool = False  # it is in its verifier's hands
    queued_s: float = 0.0  # how long its calls have stood in line
    reported_queued_s: float = 0.0  # what the gateway said of that last; it counts from nought when it starts

    def update_queue_time(self, state: SessionState) -> None:
        more = state.waited_s - self.reported_queued_s
        self.queued_s += more if more >= 0 else state.waited_s
        self.reported_queued_s = state.waited_s

    def ran_s(self, now: float, attempt_timeout_s: float) -> float:
        """How long it has run, without what it stood in line for."""
        began = now if self.launched_at is None else self.launched_at
        return now - began - min(self.queued_s, attempt_timeout_s)


def overdue_failure(
    deadlines: Deadlines, progress: Progress, state: SessionState | None, now: float, *, lives: bool = False
) -> Failure | None:
    """Why an attempt is given up now; None while it may go on. Without a `state` the gateway is silent.

    `lives`: its runtime knows that it runs; then silence of its SDK proves nothing.
    """
    if _over(deadlines.rollout_timeout_s, progress.rollout_started_at, now):
        return _late(f"the rollout has lived for {deadlines.rollout_timeout_s:g} s with all its attempts")
    if progress.launched_at is None:
        return None
    if progress.grading:
        return _grading(deadlines, progress, now)
    if _over(deadlines.upload_timeout_s, progress.ended_at, now):
        late_s = f"{deadlines.upload_timeout_s:g} s (upload_timeout_s)"
        told = f"the agent ended without an outcome; none came within {late_s}"
        if progress.completed_at is not None:
            told += (
                "; its session is completed, so the gateway may have it:"
                " with --deliver gateway it must write to where the collector looks (--outcomes)"
            )
        return Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, told)
    if progress.ran_s(now, deadlines.attempt_timeout_s) > deadlines.attempt_timeout_s:
        return _ran_out(deadlines, progress, state)
    return _silent(deadlines, progress, state, now, lives) if state else None


def heartbeat_lost(deadlines: Deadlines, progress: Progress, state: SessionState | None) -> bool:
    """Whether an agent whose SDK sent signs of life has stopped sending them."""
    if state is None or state.in_flight or progress.grading:
        return False
    if progress.completed_at is not None or progress.ended_at is not None:
        return False
    return state.unseen_s is not None and state.unseen_s > deadlines.heartbeat_timeout_s


def _grading(deadlines: Deadlines, progress: Progress, now: float) -> Failure | None:
    """A verifier's time is not the policy's, and not the agent's. `judge` sees to each verifier's own."""
    if _over(deadlines.upload_timeout_s, progress.ended_at, now):
        told = f"the verdict that the gateway has was not in the store after {deadlines.upload_timeout_s:g} s"
        return Failure(FailureKind.INFRASTRUCTURE, Reason.UPLOAD, told)
    if progress.ran_s(now, deadlines.attempt_timeout_s) > deadlines.attempt_timeout_s:
        told = f"no verdict within {deadlines.attempt_timeout_s:g} s of the launch; the agent had handed in"
        return Failure(FailureKind.VERIFIER, Reason.TIMEOUT, told)
    return None


def _silent(
    deadlines: Deadlines, progress: Progress, state: SessionState, now: float, lives: bool
) -> Failure | None:
    """What the gateway's view of the session reveals."""
    if _over(deadlines.verifier_timeout_s, progress.completed_at, now):
        return _late(f"no outcome in {deadlines.verifier_timeout_s:g} s after the session was completed")
    if progress.completed_at is not None or state.in_flight:
        return None
    if heartbeat_lost(deadlines, progress, state) and not lives:
        told = f"the agent gave no sign of life for {state.unseen_s or 0.0:.0f} s"
        return Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, told)
    if not state.calls and _over(deadlines.first_call_timeout_s, progress.launched_at, now):
        return _late(f"no model call in the first {deadlines.first_call_timeout_s:g} s")
    if state.calls and deadlines.idle_timeout_s is not None and state.idle_s > deadlines.idle_timeout_s:
        return _late(
            f"no model call for {state.idle_s:.0f} s; idle_timeout_s is {deadlines.idle_timeout_s:g}"
        )
    return None


def _ran_out(deadlines: Deadlines, progress: Progress, state: SessionState | None) -> Failure:
    late = f"no outcome within {deadlines.attempt_timeout_s:g} s; "
    if progress.queued_s > deadlines.attempt_timeout_s:
        stood = f"its calls stood in line for {progress.queued_s:.0f} s"
        return _late(f"{late}{stood}; have more engines, or less concurrency")
    if state is None:
        return _late(late + "the gateway cannot say what it did")
    if state.calls and state.idle_s <= deadlines.active_window_s:
        told = f"the model was still being called ({state.calls} calls)"
        return Failure(FailureKind.POLICY, Reason.TIMEOUT, late + told)
    if not state.calls:
        return _late(late + "the model was never called")
    return _late(late + f"the last model call was {state.idle_s:.0f} s ago")


def _late(message: str) -> Failure:
    return Failure(FailureKind.INFRASTRUCTURE, Reason.TIMEOUT, message)


def _over(limit: float | None, since: float | None, now: float) -> bool:
    return limit is not None and since is not None and now - since > limit
