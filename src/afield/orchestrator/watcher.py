"""Attempt watcher: detects outcomes and dead agents from hints, sweeps and sessions.

1. Hints from the queue announce a decision at once.
2. Sweeps of the store find decisions whose hints were lost.
3. The gateway's session states show agents that are dead, silent or over a deadline.

Each only wakes the task that waits for an attempt; that task reads the decision from the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from afield.errors import Outage
from afield.interfaces import Exit, Fence, Gateway, PendingAttempt, Phase, Runtime, SessionState, Transport
from afield.orchestrator.availability import Availability, describe_error
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Progress, heartbeat_lost, overdue_failure
from afield.orchestrator.state import RunState
from afield.types import Attempt, Failure, RewardSource, Rollout
from afield.wire import OutcomeRecord

log = logging.getLogger(__name__)

HINT_WAIT_S = 1.0
AT_A_LOOK = 5_000  # sessions per request for states
LOOKS = 10  # watch intervals after which a request for states is abandoned
SWEEPING = 0.8  # share of the poll interval that is slept; the rest is for the sweep itself
APART_S = 60.0  # seconds for which a session that breaks batch requests is left out


class RunningAttempt:
    """State of an attempt in this process."""

    def __init__(
        self,
        rollout: Rollout,
        attempt: Attempt,
        rollout_started_at: float,
        place: Attempt | None = None,
        reward_from: RewardSource = "agent",
    ) -> None:
        self.pending = PendingAttempt(rollout, attempt, reward_from)
        self.runtime_attempt = place or attempt
        """Attempt as the runtime knows it; verifiers have their own."""
        self.progress = Progress(rollout_started_at=rollout_started_at)
        self.changed = asyncio.Event()
        """Set whenever the attempt should be examined again."""
        self.exit: Exit | None = None
        self.launch_requested = False
        self.verifier_attempt: Attempt | None = None
        self.abandon_failure: Failure | None = None
        """Why the attempt is abandoned: a deadline or a cancellation. None while it is not."""
        self.decision: OutcomeRecord | Fence | None = None
        """The committed outcome or fence, once it was read from the store."""
        self.excused_s = 0.0
        """Seconds by which deadlines were extended because this session was left out of batch requests."""
        self.decision_error = ""
        """Why the stored outcome cannot be read."""
        self.throttle_message = ""
        """Last message of a rate-limited runtime."""
        self.wait_error = ""
        """Why the runtime cannot report the end."""
        self.draw = attempt.session_id
        """Key of the random numbers, see `SessionSpec.draw`."""
        self._limit: asyncio.Timeout | None = None

    @property
    def launched(self) -> bool:
        return self.progress.launched_at is not None

    @property
    def session_id(self) -> str:
        return self.pending.attempt.session_id

    def abandon(self, failure: Failure) -> None:
        self.abandon_failure = self.abandon_failure or failure
        self.changed.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def bounded(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Like `asyncio.timeout`, but expires at once on `abandon`."""
        async with asyncio.timeout(seconds) as limit:
            outer, self._limit = self._limit, limit
            try:
                yield limit
            finally:
                self._limit = outer


class AttemptWatcher:
    """Watches all running attempts (`running`, by session id) of one run."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        run_state: RunState,
        gateway_calls: Availability,
        store_calls: Availability,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._run_state = run_state
        self._gateway_calls = gateway_calls
        self._store_calls = store_calls
        self._apart: dict[tuple[str, str], float] = {}  # (request, session id) left out until this time
        self.running: dict[str, RunningAttempt] = {}
        self.used: list[Attempt] = []
        self._until = 0.0
        self._hearing = asyncio.Lock()  # held from receiving hints until they are sorted
        self._silent_since: float | None = None  # start of the gateway's outage
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the three background tasks of the watcher."""
        self._tasks = [tasks.create_task(work) for work in (self._listen(), self._sweep(), self._watch())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def inherit(self) -> None:
        """Make `flush` wait for hints that a dead collector leased."""
        self._until = max(self._until, asyncio.get_running_loop().time() + self._transport.held_s)

    async def flush(self) -> None:
        """Acknowledge the hints of all decided attempts, including those leased by a dead collector."""
        clock = asyncio.get_running_loop().time
        self._flushing = True  # the listener ends after its current wait
        try:
            if not self._transport.held_s and self._tasks:
                self._tasks[0].cancel()  # a hint that it has just received is still in `unacknowledged`
            while True:
                wait_s = max(0.0, min(HINT_WAIT_S, self._until - clock()))
                async with self._hearing:
                    await self._sort(await self._hints(wait_s))
                    await self._acknowledge()
                if clock() >= self._until:
                    break
            async with self._hearing, asyncio.timeout(self._config.call_timeout_s):
                await self._sort(await self._transport.unacknowledged(self._config.exp_id))
            await self._acknowledge()
        except Exception as error:
            log.warning(
                "watcher: hints not acknowledged, they may be delivered again: %s", describe_error(error)
            )

    async def _hints(self, wait_s: float) -> list[Attempt]:
        async with asyncio.timeout(wait_s + self._config.call_timeout_s):
            return await self._transport.hints(self._config.exp_id, wait_s)

    async def _acknowledge(self) -> None:
        """Acknowledge used hints; after an error they are kept for the next call."""
        used, self.used = self.used, []
        if not used:
            return
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._transport.acknowledge(self._config.exp_id, used)
        except BaseException:
            self.used += used
            raise

    async def _sort(self, hinted: Sequence[Attempt]) -> None:
        """Wake running attempts with a hint; mark hints of this run's earlier attempts as used."""
        for attempt in hinted:
            if running := self.running.get(attempt.session_id):
                running.changed.set()
            elif await asyncio.to_thread(self._run_state.has_attempt, attempt):
                self.used.append(attempt)

    async def _listen(self) -> None:
        while not self._flushing:
            try:
                async with self._hearing:
                    await self._acknowledge()
                    await self._sort(await self._hints(HINT_WAIT_S))
            except Exception as error:
                log.warning("watcher: no hints, relying on sweeps: %s", describe_error(error))
                await asyncio.sleep(self._config.poll_interval_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEPING * self._config.poll_interval_s)
            waiting = [
                r.pending for s, r in self.running.items() if r.launched and self._is_in_batch("sweep", s)
            ]
            try:
                answers, spoiled = await self._store_calls.call_in_batches(
                    self._transport.sweep, waiting, self._config.call_timeout_s
                )
            except Exception as error:
                log.warning("watcher: sweep failed: %s", describe_error(error))
                continue
            self._set_apart("sweep", [pending.attempt.session_id for pending in spoiled])
            for attempt in (attempt for completed in answers for attempt in completed):
                if running := self.running.get(attempt.session_id):
                    running.changed.set()

    async def _watch(self) -> None:
        every = min(self._config.watch_interval_s, self._config.deadlines.shortest_s / 2)
        clock = asyncio.get_running_loop().time
        looked = clock()
        while True:
            await asyncio.sleep(every)
            states = await self._states([s for s, r in self.running.items() if r.launched])
            now, before = clock(), looked
            looked = now
            if self._silent_since is not None:
                self._excuse(self.running.values(), now - before)
            else:
                self._excuse_apart(now - before)
            alive = await self._alive(states)
            for session_id, running in list(self.running.items()):
                state = states.get(session_id)
                if state:
                    running.progress.update_queue_time(state)
                if state and state.phase == "completed" and running.progress.completed_at is None:
                    running.progress.completed_at = now
                    running.changed.set()
                if running.progress.ended_at is not None:
                    running.changed.set()
                lives = session_id in alive
                if failure := overdue_failure(
                    self._config.deadlines, running.progress, state, now, lives=lives
                ):
                    running.abandon(failure)

    async def _alive(self, states: dict[str, SessionState]) -> set[str]:
        """Sessions without heartbeats that their runtime reports as running."""
        if not self._runtime.capabilities.tells_end:
            return set()
        lost = [
            running
            for session_id, running in self.running.items()
            if heartbeat_lost(self._config.deadlines, running.progress, states.get(session_id))
        ]
        phases = await asyncio.gather(*map(self._phase, lost))
        there = (Phase.STARTING, Phase.RUNNING)
        return {r.session_id for r, phase in zip(lost, phases, strict=True) if phase in there}

    async def _phase(self, running: RunningAttempt) -> Phase:
        try:
            async with asyncio.timeout(self._config.deadlines.heartbeat_timeout_s):
                return (await self._runtime.status(running.runtime_attempt)).phase
        except Exception as error:
            log.warning(
                "attempt %s: its runtime cannot report its status: %s",
                running.session_id,
                describe_error(error),
            )
            return Phase.UNKNOWN

    def _is_in_batch(self, what: str, session_id: str) -> bool:
        """Whether a batch request includes the session."""
        until = self._apart.get((what, session_id))
        if until is not None and asyncio.get_running_loop().time() >= until:
            del self._apart[what, session_id]
            until = None
        return until is None

    def _set_apart(self, what: str, session_ids: Sequence[str]) -> None:
        now = asyncio.get_running_loop().time()
        self._apart = {key: until for key, until in self._apart.items() if until > now}
        self._apart.update({(what, session_id): now + APART_S for session_id in session_ids})

    def _excuse(self, attempts: Iterable[RunningAttempt], seconds: float) -> None:
        """Extend deadlines by the time for which the gateway did not answer."""
        for running in attempts:
            if running.progress.launched_at is not None:
                running.progress.launched_at += seconds

    def _excuse_apart(self, seconds: float) -> None:
        """Extend deadlines of sessions left out of requests, by `unavailable_timeout_s` in all."""
        apart = [r for s, r in self.running.items() if ("states", s) in self._apart]
        apart = [running for running in apart if running.excused_s < self._config.unavailable_timeout_s]
        for running in apart:
            running.excused_s += seconds
        self._excuse(apart, seconds)

    async def _states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """Read session states; empty during a gateway outage, Outage after `unavailable_timeout_s`."""
        clock = asyncio.get_running_loop().time
        began, limit_s = clock(), LOOKS * self._config.watch_interval_s
        states: dict[str, SessionState] = {}
        due = [session_id for session_id in session_ids if self._is_in_batch("states", session_id)]
        try:
            for first in range(0, len(due), AT_A_LOOK):
                batch = due[first : first + AT_A_LOOK]
                answers, spoiled = await self._gateway_calls.call_in_batches(
                    self._gateway.states, batch, limit_s
                )
                self._set_apart("states", spoiled)
                for answer in answers:
                    states |= answer
            self._silent_since = None
        except Exception as error:
            if self._silent_since is None:
                self._silent_since = began
                log.warning("watcher: session states unavailable: %s", describe_error(error))
            silent_s = clock() - self._silent_since
            if silent_s > self._config.unavailable_timeout_s:
                message = f"the gateway does not answer for {silent_s:.0f} s: {describe_error(error)}"
                raise Outage(f"{message}; start it again, then resume the run with --resume") from error
        return states
