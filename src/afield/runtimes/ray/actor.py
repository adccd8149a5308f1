"""Ray actor that reserves resources and runs sessions through a fork server.

1. Starting a Ray worker costs half a second of CPU, a fork a few milliseconds. One actor therefore serves
many sessions, each in a fresh process of its fork server.
2. All methods are idempotent and can be called by any process of the cluster.
3. If the actor dies, the fork server's socket closes and every session ends.

Requires Linux and afield's base install.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from afield.interfaces.runtime import Phase
from afield.runtimes.ray.messages import (
    FRAME,
    LOG_BYTES,
    AgentLoaded,
    Event,
    Order,
    SessionAccepted,
    SessionExited,
    StartSession,
    StopSession,
)
from afield.utils.log_tail import tail

TAIL_BYTES = 4_000
MAX_REMEMBERED = 1_000
DROPPED_ENV = ("AFIELD_ADMIN_KEY",)
_events = msgspec.json.Decoder(Event)


class ForkServerSettings(Struct, frozen=True, kw_only=True):
    """Arguments of an actor."""

    target: str
    """`path/to/file.py:name` or `package.module:name`."""
    memory_mb: int | None = None
    """Maximum resident memory of a session in MB; None for no limit."""
    log_dir: str = ""
    """Directory for session logs on the node; empty keeps them in unnamed files."""


class ActorStatus(Struct, frozen=True, kw_only=True):
    """Status of an actor after its start."""

    problem: str = ""
    """Why it cannot serve; empty if it can."""
    where: str = ""
    """Host name and process id of the worker."""
    threads: tuple[str, ...] = ()
    """Names of threads that the agent's module starts at import; they do not survive a fork."""


class RaySessionInfo(Struct, frozen=True, kw_only=True):
    """Running session of an actor."""

    session_id: str
    """Id of the attempt's session."""
    where: str
    """Host name and process ids, for operators."""
    since: float
    """Start in seconds since the epoch."""
    phase: Phase
    """STARTING until the agent has its payload, then RUNNING."""


class _ActorSession:
    def __init__(self) -> None:
        self.since = time.time()
        self.taken: asyncio.Future[SessionAccepted] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[SessionExited] = asyncio.get_running_loop().create_future()


class ForkServerActor:
    """Asyncio actor; all methods run on one event loop."""

    def __init__(self, settings: ForkServerSettings) -> None:
        self._settings = settings
        self._sessions: dict[str, _ActorSession] = {}
        self._ended: OrderedDict[str, SessionExited] = OrderedDict()
        self._start: asyncio.Task[ActorStatus] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._standing: asyncio.Future[AgentLoaded] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the actor)
        self._gone = ""
        self._where = f"{socket.gethostname()}, worker {os.getpid()}"

    async def ready(self) -> ActorStatus:
        """Wait until the agent is loaded, or has failed to load."""
        if self._start is None:
            self._start = asyncio.create_task(self._begin())
        return await asyncio.shield(self._start)

    async def launch(self, session_id: str, payload: bytes) -> SessionAccepted | SessionExited:
        """Launch a session; waits until the agent has accepted or refused the payload, or died."""
        await self.ready()
        if ended := self._ended.get(session_id):
            return ended
        session = self._sessions.get(session_id)
        if session is None:
            if self._gone or self._writer is None:
                return SessionExited(session_id, self._gone or "its fork server has not started")
            session = self._sessions[session_id] = _ActorSession()
            self._order(StartSession(session_id, Raw(payload)))
        await asyncio.wait({session.taken, session.ended}, return_when=asyncio.FIRST_COMPLETED)
        return session.taken.result() if session.taken.done() else session.ended.result()

    async def ended(self, session_id: str) -> SessionExited | None:
        """Wait until a session has ended; None if it is unknown."""
        if session := self._sessions.get(session_id):
            return await asyncio.shield(session.ended)
        return self._ended.get(session_id)

    async def stop(self, session_id: str) -> bool:
        """Kill a session and wait until it has ended; returns False if it is unknown."""
        if session_id not in self._sessions:
            return False
        self._order(StopSession(session_id))
        await self.ended(session_id)
        return True

    async def logs(self, session_id: str) -> str:
        session = self._sessions.get(session_id)
        if session is not None and session.taken.done():
            return tail(Path(session.taken.result().log), LOG_BYTES)
        ended = self._ended.get(session_id)
        return ended.log if ended else ""

    async def sessions(self) -> list[RaySessionInfo]:
        return [self._info(session_id, session) for session_id, session in self._sessions.items()]

    async def over(self) -> str:
        """Wait until the fork server has ended; returns why.

        A pending call also reveals the actor's own death.
        """
        await self.ready()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return self._gone

    async def close(self) -> None:
        """End all sessions and wait until they have ended."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.write_eof()
        if self._reading is not None:
            await asyncio.shield(self._reading)

    # --- fork server -----------------------------------------------------------------------------

    async def _begin(self) -> ActorStatus:
        ours, theirs = socket.socketpair()
        settings = self._settings
        dropping = [part for name in DROPPED_ENV for part in ("-u", name)]
        command = [
            "env",
            *dropping,
            sys.executable,
            "-u",
            "-m",
            "afield.runtimes.ray.fork_server",
            settings.target,
        ]
        command += [str(theirs.fileno()), "--log-dir", settings.log_dir]
        if settings.memory_mb:
            command += ["--memory-mb", str(settings.memory_mb)]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._standing = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader, process))
        ready = await self._standing
        return ActorStatus(problem=ready.problem, where=self._where, threads=ready.threads)

    def _order(self, order: Order) -> None:
        if self._writer is not None:
            frame = msgspec.json.encode(order)
            self._writer.write(FRAME.pack(len(frame)) + frame)

    async def _read(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = FRAME.unpack(await reader.readexactly(FRAME.size))
                self._on_event(_events.decode(await reader.readexactly(size)))
        code = await process.wait()
        killed = -code if code < 0 else code - 128
        died = f"signal {killed}" if killed > 0 else f"exit code {code}"
        self._gone = f"the fork server ended with {died}; its log ends: {self._own_tail()}"
        for session_id in list(self._sessions):
            self._on_event(SessionExited(session_id, self._gone))
        self._on_event(AgentLoaded(self._gone))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, AgentLoaded):
            if self._standing is not None and not self._standing.done():
                self._standing.set_result(event)
            return
        session = self._sessions.get(event.session_id)
        if session is None:
            return
        if isinstance(event, SessionAccepted):
            session.taken.set_result(event)
            return
        del self._sessions[event.session_id]
        self._ended[event.session_id] = msgspec.structs.replace(event, log=event.log[-TAIL_BYTES:])
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        session.ended.set_result(event)

    def _info(self, session_id: str, session: _ActorSession) -> RaySessionInfo:
        phase, where = Phase.STARTING, self._where
        if session.taken.done():
            phase, where = Phase.RUNNING, f"{where}, pid {session.taken.result().pid}"
        return RaySessionInfo(session_id=session_id, where=where, since=session.since, phase=phase)

    def _own_tail(self) -> str:
        return tail(Path(f"/proc/self/fd/{self._log.fileno()}"), TAIL_BYTES)
