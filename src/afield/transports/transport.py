"""The transport: a store that is the truth, and a notifier that only hints, behind the domain verbs.

Decisions are made by `put_if_absent` alone. Hints stay leased until they are acknowledged; one that
cannot be read, or that came too often, becomes a dead letter. A queue that does not answer is logged
and waited for: sweeps find everything without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Self, TypeVar

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.interfaces.transport import Fence, PendingAttempt
from afield.sdk import outcomes
from afield.transports import fences, hints
from afield.transports.notifiers.base import LEASE_S, Clearing, Leased, Notifier
from afield.transports.stores.base import Store
from afield.types import Attempt
from afield.wire import Hint, Invocation, OutcomeRecord

log = logging.getLogger("afield.transports")

FEW = 64
TIMES = 10
AWAY_S = 2.0
HELD_S = LEASE_S + 2.0
REMEMBERED = 50_000
SETTLED = 4_096  # a hint for one that is forgotten again is told once more, and acknowledged then
P = ParamSpec("P")
T = TypeVar("T")
Named = tuple[str, Attempt]


class _Held:
    """A leased message, and which attempts it still waits for."""

    def __init__(self, leased: Leased, about: set[Named]) -> None:
        self.leased = leased
        self.about = about


class StoreTransport:
    """`times`: a message handed out more often than this without being acknowledged is a dead letter."""

    def __init__(self, store: Store, notifier: Notifier, *, few: int = FEW, times: int = TIMES) -> None:
        self.store = store
        self.notifier = notifier
        self._few = few
        self._times = times
        self._pages = 0
        self._threads: ThreadPoolExecutor | None = None
        self._entered = False
        self._queue_lost = False
        self._held: OrderedDict[Named, _Held] = OrderedDict()
        self._settled: OrderedDict[Named, None] = OrderedDict()

    async def __aenter__(self) -> Self:
        if self.store.threads:
            self._threads = ThreadPoolExecutor(self.store.threads, thread_name_prefix="outcomes")
        self._entered = True
        try:
            await self._call(self.store.open)
            await self.notifier.__aenter__()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.notifier.__aexit__(*exc)
        finally:
            self._end()

    def _end(self) -> None:
        self._entered = False
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        self.store.close()

    async def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._entered:
            raise UsageError("a transport is used before 'async with' or after it")
        if self._threads is None:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))

    # --- the store ---------------------------------------------------------------------------------

    def address(self, exp_id: str) -> dict[str, Any]:
        return {**self.store.address, **self.notifier.address(exp_id)}

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        stands = await self._call(outcomes.deliver, self.store, invocation, record)
        if not stands:
            return False
        try:
            await self.notifier.send(invocation.exp_id, _hint(invocation.exp_id, invocation.session_id))
        except Unavailable as error:
            log.warning("no hint for %s (%s); it will be found by a sweep", invocation.session_id, error)
        return stands

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        return await self._call(fences.decision, self.store, waiting)

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        standing = await self._call(fences.fence, self.store, waiting, reason)
        await self.acknowledge(waiting.rollout.exp_id, [waiting.attempt])
        return standing

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        """Few are asked for one by one, all at once; many are looked up in a listing."""
        if self.store.page and len(waiting) > max(self._few, self._pages):
            return await self._call(self._listed, waiting)
        found = await asyncio.gather(
            *(self._call(fences.decidable, self.store, one) for one in waiting), return_exceptions=True
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one.attempt for one, there in zip(waiting, found, strict=True) if there]

    def _listed(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        keys: set[str] = set()
        for exp_id in {one.rollout.exp_id for one in waiting}:
            keys.update(self.store.list(f"{exp_id}/"))
        self._pages = len(keys) // self.store.page
        return [
            one.attempt
            for one in waiting
            if keys.intersection([fences.commit_key(one), *fences.result_keys(self.store, one)])
        ]

    async def late(self, exp_id: str) -> list[Attempt]:
        return await self._call(fences.late, self.store, exp_id)

    @property
    def held_s(self) -> float:
        return 0.0 if isinstance(self.notifier, Clearing) else HELD_S

    # --- the queue ---------------------------------------------------------------------------------

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            left = max(0.0, end - loop.time())
            try:
                leased = await self.notifier.lease(exp_id, left)
                attempts = [a for one in leased for a in await self._take(one, exp_id)]
                self._queue_lost = False
            except Unavailable as error:
                self._queue_is_lost(error)
                await asyncio.sleep(min(left, AWAY_S))
                attempts = []
            if attempts or loop.time() >= end:
                return list(dict.fromkeys(attempts))

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        done = [leased for attempt in attempts for leased in self._settle((exp_id, attempt))]
        try:
            await self.notifier.ack(done)
            if isinstance(self.notifier, Clearing):
                await self.notifier.clear(exp_id, [_hint(exp_id, attempt.session_id) for attempt in attempts])
        except Unavailable as error:
            self._queue_is_lost(error)

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        if not isinstance(self.notifier, Clearing):
            return []
        found: list[Attempt] = []
        for body in await self.notifier.bodies(exp_id):
            with contextlib.suppress(WireError):  # a dead letter when it is handed out
                found += [attempt for exp, attempt in hints.read(body) if exp == exp_id]
        return list(dict.fromkeys(found))

    async def _take(self, leased: Leased, exp_id: str) -> list[Attempt]:
        try:
            about = hints.read(leased.body)
        except WireError as error:
            await self._bury(leased, str(error))
            return []
        if any(exp != exp_id for exp, _ in about):
            # Soon, not at once: its owner gets it, and this one does not spin on it.
            await self.notifier.extend(leased, AWAY_S)
            about = [named for named in about if named[0] == exp_id]
            return [attempt for _, attempt in about]
        open_ = {named for named in about if named not in self._settled}
        if not open_:
            await self.notifier.ack([leased])
            return []
        if leased.times > self._times:
            await self._bury(leased, f"handed out {leased.times} times, never acknowledged")
            return [attempt for _, attempt in open_]
        held = _Held(leased, open_)
        for named in open_:
            self._held[named] = held
            self._held.move_to_end(named)
        while len(self._held) > REMEMBERED:
            self._held.popitem(last=False)
        return [attempt for _, attempt in open_]

    async def _bury(self, letter: Leased, reason: str) -> None:
        log.warning("a dead letter of %s: %s", letter.exp_id, reason)
        await self.notifier.dead(letter, reason)

    def _settle(self, named: Named) -> list[Leased]:
        """Nobody needs a hint for this one any more; gives back the message that waited for it alone."""
        self._settled[named] = None
        while len(self._settled) > SETTLED:
            self._settled.popitem(last=False)
        held = self._held.pop(named, None)
        if held is None:
            return []
        held.about.discard(named)
        return [] if held.about else [held.leased]

    def _queue_is_lost(self, error: Unavailable) -> None:
        if not self._queue_lost:
            log.warning("no hints for now (%s); sweeps find what they would tell", error)
        self._queue_lost = True


def _hint(exp_id: str, session_id: str) -> bytes:
    return wire.encode(Hint(exp_id=exp_id, session_id=session_id))
