"""Agents that somebody else serves at known addresses, e.g. with `python -m afield.sdk.serve`.

An attempt goes to the address with the fewest of ours; it lives on when this runtime or its process ends, and
`adopt` finds it again. One `/ping` per address and poll tells which attempts have ended. A server that was
restarted, or does not answer for `unreachable_s`, has lost what ran there. Servers that are not the SDK's
(a plain BedrockAgentCoreApp) do not tell their sessions apart: there an attempt has ended when the server is
idle, so that with several at once nothing is known until the last one; they must answer a POST before the
work, and cannot be asked to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from msgspec import Struct

from afield.errors import AfieldError, InfrastructureFailure, RateLimited, RolloutFailure, UsageError
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes import invocations
from afield.runtimes.attempt_table import Attempts, broken
from afield.runtimes.invocations import SILENT, Said
from afield.sdk.signed_invocations import key_from_file, user_key
from afield.types import Attempt, Reason

# Below the 5 s after which common servers close an idle connection.
KEEPALIVE_S = 3.0
# An address that refused a connection is the last choice for this long.
SHUNNED_S = 5.0
# Nothing was sent.
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Address:
    """One server. `accepted` maps the sessions it took to the instance that took them ("" if not said)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.reserved: set[str] = set()
        self.accepted: dict[str, str] = {}
        self.news = asyncio.Event()
        self.asking = asyncio.Lock()
        self.shunned_until = 0.0
        self.silent_since: float | None = None
        self.seen: tuple[float, Said] | None = None

    @property
    def load(self) -> int:
        return len(self.reserved | self.accepted.keys())

    def accept(self, session_id: str, instance: str) -> None:
        self.accepted[session_id] = instance
        self.news.set()

    def leave(self, session_id: str) -> None:
        self.reserved.discard(session_id)
        self.accepted.pop(session_id, None)


class Sighting(Struct, frozen=True, kw_only=True):
    """Where a session was seen; else which addresses were silent, and whether one did not tell."""

    address: Address | None = None
    instance: str = ""
    silent: Sequence[str] = ()
    vague: bool = False

    @property
    def gone(self) -> bool:
        return not (self.address or self.silent or self.vague)


class ServedRuntime:
    """`urls` without a path: `http://10.0.0.7:8080`. Closing it ends nothing that runs there.

    What is sent is signed with the key in `key_file`, or else this user's own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key_file: Path | None = None,
        poll_s: float = 0.5,
        unreachable_s: float = 10.0,
    ) -> None:
        if not urls:
            raise ValueError("a served runtime needs at least one address, such as http://127.0.0.1:8080")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"address {url!r} must begin with http:// or https://")
        self._addresses = [Address(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._key_file = key_file
        self._poll_s = poll_s
        self._unreachable_s = unreachable_s
        self._attempts = Attempts()
        self._launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        self._polls: list[asyncio.Task[None]] = []
        self._seeks: dict[str, asyncio.Task[None]] = {}
        self._open = False

    async def __aenter__(self) -> Self:
        self._key = key_from_file(self._key_file) if self._key_file else user_key()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._http = await aiohttp.ClientSession(connector=connector).__aenter__()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._polls = [self._group.create_task(self._poll(address)) for address in self._addresses]
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            for task in (*self._launches.values(), *self._seeks.values(), *self._polls):
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            for session_id in self._attempts:
                said = f"{session_id}: the runtime was closed; the agent may run on"
                self._attempts.settle(session_id, broken(said, Reason.CANCELLED))
            await self._http.close()

    @property
    def capabilities(self) -> Capabilities:
        """Sessions go on without us, but they are their server's to end."""
        return Capabilities(isolation="none", reaches=True, outlives=True)

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        """One address that answers is enough."""
        answers = await asyncio.gather(*(self._ask(address) for address in self._addresses))
        if not any(isinstance(answer, Said) for answer in answers):
            said = "; ".join(f"{a.url}: {answer}" for a, answer in zip(self._addresses, answers, strict=True))
            raise UsageError(
                f"no agent answers GET /ping ({said});"
                " start one, for example with: python -m afield.sdk.serve agent.py:agent --port 8080"
            )

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        await self._attempts.once(
            attempt.session_id,
            self._launches,
            lambda: self._group.create_task(self._launch(attempt, payload)),
        )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """None while an address is silent or does not tell: `wait` then looks on until it is known."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return None if session_id in self._seeks else True
        sighting = await self._find(session_id)
        if sighting.gone or not self._attempts.begin(session_id):
            return self._attempts.running(session_id)
        if sighting.address:
            sighting.address.accept(session_id, sighting.instance)
            return True
        self._seeks[session_id] = self._group.create_task(self._seek(session_id))
        self._seeks[session_id].add_done_callback(lambda _: self._seeks.pop(session_id, None))
        return None

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        """Asks the server that has it, or all where that is not known. One that is silent is let be."""
        session_id = attempt.session_id
        if self._attempts.finished(session_id):
            return
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        if session_id in self._launches:
            return  # It is stopped as soon as it is known who took it.
        having = [address for address in self._addresses if session_id in address.accepted]
        for address in having:
            address.leave(session_id)
        await asyncio.gather(*(self._end(address, attempt) for address in having or self._addresses))

    async def status(self, attempt: Attempt) -> SessionStatus:
        """Also of an attempt that another process launched, where its server tells sessions apart."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return self._live(session_id)
        sighting = await self._find(session_id)
        if sighting.address:
            return SessionStatus(session_id=session_id, phase=Phase.RUNNING, where=sighting.address.url)
        return self._attempts.live(session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._live(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        """Empty: whoever serves the agent has its log."""
        return ""

    def _live(self, session_id: str) -> SessionStatus:
        having = [address.url for address in self._addresses if session_id in address.accepted]
        starting = session_id in self._launches
        return self._attempts.live(session_id, having[0] if having else "", starting=starting)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> AfieldError | None:
        session_id = attempt.session_id
        try:
            address = await self._placed(attempt, payload)
        except RateLimited as throttled:
            self._attempts.forget(session_id, broken(str(throttled), Reason.LAUNCH))
            return throttled
        except RolloutFailure as failure:
            self._attempts.settle(session_id, Exit(failure.failure))
            return failure
        if not self._attempts.running(session_id):
            address.leave(session_id)
            await self._end(address, attempt)
            return InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)
        return None

    async def _placed(self, attempt: Attempt, payload: dict[str, Any]) -> Address:
        """The address that took it: the least loaded that can be reached and takes more."""
        session_id = attempt.session_id
        left = list(self._addresses)
        silent: list[str] = []
        busy: list[RateLimited] = []
        while left and self._attempts.running(session_id):
            now = asyncio.get_running_loop().time()
            address = min(left, key=lambda a: (a.shunned_until > now, a.load))
            left.remove(address)
            # Before the first await: others who choose now count it in.
            address.reserved.add(session_id)
            try:
                address.accept(session_id, await self._post(address, attempt, payload))
                return address
            except UNREACHED as error:
                address.shunned_until = now + SHUNNED_S
                silent.append(f"{address.url}: {_named(error)}")
            except RateLimited as error:
                busy.append(error)
            finally:
                address.reserved.discard(session_id)
        if not self._attempts.running(session_id):
            raise InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)
        if busy:
            asked = [error.retry_after_s for error in busy if error.retry_after_s is not None]
            raise RateLimited(str(busy[0]), min(asked, default=None))
        said = f"no address takes {session_id}: {'; '.join(silent)}"
        raise InfrastructureFailure(said, Reason.LAUNCH)

    async def _post(self, address: Address, attempt: Attempt, payload: dict[str, Any]) -> str:
        """Posting is idempotent, so one that got no answer is tried once more, at the same address only:

        it may have been taken, and must not run in two places.
        """
        for last in (False, True):
            try:
                return await invocations.post(self._http, address.url, attempt, payload, self._key)
            except (aiohttp.ClientError, OSError) as error:
                # TimeoutError is an OSError.
                if not last and isinstance(error, UNREACHED):
                    raise
                if last or isinstance(error, TimeoutError):
                    said = f"{address.url} did not take {attempt.session_id}: {_named(error)}"
                    raise InfrastructureFailure(said, Reason.LAUNCH) from error
        raise AssertionError("unreachable")

    async def _end(self, address: Address, attempt: Attempt) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await invocations.delete(self._http, address.url, attempt, self._key)

    # --- what runs, and what has ended -----------------------------------------------------------

    async def _poll(self, address: Address) -> None:
        while True:
            if not address.accepted:
                address.silent_since = None
                address.news.clear()
                await address.news.wait()
            await asyncio.sleep(self._poll_s)
            # Taken before the question: one that is accepted while it is under way is not in the answer.
            expected = dict(address.accepted)
            asked_at = asyncio.get_running_loop().time()
            answer = await self._ask(address)
            if isinstance(answer, Said):
                address.silent_since = None
                self._settle(address, expected, answer)
                continue
            if address.silent_since is None:
                address.silent_since = asked_at
            silent_s = asyncio.get_running_loop().time() - address.silent_since
            if silent_s >= self._unreachable_s:
                said = f"{address.url} has not answered for {silent_s:.0f} s: {answer}"
                self._bury(address, expected, said)

    def _settle(self, address: Address, expected: dict[str, str], said: Said) -> None:
        active = said.active
        if active is None:
            active = [] if said.status == "Healthy" else list(expected)
        gone = expected.keys() - set(active)
        lost = {s for s in gone if expected[s] and expected[s] != said.instance}
        for session_id in gone - lost:
            self._attempts.settle(session_id, Exit())
            address.leave(session_id)
        self._bury(address, lost, f"{address.url} was restarted")

    def _bury(self, address: Address, sessions: Iterable[str], said: str) -> None:
        for session_id in sessions:
            self._attempts.settle(session_id, broken(f"{said}; {session_id} ran there", Reason.DIED))
            address.leave(session_id)

    async def _find(self, session_id: str) -> Sighting:
        answers = await asyncio.gather(*(self._look(address) for address in self._addresses))
        silent: list[str] = []
        vague = False
        for address, said in zip(self._addresses, answers, strict=True):
            if said is None:
                silent.append(address.url)
            elif said.active is None:
                vague |= said.status != "Healthy"
            elif session_id in said.active:
                return Sighting(address=address, instance=said.instance)
        return Sighting(silent=silent, vague=vague)

    async def _seek(self, session_id: str) -> None:
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while self._attempts.running(session_id):
            await asyncio.sleep(self._poll_s)
            sighting = await self._find(session_id)
            if sighting.address:
                sighting.address.accept(session_id, sighting.instance)
                return
            if sighting.gone:
                self._attempts.settle(session_id, Exit())
            elif not sighting.silent:
                heard_at = loop.time()
            elif loop.time() - heard_at >= self._unreachable_s:
                said = f"{session_id} is not to be found; silent: {', '.join(sighting.silent)}"
                self._attempts.settle(session_id, broken(said, Reason.DIED))

    async def _look(self, address: Address) -> Said | None:
        """What an address said a moment ago, or says now: many who look at once ask once."""
        async with address.asking:
            now = asyncio.get_running_loop().time()
            if address.seen is not None and now - address.seen[0] < self._poll_s:
                return address.seen[1]
            answer = await self._ask(address)
            if not isinstance(answer, Said):
                return None
            address.seen = (now, answer)
            return answer

    async def _ask(self, address: Address) -> Said | str:
        """What it says, or why it says nothing."""
        try:
            return await invocations.ping(self._http, address.url, self._unreachable_s)
        except SILENT as error:
            return _named(error)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
