"""Runs an agent's rollouts in the background and delivers what comes of them.

Accepting a payload checks it and starts a thread; the same session again starts nothing. A sync agent
runs in its thread, an async one on an event loop that all async agents share and nothing else uses.
Whatever an agent does becomes an outcome: a reward or a typed failure. A session stays active until
its outcome is delivered or given up, with a log line. Stopping cancels an async agent; a sync one runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from afield.sdk.classify import attributed, describe, storable
from afield.sdk.deliver import deliver as deliver_to_address
from afield.sdk.deliver import file_root
from afield.sdk.heartbeat import PROCESS, Heartbeat
from afield.sdk.outcomes import Refused
from afield.sdk.result import Result, read_result, read_submission
from afield.types import Failure, FailureKind, Outcome, Reason
from afield.wire import ROLLOUT_FIELD, Invocation, OutcomeRecord, Submission

log = logging.getLogger("afield.sdk")

REMEMBERED = 10_000
Deliver = Callable[[Invocation, OutcomeRecord | Submission], bool]


class Accepted(Struct, frozen=True, kw_only=True):
    """The answer to an invocation; `instance` tells this process from one that takes its place."""

    status: str = "processing"
    session_id: str
    data_key: str
    instance: str = ""


def _nothing(session_id: str) -> None:
    pass


class Runner:
    """`began` and `ended` are told each session id once, from any thread."""

    def __init__(
        self,
        entry: AgentEntry,
        *,
        deliver: Deliver = deliver_to_address,
        began: Callable[[str], None] = _nothing,
        ended: Callable[[str], None] = _nothing,
        alive: Heartbeat = PROCESS,
    ) -> None:
        self._entry = entry
        self._deliver = deliver
        self._began = began
        self._ended = ended
        self._alive = alive
        self._lock = threading.Lock()
        self._active: dict[str, Accepted] = {}
        self._done: OrderedDict[str, Accepted] = OrderedDict()
        self._stopped: set[str] = set()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.instance = secrets.token_hex(8)
        self.file_roots: tuple[Path, ...] | None = None  # `file:` outcomes only below these; None: anywhere
        self.changed = time.time()

    @property
    def active(self) -> list[str]:
        with self._lock:
            return list(self._active)

    def accept(self, payload: object, *, begin: threading.Event | None = None) -> Accepted:
        """Start a rollout. Raises before any work: WireError when the payload is not one, or Unavailable.

        The agent is called once `begin` is set.
        """
        invocation = wire.read_payload(payload)
        self._check_outcome(invocation)
        accepted = Accepted(
            session_id=invocation.session_id, data_key=invocation.data_key, instance=self.instance
        )
        with self._lock:
            known = self._active.get(accepted.session_id) or self._done.get(accepted.session_id)
            if known is not None:
                return known
            if not self._active:
                self.changed = time.time()
            self._active[accepted.session_id] = accepted
        self._began(accepted.session_id)
        context = contextvars.copy_context()
        # A daemon: an agent that never returns must not keep its process from ending.
        thread = threading.Thread(
            target=context.run, args=(self._work, invocation, payload, begin), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._end(accepted.session_id)
            raise Unavailable(f"no thread for {accepted.session_id}: {error}; run fewer at once") from error
        return accepted

    def _check_outcome(self, invocation: Invocation) -> None:
        url = invocation.outcome_url or ""
        if self.file_roots is None or not url.startswith("file:"):
            return
        try:
            place = file_root(url).resolve()
        except UsageError as error:
            raise WireError(str(error)) from error
        if not any(place.is_relative_to(root.resolve()) for root in self.file_roots):
            roots = ", ".join(map(str, self.file_roots)) or "none"
            raise WireError(
                f"outcome_url {url!r} is outside the directories this agent may write outcomes to ({roots});"
                ' start it with --outcome-root, or deliver through the gateway: deliver = "gateway"'
            )

    def tell(self, ended: Callable[[str], None]) -> None:
        """`ended` is told as well, from now on."""
        before = self._ended

        def both(session_id: str) -> None:
            before(session_id)
            ended(session_id)

        self._ended = both

    def stop(self, session_id: str) -> bool:
        """End a rollout; False if it is not running. Repeating is harmless.

        Whoever stops it has decided it: if it then fails, it leaves no outcome.
        """
        with self._lock:
            if session_id not in self._active:
                return False
            again = session_id in self._stopped
            self._stopped.add(session_id)
            task, loop = self._tasks.get(session_id), self._loop
        if task is not None and loop is not None and not again:
            # The loop is closed when the app is shutting down.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        return True

    def close(self) -> None:
        """Says which rollouts the end of the process takes with it, and ends the agents' loop."""
        with self._lock:
            surprised = [session_id for session_id in self._active if session_id not in self._stopped]
        for session_id in surprised:
            log.error("%s was still running when the app shut down; it leaves no outcome", session_id)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _work(self, invocation: Invocation, payload: dict[str, Any], begin: threading.Event | None) -> None:
        session_id = invocation.session_id
        if begin is not None:
            begin.wait()
        self._alive.keep(invocation)
        try:
            record = None if session_id in self._stopped else self._perform(invocation, payload)
            if record is None or (_failure_of(record) is not None and session_id in self._stopped):
                log.info("%s was stopped", session_id)
            else:
                self._bring(invocation, record)
        finally:
            self._alive.drop(session_id)
            self._end(session_id)

    def _end(self, session_id: str) -> None:
        with self._lock:
            self._done[session_id] = self._active.pop(session_id)
            self._stopped.discard(session_id)
            while len(self._done) > REMEMBERED:
                self._done.popitem(last=False)
            if not self._active:
                self.changed = time.time()
        self._ended(session_id)

    def _perform(self, invocation: Invocation, payload: dict[str, Any]) -> OutcomeRecord | Submission:
        started = time.time()
        echo: dict[str, Any] = {}
        results: list[Result | Submission] = []
        failures: list[Failure] = []
        blamed = _blamed(invocation)
        with boundary(blamed.kind, Reason.RAISED, failures.append), attributed(blamed):
            # Echoed as it came, whatever the agent does to it; the session's key stays out of the store.
            echo = copy.deepcopy({k: v for k, v in payload.items() if k != ROLLOUT_FIELD})
            value = self._entry.call(payload, invocation)
            if inspect.isawaitable(value):
                work = self._awaited(value, invocation)
                value = asyncio.run_coroutine_threadsafe(work, self._agents_loop()).result()
            judged = invocation.role == "judged"
            results.append(read_submission(value) if judged else read_result(value, self._entry.aggregate))
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
            rewards=result.rewards,
            turn_rewards=result.turn_rewards,
            named_turn_rewards=result.named_turn_rewards,
            metrics=result.metrics,
            stop_reason=result.stop_reason,
        )
        return OutcomeRecord.of(invocation, outcome, payload=echo, extra=result.extra, **times)

    def _bring(self, invocation: Invocation, record: OutcomeRecord | Submission) -> None:
        try:
            wire.encode(record)
        except WireError as error:
            failure = TaskFailure(f"the outcome {error}", Reason.UPLOAD).failure
            record = OutcomeRecord.of(invocation, _failed(invocation, failure))
        session_id = invocation.session_id
        if failure := _failure_of(record):
            log.warning("%s failed: %s", session_id, failure.message)
        lost: list[Failure] = []
        with boundary(FailureKind.INFRASTRUCTURE, Reason.UPLOAD, lost.append):
            try:
                stands = self._deliver(invocation, record)
            except Refused as error:
                log.warning("%s: %s", session_id, error)
                stands = self._deliver(invocation, _refused(invocation, record, error))
            if not stands:
                log.warning("%s was decided before; this outcome of it is refused", session_id)
        with self._lock:
            decided = session_id in self._stopped  # nobody wants its outcome any more
        for failure in lost if not decided else ():
            log.error("the outcome of %s is lost: %s", session_id, failure.message)

    async def _awaited(self, value: Awaitable[Any], invocation: Invocation) -> Any:
        session_id = invocation.session_id
        if task := asyncio.current_task():
            with self._lock:
                self._tasks[session_id] = task
                stopped = session_id in self._stopped
            if stopped:
                task.cancel()
        try:
            # Attributed here as well: a SystemExit that leaves a task stops its loop.
            with attributed(_blamed(invocation)):
                return await value
        finally:
            self._tasks.pop(session_id, None)

    def _agents_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="agents", daemon=True).start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    while not stopped:
        try:
            loop.run_forever()
            stopped = True
        except (SystemExit, KeyboardInterrupt) as error:
            log.warning("a task of an agent raised %s; the agents' loop goes on", describe(error))
    loop.close()


def _blamed(invocation: Invocation) -> type[RolloutFailure]:
    """Whose fault it is when its code raises."""
    return VerifierFailure if invocation.role == "verifier" else TaskFailure


def _refused(invocation: Invocation, record: OutcomeRecord | Submission, error: Refused) -> OutcomeRecord:
    """The typed failure in place of what the other side does not take."""
    if error.too_large or isinstance(record, Submission):
        failure = _blamed(invocation)(str(error), Reason.UPLOAD).failure
    else:
        failure = VerifierFailure(str(error), Reason.REWARD).failure
    return OutcomeRecord.of(invocation, _failed(invocation, failure))


def _failure_of(record: OutcomeRecord | Submission) -> Failure | None:
    return record.outcome.failure if isinstance(record, OutcomeRecord) else None


def _failed(invocation: Invocation, failure: Failure) -> Outcome:
    return wire.failed(invocation.rollout_id, invocation.attempt, storable(failure))
