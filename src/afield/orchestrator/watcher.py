"""How it is noticed that something happened to an attempt: hints, sweeps, and a look at the sessions.

A hint tells of a decision at once; a sweep finds those whose hints were lost; the gateway's view of the
sessions reveals agents that are dead, silent or late. All three only wake whoever waits: what is true
is read from the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager

from afield.errors import Outage
from afield.interfaces import Exit, Fence, Gateway, PendingAttempt, Phase, Runtime, SessionState, Transport
from afield.orchestrator.availability import Availability, describe_error
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Progress, heartbeat_lost, overdue_failure
from afield.orchestrator.state import RunState
from afield.types import Attempt, Failure, Rollout
from afield.wire import OutcomeRecord

log = logging.getLogger("afield.orchestrator.groups")

HINT_WAIT_S = 1.0
AT_A_LOOK = 5_000  # sessions in one question to the gateway
LOOKS = 10  # a gateway that has not answered when so many looks are due is silent
SWEEPING = 0.8  # of the sweep interval is slept; what it takes to look and to read is within it
APART_S = 60.0  # a session that spoils the answer about all others is left out for so long


class RunningAttempt:
    """An attempt that is under way. `news` is set whenever there is a reason to look at it again.

    `place` is the name that its runtime knows it by.
    """

    def __init__(self, rollout: Rollout, attempt: Attempt, born: float, place: Attempt | None = None) -> None:
        self.waiting = PendingAttempt(rollout, attempt)
        self.place = place or attempt
        self.progress = Progress(rollout_started_at=born)
        self.news = asyncio.Event()
        self.exit: Exit | None = None
        self.asked = False  # the runtime, to launch it
        self.judge: Attempt | None = None  # the name of the verifier that was launched for it
        self.verdict: Failure | None = None
        self.stands: OutcomeRecord | Fence | None = None  # what was read from the store
        self.excused_s = 0.0  # in which the gateway could not be asked about it alone
        self.unreadable = ""  # why what the store has of it cannot be read
        self.refusal = ""  # what its place said when it took no more
        self.unknown = ""  # why its runtime cannot tell its end, if it cannot
        self.draw = attempt.session_id
        self._limit: asyncio.Timeout | None = None

    @property
    def launched(self) -> bool:
        return self.progress.launched_at is not None

    @property
    def session_id(self) -> str:
        return self.waiting.attempt.session_id

    def give_up(self, failure: Failure) -> None:
        self.verdict = self.verdict or failure
        self.news.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def bounded(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """`asyncio.timeout` that giving the attempt up cuts short."""
        async with asyncio.timeout(seconds) as limit:
            outer, self._limit = self._limit, limit
            try:
                yield limit
            finally:
                self._limit = outer


class AttemptWatcher:
    """The attempts that run, by session id, and the hints that were acted on.

    `asking` and `storing` are how the gateway and the store are asked: shared by all who ask them.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        run_state: RunState,
        asking: Availability,
        storing: Availability,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._run_state = run_state
        self._asking = asking
        self._storing = storing
        self._apart: dict[tuple[str, str], float] = {}  # what is not asked about a session, and until when
        self.running: dict[str, RunningAttempt] = {}
        self.used: list[Attempt] = []
        self._until = 0.0
        self._hearing = asyncio.Lock()  # from taking hints until it is known what becomes of each
        self._silent_since: float | None = None  # the gateway

    def chores(self) -> tuple[Coroutine[None, None, None], ...]:
        """To be run for as long as anything is waited for."""
        return self._listen(), self._sweep(), self._watch()

    def inherit(self) -> None:
        """A collector before this one died, and may hold hints that come only when its lease has run out."""
        self._until = max(self._until, asyncio.get_running_loop().time() + self._transport.held_s)

    async def flush(self) -> None:
        """Acknowledge what was acted on, here or by a collector that died, so that nothing is left behind."""
        clock = asyncio.get_running_loop().time
        try:
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
            log.warning("hints that were acted on may come again: %s", describe_error(error))

    async def _hints(self, wait_s: float) -> list[Attempt]:
        async with asyncio.timeout(wait_s + self._config.call_timeout_s):
            return await self._transport.hints(self._config.exp_id, wait_s)

    async def _acknowledge(self) -> None:
        """What is not acknowledged now is the next time."""
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
        """Wake whoever waits. What was decided before is ours to acknowledge; the rest is somebody else's."""
        for attempt in hinted:
            if running := self.running.get(attempt.session_id):
                running.news.set()
            elif await asyncio.to_thread(self._run_state.has_attempt, attempt):
                self.used.append(attempt)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._hearing:
                    await self._acknowledge()
                    await self._sort(await self._hints(HINT_WAIT_S))
            except Exception as error:
                log.warning("no hints (%s); sweeps find what they would tell", describe_error(error))
                await asyncio.sleep(self._config.poll_interval_s)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEPING * self._config.poll_interval_s)
            waiting = [r.waiting for s, r in self.running.items() if r.launched and self._asked("sweep", s)]
            try:
                answers, spoiled = await self._storing.call_in_batches(
                    self._transport.sweep, waiting, self._config.call_timeout_s
                )
            except Exception as error:
                log.warning("the store was not swept: %s", describe_error(error))
                continue
            self._set_apart("sweep", [one.attempt.session_id for one in spoiled])
            for attempt in (attempt for found in answers for attempt in found):
                if running := self.running.get(attempt.session_id):
                    running.news.set()

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
                    running.news.set()
                if running.progress.ended_at is not None:
                    running.news.set()
                lives = session_id in alive
                if failure := overdue_failure(
                    self._config.deadlines, running.progress, state, now, lives=lives
                ):
                    running.give_up(failure)

    async def _alive(self, states: dict[str, SessionState]) -> set[str]:
        """Those whose SDK is silent, and whose runtime knows that they run: busy is not dead."""
        if not self._runtime.capabilities.tells_end:
            return set()
        silent = [
            running
            for session_id, running in self.running.items()
            if heartbeat_lost(self._config.deadlines, running.progress, states.get(session_id))
        ]
        phases = await asyncio.gather(*map(self._phase, silent))
        there = (Phase.STARTING, Phase.RUNNING)
        return {r.session_id for r, phase in zip(silent, phases, strict=True) if phase in there}

    async def _phase(self, running: RunningAttempt) -> Phase:
        try:
            async with asyncio.timeout(self._config.deadlines.heartbeat_timeout_s):
                return (await self._runtime.status(running.place)).phase
        except Exception as error:
            log.warning(
                "%s: its runtime cannot say whether it runs: %s", running.session_id, describe_error(error)
            )
            return Phase.UNKNOWN

    def _asked(self, what: str, session_id: str) -> bool:
        """False while the session is left out of questions about many."""
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
        """Agents could not work without their gateway: that time is not theirs."""
        for running in attempts:
            if running.progress.launched_at is not None:
                running.progress.launched_at += seconds

    def _excuse_apart(self, seconds: float) -> None:
        """Nor could one whose session alone the gateway says nothing of; up to patience, in all."""
        apart = [r for s, r in self.running.items() if ("states", s) in self._apart]
        apart = [running for running in apart if running.excused_s < self._config.unavailable_timeout_s]
        for running in apart:
            running.excused_s += seconds
        self._excuse(apart, seconds)

    async def _states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """What the gateway says; nothing when it is silent, and an Outage when it is for too long."""
        clock = asyncio.get_running_loop().time
        began, limit_s = clock(), LOOKS * self._config.watch_interval_s
        found: dict[str, SessionState] = {}
        asked = [session_id for session_id in session_ids if self._asked("states", session_id)]
        try:
            for first in range(0, len(asked), AT_A_LOOK):
                batch = asked[first : first + AT_A_LOOK]
                answers, spoiled = await self._asking.call_in_batches(self._gateway.states, batch, limit_s)
                self._set_apart("states", spoiled)
                for answer in answers:
                    found |= answer
            self._silent_since = None
        except Exception as error:
            if self._silent_since is None:
                self._silent_since = began
                log.warning("the sessions cannot be looked at: %s", describe_error(error))
            silent_s = clock() - self._silent_since
            if silent_s > self._config.unavailable_timeout_s:
                told = f"the gateway does not answer for {silent_s:.0f} s: {describe_error(error)}"
                raise Outage(f"{told}; see that it runs, and go on where it was") from error
        return found
