"""Gateway service: `interfaces.Gateway` in process, without HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from msgspec import Struct

from afield import trajectories
from afield.chat import ChatTokenizer
from afield.errors import Conflict, Unavailable, UsageError
from afield.gateway import outcomes
from afield.gateway.api_error import bad_request
from afield.gateway.calls import Calls
from afield.gateway.engine_pool import EnginePool
from afield.gateway.header_keys import HeaderKeyCredentials, HeaderKeyRow, HeaderKeys
from afield.gateway.metrics import Metrics, Snapshot, exposition
from afield.gateway.outcome_delivery import OutcomeDelivery
from afield.gateway.outcomes import DEFAULT_LIMITS, GatewayLimits, OutcomeReport
from afield.gateway.session_keys import KeyScope, SecretPlace, SessionKeys, signing_secret
from afield.gateway.sessions import ENDING_S, Session, SessionManager, SessionPhase, turns_of
from afield.gateway.shards import Shard
from afield.gateway.store import GatewayStore, PublishedPolicy, SessionRow
from afield.gateway.stored_responses import StoredResponses
from afield.interfaces import SessionCredentials, SessionRecord, SessionSpec, SessionState, Transport
from afield.runs.exclusions import ExclusionReason
from afield.types import Exclusion, Image, Policy, Trajectory, Turn, TurnStatus
from afield.wire import Invocation, Submission

log = logging.getLogger(__name__)
EXPIRY_INTERVAL_S = 5.0
"""Interval between checks for expired sessions, in seconds."""
LAG_EVERY_S = 0.5
"""Interval between measurements of event loop lag, in seconds."""
PRUNE_EVERY_S = 600.0
"""Interval between deletions of old sessions, in seconds."""


class Routes(Protocol):
    """URLs in front of a gateway's paths, for the agent of a session and the clients of a header key."""

    def session_url(self, session_id: str) -> str: ...

    def header_key_url(self, key_id: str) -> str: ...


class DirectRoutes(Struct, frozen=True):
    """Routes of a gateway that agents reach at one address."""

    url: str
    """Public URL of the gateway."""

    def session_url(self, session_id: str) -> str:
        return self.url

    def header_key_url(self, key_id: str) -> str:
        return self.url


class LocalGateway:
    """A gateway with its store, sessions and engine pool. The caller enters `engine` and `outlet`.

    `outlet` receives the outcomes of sessions with an experiment. `ending_s` is the time for running
    calls to end with their session, `expiry_interval_s` the time between checks for expired sessions.
    With `path_keys`, base URLs contain the session key, for clients that cannot send one.
    """

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        engine: EnginePool,
        store: Path,
        admin_key: str,
        public_url: str,
        routes: Routes | None = None,
        durable: bool = False,
        store_shared: bool = False,
        keep_sessions_s: float = 0.0,
        shard: Shard | None = None,
        outlet: Transport | None = None,
        limits: GatewayLimits = DEFAULT_LIMITS,
        ending_s: float = ENDING_S,
        expiry_interval_s: float = EXPIRY_INTERVAL_S,
        path_keys: bool = False,
        secret: SecretPlace = SecretPlace(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.time,
        make_calls: Callable[..., Calls] = Calls,
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = engine
        self._routes = routes or DirectRoutes(public_url.rstrip("/"))
        self._store_path = store
        self._durable = durable
        self._store_shared = store_shared
        self._keep_sessions_s = keep_sessions_s
        self.shard = shard
        self._outlet = outlet
        self.limits = limits
        self._ending_s = ending_s
        self._expiry_interval_s = expiry_interval_s
        self._admin_key = admin_key
        self.path_keys = path_keys
        self._secret_place = secret
        self._clock = clock
        self._make_calls = make_calls
        self._stack = AsyncExitStack()
        self._outbox: OutcomeDelivery | None = None

    async def __aenter__(self) -> Self:
        store = GatewayStore(
            self._store_path / "gateway.sqlite",
            durable=self._durable,
            exclusive=self.shard is None,
            shared=self._store_shared,
        )
        self._store = await self._stack.enter_async_context(store)
        secret = await asyncio.to_thread(self._signing_secret, store)
        self.keys = SessionKeys(secret, self._admin_key)
        self.metrics = Metrics()
        delivers = self._outlet is not None
        self.sessions = SessionManager(
            *(store, self._clock, self.shard),
            delivers=delivers,
            left=self._forget,
            waited_s=self.engine.queue_time.waited_s,
            limits=self.limits,
            ending_s=self._ending_s,
        )
        owns = self.shard.owns if self.shard else lambda _: True
        self.header_keys = HeaderKeys(store, self.keys, self.sessions, self._clock, owns)
        if self.shard:
            await self._stack.enter_async_context(self.shard)
        self.calls = self._make_calls(
            store=store,
            sessions=self.sessions,
            engine=self.engine,
            info=await self.engine.info(),
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            clock=self._clock,
        )
        self.responses = StoredResponses(store, self.sessions, self.tokenizer)
        await self._serve_published()
        if self._outlet is not None:
            outbox = OutcomeDelivery(self._outlet, store, self.sessions, self._invocation, owns)
            self._outbox = await self._stack.enter_async_context(outbox)
        chores = [asyncio.create_task(self._reap()), asyncio.create_task(self._watch_lag())]
        if self._keep_sessions_s:
            chores.append(asyncio.create_task(self._prune()))
        self._stack.push_async_callback(_end, chores)
        return self

    def _signing_secret(self, store: GatewayStore) -> bytes:
        return signing_secret(self._secret_place, store.id, self._store_path, sessions=not store.empty)

    async def __aexit__(self, *exc: object) -> None:
        await self.sessions.close()
        await self._stack.aclose()

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        session, _ = await self.open_session(spec)
        return self.credentials(session)

    async def open_session(self, spec: SessionSpec) -> tuple[Session, bool]:
        """Opens a session; returns it and whether it is new."""
        if self._outlet is not None:
            outcomes.check_address(spec, spec.id or "")
        return await self.sessions.open(spec)

    def _forget(self, session_id: str) -> None:
        """Frees the memory of a closed session."""
        self.keys.forget(session_id)
        self.engine.forget(session_id)

    def credentials(self, session: Session) -> SessionCredentials:
        spec = session.row.spec
        judged = spec.reward_from == "verifier"
        scopes = {KeyScope(scope) for scope in spec.scope} | {KeyScope.OUTCOME}

        def issue(scopes: frozenset[KeyScope]) -> str:
            return self.keys.issue(session.id, scopes, session.row.nonce)

        verifier = frozenset({KeyScope.REWARD, KeyScope.OUTCOME, KeyScope.READ})
        key = issue(frozenset(scopes - {KeyScope.REWARD} if judged else scopes))
        url = self._routes.session_url(session.id)
        base = f"{url}/k/{key}" if self.path_keys else f"{url}/s/{session.id}"
        return SessionCredentials(
            id=session.id,
            api_key=key,
            base_url=base,
            openai_base_url=f"{base}/v1",
            verifier_key=issue(verifier) if judged else None,
        )

    def header_key_credentials(self, row: HeaderKeyRow) -> HeaderKeyCredentials:
        key = self.header_keys.token(row)
        url = self._routes.header_key_url(row.id)
        base = f"{url}/k/{key}" if self.path_keys else url
        return HeaderKeyCredentials(
            id=row.id,
            api_key=key,
            base_url=base,
            openai_base_url=f"{base}/v1",
            header=row.spec.header,
        )

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Returns 200 while an engine is ready, else 503."""
        info = await self.engine.info()
        ready = sum(worker["ready"] for worker in self.engine.stats()["workers"].values())
        status = "ok" if ready else "no engine is up"
        fields = {"status": status, "version": info.version, "engine": info.kind, "workers": ready}
        fields |= {"dtype": info.dtype, "context": info.max_context, "outcomes": self._outlet is not None}
        return (200 if ready else 503), fields

    async def exposition(self) -> str:
        """Returns the metrics page of all processes."""
        snapshots = [self.snapshot()]
        if self.shard:
            others = await self.shard.gather("/metrics/snapshot", self._admin_key)
            snapshots += [msgspec.json.decode(other, type=Snapshot) for other in others]
        return exposition(snapshots)

    def snapshot(self) -> Snapshot:
        stats = self.engine.stats()
        return Snapshot(
            metrics=self.metrics,
            gauges={
                "sessions_open": len(self.sessions),
                "engine_calls_in_flight": stats["in_flight"],
                "engine_calls_waiting": stats["waiting"],
                "engine_failovers": stats["failovers"],
                "engine_workers_ready": sum(worker["ready"] for worker in stats["workers"].values()),
            },
        )

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_interval_s)
            try:
                ended, idle = await self.sessions.reap(), await self.header_keys.close_idle()
            except Unavailable as error:
                log.error("sessions: expiry failed, retrying error=%s", error)
                continue
            if ended:
                log.info("sessions: expired sessions aborted count=%d", ended)
            if idle:
                log.info("header keys: idle sessions completed count=%d", idle)

    async def _prune(self) -> None:
        """Deletes old sessions, after a first wait: a collector that starts with this gateway may need
        them."""
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            try:
                removed = await self.sessions.prune(self._keep_sessions_s)
            except Unavailable as error:
                log.error("store: removal of closed sessions failed, retrying error=%s", error)
                continue
            if removed:
                hours = self._keep_sessions_s / 3600
                log.info("store: closed sessions removed count=%d keep_hours=%g", removed, hours)

    async def _watch_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.metrics.loop_lag_s.observe(max(0.0, time.monotonic() - due))

    async def state(self, session_id: str) -> SessionState:
        return self.sessions.get(session_id).state()

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        if self.shard is None:
            return self.sessions.states(session_ids)
        homes = self.shard.homes(session_ids)
        states = self.sessions.states(homes.pop(self.shard.index, []))
        bodies = {home: msgspec.json.encode({"ids": ids}) for home, ids in homes.items()}
        for answer in await self.shard.ask("/sessions/states", bodies, self._admin_key):
            states |= msgspec.json.decode(answer, type=dict[str, dict[str, SessionState]])["sessions"]
        return states

    async def list_sessions(
        self, phase: str | None, limit: int, after: str, key_id: str = ""
    ) -> list[SessionState]:
        """Lists sessions of all processes by id; `key_id` selects those of a header key."""
        states = await self.states(self._store.session_ids(phase, limit, after, key_id))
        return [states[session_id] for session_id in sorted(states)]

    async def version(self) -> int:
        return self.engine.stats()["version"]

    async def abort(self, session_id: str, reason: str) -> None:
        await self.sessions.abort(self.sessions.get(session_id), reason)

    async def finalize(self, session_id: str) -> SessionRecord:
        session = self.sessions.get(session_id)
        first = session.phase is not SessionPhase.FINALIZED
        await self.sessions.finalize(session)
        if first:
            # In two steps: `+=` would read the sum before the await.
            drifted = await asyncio.to_thread(self._drifted, session.tree.turns)
            self.metrics.drift += drifted
            self.metrics.excluded_from(session.excluded)
        return self.record(session)

    async def submission(self, session_id: str) -> Submission | None:
        return outcomes.submission(self.sessions.get(session_id).row)

    def _drifted(self, turns: list[Turn]) -> int:
        """Counts the turns whose text encodes to other ids."""
        committed = [turn.token_ids for turn in turns if turn.status is TurnStatus.COMMITTED]
        spelled = ((ids, self.tokenizer.decode(ids)) for ids in committed)
        return sum(tuple(self.tokenizer.encode_raw(text)) != ids for ids, text in spelled)

    def record(self, session: Session) -> SessionRecord:
        assembled = trajectories.linear(session.tree, self.excluded(session))
        turns = [row.turn for row in sorted(session.rows.values(), key=lambda row: (row.seq, row.n))]
        return SessionRecord(
            trajectories=assembled.trajectories,
            excluded=(*assembled.excluded, *self.dangling(session)),
            turns=tuple(turns),
            images=self._images(session.id, assembled.trajectories),
            refused=session.refused,
        )

    def _images(self, session_id: str, rows: Sequence[Trajectory]) -> tuple[Image, ...]:
        """Returns the images of the rows, each once."""
        digests = dict.fromkeys(image.digest for row in rows for image in row.images)
        return tuple(self._store.image(session_id, digest) for digest in digests)

    def dangling(self, session: Session) -> list[Exclusion]:
        """Returns the calls that a gateway crash left without an end."""
        turns = [row.turn for row in session.rows.values()]
        return [
            Exclusion(t.id, 0, ExclusionReason.DANGLING) for t in turns if t.status is TurnStatus.DANGLING
        ]

    def excluded(self, session: Session) -> dict[str, str]:
        """Returns the excluded turns and their reasons."""
        return session.excluded_turns()

    async def publish(self, policy: Policy, path: str) -> None:
        await self.engine.load(policy.version, path)
        await self._store.put_policy(PublishedPolicy(self.tokenizer.name, policy.version, path))

    async def _serve_published(self) -> None:
        """Loads the published weights again after a restart."""
        published = self._store.policy
        if published is None or published.version == await self.version():
            return
        if published.model != self.tokenizer.name:
            message = "policy: published weights are of another model version=%d model=%s serving=%s"
            log.warning(message, published.version, published.model, self.tokenizer.name)
            return
        try:
            await self.engine.load(published.version, published.path)
        except (UsageError, Unavailable, Conflict) as error:
            message = "policy: published weights not loaded version=%d path=%s error=%s serving=%d"
            log.error(message, published.version, published.path, error, await self.version())
        else:
            log.info(
                "policy: published weights loaded again version=%d path=%s", published.version, published.path
            )

    # --- outcomes ---

    async def record_outcome(self, session: Session, statement: OutcomeReport, *, verdict: bool) -> None:
        """Stores an outcome, then delivers it to the transport."""
        if self._outbox is None and statement.record is not None and session.row.spec.exp_id is not None:
            raise bad_request("this gateway does not forward outcomes", "start it with --outcomes")
        late = None
        if self._outbox and not verdict:
            late = outcomes.late(session.row, statement, turns_of(session), self.limits)
        if self._outbox and late is not None:
            await self._outbox.bring_late(session, late)
            return
        await self.sessions.record_outcome(session, statement, verdict=verdict)
        await self.deliver(session)

    async def deliver(self, session: Session) -> None:
        """Delivers the session's outcome if it is due."""
        if self._outbox:
            await self._outbox.deliver(session)

    def _invocation(self, row: SessionRow) -> Invocation:
        spec, base = row.spec, f"{self._routes.session_url(row.id)}/s/{row.id}"
        assert spec.exp_id and spec.input_id and spec.rollout_id and spec.attempt
        return Invocation(
            exp_id=spec.exp_id,
            input_id=spec.input_id,
            rollout_id=spec.rollout_id,
            attempt=spec.attempt,
            group_id=spec.group_id or spec.rollout_id,
            session_id=row.id,
            base_url=base,
            api_key=self.keys.issue(row.id, frozenset({KeyScope.OUTCOME}), row.nonce),
            model_id=self.tokenizer.name,
            outcome_url=f"{base}/outcome",
        )

    async def wait(self, session_id: str, deadline: Callable[[], float]) -> SessionState:
        """Waits until the session is closed or the deadline passes."""
        session = self.sessions.get(session_id)
        while session.phase is SessionPhase.OPEN and (timeout := deadline()) > 0:
            try:
                await asyncio.wait_for(session.changed.wait(), timeout)
            except TimeoutError:
                break
        return session.state()


async def _end(chores: list[asyncio.Task[None]]) -> None:
    for chore in chores:
        chore.cancel()
    await asyncio.gather(*chores, return_exceptions=True)
