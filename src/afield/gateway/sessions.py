"""Sessions: phase, budget, turn tree and outcome, backed by the store.

Totals are updated when calls end, so that a state needs no walk over turns. The row of a closed session has
its totals.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Self

from msgspec import structs

from afield import trajectories
from afield.errors import Conflict, NotFound
from afield.gateway import constraints, outcomes, repeats, side_calls
from afield.gateway.api_error import ApiError, budget_exhausted, conflict
from afield.gateway.outcomes import DEFAULT_LIMITS, GatewayLimits, OutcomeReport, TurnNames
from afield.gateway.request_cache import ConversationCache, MessageCache
from afield.gateway.shards import Shard
from afield.gateway.store import (
    Delivery,
    FailedVerdict,
    GatewayStore,
    SessionRow,
    SessionTotals,
    TurnRow,
    shield_and_wait,
)
from afield.interfaces import SessionSpec, SessionState
from afield.runs.exclusions import ExclusionReason
from afield.runs.turn_facts import ENGINE_FAILED
from afield.turn_tree import TurnTree
from afield.types import RefusedCalls, Turn, TurnStatus, check_id

UNDELIVERED = ExclusionReason.UNDELIVERED
MAX_REFUSAL = 500
"""Characters of a refusal's message that are recorded."""


class SessionPhase(StrEnum):
    """Phase of a session."""

    OPEN = "open"
    """Accepts calls."""
    COMPLETED = "completed"
    """The agent has reported its end."""
    ABORTED = "aborted"
    """Ended by an abort or an expired deadline."""
    FINALIZED = "finalized"
    """The record has been taken."""


class Session:
    """A session in memory, shared by all requests.

    Stored fields change while `lock` is held (see `SessionManager`), all others on the event loop.
    `closed` is set before the stored phase changes: no call starts afterwards. `sealed` is set before the
    record is taken: no turn is written afterwards.
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
        self.closed = row.phase != SessionPhase.OPEN
        self.deleted = False
        self.rows = {r.n: r for r in rows}
        self.tree = TurnTree(r.turn for r in rows if r.turn.status is not TurnStatus.DANGLING)
        self.calls = max(self.rows, default=0)
        self.charged = sum(ENGINE_FAILED not in r.turn.tags for r in rows)
        self.commits = max((r.seq for r in rows if r.turn.status is not TurnStatus.DANGLING), default=0)
        self.unsupported = row.totals.unsupported if row.totals else ""
        self._refused = {refused.code: refused for refused in (row.totals.refused if row.totals else ())}
        self.last_activity = max([row.created, *(r.turn.ended or r.turn.started for r in rows)])
        # After a restart it is unknown whether these were delivered; a repeated request gets them.
        self.maybe_undelivered = {turn.id for turn in self.tree.leaves if turn.status is TurnStatus.COMMITTED}
        self.conversation_cache = ConversationCache()
        self.message_cache = MessageCache()
        self.images: set[str] = set()  # digests of stored images
        self.texts: set[str] = set()  # digests of stored shared texts
        self.in_flight: set[asyncio.Task[Any]] = set()
        self.body_bytes = 0  # bytes of running requests
        self.running: set[int] = set()
        self._begun = {r.n for r in rows if r.turn.status is TurnStatus.DANGLING}
        # Time without a gateway does not count as idle.
        self._quiet_since = clock()
        self._seen: float | None = None
        self.keyed_calls: dict[str, asyncio.Future[None]] = {}
        self._keys = {r.turn.id: r.idempotency_key for r in rows if r.idempotency_key}
        self._threads = {r.turn.id: r.thread for r in rows if r.thread}
        self.changed = asyncio.Event()
        self.prompt_tokens = sum(_prompt_length(self.tree, t) for t in self.tree.turns)
        self.sampled_tokens = sum(len(r.turn.token_ids) for r in rows)
        self._reserved = 0  # tokens reserved by running calls
        self._released = asyncio.Event()
        self.sealed = row.phase == SessionPhase.FINALIZED
        self._writes = 0
        self._written = asyncio.Event()
        self._versions: tuple[int, int] | None = None
        self._excluded: tuple[int, dict[str, str] | None, dict[str, int]] = 0, None, {}
        for turn in self.tree.turns:
            self._widen(turn)

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def phase(self) -> SessionPhase:
        return SessionPhase(self.row.phase)

    @property
    def dangling(self) -> int:
        """Calls without an end that do not run."""
        return len(self._begun - self.running)

    @property
    def undelivered(self) -> list[str]:
        return [turn for turn, reason in self.row.excluded.items() if reason == UNDELIVERED]

    def excluded_turns(self, row: SessionRow | None = None) -> dict[str, str]:
        """Returns the excluded committed turns and their reasons."""
        row = row or self.row
        unused = repeats.excluded(self.tree, row.spec.abandoned_answers, row.excluded)
        constrained = constraints.excluded(self.tree.turns) if row.spec.constrained_turns == "exclude" else {}
        recorded = constrained | unused | row.excluded
        return side_calls.excluded_turns(self.tree.turns, recorded, row.spec.side_calls) | recorded

    @property
    def excluded(self) -> dict[str, int]:
        """Excluded tokens by reason; recomputed after a new call or reason."""
        turns, excluded, counts = self._excluded
        if turns != len(self.tree) or excluded is not self.row.excluded:
            counts = self.excluded_in(self.row)
            self._excluded = len(self.tree), self.row.excluded, counts
        return counts

    def excluded_in(self, row: SessionRow) -> dict[str, int]:
        """Returns the excluded tokens by reason for a row."""
        tokens: Counter[str] = Counter()
        for exclusion in trajectories.exclusions(self.tree, self.excluded_turns(row)):
            tokens[exclusion.reason] += exclusion.tokens
        return dict(+tokens)

    @property
    def idle_s(self) -> float:
        """Seconds without a running call, while a gateway ran."""
        return 0.0 if self.in_flight else max(0.0, self._clock() - self._quiet_since)

    def alive(self) -> None:
        """Records a heartbeat of the agent's SDK."""
        self._seen = self._clock()

    def request_started(self, task: asyncio.Task[Any]) -> None:
        """Records the task that responds to a model request."""
        self.in_flight.add(task)
        self._touch()

    def request_ended(self, task: asyncio.Task[Any]) -> None:
        self.in_flight.discard(task)
        self._touch()

    def _touch(self) -> None:
        self._quiet_since = now = self._clock()
        if self._seen is not None:
            self._seen = now

    def key_of(self, turn_id: str) -> str:
        """Returns the idempotency key of a turn's request."""
        return self._keys.get(turn_id, "")

    def keyed(self, key: str) -> set[str]:
        """Returns the turns of requests with an idempotency key."""
        return {turn_id for turn_id, other in self._keys.items() if other == key} if key else set()

    def thread_of(self, turn_id: str) -> str:
        return self._threads.get(turn_id, "")

    def begin_keyed_call(self, key: str) -> asyncio.Future[None] | None:
        """Starts a call with an idempotency key; repeated requests wait for its future."""
        return self.keyed_calls.setdefault(key, asyncio.get_running_loop().create_future()) if key else None

    def end_keyed_call(self, key: str, future: asyncio.Future[None] | None) -> None:
        if future is None:
            return
        if not future.done():
            future.set_result(None)
        if self.keyed_calls.get(key) is future:
            del self.keyed_calls[key]

    def expired(self, now: float) -> bool:
        ttl = self.row.spec.ttl_s
        return ttl is not None and now > self.row.created + ttl

    def check_open(self, now: float) -> None:
        if self.closed:
            phase = self.phase if self.phase is not SessionPhase.OPEN else "being closed"
            raise conflict(f"session {self.id} is {phase}", "open a new session for another attempt")
        if self.expired(now):
            raise conflict(f"session {self.id} has expired after {self.row.spec.ttl_s} s", "open a new one")

    async def reserve(self, tokens: int, clock: Callable[[], float]) -> int:
        """Waits until the token budget allows a call, and returns its number of tokens.

        The number is that of a session without other running calls, at most `tokens`. `reserved` reserves
        them.
        """
        limit = self.row.spec.budget.tokens
        if limit is None:
            return tokens
        while True:
            remaining = limit - self.sampled_tokens
            granted = min(tokens, remaining)
            if self._reserved + granted <= remaining or not self._reserved:
                return granted
            self._released.clear()
            await self._released.wait()
            self.check_open(clock())

    def reserved(self, tokens: int) -> Reservation:
        self._reserved += tokens
        return Reservation(self, tokens)

    def release(self, tokens: int) -> None:
        """Returns reserved tokens to the budget."""
        self._reserved -= tokens
        self._released.set()

    def charge(self, now: float) -> int:
        """Takes a call from the budget and returns its number; raises ApiError if it is exhausted."""
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
        """Returns the queue time that does not count, at most `wall_s` (as in attempt deadlines)."""
        return min(self._waited_s(self.id), wall_s)

    def spend(self, tokens: int, now: float) -> None:
        """Counts sampled tokens against the reservation."""
        self.sampled_tokens += tokens
        self._reserved -= tokens
        self.last_activity = now

    @property
    def out_of_tokens(self) -> bool:
        limit = self.row.spec.budget.tokens
        return limit is not None and self.sampled_tokens >= limit

    def intend(self, row: TurnRow) -> None:
        """Adds the durable intent of a call."""
        self.rows[row.n] = row
        self._begun.add(row.n)

    def record(self, row: TurnRow) -> None:
        """Adds a durable turn."""
        self.tree.add(row.turn)
        self.rows[row.n] = row
        if row.idempotency_key:
            self._keys[row.turn.id] = row.idempotency_key
        if row.thread:
            self._threads[row.turn.id] = row.thread
        self._begun.discard(row.n)
        self._widen(row.turn)
        self.prompt_tokens += _prompt_length(self.tree, row.turn)
        self.last_activity = row.turn.ended or self.last_activity

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Marks a write in progress; `seal` waits for it."""
        self._writes += 1
        try:
            yield
        finally:
            self._writes -= 1
            if not self._writes:
                self._written.set()

    def check_unsealed(self) -> None:
        if self.sealed:
            hint = "its turn is not recorded: the record of the session has been taken"
            raise conflict(f"session {self.id} was finalized while this call ran", hint)

    async def seal(self) -> None:
        """Refuses further writes and waits for running ones."""
        self.sealed = True
        while self._writes:
            self._written.clear()
            await self._written.wait()

    def _widen(self, turn: Turn) -> None:
        for span in turn.versions:
            low, high = self._versions or (span.low, span.high)
            self._versions = min(low, span.low), max(high, span.high)

    def totals(self) -> SessionTotals | None:
        """Returns the totals; None while a call may still end."""
        if not self.closed or self.in_flight or self.running:
            return None
        return self._totals()

    def _totals(self) -> SessionTotals:
        return SessionTotals(
            calls=self.calls,
            turns=len(self.tree),
            branches=self.tree.branches,
            prompt=self.prompt_tokens,
            sampled=self.sampled_tokens,
            dangling=self.dangling,
            versions=self._versions,
            last_activity=self.last_activity,
            excluded=self.excluded,
            unsupported=self.unsupported,
            refused=self.refused,
        )

    @property
    def refused(self) -> tuple[RefusedCalls, ...]:
        """Refused model calls, by class of error."""
        return tuple(self._refused.values())

    def refuse(self, error: ApiError) -> None:
        """Counts a refused model call; calls after the end of the session are not counted."""
        if self.closed:
            return
        now = self._clock()
        before = self._refused.get(error.code)
        count, first = (before.count, before.first) if before else (0, now)
        text = error.text[:MAX_REFUSAL]
        self._refused[error.code] = RefusedCalls(error.code, error.status, count + 1, text, first, now)

    def state(self) -> SessionState:
        now = self._clock()
        return state_of(
            self.row,
            self._totals(),
            in_flight=len(self.in_flight),
            idle_s=0.0 if self.in_flight else max(0.0, now - self._quiet_since),
            unseen_s=None if self._seen is None else max(0.0, now - self._seen),
            waited_s=self._waited_s(self.id),
        )


class Reservation:
    """Reserved tokens of one call."""

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
        """Returns the unused tokens. Idempotent."""
        left, self.left = self.left, 0
        self._session.release(left)


class BodyBytes:
    """Bytes of one request, counted against its session while it is read and answered."""

    def __init__(self, session: Session, limit: int) -> None:
        self._session = session
        self._limit = limit
        self._held = 0

    def __enter__(self) -> BodyBytes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.body_bytes -= self._held

    def take(self, size: int) -> None:
        total = self._session.body_bytes + size
        if total > self._limit:
            message = (
                f"the requests of session {self._session.id} in flight have {total} bytes;"
                f" {self._limit} are allowed at once"
            )
            hint = "send fewer large requests at a time"
            raise ApiError(429, "too_many_bytes_in_flight", message, hint, retry_after_s=BODY_RETRY_S)
        self._session.body_bytes = total
        self._held += size


def state_of(row: SessionRow, totals: SessionTotals, **now: Any) -> SessionState:
    spec = row.spec
    return SessionState(
        id=row.id,
        phase=row.phase,
        rollout_id=spec.rollout_id,
        attempt=spec.attempt,
        group_id=spec.group_id,
        calls=totals.calls,
        turns=totals.turns,
        branches=totals.branches,
        tokens={"prompt": totals.prompt, "sampled": totals.sampled},
        excluded=totals.excluded,
        dangling=totals.dangling,
        versions=totals.versions,
        rewards=list(row.rewards),
        graded=outcomes.graded(row),
        failed_verdicts=tuple(failed.failure for failed in row.failed_verdicts),
        created=row.created,
        last_activity=totals.last_activity,
        unsupported=totals.unsupported,
        refused=totals.refused,
        **now,
    )


def _prompt_length(tree: TurnTree, turn: Turn) -> int:
    return tree.length(turn.id) - len(turn.token_ids)


RESERVED = "states"
"""Session id that is a route of the admin API."""
ENDING_S = 10.0
"""Time for running calls to end with their session, in seconds."""
BODY_RETRY_S = 1.0
"""Retry-After of a request beyond the bytes of its session, in seconds."""
log = logging.getLogger(__name__)
PRUNED_AT_ONCE = 10_000
"""Maximum of sessions that one `prune` deletes."""


def _new_id() -> str:
    return f"s-{uuid.uuid4().hex}"


def turns_of(session: Session) -> TurnNames:
    rows = sorted(session.rows.values(), key=lambda row: (row.seq, row.n))
    answered = (row.turn.id for row in rows if row.turn.status is TurnStatus.COMMITTED)
    return TurnNames(
        ids=dict.fromkeys(row.turn.id for row in rows),
        answered=tuple(answered),
        running=len(session.running),
    )


class SessionManager:
    """All sessions of a store."""

    def __init__(
        self,
        store: GatewayStore,
        clock: Callable[[], float],
        shard: Shard | None = None,
        *,
        delivers: bool = False,
        left: Callable[[str], None] = lambda _: None,
        waited_s: Callable[[str], float] = lambda _: 0.0,
        limits: GatewayLimits = DEFAULT_LIMITS,
        ending_s: float = ENDING_S,
    ) -> None:
        """`delivers` marks complete outcomes as due. `left` is called with the id of a closed session.

        `waited_s` returns a session's queue time. `ending_s` is the time for running calls to end.
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
        """Number of open sessions in memory."""
        return len(self._live)

    async def open(self, spec: SessionSpec, opened_by: str = "") -> tuple[Session, bool]:
        """Opens a session; returns it and whether it is new. `opened_by` names the header key."""
        session_id = spec.id or (self._shard.own_id(_new_id) if self._shard else _new_id())
        check_id(session_id, "session id")
        if session_id == RESERVED:
            raise ValueError(f"session id {session_id!r} is the name of a route; choose another")
        while session_id in self._opening:
            await asyncio.wait([self._opening[session_id]])
        existing = self.find(session_id)
        if existing is not None:
            if (existing.row.spec, existing.row.opened_by) != (
                structs.replace(spec, id=session_id),
                opened_by,
            ):
                raise Conflict(
                    f"session {session_id} already exists with different options; open it with the same ones,"
                    " or choose another id"
                )
            return existing, False
        row = SessionRow(
            id=session_id,
            spec=structs.replace(spec, id=session_id),
            phase=SessionPhase.OPEN,
            created=self._clock(),
            nonce=secrets.token_hex(4),
            opened_by=opened_by,
        )
        opening = self._opening[session_id] = asyncio.create_task(self._create(row))
        return await shield_and_wait(opening), True

    async def _create(self, row: SessionRow) -> Session:
        """Creates a session. The store writes concurrent ones as one group."""
        try:
            await self._store.put_session(row)
            session = self._known.get(row.id) or self._session(
                row, []
            )  # another request may have loaded the written row
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
        """Returns the states of existing sessions. Closed ones are read from their rows."""
        now = self._clock()
        states: dict[str, SessionState] = {}
        for session_id in session_ids:
            session = self._known.get(session_id)
            row = None if session else self._store.session(session_id)
            if row and row.totals:
                idle_s = max(0.0, now - row.totals.last_activity)
                states[session_id] = state_of(row, row.totals, idle_s=idle_s)
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
        """Adds a reward. Idempotent; raises 409 for another value with the same name and turn."""
        async with session.lock:
            rewards = outcomes.with_rewards(session.row, [entry], turns_of(session), self._limits)
            if rewards != session.row.rewards:
                await self._save(session, rewards=rewards)

    async def complete(self, session: Session, metrics: dict[str, float]) -> None:
        if session.phase is SessionPhase.ABORTED:
            raise conflict(f"session {session.id} is aborted")
        session.closed = True
        async with session.lock:
            if session.phase is SessionPhase.OPEN:
                await self._save(
                    session, phase=SessionPhase.COMPLETED, metrics=metrics, totals=session.totals()
                )
        self._leave(session)

    async def abort(self, session: Session, reason: str) -> None:
        """Closes a session; running calls end now and leave aborted turns."""
        session.closed = True
        async with session.lock:
            if session.phase is SessionPhase.OPEN:
                changes = {"reason": reason, "totals": session.totals()}
                await self._save(session, phase=SessionPhase.ABORTED, **changes)
        await self._end_calls(session)
        if (
            session.phase is SessionPhase.ABORTED
            and session.row.totals is None
            and (totals := session.totals())
        ):
            async with session.lock:
                await self._save(session, totals=totals)
        self._leave(session)

    async def finalize(self, session: Session) -> None:
        """Closes a session for its record. Calls that do not end in time are not recorded."""
        session.closed = True
        await self._end_calls(session)
        await session.seal()
        async with session.lock:
            if session.phase is not SessionPhase.FINALIZED:
                await self._save(session, phase=SessionPhase.FINALIZED, totals=session.totals())
        self._leave(session)

    async def delete(self, session: Session) -> None:
        await self.abort(session, "deleted")
        async with session.lock:
            await shield_and_wait(self._store.delete_session(session.id))
            session.deleted = True
            self._known.pop(session.id, None)  # not earlier: a concurrent request would load it again

    async def exclude_turn(self, session: Session, turn_id: str, reason: str = UNDELIVERED) -> None:
        """Excludes a turn from training, for example because it was not delivered."""
        async with session.lock:
            committed = session.tree[turn_id].status is TurnStatus.COMMITTED
            if committed and not session.sealed and turn_id not in session.row.excluded:
                await self._save(session, excluded={**session.row.excluded, turn_id: reason})

    async def delete_response(self, session: Session, turn_id: str) -> None:
        """Hides a response from the client. The turn stays in the record."""
        async with session.lock:
            before = session.row.deleted_responses
            if turn_id not in before:
                await self._save(session, deleted_responses=(*before, turn_id))

    async def redeliver(self, session: Session, turn_id: str) -> bool:
        """Claims an undelivered turn for delivery; returns whether this caller has it."""
        if session.row.excluded.get(turn_id) != UNDELIVERED:
            return False
        async with session.lock:
            if session.sealed or session.row.excluded.get(turn_id) != UNDELIVERED:
                return False
            before = session.row.excluded
            try:
                await self._save(
                    session, excluded={i: reason for i, reason in before.items() if i != turn_id}
                )
            except asyncio.CancelledError:
                await self._save(session, excluded=before)
                raise
            return True

    async def record_outcome(self, session: Session, statement: OutcomeReport, *, verdict: bool) -> None:
        """Records an outcome or verdict. Idempotent; raises 409 for another one.

        Rewards, outcome and phase are one write.
        """
        field = "verdict" if verdict else "outcome"
        async with session.lock:
            recorded = getattr(session.row, field)
            if recorded not in (None, statement.canonical):
                raise conflict(f"session {session.id} already has another {field}", "the first one counts")
            failed = outcomes.failed_verdict(session.row, statement) if verdict and recorded is None else None
            if failed:
                await self._note_failed(session, failed)
                return
            if recorded is None:
                self._check_takes_outcome(session, field)
                rewards = outcomes.with_rewards(
                    session.row, statement.entries, turns_of(session), self._limits
                )
                session.closed = True
                changes: dict[str, Any] = {field: statement.canonical, "outcome_at": self._clock()}
                if session.phase is SessionPhase.OPEN:
                    changes |= {
                        "phase": SessionPhase.COMPLETED,
                        "metrics": statement.metrics,
                        "totals": session.totals(),
                    }
                await self._save(session, rewards=rewards, **changes)
        self._leave(session)

    async def _note_failed(self, session: Session, failed: FailedVerdict) -> None:
        """Records a failed verdict; another verifier may follow."""
        before = session.row.failed_verdicts
        if failed not in before:
            self._check_takes_outcome(session, "verdict")
            await self._save(session, failed_verdicts=(*before, failed))

    def _check_takes_outcome(self, session: Session, field: str) -> None:
        if session.phase is SessionPhase.FINALIZED:
            raise conflict(f"session {session.id} is finalized", f"an {field} comes before finalize")
        if session.phase is SessionPhase.ABORTED and not (self._delivers and outcomes.addressed(session.row)):
            raise conflict(f"session {session.id} is aborted")
        if session.row.delivery:
            raise conflict(f"session {session.id} already has an outcome", "the first one counts")

    async def delivered(self, session: Session, delivery: Delivery) -> None:
        async with session.lock:
            if not session.deleted:
                await self._save(session, delivery=delivery)

    async def reap(self) -> int:
        """Aborts expired sessions and returns their number."""
        now = self._clock()
        expired = [session for session in self._live.values() if session.expired(now)]
        for session in expired:
            await self.abort(session, f"expired after {session.row.spec.ttl_s} s")
        return len(expired)

    async def prune(self, keep_s: float, at_most: int = PRUNED_AT_ONCE) -> int:
        """Deletes closed sessions older than `keep_s`, and returns their number.

        Sessions with an undelivered outcome and sessions in use are kept.
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
        """Ends running calls; their aborted turns are recorded."""
        await asyncio.gather(*(self._end_calls(session) for session in list(self._known.values())))

    def _leave(self, session: Session) -> None:
        self._live.pop(session.id, None)
        self._left(session.id)

    async def _end_calls(self, session: Session) -> None:
        tasks = [task for task in session.in_flight if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=self._ending_s)
            if pending:
                message = "session %s: calls did not end in time calls=%d timeout_s=%g"
                log.error(message, session.id, len(pending), self._ending_s)

    async def _save(self, session: Session, **changes: Any) -> None:
        """Saves changes of a row; call it with the session's lock held."""
        if session.deleted:
            raise NotFound(f"session {session.id} was deleted")
        row = structs.replace(session.row, **changes)
        if row.totals is not None and "excluded" in changes:
            row = structs.replace(row, totals=structs.replace(row.totals, excluded=session.excluded_in(row)))
        if self._delivers and not row.delivery and outcomes.due(row):
            row = structs.replace(row, delivery=Delivery.DUE)
        await shield_and_wait(self._put(session, row))

    async def _put(self, session: Session, row: SessionRow) -> None:
        await self._store.put_session(row)
        session.row = row
        changed, session.changed = session.changed, asyncio.Event()
        changed.set()
