"""How it is noticed that something happened to an attempt: hints, sweeps, and a look at the sessions.

A hint tells of a decision at once; a sweep finds those whose hints were lost; the gateway's view of the
sessions reveals agents that are dead, silent or late. All three only wake whoever waits: what is true
is read from the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager

from afield.deadlines import Progress, overdue
from afield.errors import Unavailable
from afield.ledger import Ledger
from afield.plan import Plan
from afield.seams import Exit, Gateway, SessionState, Transport, Waiting
from afield.types import Attempt, Failure, Rollout

log = logging.getLogger("afield.collect")

HINT_WAIT_S = 1.0
AT_A_LOOK = 5_000  # sessions in one question to the gateway
LOOKS = 10  # a gateway that has not answered when so many looks are due is silent
SWEEPING = 0.8  # of the sweep interval is slept; what it takes to look and to read is within it


class Running:
    """An attempt that is under way. `news` is set whenever there is a reason to look at it again.

    `place` is the name that its runtime knows it by.
    """

    def __init__(self, rollout: Rollout, attempt: Attempt, born: float, place: Attempt | None = None) -> None:
        self.waiting = Waiting(rollout, attempt)
        self.place = place or attempt
        self.progress = Progress(born=born)
        self.news = asyncio.Event()
        self.exit: Exit | None = None
        self.asked = False  # the runtime, to launch it
        self.judge: Attempt | None = None  # the name of the verifier that was launched for it
        self.verdict: Failure | None = None
        self.draw = attempt.session_id
        self._limit: asyncio.Timeout | None = None

    @property
    def launched(self) -> bool:
        return self.progress.launched is not None

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


class Noticer:
    """The attempts that run, by session id, and the hints that were acted on."""

    def __init__(self, plan: Plan, gateway: Gateway, transport: Transport, ledger: Ledger) -> None:
        self._plan = plan
        self._gateway = gateway
        self._transport = transport
        self._ledger = ledger
        self.running: dict[str, Running] = {}
        self.used: list[Attempt] = []
        self._until = 0.0
        self._silent_since: float | None = None  # the gateway

    def chores(self) -> tuple[Coroutine[None, None, None], ...]:
        """To be run for as long as anything is waited for."""
        return self._listen(), self._sweep(), self._watch()

    def inherit(self) -> None:
        """A collector before this one died, and may hold hints that come only when its lease has run out."""
        self._until = max(self._until, asyncio.get_running_loop().time() + self._transport.held_s)

    async def flush(self) -> None:
        """Acknowledge what was acted on, so that nothing of it is left behind."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                wait_s = max(0.0, min(HINT_WAIT_S, self._until - clock()))
                self._sort(await self._transport.hints(self._plan.exp_id, wait_s))
                used, self.used = self.used, []
                await self._transport.acknowledge(self._plan.exp_id, used)
                if clock() >= self._until:
                    return
        except Unavailable as error:
            log.warning("hints that were acted on may come again: %s", error)

    def _sort(self, hinted: Sequence[Attempt]) -> None:
        """Wake whoever waits. What was decided before is ours to acknowledge; the rest is somebody else's."""
        for attempt in hinted:
            if running := self.running.get(attempt.session_id):
                running.news.set()
            elif self._ledger.begun(attempt):
                self.used.append(attempt)

    async def _listen(self) -> None:
        while True:
            used, self.used = self.used, []
            try:
                if used:
                    await self._transport.acknowledge(self._plan.exp_id, used)
                hinted = await self._transport.hints(self._plan.exp_id, HINT_WAIT_S)
            except Unavailable as error:
                log.warning("no hints (%s); sweeps find what they would tell", error)
                self.used += used
                await asyncio.sleep(self._plan.sweep_s)
                continue
            self._sort(hinted)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEPING * self._plan.sweep_s)
            waiting = [r.waiting for r in self.running.values() if r.launched]
            try:
                found = await self._transport.sweep(waiting) if waiting else []
            except Unavailable as error:
                log.warning("the store was not swept: %s", error)
                continue
            for attempt in found:
                if running := self.running.get(attempt.session_id):
                    running.news.set()

    async def _watch(self) -> None:
        every = min(self._plan.watch_s, self._plan.deadlines.shortest / 2)
        clock = asyncio.get_running_loop().time
        looked = clock()
        while True:
            await asyncio.sleep(every)
            states = await self._states([s for s, r in self.running.items() if r.launched])
            now, before = clock(), looked
            looked = now
            if self._silent_since is not None:
                self._excuse(now - before)
            for session_id, running in list(self.running.items()):
                state = states.get(session_id)
                if state:
                    running.progress.look(state)
                if state and state.phase == "completed" and running.progress.completed is None:
                    running.progress.completed = now
                    running.news.set()
                if running.progress.ended is not None:
                    running.news.set()
                if failure := overdue(self._plan.deadlines, running.progress, state, now):
                    running.give_up(failure)

    def _excuse(self, seconds: float) -> None:
        """Agents could not work without their gateway: that time is not theirs."""
        for running in self.running.values():
            if running.progress.launched is not None:
                running.progress.launched += seconds

    async def _states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """What the gateway says; nothing when it is silent, and an error when it is for too long."""
        clock = asyncio.get_running_loop().time
        began = clock()
        found: dict[str, SessionState] = {}
        try:
            async with asyncio.timeout(LOOKS * self._plan.watch_s):
                for first in range(0, len(session_ids), AT_A_LOOK):
                    found |= await self._gateway.states(session_ids[first : first + AT_A_LOOK])
            self._silent_since = None
        except (Unavailable, TimeoutError) as error:
            if self._silent_since is None:
                self._silent_since = began
                log.warning("the sessions cannot be looked at: %s", error or "no answer")
            silent_s = clock() - self._silent_since
            if silent_s > self._plan.patience_s:
                told = f"the gateway does not answer for {silent_s:.0f} s: {error or 'it hangs'}"
                raise Unavailable(f"{told}; see that it runs, and go on where it was") from error
        return found
