"""StoreTransport: an outcome store for decisions and a notifier for hints.

1. Attempts are decided by `put_if_absent` of their commit in the store.
2. Hints are leased until they are acknowledged. A hint that cannot be read, or that was delivered too often,
   becomes a dead letter.
3. An unavailable queue is logged and retried; polling finds outcomes without it.
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
from afield.sdk.stores import deliver_to_store
from afield.transports import decisions
from afield.transports.notifiers.base import LEASE_S, ClearableNotifier, Leased, Notifier, read_message
from afield.transports.stores.base import CollectorStore
from afield.types import Attempt
from afield.wire import Hint, Invocation, OutcomeRecord

log = logging.getLogger(__name__)

SINGLE_READS = 64  # number of attempts up to which a sweep reads single keys instead of listing
MAX_DELIVERIES = 10
RETRY_S = 2.0
HELD_S = LEASE_S + 2.0
MAX_HELD = 50_000
MAX_ACKNOWLEDGED = 4_096  # a hint for a forgotten attempt is returned once more, then acknowledged
P = ParamSpec("P")
T = TypeVar("T")
ExperimentAttempt = tuple[str, Attempt]


class _Held:
    """Leased message with its attempts that are not acknowledged yet."""

    def __init__(self, leased: Leased, about: set[ExperimentAttempt]) -> None:
        self.leased = leased
        self.about = about


class StoreTransport:
    """Transport that combines a store and a notifier.

    `single_reads` is the number of attempts up to which a sweep reads single keys. A message delivered more
    than `max_deliveries` times without acknowledgement becomes a dead letter.
    """

    def __init__(
        self,
        store: CollectorStore,
        notifier: Notifier,
        *,
        single_reads: int = SINGLE_READS,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> None:
        self.store = store
        self.notifier = notifier
        self._single_reads = single_reads
        self._max_deliveries = max_deliveries
        self._pages = 0
        self._threads: ThreadPoolExecutor | None = None
        self._entered = False
        self._unavailable = False
        self._held: OrderedDict[ExperimentAttempt, _Held] = OrderedDict()
        self._acknowledged: OrderedDict[ExperimentAttempt, None] = OrderedDict()

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
            raise UsageError("the transport is not open; use it inside 'async with'")
        if self._threads is None:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args, **kwargs))

    # --- the store ---------------------------------------------------------------------------------

    def address(self, exp_id: str) -> dict[str, Any]:
        return {**self.store.address, **self.notifier.address(exp_id)}

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        stands = await self._call(deliver_to_store, self.store, invocation, record)
        if not stands:
            return False
        try:
            await self.notifier.send(invocation.exp_id, _hint(invocation.exp_id, invocation.session_id))
        except Unavailable as error:
            log.warning("hint: %s not sent: %s; polling finds the outcome", invocation.session_id, error)
        return stands

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        return await self._call(decisions.decision, self.store, waiting)

    async def commit_result(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        return await self._call(decisions.commit_result, self.store, waiting)

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        standing = await self._call(decisions.fence, self.store, waiting, reason)
        await self.acknowledge(waiting.rollout.exp_id, [waiting.attempt])
        return standing

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        """Read single keys concurrently for few attempts; list the store for many."""
        if self.store.page and len(waiting) > max(self._single_reads, self._pages):
            return await self._call(self._listed, waiting)
        decided = await asyncio.gather(
            *(self._call(decisions.decidable, self.store, pending) for pending in waiting),
            return_exceptions=True,
        )
        for result in decided:
            if isinstance(result, BaseException):
                raise result
        return [pending.attempt for pending, ok in zip(waiting, decided, strict=True) if ok]

    def _listed(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        keys: set[str] = set()
        for exp_id in {pending.rollout.exp_id for pending in waiting}:
            keys.update(self.store.list(f"{exp_id}/"))
        self._pages = len(keys) // self.store.page
        return [
            pending.attempt
            for pending in waiting
            if keys.intersection([decisions.commit_key(pending), *decisions.result_keys(self.store, pending)])
        ]

    async def late(self, exp_id: str) -> list[Attempt]:
        return await self._call(decisions.late, self.store, exp_id)

    @property
    def held_s(self) -> float:
        return 0.0 if isinstance(self.notifier, ClearableNotifier) else HELD_S

    # --- the queue ---------------------------------------------------------------------------------

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            left = max(0.0, end - loop.time())
            try:
                leased = await self.notifier.lease(exp_id, left)
                attempts = [a for lease in leased for a in await self._take(lease, exp_id)]
                self._unavailable = False
            except Unavailable as error:
                self._log_unavailable(error)
                await asyncio.sleep(min(left, RETRY_S))
                attempts = []
            if attempts or loop.time() >= end:
                return list(dict.fromkeys(attempts))

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        leases = [leased for attempt in attempts for leased in self._release((exp_id, attempt))]
        try:
            await self.notifier.ack(leases)
            if isinstance(self.notifier, ClearableNotifier):
                await self.notifier.clear(exp_id, [_hint(exp_id, attempt.session_id) for attempt in attempts])
        except Unavailable as error:
            self._log_unavailable(error)

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        if not isinstance(self.notifier, ClearableNotifier):
            return []
        attempts: list[Attempt] = []
        for body in await self.notifier.bodies(exp_id):
            with contextlib.suppress(WireError):  # becomes a dead letter when it is leased
                attempts += [attempt for exp, attempt in read_message(body) if exp == exp_id]
        return list(dict.fromkeys(attempts))

    async def _take(self, leased: Leased, exp_id: str) -> list[Attempt]:
        try:
            about = read_message(leased.body)
        except WireError as error:
            await self._move_to_dead(leased, str(error))
            return []
        if any(exp != exp_id for exp, _ in about):
            # A message of another experiment is returned after a pause, so that this loop does not spin.
            await self.notifier.extend(leased, RETRY_S)
            about = [pair for pair in about if pair[0] == exp_id]
            return [attempt for _, attempt in about]
        pending = {pair for pair in about if pair not in self._acknowledged}
        if not pending:
            await self.notifier.ack([leased])
            return []
        if leased.times > self._max_deliveries:
            await self._move_to_dead(leased, f"delivered {leased.times} times without acknowledgement")
            return [attempt for _, attempt in pending]
        held = _Held(leased, pending)
        for pair in pending:
            self._held[pair] = held
            self._held.move_to_end(pair)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)
        return [attempt for _, attempt in pending]

    async def _move_to_dead(self, letter: Leased, reason: str) -> None:
        log.warning("hint: %s dead letter: %s", letter.exp_id, reason)
        await self.notifier.dead(letter, reason)

    def _release(self, pair: ExperimentAttempt) -> list[Leased]:
        """Mark an attempt as acknowledged; returns the message if no other attempt waits for it."""
        self._acknowledged[pair] = None
        while len(self._acknowledged) > MAX_ACKNOWLEDGED:
            self._acknowledged.popitem(last=False)
        held = self._held.pop(pair, None)
        if held is None:
            return []
        held.about.discard(pair)
        return [] if held.about else [held.leased]

    def _log_unavailable(self, error: Unavailable) -> None:
        if not self._unavailable:
            log.warning("hints: queue unavailable: %s; polling finds outcomes", error)
        self._unavailable = True


def _hint(exp_id: str, session_id: str) -> bytes:
    return wire.encode(Hint(exp_id=exp_id, session_id=session_id))
