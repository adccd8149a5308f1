"""Runner: runs an agent's rollouts in background threads and delivers their outcomes.

1. `accept` checks a payload and starts a thread; a repeated session starts nothing.
2. A sync agent runs in its thread, an async one on an event loop shared by all async agents.
3. A return value or exception becomes an outcome: rewards, or a typed failure.
4. A session is active until its outcome is delivered, or logged as lost.
5. `stop` cancels an async agent; a sync one runs on, and its failure is dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield import wire
from afield.errors import (
    RolloutFailure,
    TaskFailure,
    Unavailable,
    UsageError,
    VerifierFailure,
    WireError,
    boundary,
)
from afield.sdk.agent import AgentEntry
from afield.sdk.classify import attributed, storable
from afield.sdk.deliver import deliver as deliver_to_address
from afield.sdk.deliver import file_root
from afield.sdk.heartbeat import PROCESS_HEARTBEAT, Heartbeat
from afield.sdk.results import AgentResult, read_result, read_submission
from afield.sdk.stores import OutcomeRejected
from afield.types import Failure, FailureKind, Outcome, Reason
from afield.utils.loop_thread import LoopThread
from afield.wire import ROLLOUT_FIELD, Invocation, OutcomeRecord, Submission

log = logging.getLogger(__name__)

MAX_DONE = 10_000  # ended sessions that a repeated invocation is answered for
Deliver = Callable[[Invocation, OutcomeRecord | Submission], bool]


class Accepted(Struct, frozen=True, kw_only=True):
    """Response to an invocation."""

    status: str = "processing"
    """State of the invocation; always "processing"."""
    session_id: str
    """Id of the session that runs the agent."""
    data_key: str
    """Key under which the outcome will be stored."""
    instance: str = ""
    """Random id of this process; it changes on a restart."""


def _nothing(session_id: str) -> None:
    pass


class Runner:
    """Runs rollouts of one agent. `began` and `ended` are called with each session id, from any thread."""

    def __init__(
        self,
        entry: AgentEntry,
        *,
        deliver: Deliver = deliver_to_address,
        began: Callable[[str], None] = _nothing,
        ended: Callable[[str], None] = _nothing,
        heartbeat: Heartbeat = PROCESS_HEARTBEAT,
    ) -> None:
        self._entry = entry
        self._deliver = deliver
        self._began = began
        self._ended = ended
        self._heartbeat = heartbeat
        self._lock = threading.Lock()
        self._active: dict[str, Accepted] = {}
        self._done: OrderedDict[str, Accepted] = OrderedDict()
        self._stopped: set[str] = set()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._loop = LoopThread("agents")
        self.instance = secrets.token_hex(8)
        """Random id of this process."""
        self.file_roots: tuple[Path, ...] | None = None
        """Directories that `file:` outcomes may be written below; None allows all."""
        self.changed = time.time()
        """Last time the runner became idle or busy, in seconds since the epoch."""

    @property
    def active(self) -> list[str]:
        with self._lock:
            return list(self._active)

    def accept(self, payload: object, *, begin: threading.Event | None = None) -> Accepted:
        """Start a rollout; raises WireError for an invalid payload, or Unavailable without a free thread.

        With `begin`, the agent is called once that event is set.
        """
        invocation = wire.read_payload(payload)
        self._check_outcome(invocation)
        accepted = Accepted(
            session_id=invocation.session_id, data_key=invocation.data_key, instance=self.instance
        )
        with self._lock:
            repeated = self._active.get(accepted.session_id) or self._done.get(accepted.session_id)
            if repeated is not None:
                return repeated
            if not self._active:
                self.changed = time.time()
            self._active[accepted.session_id] = accepted
        self._began(accepted.session_id)
        context = contextvars.copy_context()
        # A daemon thread, so that an agent that never returns does not keep the process alive.
        thread = threading.Thread(
            target=context.run, args=(self._work, invocation, payload, begin), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._end(accepted.session_id)
            raise Unavailable(
                f"cannot start a thread for {accepted.session_id}: {error}; run fewer rollouts at once"
            ) from error
        return accepted

    def _check_outcome(self, invocation: Invocation) -> None:
        url = invocation.outcome_url or ""
        if self.file_roots is None or not url.startswith("file:"):
            return
        try:
            directory = file_root(url).resolve()
        except UsageError as error:
            raise WireError(str(error)) from error
        if not any(directory.is_relative_to(root.resolve()) for root in self.file_roots):
            roots = ", ".join(map(str, self.file_roots)) or "none"
            raise WireError(
                f"outcome_url {url!r} is outside the allowed outcome directories ({roots});"
                ' start the agent with --outcome-root, or set deliver = "gateway"'
            )

    def on_end(self, ended: Callable[[str], None]) -> None:
        """Add a callback for ended sessions."""
        before = self._ended

        def both(session_id: str) -> None:
            before(session_id)
            ended(session_id)

        self._ended = both

    def stop(self, session_id: str) -> bool:
        """Stop a rollout; False if it is not running. Repeating is harmless.

        The caller has decided the rollout: if the agent fails afterwards, no outcome is delivered.
        """
        with self._lock:
            if session_id not in self._active:
                return False
            repeated = session_id in self._stopped
            self._stopped.add(session_id)
            task = self._tasks.get(session_id)
        if task is not None and not repeated:
            self._loop.call(task.cancel)
        return True

    def close(self) -> None:
        """Log rollouts that end with the process, and stop the event loop of async agents."""
        with self._lock:
            running = [session_id for session_id in self._active if session_id not in self._stopped]
            # The end of the event loop cancels them, also those whose task has not begun.
            self._stopped.update(self._active)
        for session_id in running:
            log.error("runner: %s running at shutdown, no outcome is delivered", session_id)
        self._loop.stop()

    def _work(self, invocation: Invocation, payload: dict[str, Any], begin: threading.Event | None) -> None:
        session_id = invocation.session_id
        if begin is not None:
            begin.wait()
        self._heartbeat.keep(invocation)
        try:
            record = None if session_id in self._stopped else self._perform(invocation, payload)
            if record is None or (_failure_of(record) is not None and session_id in self._stopped):
                log.info("runner: %s stopped", session_id)
            else:
                self._deliver_outcome(invocation, record)
        finally:
            self._heartbeat.drop(session_id)
            self._end(session_id)

    def _end(self, session_id: str) -> None:
        with self._lock:
            self._done[session_id] = self._active.pop(session_id)
            self._stopped.discard(session_id)
            while len(self._done) > MAX_DONE:
                self._done.popitem(last=False)
            if not self._active:
                self.changed = time.time()
        self._ended(session_id)

    def _perform(self, invocation: Invocation, payload: dict[str, Any]) -> OutcomeRecord | Submission:
        started = time.time()
        echo: dict[str, Any] = {}
        results: list[AgentResult | Submission] = []
        failures: list[Failure] = []
        failure_class = _failure_class(invocation)
        with boundary(failure_class.kind, Reason.RAISED, failures.append), attributed(failure_class):
            # A copy before the agent can change it; without `_rollout`, which holds the session's key.
            echo = copy.deepcopy({k: v for k, v in payload.items() if k != ROLLOUT_FIELD})
            value = self._entry.call(payload, invocation)
            if inspect.isawaitable(value):
                value = self._result_of(value, invocation)
            judged = invocation.role == "judged"
            if judged:
                results.append(read_submission(value))
            else:
                results.append(read_result(value, self._entry.aggregate, invocation.reward_from))
        times = {"started": started, "ended": time.time()}
        if not results:
            return OutcomeRecord.of(invocation, _failed(invocation, failures[0]), payload=echo, **times)
        result = results[0]
        if isinstance(result, Submission):
            return result
        outcome = Outcome(
            rollout_id=invocation.rollout_id,
            attempt=invocation.attempt,
            reward=result.reward,
            reward_pending=result.reward is None,
            rewards=result.rewards,
            turn_rewards=result.turn_rewards,
            named_turn_rewards=result.named_turn_rewards,
            metrics=result.metrics,
            stop_reason=result.stop_reason,
        )
        return OutcomeRecord.of(invocation, outcome, payload=echo, extra=result.extra, **times)

    def _deliver_outcome(self, invocation: Invocation, record: OutcomeRecord | Submission) -> None:
        try:
            wire.encode(record)
        except WireError as error:
            failure = TaskFailure(f"the outcome {error}", Reason.UPLOAD).failure
            record = OutcomeRecord.of(invocation, _failed(invocation, failure))
        session_id = invocation.session_id
        if failure := _failure_of(record):
            log.warning("runner: %s failed: %s", session_id, failure.message)
        lost: list[Failure] = []
        with boundary(FailureKind.INFRASTRUCTURE, Reason.UPLOAD, lost.append):
            try:
                stands = self._deliver(invocation, record)
            except OutcomeRejected as error:
                log.warning("runner: %s outcome rejected: %s", session_id, error)
                stands = self._deliver(invocation, _rejected(invocation, record, error))
            if not stands:
                log.warning("runner: %s already decided, outcome refused", session_id)
        with self._lock:
            stopped = session_id in self._stopped
        for failure in lost if not stopped else ():
            log.error("runner: %s outcome lost: %s", session_id, failure.message)

    def _result_of(self, value: Awaitable[Any], invocation: Invocation) -> Any:
        try:
            return self._loop.start().submit(self._awaited(value, invocation)).result()
        finally:
            if inspect.iscoroutine(value):  # it has not begun if the event loop ended before
                value.close()

    async def _awaited(self, value: Awaitable[Any], invocation: Invocation) -> Any:
        session_id = invocation.session_id
        if task := asyncio.current_task():
            with self._lock:
                self._tasks[session_id] = task
                stopped = session_id in self._stopped
            if stopped:
                task.cancel()
        try:
            # Attributed here too, so that a SystemExit does not leave the task.
            with attributed(_failure_class(invocation)):
                return await value
        except RolloutFailure:
            if session_id in self._stopped:  # its failure is dropped, and the loop may be ending
                raise asyncio.CancelledError from None
            raise
        finally:
            self._tasks.pop(session_id, None)


def _failure_class(invocation: Invocation) -> type[RolloutFailure]:
    """Failure that an exception of the invoked code counts as."""
    return VerifierFailure if invocation.role == "verifier" else TaskFailure


def _rejected(
    invocation: Invocation, record: OutcomeRecord | Submission, error: OutcomeRejected
) -> OutcomeRecord:
    """A failure to deliver in place of a rejected outcome."""
    if error.too_large or isinstance(record, Submission):
        failure = _failure_class(invocation)(str(error), Reason.UPLOAD).failure
    else:
        failure = VerifierFailure(str(error), Reason.REWARD).failure
    return OutcomeRecord.of(invocation, _failed(invocation, failure))


def _failure_of(record: OutcomeRecord | Submission) -> Failure | None:
    return record.outcome.failure if isinstance(record, OutcomeRecord) else None


def _failed(invocation: Invocation, failure: Failure) -> Outcome:
    return wire.failed(invocation.rollout_id, invocation.attempt, storable(failure))
