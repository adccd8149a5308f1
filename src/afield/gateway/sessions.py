"""Sessions: their phases, budgets, rewards and forests.

A session is made by `open` and by nothing else. It is `open` until it is completed or aborted, and
`finalized` once its record has been taken. Every change is durable before it is answered. A session
that is over leaves memory; the store gives it back when somebody asks, also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from afield.errors import Conflict, NotFound
from afield.gateway import outcomes
from afield.gateway.api_error import conflict
from afield.gateway.outcomes import USUAL, Limits, Statement, Turns
from afield.gateway.session import UNDELIVERED, Phase, Session, state_of
from afield.gateway.shards import Shard
from afield.gateway.store import Delivery, FailedVerdict, SessionRow, Store, TurnRow, shield_and_wait
from afield.interfaces import SessionSpec, SessionState
from afield.types import TurnStatus, check_id

RESERVED = "states"
ENDING_S = 10.0
log = logging.getLogger("afield.gateway")
PRUNED_AT_ONCE = 10_000


def _new_id() -> str:
    return f"s-{uuid.uuid4().hex}"


def turns_of(session: Session) -> Turns:
    rows = sorted(session.rows.values(), key=lambda row: (row.seq, row.n))
    answered = (row.turn.id for row in rows if row.turn.status is TurnStatus.COMMITTED)
    return Turns(
        known=dict.fromkeys(row.turn.id for row in rows),
        answered=tuple(answered),
        running=len(session.running),
    )


class Sessions:
    """All sessions of a store."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        shard: Shard | None = None,
        *,
        delivers: bool = False,
        left: Callable[[str], None] = lambda _: None,
        waited_s: Callable[[str], float] = lambda _: 0.0,
        limits: Limits = USUAL,
        ending_s: float = ENDING_S,
    ) -> None:
        """`delivers`: outcomes go on to a store of outcomes, and are marked as due for that.

        `left` is told the id of a session that is over, as often as it is; `waited_s` says how long one has
        stood in line. `ending_s` is how long calls may take to end when their session does.
        """
        self._ending_s = ending_s
        self._store = store
        self._delivers = delivers
        self._left = left
        self._waited_s = waited_s
        self._limits = limits
        self._clock = clock
        self._shard = shard
        self._live: dict[str, Session] = {}
        self._known: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self._opening: dict[str, asyncio.Task[Session]] = {}

    def __len__(self) -> int:
        """How many are held in memory: the open ones."""
        return len(self._live)

    async def open(self, spec: SessionSpec, opened_by: str = "") -> tuple[Session, bool]:
        """The session, and whether it is new. `opened_by` is the header key that it is opened by."""
        session_id = spec.id or (self._shard.own_id(_new_id) if self._shard else _new_id())
        check_id(session_id, "session id")
        if session_id == RESERVED:
            raise ValueError(f"session id {session_id!r} is the name of a route; choose another")
        while session_id in self._opening:
            await asyncio.wait([self._opening[session_id]])
        known = self.find(session_id)
        if known is not None:
            if (known.row.spec, known.row.opened_by) != (structs.replace(spec, id=session_id), opened_by):
                raise Conflict(f"session {session_id} exists with another specification")
            return known, False
        row = SessionRow(
            id=session_id,
            spec=structs.replace(spec, id=session_id),
            phase=Phase.OPEN,
            created=self._clock(),
            nonce=secrets.token_hex(4),
            opened_by=opened_by,
        )
        opening = self._opening[session_id] = asyncio.create_task(self._create(row))
        return await shield_and_wait(opening), True

    async def _create(self, row: SessionRow) -> Session:
        """Opens of different ids wait together: the store writes them as one group."""
        try:
            await self._store.put_session(row)
            session = self._known.get(row.id) or self._session(row, [])  # written rows are there for all
            self._live[row.id] = self._known[row.id] = session
            return session
        finally:
            del self._opening[row.id]

    def get(self, session_id: str) -> Session:
        session = self.find(session_id)
        if session is None:
            raise NotFound(f"there is no session {session_id!r}; POST /sessions makes one")
        return session

    def states(self, session_ids: Iterable[str]) -> dict[str, SessionState]:
        """Of those that are known. One that is over is told from its row, wherever that says enough."""
        now = self._clock()
        states: dict[str, SessionState] = {}
        for session_id in session_ids:
            session = self._known.get(session_id)
            row = None if session else self._store.session(session_id)
            if row and row.tally:
                idle_s = max(0.0, now - row.tally.last_activity)
                states[session_id] = state_of(row, row.tally, idle_s=idle_s)
            elif session or row:
                states[session_id] = self.get(session_id).state()
        return states

    def find(self, session_id: str) -> Session | None:
        if session := self._known.get(session_id):
            return session
        row = self._store.session(session_id)
        if row is None:
            return None
        session = self._known[session_id] = self._session(row, self._store.turns(session_id))
        if not session.closed:
            self._live[session_id] = session
        return session

    def _session(self, row: SessionRow, rows: list[TurnRow]) -> Session:
        return Session(row, rows, self._clock, self._waited_s)

    async def reward(self, session: Session, entry: dict[str, Any]) -> None:
        """Take a reward. The same again is fine; another value for the same name and turn is refused."""
        async with session.lock:
            rewards = outcomes.with_rewards(session.row, [entry], turns_of(session), self._limits)
            if rewards != session.row.rewards:
                await self._save(session, rewards=rewards)

    async def complete(self, session: Session, metrics: dict[str, float]) -> None:
        if session.phase is Phase.ABORTED:
            raise conflict(f"session {session.id} is aborted")
        session.closed = True
        async with session.lock:
            if session.phase is Phase.OPEN:
                await self._save(session, phase=Phase.COMPLETED, metrics=metrics, tally=session.tally())
        self._leave(session)

    async def abort(self, session: Session, reason: str) -> None:
        """No more calls; those in flight end now and leave their partials."""
        session.closed = True
        async with session.lock:
            if session.phase is Phase.OPEN:
                changes = {"reason": reason, "tally": session.tally()}
                await self._save(session, phase=Phase.ABORTED, **changes)
        await self._end_calls(session)
        if session.phase is Phase.ABORTED and session.row.tally is None and (tally := session.tally()):
            async with session.lock:
                await self._save(session, tally=tally)
        self._leave(session)

    async def finalize(self, session: Session) -> None:
        """No more calls. One that cannot be ended in time stays without an end, and its turn is not recorded
        afterwards: the record that is taken now is the only one."""
        session.closed = True
        await self._end_calls(session)
        await session.seal()
        async with session.lock:
            if session.phase is not Phase.FINALIZED:
                await self._save(session, phase=Phase.FINALIZED, tally=session.tally())
        self._leave(session)

    async def delete(self, session: Session) -> None:
        await self.abort(session, "deleted")
        async with session.lock:
            await shield_and_wait(self._store.delete_session(session.id))
            session.deleted = True
            self._known.pop(session.id, None)  # not before: whoever asks meanwhile would load it again

    async def withhold(self, session: Session, turn_id: str, reason: str = UNDELIVERED) -> None:
        """Keep a turn out of the loss: its client left before it got the end of it, for one."""
        async with session.lock:
            committed = session.forest[turn_id].status is TurnStatus.COMMITTED
            if committed and not session.sealed and turn_id not in session.row.withheld:
                await self._save(session, withheld={**session.row.withheld, turn_id: reason})

    async def delete_response(self, session: Session, turn_id: str) -> None:
        """Show it to the client no more. The turn stays in the record."""
        async with session.lock:
            before = session.row.deleted_responses
            if turn_id not in before:
                await self._save(session, deleted_responses=(*before, turn_id))

    async def redeliver(self, session: Session, turn_id: str) -> bool:
        """Whether this caller is the one to hand out a turn that its client missed."""
        if session.row.withheld.get(turn_id) != UNDELIVERED:
            return False
        async with session.lock:
            if session.sealed or session.row.withheld.get(turn_id) != UNDELIVERED:
                return False
            before = session.row.withheld
            try:
                await self._save(session, withheld={i: why for i, why in before.items() if i != turn_id})
            except asyncio.CancelledError:
                await self._save(session, withheld=before)
                raise
            return True

    async def record_outcome(self, session: Session, statement: Statement, *, verdict: bool) -> None:
        """What the agent, or its verifier, says came of the work. The same again is fine; another is refused.

        Rewards, outcome and the end of the session are one write, with the mark that the outcome is due.
        """
        what = "verdict" if verdict else "outcome"
        async with session.lock:
            known = getattr(session.row, what)
            if known not in (None, statement.said):
                raise conflict(f"session {session.id} already has another {what}", "the first one counts")
            failed = outcomes.failed_verdict(session.row, statement) if verdict and known is None else None
            if failed:
                await self._note_failed(session, failed)
                return
            if known is None:
                self._check_settles(session, what)
                rewards = outcomes.with_rewards(
                    session.row, statement.entries, turns_of(session), self._limits
                )
                session.closed = True
                changes: dict[str, Any] = {what: statement.said, "settled": self._clock()}
                if session.phase is Phase.OPEN:
                    changes |= {
                        "phase": Phase.COMPLETED,
                        "metrics": statement.metrics,
                        "tally": session.tally(),
                    }
                await self._save(session, rewards=rewards, **changes)
        self._leave(session)

    async def _note_failed(self, session: Session, failed: FailedVerdict) -> None:
        """A verifier could not grade, and another is tried: nothing is decided."""
        before = session.row.failed_verdicts
        if failed not in before:
            self._check_settles(session, "verdict")
            await self._save(session, failed_verdicts=(*before, failed))

    def _check_settles(self, session: Session, what: str) -> None:
        if session.phase is Phase.FINALIZED:
            raise conflict(f"session {session.id} is finalized", f"an {what} comes before finalize")
        if session.phase is Phase.ABORTED and not (self._delivers and outcomes.addressed(session.row)):
            raise conflict(f"session {session.id} is aborted")
        if session.row.delivery:
            raise conflict(f"session {session.id} already has an outcome", "the first one counts")

    async def delivered(self, session: Session, delivery: Delivery) -> None:
        async with session.lock:
            if not session.deleted:
                await self._save(session, delivery=delivery)

    async def reap(self) -> int:
        """End the sessions that have outlived their time; says how many."""
        now = self._clock()
        expired = [session for session in self._live.values() if session.expired(now)]
        for session in expired:
            await self.abort(session, f"expired after {session.row.spec.ttl_s} s")
        return len(expired)

    async def prune(self, keep_s: float, at_most: int = PRUNED_AT_ONCE) -> int:
        """Remove sessions from the store that began `keep_s` ago and are over; says how many.

        One whose outcome is still due elsewhere stays, and so does one that somebody uses now.
        """
        ended = self._store.ended_before(self._clock() - keep_s, at_most)
        removable = [
            session_id
            for session_id in ended
            if session_id not in self._known and (self._shard is None or self._shard.owns(session_id))
        ]
        await shield_and_wait(self._store.delete_sessions(removable))
        return len(removable)

    async def close(self) -> None:
        """The gateway stops: calls that still run end now, with their partials kept."""
        await asyncio.gather(*(self._end_calls(session) for session in list(self._known.values())))

    def _leave(self, session: Session) -> None:
        self._live.pop(session.id, None)
        self._left(session.id)

    async def _end_calls(self, session: Session) -> None:
        tasks = [task for task in session.in_flight if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=self._ending_s)
            if left:
                told = "session %s: %d calls do not end within %g s"
                log.error(told, session.id, len(left), self._ending_s)

    async def _save(self, session: Session, **changes: Any) -> None:
        """Under the session's lock: what is stored and what is in memory change together."""
        if session.deleted:
            raise NotFound(f"session {session.id} was deleted")
        row = structs.replace(session.row, **changes)
        if row.tally is not None and "withheld" in changes:
            row = structs.replace(row, tally=structs.replace(row.tally, excluded=session.excluded_in(row)))
        if self._delivers and not row.delivery and outcomes.due(row):
            row = structs.replace(row, delivery=Delivery.DUE)
        await shield_and_wait(self._put(session, row))

    async def _put(self, session: Session, row: SessionRow) -> None:
        await self._store.put_session(row)
        session.row = row
        changed, session.changed = session.changed, asyncio.Event()
        changed.set()
