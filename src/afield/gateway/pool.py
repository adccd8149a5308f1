"""Gateway pool: `interfaces.Gateway` over several gateways.

1. A new session goes to the ready gateway with the fewest open sessions; the place is reserved before the
   first await. A session stays on its gateway, which its base URL names.
2. Each gateway is watched: one that ends, or does not answer, is replaced. The replacement opens the same
   store, so its sessions continue. Without that store they are forgotten, and their attempts are retried.
3. Weights are published to one gateway first, so that engines that several gateways share load them once,
   then to the others. A gateway without the newest weights gets no new sessions until it has loaded them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Self, TypeVar

from msgspec import Struct, structs

from afield.errors import AfieldError, NotFound, Unavailable
from afield.gateway.client import HttpGateway
from afield.gateway.engine_pool import common_dtype
from afield.interfaces import (
    GatewayEndpoint,
    GatewayLauncher,
    SessionCredentials,
    SessionRecord,
    SessionSpec,
    SessionState,
)
from afield.types import Policy
from afield.utils.backoff import Backoff
from afield.wire import Submission

log = logging.getLogger(__name__)
RETRY_S = 0.2
"""Seconds between two tries of a request whose gateway is being replaced."""
PROBES = 3
"""Health requests without an answer after which a gateway counts as lost."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Back-off between two starts of a gateway, in seconds."""
ENDED = ("finalized", "aborted")
T = TypeVar("T")


class PoolTimeouts(Struct, frozen=True, kw_only=True):
    """Timeouts of a pool."""

    unavailable_s: float = 10.0
    """Seconds for which a request waits for the replacement of its gateway (default: 10)."""
    probe_interval_s: float = 2.0
    """Seconds between two health requests (default: 2)."""
    probe_s: float = 10.0
    """Seconds for the answer to a health request (default: 10)."""


class PooledGateway:
    """A gateway of the pool, across replacements."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.client: HttpGateway | None = None
        """Client while it serves; None while it is being replaced."""
        self.version = 0
        self.sessions: set[str] = set()
        """Open sessions, including those that are being opened."""
        self.problem = "it is starting"
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Result of the first start."""

    def __str__(self) -> str:
        return f"gateway-{self.number}"


class GatewayPool:
    """Implements `interfaces.Gateway` over `count` gateways of a launcher.

    With `inherits`, stores may have sessions of an earlier process: they are found by asking all gateways.
    `record` is called with the number and the endpoint of each started gateway, and with None once it is
    lost.
    """

    def __init__(
        self,
        launcher: GatewayLauncher,
        count: int,
        *,
        inherits: bool = False,
        record: Callable[[int, GatewayEndpoint | None], None] = lambda number, endpoint: None,
        timeouts: PoolTimeouts = PoolTimeouts(),  # noqa: B008 - frozen
    ) -> None:
        self._launcher = launcher
        self._count = count
        self._inherits = inherits
        self._record = record
        self._timeouts = timeouts
        self._homes: dict[str, PooledGateway] = {}
        self._policy: tuple[Policy, str] | None = None
        self._publishing = asyncio.Lock()
        self.replacements = 0
        """Number of gateways that were replaced."""

    async def __aenter__(self) -> Self:
        await self._launcher.__aenter__()
        self._members = [PooledGateway(number) for number in range(self._count)]
        self._tasks = [asyncio.create_task(self._keep(member)) for member in self._members]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(m.ready for m in self._members), return_exceptions=True)
        await self._launcher.__aexit__(*exc)

    async def client(self) -> AbstractAsyncContextManager[GatewayPool]:
        """Wait until all gateways serve; raises the error of one that cannot be started."""
        await asyncio.gather(*(member.ready for member in self._members))
        return nullcontext(self)

    async def died(self) -> Unavailable:
        """Wait until the pool cannot replace its gateways any more; returns why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return Unavailable(f"the gateway pool failed: {done.pop().exception()}; resume the run with --resume")

    # --- gateways ---

    async def _keep(self, member: PooledGateway) -> None:
        """Start a gateway, watch it, and replace it when it is lost."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                endpoint = await self._launcher.start(member.number)
                async with HttpGateway(endpoint.url, endpoint.admin_key, unavailable_timeout_s=0.0) as client:
                    await self._admit(member, endpoint, client)
                    backoff.reset()
                    try:
                        member.problem = await self._until_lost(member, client)
                    finally:
                        member.client = None
            except AfieldError as error:
                member.problem = str(error)
                if not member.ready.done():
                    member.ready.set_exception(error)
                    return
            self.replacements += 1
            self._record(member.number, None)
            log.error("%s: lost, starting a replacement reason=%s", member, member.problem)
            await backoff.sleep()

    async def _admit(self, member: PooledGateway, endpoint: GatewayEndpoint, client: HttpGateway) -> None:
        """Bring a started gateway to the published weights; then it takes sessions."""
        if member.sessions and not endpoint.keeps_sessions:
            log.error("%s: sessions lost with its store count=%d", member, len(member.sessions))
            for session_id in member.sessions:
                del self._homes[session_id]
            member.sessions.clear()
        async with self._publishing:
            member.version = await client.version()
            await self._catch_up(member, client)
            member.client = client
        self._record(member.number, endpoint)
        log.info("%s: serves url=%s pid=%d host=%s", member, endpoint.url, endpoint.pid, endpoint.host)
        if not member.ready.done():
            member.ready.set_result(None)

    async def _catch_up(self, member: PooledGateway, client: HttpGateway) -> None:
        if self._policy and member.version < self._policy[0].version:
            await client.publish(*self._policy)
            member.version = self._policy[0].version

    async def _until_lost(self, member: PooledGateway, client: HttpGateway) -> str:
        """Wait until the gateway ends or `PROBES` health requests in a row have no answer; returns why."""
        ended = asyncio.create_task(self._launcher.ended(member.number))
        unanswered = 0
        try:
            while True:
                await asyncio.wait([ended], timeout=self._timeouts.probe_interval_s)
                if ended.done():
                    return ended.result()
                if not await client.answers(self._timeouts.probe_s):
                    unanswered += 1
                    if unanswered == PROBES:
                        return f"it did not answer {PROBES} health requests"
                    continue
                unanswered = 0
                try:
                    async with self._publishing:
                        await self._catch_up(member, client)
                except AfieldError as error:
                    log.warning("%s: newest weights not loaded, retrying error=%s", member, error)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    @property
    def _live(self) -> dict[PooledGateway, HttpGateway]:
        return {member: member.client for member in self._members if member.client is not None}

    async def _wait_for_live(self) -> dict[PooledGateway, HttpGateway]:
        clock = asyncio.get_running_loop().time
        end = clock() + self._timeouts.unavailable_s
        while not (live := self._live):
            if clock() >= end:
                raise Unavailable("; ".join(f"{member}: {member.problem}" for member in self._members))
            await asyncio.sleep(RETRY_S)
        return live

    # --- sessions ---

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        spec = structs.replace(spec, id=spec.id or f"s-{uuid.uuid4().hex}")
        assert spec.id is not None
        if self._inherits and spec.id not in self._homes:
            await self._find_inherited(spec.id)
        reserved = spec.id in self._homes
        try:
            return await self._ask(self._place(spec.id), lambda client: client.open(spec))
        except Unavailable:  # the gateway may have opened it: the place stays reserved
            raise
        except AfieldError:
            if not reserved:
                self._leave(spec.id)
            raise

    def _place(self, session_id: str) -> PooledGateway:
        """Reserve a place for a session: on its gateway, or on the one with the fewest open sessions."""
        if home := self._homes.get(session_id):
            return home
        live = self._live
        newest = max((member.version for member in live), default=0)
        ready = [member for member in live if member.version == newest]
        if not ready:
            raise Unavailable("; ".join(f"{member}: {member.problem}" for member in self._members))
        home = min(ready, key=lambda member: len(member.sessions))
        return self._assign(session_id, home)

    def _assign(self, session_id: str, home: PooledGateway) -> PooledGateway:
        self._homes[session_id] = home
        home.sessions.add(session_id)
        return home

    def _leave(self, session_id: str) -> None:
        if home := self._homes.pop(session_id, None):
            home.sessions.discard(session_id)

    async def _find_inherited(self, session_id: str) -> None:
        try:
            home, state = await self._search(session_id)
        except NotFound:
            return
        if state.phase not in ENDED and session_id not in self._homes:
            self._assign(session_id, home)

    async def _search(self, session_id: str) -> tuple[PooledGateway, SessionState]:
        """Ask all gateways for a session; raises Unavailable if one that may have it is being replaced."""
        live = await self._wait_for_live()
        answers = await asyncio.gather(*(client.states([session_id]) for client in live.values()))
        for member, states in zip(live, answers, strict=True):
            if session_id in states:
                return member, states[session_id]
        if missing := [str(member) for member in self._members if member not in live]:
            raise Unavailable(f"session {session_id} may be on {', '.join(missing)}, which is being replaced")
        raise NotFound(f"no gateway of the pool has a session {session_id!r}")

    async def _at(self, session_id: str, call: Callable[[HttpGateway], Awaitable[T]]) -> T:
        home = self._homes.get(session_id) or (await self._search(session_id))[0]
        return await self._ask(home, call)

    async def _ask(self, member: PooledGateway, call: Callable[[HttpGateway], Awaitable[T]]) -> T:
        """Ask a gateway, or its replacement."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._timeouts.unavailable_s
        while True:
            error = Unavailable(f"{member} is being replaced: {member.problem}")
            if member.client is not None:
                try:
                    return await call(member.client)
                except Unavailable as raised:
                    error = raised
            if clock() >= end:
                raise error
            await asyncio.sleep(RETRY_S)

    async def state(self, session_id: str) -> SessionState:
        return await self._at(session_id, lambda client: client.state(session_id))

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """States by id, without those on gateways that do not answer; raises Unavailable if none does.

        The state of a single session waits for its gateway.
        """
        if len(session_ids) == 1:
            try:
                return {session_ids[0]: await self.state(session_ids[0])}
            except NotFound:
                return {}
        ids_by_gateway: dict[PooledGateway, list[str]] = {}
        live = await self._wait_for_live()
        for session_id in session_ids:
            home = self._homes.get(session_id)
            for member in {home} & live.keys() if home else live:
                ids_by_gateway.setdefault(member, []).append(session_id)
        answers = await asyncio.gather(
            *(live[member].states(ids) for member, ids in ids_by_gateway.items()), return_exceptions=True
        )
        states: dict[str, SessionState] = {}
        errors: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                states |= answer
        for error in errors:
            if not isinstance(error, Unavailable) or len(errors) == len(answers):
                raise error
        return states

    async def abort(self, session_id: str, reason: str) -> None:
        try:
            await self._at(session_id, lambda client: client.abort(session_id, reason))
        except NotFound:
            self._leave(session_id)
            raise
        self._leave(session_id)

    async def finalize(self, session_id: str) -> SessionRecord:
        record = await self._at(session_id, lambda client: client.finalize(session_id))
        self._leave(session_id)
        return record

    async def submission(self, session_id: str) -> Submission | None:
        return await self._at(session_id, lambda client: client.submission(session_id))

    # --- weights ---

    async def version(self) -> int:
        """Version of the newest weights that a gateway serves; new sessions are opened there."""
        live = await self._wait_for_live()
        answers = await asyncio.gather(
            *(client.version() for client in live.values()), return_exceptions=True
        )
        versions = [answer for answer in answers if isinstance(answer, int)]
        for error in answers:
            if isinstance(error, BaseException) and (not versions or not isinstance(error, Unavailable)):
                raise error
        return max(versions)

    async def publish(self, policy: Policy, path: str) -> None:
        """Load weights on all gateways. One that fails is asked again, and has no new sessions until then."""
        async with self._publishing:
            live = await self._wait_for_live()
            errors: dict[PooledGateway, str] = {}
            for member, client in live.items():
                try:
                    await self._load(member, client, policy, path)
                    break
                except Unavailable as error:
                    errors[member] = str(error)
            else:
                reasons = "; ".join(f"{member}: {error}" for member, error in errors.items())
                raise Unavailable(f"no gateway has loaded version {policy.version}: {reasons}")
            self._policy = policy, path
            rest = [member for member in live if member.version < policy.version]
            answers = await asyncio.gather(
                *(self._load(member, live[member], policy, path) for member in rest), return_exceptions=True
            )
        for member, answer in zip(rest, answers, strict=True):
            if isinstance(answer, AfieldError):
                log.warning("%s: version %d not loaded, retrying error=%s", member, policy.version, answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def _load(self, member: PooledGateway, client: HttpGateway, policy: Policy, path: str) -> None:
        await client.publish(policy, path)
        member.version = policy.version

    async def context(self) -> int | None:
        """Smallest context length of the gateways' engines in tokens; None if unknown."""
        live = await self._wait_for_live()
        lengths = await asyncio.gather(*(client.context() for client in live.values()))
        return min((length for length in lengths if length is not None), default=None)

    async def engine_dtype(self) -> str:
        """Dtype that the engines of all gateways represent; empty if unknown."""
        live = await self._wait_for_live()
        return common_dtype(await asyncio.gather(*(client.engine_dtype() for client in live.values())))
