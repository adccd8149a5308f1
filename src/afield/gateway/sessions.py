"""Sessions: their phases, budgets, rewards and forests.

A session is made by `open` and by nothing else. It is `open` until it is completed or aborted, and
`finalized` once its record has been taken. Every change is durable before it is answered. A session
that is over leaves memory; the store gives it back when somebody asks, also after a restart.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
import weakref
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec import structs

from afield.errors import Conflict, Missing
from afield.forest import Forest
from afield.gateway.memo import Memo
from afield.gateway.recall import Recall
from afield.gateway.refusal import Refusal, budget_exhausted, conflict
from afield.gateway.shards import Shard
from afield.gateway.store import SessionRow, Store, TurnRow, to_its_end
from afield.seams import SessionSpec, SessionState
from afield.types import Turn, TurnStatus, check_id

UNDELIVERED = "undelivered"
SUPERSEDED = "superseded"
ENGINE_FAILED = "engine-failed"  # tag of a call that the engine broke: it is not held against the budget


class Phase(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FINALIZED = "finalized"


class Session:
    """One session in memory, the same object for everyone who asks.

    What is stored changes under `lock` (see `Sessions`); the rest only on the event loop, in one go.
    `closed` comes before the phase that is stored: from then on no call is taken.
    """

    def __init__(self, row: SessionRow, rows: list[TurnRow]) -> None:
        self.row = row
        self.lock = asyncio.Lock()
        self.closed = row.phase != Phase.OPEN
        self.deleted = False
        self.rows = {r.n: r for r in rows}
        self.forest = Forest(r.turn for r in rows if r.turn.status is not TurnStatus.DANGLING)
        self.calls = max(self.rows, default=0)
        self.charged = sum(ENGINE_FAILED not in r.turn.tags for r in rows)
        self.commits = max((r.seq for r in rows if r.turn.status is not TurnStatus.DANGLING), default=0)
        self.last_activity = max([row.created, *(r.turn.ended or r.turn.started for r in rows)])
        # Before a restart, nobody knows whether these reached their clients; who asks again gets them.
        self.unsure = {turn.id for turn in self.forest.leaves if turn.status is TurnStatus.COMMITTED}
        self.recall = Recall()
        self.memo = Memo()
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.flights: dict[tuple[str, int], asyncio.Future[None]] = {}
        self.changed = asyncio.Event()
        self.prompt_tokens = sum(_prompt_length(self.forest, t) for t in self.forest.turns)
        self.sampled_tokens = sum(len(r.turn.token_ids) for r in rows)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def phase(self) -> Phase:
        return Phase(self.row.phase)

    @property
    def dangling(self) -> int:
        return sum(r.turn.status is TurnStatus.DANGLING for r in self.rows.values())

    @property
    def undelivered(self) -> list[str]:
        return [turn for turn, reason in self.row.withheld.items() if reason == UNDELIVERED]

    def takes_off(self, key: tuple[str, int]) -> asyncio.Future[None]:
        """A call begins. Who asks the same again may wait for it to land."""
        flight: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return self.flights.setdefault(key, flight)

    def lands(self, key: tuple[str, int], flight: asyncio.Future[None]) -> None:
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

    def charge(self, now: float) -> int:
        """Take a call from the budget; gives its number. Checked and taken in one go."""
        self.check_open(now)
        budget = self.row.spec.budget
        if budget.calls is not None and self.charged >= budget.calls:
            raise budget_exhausted(f"session {self.id} has used its budget of {budget.calls} calls")
        if self.out_of_tokens:
            raise budget_exhausted(f"session {self.id} has used its budget of {budget.tokens} tokens")
        if budget.wall_s is not None and now > self.row.created + budget.wall_s:
            raise budget_exhausted(f"session {self.id} has used its {budget.wall_s} s of wall time")
        self.calls += 1
        self.charged += 1
        self.last_activity = now
        return self.calls

    def spend(self, tokens: int, now: float) -> None:
        """Tokens count when they are sampled, so that calls side by side share what is left."""
        self.sampled_tokens += tokens
        self.last_activity = now

    @property
    def out_of_tokens(self) -> bool:
        limit = self.row.spec.budget.tokens
        return limit is not None and self.sampled_tokens >= limit

    def record(self, row: TurnRow) -> None:
        """A call has ended and is durable."""
        self.forest.add(row.turn)
        self.rows[row.n] = row
        self.prompt_tokens += _prompt_length(self.forest, row.turn)
        self.last_activity = row.turn.ended or self.last_activity

    def state(self) -> SessionState:
        spans = [span for turn in self.forest.turns for span in turn.versions]
        spec = self.row.spec
        return SessionState(
            id=self.id,
            phase=self.row.phase,
            rollout_id=spec.rollout_id,
            attempt=spec.attempt,
            group_id=spec.group_id,
            calls=self.calls,
            turns=len(self.forest),
            branches=self.forest.branches,
            tokens={"prompt": self.prompt_tokens, "sampled": self.sampled_tokens},
            dangling=self.dangling,
            versions=(min(s.low for s in spans), max(s.high for s in spans)) if spans else None,
            rewards=list(self.row.rewards),
            created=self.row.created,
            last_activity=self.last_activity,
        )


def _new_id() -> str:
    return f"s-{uuid.uuid4().hex}"


def _prompt_length(forest: Forest, turn: Turn) -> int:
    return forest.length(turn.id) - len(turn.token_ids)


class Sessions:
    """All sessions of a store."""

    def __init__(self, store: Store, clock: Callable[[], float], shard: Shard | None = None) -> None:
        self._store = store
        self._clock = clock
        self._shard = shard
        self._live: dict[str, Session] = {}
        self._known: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self._opening = asyncio.Lock()

    def __len__(self) -> int:
        """How many are held in memory: the open ones."""
        return len(self._live)

    async def open(self, spec: SessionSpec) -> tuple[Session, bool]:
        """The session, and whether it is new."""
        session_id = spec.id or (self._shard.own_id(_new_id) if self._shard else _new_id())
        check_id(session_id, "session id")
        async with self._opening:
            known = self._find(session_id)
            if known is not None:
                if known.row.spec != structs.replace(spec, id=session_id):
                    raise Conflict(f"session {session_id} exists with another specification")
                return known, False
            row = SessionRow(
                id=session_id,
                spec=structs.replace(spec, id=session_id),
                phase=Phase.OPEN,
                created=self._clock(),
                nonce=secrets.token_hex(4),
            )
            await self._store.put_session(row)
            session = self._live[session_id] = self._known[session_id] = Session(row, [])
            return session, True

    def get(self, session_id: str) -> Session:
        session = self._find(session_id)
        if session is None:
            raise Missing(f"there is no session {session_id!r}; POST /sessions makes one")
        return session

    def list(self, phase: str | None, limit: int, after: str) -> list[SessionState]:
        return [self._look(i).state() for i in self._store.session_ids(phase, limit, after)]

    def _look(self, session_id: str) -> Session:
        """To read only: a session of another process is not taken into this one's memory."""
        if self._shard is None or self._shard.owns(session_id):
            return self.get(session_id)
        row = self._store.session(session_id)
        if row is None:
            raise Missing(f"there is no session {session_id!r}")
        return Session(row, self._store.turns(session_id))

    def _find(self, session_id: str) -> Session | None:
        if session := self._known.get(session_id):
            return session
        row = self._store.session(session_id)
        if row is None:
            return None
        session = self._known[session_id] = Session(row, self._store.turns(session_id))
        if not session.closed:
            self._live[session_id] = session
        return session

    async def reward(self, session: Session, entry: dict[str, Any]) -> None:
        """Take a reward. The same again is fine; another value for the same name and turn is refused."""
        value = entry["reward"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refusal(400, "invalid_request_error", f"reward {value!r} is not a finite number")
        entry = {**entry, "reward": (value := float(value))}
        async with session.lock:
            for known in session.row.rewards:
                if (known.get("name"), known.get("turn")) == (entry.get("name"), entry.get("turn")):
                    if known["reward"] != value:
                        has = f"session {session.id} already has reward {known['reward']}"
                        raise conflict(f"{has}, not {value}")
                    return
            if session.phase is Phase.FINALIZED:
                raise conflict(f"session {session.id} is finalized", "rewards come before finalize")
            kept = {key: entry[key] for key in ("reward", "name", "turn") if entry.get(key) is not None}
            await self._save(session, rewards=(*session.row.rewards, kept))

    async def complete(self, session: Session, metrics: dict[str, float]) -> None:
        if session.phase is Phase.ABORTED:
            raise conflict(f"session {session.id} is aborted")
        session.closed = True
        async with session.lock:
            if session.phase is Phase.OPEN:
                await self._save(session, phase=Phase.COMPLETED, metrics=metrics)
        self._live.pop(session.id, None)

    async def abort(self, session: Session, reason: str) -> None:
        """No more calls; those in flight end now and leave their partials."""
        session.closed = True
        async with session.lock:
            if session.phase is Phase.OPEN:
                await self._save(session, phase=Phase.ABORTED, reason=reason)
        await self._end_calls(session)
        self._live.pop(session.id, None)

    async def finalize(self, session: Session) -> None:
        session.closed = True
        await self._end_calls(session)
        async with session.lock:
            if session.phase is not Phase.FINALIZED:
                await self._save(session, phase=Phase.FINALIZED)
        self._live.pop(session.id, None)

    async def delete(self, session: Session) -> None:
        await self.abort(session, "deleted")
        async with session.lock:
            await to_its_end(self._store.delete_session(session.id))
            session.deleted = True
            self._known.pop(session.id, None)  # not before: whoever asks meanwhile would load it again

    async def withhold(self, session: Session, turn_id: str, reason: str = UNDELIVERED) -> None:
        """Keep a turn out of the loss: its client left before it got the end of it, for one."""
        async with session.lock:
            committed = session.forest[turn_id].status is TurnStatus.COMMITTED
            if committed and turn_id not in session.row.withheld:
                await self._save(session, withheld={**session.row.withheld, turn_id: reason})

    async def redeliver(self, session: Session, turn_id: str) -> bool:
        """Whether this caller is the one to hand out a turn that its client missed."""
        if session.row.withheld.get(turn_id) != UNDELIVERED:
            return False
        async with session.lock:
            if session.row.withheld.get(turn_id) != UNDELIVERED:
                return False
            before = session.row.withheld
            try:
                await self._save(session, withheld={i: why for i, why in before.items() if i != turn_id})
            except asyncio.CancelledError:
                await self._save(session, withheld=before)
                raise
            return True

    async def settle(self, session: Session, outcome: dict[str, Any]) -> None:
        """What the agent says came of its work. The same again is fine; another is refused."""
        async with session.lock:
            if session.row.outcome not in (None, outcome):
                raise conflict(f"session {session.id} already has another outcome", "the first one counts")
            if session.phase is Phase.FINALIZED and session.row.outcome is None:
                raise conflict(f"session {session.id} is finalized", "an outcome comes before finalize")
            if session.row.outcome is None:
                await self._save(session, outcome=outcome)

    async def reap(self) -> int:
        """End the sessions that have outlived their time; says how many."""
        now = self._clock()
        expired = [session for session in self._live.values() if session.expired(now)]
        for session in expired:
            await self.abort(session, f"expired after {session.row.spec.ttl_s} s")
        return len(expired)

    async def close(self) -> None:
        """The gateway stops: calls that still run end now, with their partials kept."""
        await asyncio.gather(*(self._end_calls(session) for session in list(self._known.values())))

    async def _end_calls(self, session: Session) -> None:
        tasks = [task for task in session.in_flight if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)

    async def _save(self, session: Session, **changes: Any) -> None:
        """Under the session's lock: what is stored and what is in memory change together."""
        if session.deleted:
            raise Missing(f"session {session.id} was deleted")
        await to_its_end(self._put(session, structs.replace(session.row, **changes)))

    async def _put(self, session: Session, row: SessionRow) -> None:
        await self._store.put_session(row)
        session.row = row
        changed, session.changed = session.changed, asyncio.Event()
        changed.set()
