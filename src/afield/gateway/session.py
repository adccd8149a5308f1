"""One session in memory: its phase, budget, forest, and what is told of it.

Counts and sums are kept up as calls end, so that telling a state walks over nothing. A session that is
over leaves its tally in its row, and is then told of without reading its turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Self

from afield import trajectories
from afield.exclusions import ExclusionReason
from afield.gateway import constraints, outcomes, repeats, side_calls
from afield.gateway.api_error import budget_exhausted, conflict
from afield.gateway.message_cache import Memo
from afield.gateway.request_cache import Recall
from afield.gateway.store import SessionRow, Tally, TurnRow
from afield.interfaces import SessionState
from afield.turn_tree import TurnTree
from afield.types import Turn, TurnStatus

UNDELIVERED = ExclusionReason.UNDELIVERED
ENGINE_FAILED = "engine-failed"  # tag of a call that the engine broke: it is not held against the budget


class Phase(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FINALIZED = "finalized"


class Session:
    """One session in memory, the same object for everyone who asks.

    What is stored changes under `lock` (see `Sessions`); the rest only on the event loop, in one go.
    `closed` comes before the phase that is stored: from then on no call is taken. `sealed` comes before its
    record is taken: from then on nothing that goes into the record is written.
    """

    def __init__(
        self,
        row: SessionRow,
        rows: list[TurnRow],
        clock: Callable[[], float] = time.time,
        waited_s: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self.row = row
        self._clock = clock
        self._waited_s = waited_s
        self.lock = asyncio.Lock()
        self.closed = row.phase != Phase.OPEN
        self.deleted = False
        self.rows = {r.n: r for r in rows}
        self.forest = TurnTree(r.turn for r in rows if r.turn.status is not TurnStatus.DANGLING)
        self.calls = max(self.rows, default=0)
        self.charged = sum(ENGINE_FAILED not in r.turn.tags for r in rows)
        self.commits = max((r.seq for r in rows if r.turn.status is not TurnStatus.DANGLING), default=0)
        self.unsupported = row.tally.unsupported if row.tally else ""
        self.last_activity = max([row.created, *(r.turn.ended or r.turn.started for r in rows)])
        # Before a restart, nobody knows whether these reached their clients; who asks again gets them.
        self.unsure = {turn.id for turn in self.forest.leaves if turn.status is TurnStatus.COMMITTED}
        self.recall = Recall()
        self.memo = Memo()
        self.images: set[str] = set()  # digests of those that the store has for sure
        self.texts: set[str] = set()  # digests of shared texts that are stored
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.body_bytes = 0  # of requests that are read or answered now
        self.running: set[int] = set()
        self._begun = {r.n for r in rows if r.turn.status is TurnStatus.DANGLING}
        # Not before we looked: while no gateway ran, nobody could call.
        self._quiet_since = clock()
        self._seen: float | None = None
        self.flights: dict[str, asyncio.Future[None]] = {}
        self._keys = {r.turn.id: r.idempotency_key for r in rows if r.idempotency_key}
        self._threads = {r.turn.id: r.thread for r in rows if r.thread}
        self.changed = asyncio.Event()
        self.prompt_tokens = sum(_prompt_length(self.forest, t) for t in self.forest.turns)
        self.sampled_tokens = sum(len(r.turn.token_ids) for r in rows)
        self._reserved = 0  # tokens that running calls may still sample
        self._released = asyncio.Event()
        self.sealed = row.phase == Phase.FINALIZED
        self._writes = 0
        self._written = asyncio.Event()
        self._versions: tuple[int, int] | None = None
        self._excluded: tuple[int, dict[str, str] | None, dict[str, int]] = 0, None, {}
        for turn in self.forest.turns:
            self._widen(turn)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def phase(self) -> Phase:
        return Phase(self.row.phase)

    @property
    def dangling(self) -> int:
        """Calls that have no end and do not run."""
        return len(self._begun - self.running)

    @property
    def undelivered(self) -> list[str]:
        return [turn for turn, reason in self.row.withheld.items() if reason == UNDELIVERED]

    def excluded_turns(self, row: SessionRow | None = None) -> dict[str, str]:
        """Committed turns that are not trained, and why: side calls, and what the record shows."""
        row = row or self.row
        unused = repeats.excluded(self.forest, row.spec.abandoned_answers, row.withheld)
        held = constraints.excluded(self.forest.turns) if row.spec.constrained_turns == "exclude" else {}
        recorded = held | unused | row.withheld
        return side_calls.excluded_turns(self.forest.turns, recorded, row.spec.side_calls) | recorded

    @property
    def excluded(self) -> dict[str, int]:
        """Tokens kept out of the loss, by reason; counted anew when a call or a reason has come since."""
        turns, withheld, counts = self._excluded
        if turns != len(self.forest) or withheld is not self.row.withheld:
            counts = self.excluded_in(self.row)
            self._excluded = len(self.forest), self.row.withheld, counts
        return counts

    def excluded_in(self, row: SessionRow) -> dict[str, int]:
        """The same as it is, or will be, with this row."""
        tokens: Counter[str] = Counter()
        for exclusion in trajectories.exclusions(self.forest, self.excluded_turns(row)):
            tokens[exclusion.reason] += exclusion.tokens
        return dict(+tokens)

    @property
    def quiet_s(self) -> float:
        """How long no call has run; time in which no gateway ran does not count."""
        return 0.0 if self.in_flight else max(0.0, self._clock() - self._quiet_since)

    def alive(self) -> None:
        """The agent's SDK gave a sign of life."""
        self._seen = self._clock()

    def enters(self, task: asyncio.Task[Any]) -> None:
        """A request for a model call is being answered from now on, by this task."""
        self.in_flight.add(task)
        self._stirs()

    def leaves(self, task: asyncio.Task[Any]) -> None:
        self.in_flight.discard(task)
        self._stirs()

    def _stirs(self) -> None:
        self._quiet_since = now = self._clock()
        if self._seen is not None:
            self._seen = now

    def key_of(self, turn_id: str) -> str:
        """The idempotency key of the request that a turn answered."""
        return self._keys.get(turn_id, "")

    def keyed(self, key: str) -> set[str]:
        """The turns that answered requests with this idempotency key."""
        return {turn_id for turn_id, other in self._keys.items() if other == key} if key else set()

    def thread_of(self, turn_id: str) -> str:
        return self._threads.get(turn_id, "")

    def takes_off(self, key: str) -> asyncio.Future[None] | None:
        """A call begins. Whoever repeats it, by its idempotency key, may wait for it to land."""
        return self.flights.setdefault(key, asyncio.get_running_loop().create_future()) if key else None

    def lands(self, key: str, flight: asyncio.Future[None] | None) -> None:
        if flight is None:
            return
        if not flight.done():
            flight.set_result(None)
        if self.flights.get(key) is flight:
            del self.flights[key]

    def expired(self, now: float) -> bool:
        ttl = self.row.spec.ttl_s
        return ttl is not None and now > self.row.created + ttl

    def check_open(self, now: float) -> None:
        if self.closed:
            phase = self.phase if self.phase is not Phase.OPEN else "being closed"
            raise conflict(f"session {self.id} is {phase}", "open a new session for another attempt")
        if self.expired(now):
            raise conflict(f"session {self.id} has expired after {self.row.spec.ttl_s} s", "open a new one")

    async def reserve(self, tokens: int, clock: Callable[[], float]) -> int:
        """Wait until the budget has as many tokens for a call as it would have with no other call running, at
        most so many, before any is sampled. Gives how many; `reserved` takes them."""
        limit = self.row.spec.budget.tokens
        if limit is None:
            return tokens
        while True:
            left = limit - self.sampled_tokens
            room = min(tokens, left)
            if self._reserved + room <= left or not self._reserved:
                return room
            self._released.clear()
            await self._released.wait()
            self.check_open(clock())

    def reserved(self, tokens: int) -> Reservation:
        self._reserved += tokens
        return Reservation(self, tokens)

    def release(self, tokens: int) -> None:
        """So many that were reserved are not going to be sampled."""
        self._reserved -= tokens
        self._released.set()

    def charge(self, now: float) -> int:
        """Take a call from the budget; gives its number. Checked and taken in one go."""
        self.check_open(now)
        budget = self.row.spec.budget
        if budget.calls is not None and self.charged >= budget.calls:
            raise budget_exhausted(f"session {self.id} has used its budget of {budget.calls} calls")
        if self.out_of_tokens:
            raise budget_exhausted(f"session {self.id} has used its budget of {budget.tokens} tokens")
        if budget.wall_s is not None and now > self.row.created + budget.wall_s + self._excused(
            budget.wall_s
        ):
            raise budget_exhausted(f"session {self.id} has used its {budget.wall_s} s of wall time")
        self.calls += 1
        self.charged += 1
        self.last_activity = now
        return self.calls

    def _excused(self, wall_s: float) -> float:
        """Time in line is not the agent's, up to as much again: the rule of a collector's deadlines."""
        return min(self._waited_s(self.id), wall_s)

    def spend(self, tokens: int, now: float) -> None:
        """Tokens that were reserved are sampled."""
        self.sampled_tokens += tokens
        self._reserved -= tokens
        self.last_activity = now

    @property
    def out_of_tokens(self) -> bool:
        limit = self.row.spec.budget.tokens
        return limit is not None and self.sampled_tokens >= limit

    def intend(self, row: TurnRow) -> None:
        """A call is about to be made, and that is durable."""
        self.rows[row.n] = row
        self._begun.add(row.n)

    def record(self, row: TurnRow) -> None:
        """A call has ended and is durable."""
        self.forest.add(row.turn)
        self.rows[row.n] = row
        if row.idempotency_key:
            self._keys[row.turn.id] = row.idempotency_key
        if row.thread:
            self._threads[row.turn.id] = row.thread
        self._begun.discard(row.n)
        self._widen(row.turn)
        self.prompt_tokens += _prompt_length(self.forest, row.turn)
        self.last_activity = row.turn.ended or self.last_activity

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A turn is being written; whoever seals the session waits for that."""
        self._writes += 1
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._written.set()

    def check_unsealed(self) -> None:
        if self.sealed:
            why = "its turn is not recorded: the record of the session has been taken"
            raise conflict(f"session {self.id} was finalized while this call ran", why)

    async def seal(self) -> None:
        """What is written from now on comes too late for the record, and is refused."""
        self.sealed = True
        while self._writes:
            self._written.clear()
            await self._written.wait()

    def _widen(self, turn: Turn) -> None:
        for span in turn.versions:
            low, high = self._versions or (span.low, span.high)
            self._versions = min(low, span.low), max(high, span.high)

    def tally(self) -> Tally | None:
        """What was done in it, once nothing more can be; None while a call may still end."""
        if not self.closed or self.in_flight or self.running:
            return None
        return self._tally()

    def _tally(self) -> Tally:
        return Tally(
            calls=self.calls,
            turns=len(self.forest),
            branches=self.forest.branches,
            prompt=self.prompt_tokens,
            sampled=self.sampled_tokens,
            dangling=self.dangling,
            versions=self._versions,
            last_activity=self.last_activity,
            excluded=self.excluded,
            unsupported=self.unsupported,
        )

    def state(self) -> SessionState:
        now = self._clock()
        return state_of(
            self.row,
            self._tally(),
            in_flight=len(self.in_flight),
            idle_s=0.0 if self.in_flight else max(0.0, now - self._quiet_since),
            unseen_s=None if self._seen is None else max(0.0, now - self._seen),
            waited_s=self._waited_s(self.id),
        )


class Reservation:
    """Tokens of a session's budget that one call may sample."""

    __slots__ = ("_session", "left")

    def __init__(self, session: Session, tokens: int) -> None:
        self._session = session
        self.left = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def spend(self, tokens: int, now: float) -> None:
        self._session.spend(tokens, now)
        self.left -= tokens

    def release(self) -> None:
        """What was not sampled is there for others again. Repeating changes nothing."""
        left, self.left = self.left, 0
        self._session.release(left)


def state_of(row: SessionRow, tally: Tally, **now: Any) -> SessionState:
    spec = row.spec
    return SessionState(
        id=row.id,
        phase=row.phase,
        rollout_id=spec.rollout_id,
        attempt=spec.attempt,
        group_id=spec.group_id,
        calls=tally.calls,
        turns=tally.turns,
        branches=tally.branches,
        tokens={"prompt": tally.prompt, "sampled": tally.sampled},
        excluded=tally.excluded,
        dangling=tally.dangling,
        versions=tally.versions,
        rewards=list(row.rewards),
        graded=outcomes.graded(row),
        failed_verdicts=tuple(failed.failure for failed in row.failed_verdicts),
        created=row.created,
        last_activity=tally.last_activity,
        unsupported=tally.unsupported,
        **now,
    )


def _prompt_length(forest: TurnTree, turn: Turn) -> int:
    return forest.length(turn.id) - len(turn.token_ids)
