"""Sessions: one isolated place for each session id, from the invoke that starts it until it is reaped.

Many invokes at the same cold session are one start. A session ends when it is stopped, when it was
idle or alive for too long, or when its program dies; the next invoke with its id starts a fresh one.
An invoke that is being answered, and a `/ping` of HealthyBusy with `time_of_last_update`, keep it alive.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Self

import msgspec
from msgspec import Struct

from afield.agentcore_local.errors import Problem
from afield.agentcore_local.faults import Luck
from afield.agentcore_local.hosts import Broken, Place, Places
from afield.agentcore_local.http import BROKEN, ask
from afield.agentcore_local.images import Image
from afield.agentcore_local.quotas import Bucket, Counts, Quotas
from afield.agentcore_local.requests import Lifecycle
from afield.log_tail import tail

PING_S = 5.0
TAIL_BYTES = 4_000
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.05, 60.0
FIRST_ASK_S, LONGEST_ASK_S = 0.02, 0.5
SAFE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
Key = tuple[str, str, str]  # runtime id, endpoint, session id


class Pace(Struct, frozen=True, kw_only=True):
    """How long things take here. `hurry` makes lifecycles and request limits run that many times faster."""

    cold_start_s: float = 0.0
    init_s: float = 30.0
    hurry: float = 1.0
    answer_s: float = 900.0
    stream_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, least = getattr(self, name), 0.0 if name == "cold_start_s" else 1e-3
            if not least <= value < math.inf:
                raise ValueError(f"{name} = {value:g} must be at least {least:g}, and finite")


class Wanted(Struct, frozen=True, kw_only=True):
    """What a session is started from."""

    image: Image
    version: str
    env: Mapping[str, str]
    lifecycle: Lifecycle


class _Ping(Struct, frozen=True):
    status: str = ""
    time_of_last_update: float | None = None


class Session:
    def __init__(self, key: Key, wanted: Wanted) -> None:
        loop = asyncio.get_running_loop()
        self.key, self.wanted = key, wanted
        self.born = self.active = loop.time()
        self.since = time.time()
        self.invokes = self.answering = 0
        self.ready: asyncio.Future[Place] = loop.create_future()
        # There may be nobody left who waits for it.
        self.ready.add_done_callback(lambda ready: ready.exception())
        self.over: asyncio.Future[str] = loop.create_future()
        self.buried = asyncio.Event()
        self.place: Place | None = None

    @contextmanager
    def busy(self) -> Generator[None]:
        self.answering += 1
        self.invokes += 1
        try:
            yield
        finally:
            self.answering -= 1
            self.active = asyncio.get_running_loop().time()

    def end(self, why: str) -> None:
        """The first reason counts."""
        if not self.over.done():
            self.over.set_result(why)

    def view(self) -> dict[str, object]:
        runtime, endpoint, session_id = self.key
        return {
            "runtimeSessionId": session_id,
            "agentRuntimeId": runtime,
            "endpoint": endpoint,
            "agentRuntimeVersion": self.wanted.version,
            "state": "ready" if self.ready.done() else "starting",
            "where": self.place.where if self.place else "",
            "log": str(self.place.log) if self.place else "",
            "since": self.since,
            "idle_s": round(asyncio.get_running_loop().time() - self.active, 3)
            if not self.answering
            else 0.0,
            "invokes": self.invokes,
        }


class Sessions:
    def __init__(self, places: Places, quotas: Quotas, pace: Pace, luck: Luck, counts: Counts) -> None:
        self._places, self._quotas, self._pace, self._luck = places, quotas, pace, luck
        self._counts = counts
        self._alive: dict[Key, Session] = {}
        self._starts = Bucket(quotas.start_rate, quotas.burst_s, time.monotonic)

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in self._alive.values():
            session.end("closed")
        await self._group.__aexit__(None, None, None)

    def find(self, key: Key) -> Session | None:
        return self._alive.get(key)

    async def enter(self, key: Key, wanted: Wanted) -> Session:
        """The session, started if there is none. Raises the Problem of one that cannot be."""
        while (session := self._alive.get(key)) is not None and session.over.done():
            await session.buried.wait()
        if session is None:
            session = self._begin(key, wanted)
        # Shielded: a client that goes away does not end a start that others wait for.
        await asyncio.shield(session.ready)
        return session

    def _begin(self, key: Key, wanted: Wanted) -> Session:
        if len(self._alive) >= self._quotas.sessions:
            message = f"maxVms limit exceeded: {self._quotas.sessions} sessions at once"
            raise Problem("ServiceQuotaExceededException", message)
        self._starts.take("session starts")
        session = self._alive[key] = Session(key, wanted)
        self._counts.started()
        self._group.create_task(self._live(session))
        return session

    async def stop(self, session: Session, why: str = "stopped") -> None:
        """Until nothing of it is left and its id is free again."""
        session.end(why)
        await session.buried.wait()

    def stop_all(self, runtime_id: str) -> None:
        for session in [s for s in self._alive.values() if s.key[0] == runtime_id]:
            session.end("deleted")

    def view(self) -> list[dict[str, object]]:
        return [session.view() for session in self._alive.values()]

    def __len__(self) -> int:
        return len(self._alive)

    # --- one life --------------------------------------------------------------------------------

    async def _live(self, session: Session) -> None:
        starting = asyncio.create_task(self._start(session))
        problem: Problem | None = None
        try:
            await asyncio.wait({starting, session.over}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and (problem := starting.result()) is not None:
                session.end("failed")
            elif session.place is not None and not session.over.done():
                session.active = asyncio.get_running_loop().time()
                session.ready.set_result(session.place)
                await self._watch(session, session.place)
        finally:
            await self._bury(session, starting, problem)

    async def _bury(
        self, session: Session, starting: asyncio.Task[Problem | None], problem: Problem | None
    ) -> None:
        """Whoever waited for it is told when its id is free again."""
        session.end("closed")
        starting.cancel()
        await asyncio.wait({starting})
        if session.place:
            session.place.kill()
            await session.place.ended()
        why = session.over.result()
        self._counts.ends[why] += 1
        self._alive.pop(session.key, None)
        session.buried.set()
        if not session.ready.done():
            stopped = Problem("RetryableConflictException", f"the session ended while it started: {why}")
            session.ready.set_exception(problem or stopped)

    async def _start(self, session: Session) -> Problem | None:
        began = asyncio.get_running_loop().time()
        wanted, pace = session.wanted, self._pace
        name = _file_name(session.key[2], self._counts.starts)
        try:
            session.place = await self._places.start(wanted.image, name, wanted.env)
            async with asyncio.timeout(pace.init_s):
                problem = await self._first_ping(session.place)
        except Broken as error:
            return Problem("RuntimeClientError", f"the program cannot be started: {error}")
        except TimeoutError:
            said = tail(session.place.log, TAIL_BYTES) if session.place else ""
            message = f"Runtime initialization time exceeded: no /ping within {pace.init_s:g} s. {said}"
            return Problem("RuntimeClientError", message.strip())
        except OSError as error:  # of this machine: too many open files, say; the other sessions go on
            return Problem("InternalServerException", f"the session cannot be started: {error}")
        await asyncio.sleep(began + pace.cold_start_s - asyncio.get_running_loop().time())
        return problem

    async def _first_ping(self, place: Place) -> Problem | None:
        ended = asyncio.ensure_future(place.ended())
        wait_s = FIRST_ASK_S
        try:
            while not ended.done():
                if await _ping(place) is not None:
                    return None
                await asyncio.wait({ended}, timeout=wait_s)
                wait_s = min(wait_s * 1.5, LONGEST_ASK_S)
            message = f"the program ended before it served ({ended.result()}). {tail(place.log, TAIL_BYTES)}"
            return Problem("RuntimeClientError", message.strip())
        finally:
            ended.cancel()

    async def _watch(self, session: Session, place: Place) -> None:
        """Until it is over, one way or another."""
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(place.ended())
        lifecycle, hurry = session.wanted.lifecycle, self._pace.hurry
        idle_s, life_s = lifecycle.idle_runtime_session_timeout / hurry, lifecycle.max_lifetime / hurry
        fault = self._luck.strikes("die", session.key[2])
        killed_at = loop.time() + fault.seconds if fault else float("inf")
        look_s = min(max(idle_s / 4, SHORTEST_LOOK_S), LONGEST_LOOK_S)
        try:
            while True:
                next_s = min(look_s, max(0.0, min(session.born + life_s, killed_at) - loop.time()))
                await asyncio.wait({ended, session.over}, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
                if ended.done() or session.over.done():
                    break
                await self._look(session, place, idle_s, life_s, killed_at)
            if ended.done():
                session.end("died")
        finally:
            ended.cancel()

    async def _look(
        self, session: Session, place: Place, idle_s: float, life_s: float, killed_at: float
    ) -> None:
        now = asyncio.get_running_loop().time()
        if now >= session.born + life_s:
            session.end("lifetime")
        elif now >= killed_at:
            session.end("fault")
        elif session.answering:
            session.active = now
        else:
            said = await _ping(place)
            if said and said.status == "HealthyBusy" and said.time_of_last_update is not None:
                session.active = now
            elif now - session.active >= idle_s and not session.answering:
                session.end("idle")


async def _ping(place: Place) -> _Ping | None:
    """What the program says to `/ping`, or None where it does not answer."""
    try:
        async with (
            asyncio.timeout(PING_S),
            ask(await place.connect(), "GET", "/ping", {"accept": "*/*"}) as reply,
        ):
            body = await reply.read()
            if reply.status != 200:
                return None
    except (*BROKEN, TimeoutError):
        return None
    try:
        return msgspec.json.decode(body, type=_Ping)
    except msgspec.MsgspecError:
        return _Ping()


def _file_name(session_id: str, number: int) -> str:
    """Session ids may hold any character."""
    name = session_id if SAFE.match(session_id) else hashlib.sha256(session_id.encode()).hexdigest()
    return f"{name}-{number}"
