"""Attempt watcher: detects outcomes and dead agents from hints, sweeps and sessions.

1. Hints from the queue announce a decision at once.
2. Sweeps of the store find decisions whose hints were lost.
3. The gateway's session states show agents that are dead, silent or over a deadline.

Hints, sweeps and completed sessions only wake the task that waits for an attempt; that task reads the
decision from the store. A passed deadline abandons the attempt. A session that breaks requests for many is
left out of them for a while, and its deadlines are extended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
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
"""Seconds of one wait for hints."""
SESSIONS_PER_REQUEST = 5_000
"""Largest number of sessions in one request for states."""
STATES_TIMEOUT_INTERVALS = 10
"""Watch intervals after which a request for states is abandoned."""
SWEEP_SLEEP_SHARE = 0.8
"""Share of the poll interval that is slept; the rest is for the sweep itself."""
EXCLUDED_S = 60.0
"""Seconds for which a session that breaks batch requests is left out of them."""


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
        self.extended_s = 0.0
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
        self.running: dict[str, RunningAttempt] = {}
        """Attempts to watch, by session id."""
        self.used_hints: list[Attempt] = []
        """Attempts whose hints are acknowledged next: each is decided, or of an earlier process."""
        self._hints_lock = asyncio.Lock()
        """Held from receiving hints until they are routed."""
        self._hints_held_until = 0.0
        """Time at which the transport delivers hints again that a dead collector leased."""
        self._excluded_until: dict[tuple[str, str], float] = {}
        """Time until which a session is left out of batch requests, by (kind of request, session id)."""
        self._outage_since: float | None = None
        """Start of the gateway's outage; None while it answers."""
        self._tasks: list[asyncio.Task[None]] = []
        self._flushing = False
        """Whether `flush` has begun; the listener then ends after its current wait."""

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the three background tasks of the watcher."""
        self._tasks = [tasks.create_task(work) for work in (self._listen(), self._sweep(), self._watch())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def inherit(self) -> None:
        """Make `flush` wait for hints that a dead collector leased."""
        self._hints_held_until = max(
            self._hints_held_until, asyncio.get_running_loop().time() + self._transport.held_s
        )

    async def flush(self) -> None:
        """Acknowledge the hints of all decided attempts, including those leased by a dead collector."""
        clock = asyncio.get_running_loop().time
        self._flushing = True
        try:
            if not self._transport.held_s and self._tasks:
                self._tasks[0].cancel()  # a hint that it has just received is still in `unacknowledged`
            while True:
                wait_s = max(0.0, min(HINT_WAIT_S, self._hints_held_until - clock()))
                async with self._hints_lock:
                    await self._route(await self._hints(wait_s))
                    await self._acknowledge()
                if clock() >= self._hints_held_until:
                    break
            async with self._hints_lock, asyncio.timeout(self._config.call_timeout_s):
                await self._route(await self._transport.unacknowledged(self._config.exp_id))
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
        used, self.used_hints = self.used_hints, []
        if not used:
            return
        try:
            async with asyncio.timeout(self._config.call_timeout_s):
                await self._transport.acknowledge(self._config.exp_id, used)
        except BaseException:
            self.used_hints += used
            raise

    async def _route(self, hinted: Sequence[Attempt]) -> None:
        """Wake running attempts with a hint; mark hints of this run's earlier attempts as used."""
        for attempt in hinted:
            if running := self.running.get(attempt.session_id):
                running.changed.set()
            elif await asyncio.to_thread(self._run_state.has_attempt, attempt):
                self.used_hints.append(attempt)

    async def _listen(self) -> None:
        """Receive hints until `flush`; after an error, wait a poll interval."""
        while not self._flushing:
            try:
                async with self._hints_lock:
                    await self._acknowledge()
                    await self._route(await self._hints(HINT_WAIT_S))
            except Exception as error:
                log.warning("watcher: no hints, relying on sweeps: %s", describe_error(error))
                await asyncio.sleep(self._config.poll_interval_s)

    async def _sweep(self) -> None:
        """Wake attempts whose decision is in the store, in every poll interval."""
        while True:
            await asyncio.sleep(SWEEP_SLEEP_SHARE * self._config.poll_interval_s)
            waiting = [self.running[s].pending for s in self._included("sweep", self._launched())]
            try:
                answers, unanswered = await self._store_calls.call_in_batches(
                    self._transport.sweep, waiting, self._config.call_timeout_s
                )
            except Exception as error:
                log.warning("watcher: sweep failed: %s", describe_error(error))
                continue
            self._exclude("sweep", [pending.attempt.session_id for pending in unanswered])
            for attempt in itertools.chain.from_iterable(answers):
                if running := self.running.get(attempt.session_id):
                    running.changed.set()

    async def _watch(self) -> None:
        """Read all session states in every interval, and apply them to the running attempts."""
        interval_s = min(self._config.watch_interval_s, self._config.deadlines.shortest_s / 2)
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            await asyncio.sleep(interval_s)
            states = await self._read_states(self._launched())
            now, before = clock(), last
            last = now
            if self._outage_since is not None:
                self._extend_deadlines(self.running.values(), now - before)
            else:
                self._extend_excluded(now - before)
            alive = await self._reported_alive(states)
            for session_id, running in list(self.running.items()):
                self._update(running, states.get(session_id), now, lives=session_id in alive)

    def _update(
        self, running: RunningAttempt, state: SessionState | None, now: float, *, lives: bool
    ) -> None:
        """Apply a session's state: note its progress, wake its task, abandon it past a deadline."""
        progress = running.progress
        if state:
            progress.update_queue_time(state)
        if state and state.phase == "completed" and progress.completed_at is None:
            progress.completed_at = now
            running.changed.set()
        if progress.ended_at is not None:
            running.changed.set()
        if failure := overdue_failure(self._config.deadlines, progress, state, now, lives=lives):
            running.abandon(failure)

    async def _reported_alive(self, states: dict[str, SessionState]) -> set[str]:
        """Ids of sessions that lost their heartbeat, but that their runtime reports as running."""
        if not self._runtime.capabilities.tells_end:
            return set()
        lost = [
            running
            for session_id, running in self.running.items()
            if heartbeat_lost(self._config.deadlines, running.progress, states.get(session_id))
        ]
        phases = await asyncio.gather(*map(self._phase, lost))
        living = (Phase.STARTING, Phase.RUNNING)
        return {r.session_id for r, phase in zip(lost, phases, strict=True) if phase in living}

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

    def _launched(self) -> list[str]:
        """Ids of the sessions whose agents were launched."""
        return [session_id for session_id, running in self.running.items() if running.launched]

    def _included(self, request: str, session_ids: Iterable[str]) -> list[str]:
        """Return the sessions that batch requests of this kind include; forgets exclusions that are over."""
        now = asyncio.get_running_loop().time()
        included: list[str] = []
        for session_id in session_ids:
            if self._excluded_until.get((request, session_id), -math.inf) <= now:
                self._excluded_until.pop((request, session_id), None)
                included.append(session_id)
        return included

    def _exclude(self, request: str, session_ids: Sequence[str]) -> None:
        """Leave sessions out of batch requests of this kind for `EXCLUDED_S`."""
        now = asyncio.get_running_loop().time()
        self._excluded_until = {key: until for key, until in self._excluded_until.items() if until > now}
        self._excluded_until.update({(request, session_id): now + EXCLUDED_S for session_id in session_ids})

    def _extend_deadlines(self, attempts: Iterable[RunningAttempt], seconds: float) -> None:
        """Extend deadlines by the time for which the state of these attempts was unknown."""
        for running in attempts:
            if running.progress.launched_at is not None:
                running.progress.launched_at += seconds

    def _extend_excluded(self, seconds: float) -> None:
        """Extend deadlines of sessions left out of requests, each by `unavailable_timeout_s` in all."""
        excluded = [r for s, r in self.running.items() if ("states", s) in self._excluded_until]
        excluded = [r for r in excluded if r.extended_s < self._config.unavailable_timeout_s]
        for running in excluded:
            running.extended_s += seconds
        self._extend_deadlines(excluded, seconds)

    async def _read_states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """Read session states; empty during a gateway outage, Outage after `unavailable_timeout_s`."""
        clock = asyncio.get_running_loop().time
        began, limit_s = clock(), STATES_TIMEOUT_INTERVALS * self._config.watch_interval_s
        states: dict[str, SessionState] = {}
        included = self._included("states", session_ids)
        try:
            for first in range(0, len(included), SESSIONS_PER_REQUEST):
                batch = included[first : first + SESSIONS_PER_REQUEST]
                answers, unanswered = await self._gateway_calls.call_in_batches(
                    self._gateway.states, batch, limit_s
                )
                self._exclude("states", unanswered)
                for answer in answers:
                    states |= answer
            self._outage_since = None
        except Exception as error:
            if self._outage_since is None:
                self._outage_since = began
                log.warning("watcher: session states unavailable: %s", describe_error(error))
            silent_s = clock() - self._outage_since
            if silent_s > self._config.unavailable_timeout_s:
                message = f"the gateway does not answer for {silent_s:.0f} s: {describe_error(error)}"
                raise Outage(f"{message}; start it again, then resume the run with --resume") from error
        return states
