"""One cell as its keeper sees it: from the fork until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from afield.errors import Unavailable
from afield.sandbox.cgroups import Group, Groups
from afield.sandbox.channel import Channel, Received, pair
from afield.sandbox.messages import (
    Done,
    Exec,
    File,
    Go,
    Gone,
    Hello,
    Line,
    Message,
    Over,
    Start,
    Started,
    Up,
)
from afield.sandbox.relay import Relay

SETTLE_S = 5.0
DYING_S = 60.0
OWN = 2  # the first process and the agent's
LINE_S = 10.0


class SupervisedProcess:
    """`tell` reaches the controller: Started once, Gone once after it, and what came of each task."""

    def __init__(
        self,
        start: Start,
        directory: Path,
        groups: Groups,
        tell: Callable[[Message], None],
    ) -> None:
        self.id = start.id
        self._start = start
        self._socket = directory / f"{start.id}.sock"
        self._groups = groups
        self._tell = tell
        self._relay = Relay()
        self._group: Group | None = None
        self._channel: Channel | None = None
        self._pid = 0
        self._pidfd = -1
        self._more = 0
        self._over: Over | None = None
        self._closed = asyncio.Event()
        self._hello: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._up = asyncio.Event()
        self._lines: deque[asyncio.Future[socket.socket]] = deque()
        self._asking: set[int] = set()

    def _begin(self, warm: Channel) -> None:
        log = os.open(self._start.log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        ours, theirs = pair()
        self._channel = Channel(ours, self._told, self._closed.set, credentials=True)
        rlimit = "memory" not in self._groups.kinds
        start = Start(
            **{f: getattr(self._start, f) for f in Start.__struct_fields__ if f != "rlimit_memory"},
            rlimit_memory=rlimit,
        )
        warm.send(start, [theirs.detach(), log])

    async def live(self, warm: Channel, turn: asyncio.Semaphore) -> None:
        """`turn` bounds how many are made at one time: the clock of a start runs from its turn on."""
        problem = await self._risen(warm, turn)
        if problem:
            self.kill()
        else:
            self._tell(Started(id=self.id, pid=self._pid, socket=str(self._socket)))
            await self._closed.wait()
        oom, notes = await self.bury()
        if problem:
            self._tell(Started(id=self.id, problem="; ".join((problem, *notes))))
            return
        over = self._over or Over()
        self._tell(Gone(id=self.id, code=over.code, signal=over.signal, oom=oom, notes=notes))

    async def _risen(self, warm: Channel, turn: asyncio.Semaphore) -> str:
        """Until its port takes connections; says why it never did."""
        try:
            async with turn:
                deadline = asyncio.get_running_loop().time() + self._start.timeout_s
                async with asyncio.timeout_at(deadline):
                    problem = await self._rise(warm)
            if not problem:
                async with asyncio.timeout_at(deadline):
                    problem = await self._serve()
        except TimeoutError:
            return f"was not ready within {self._start.timeout_s:g} s"
        except (OSError, Unavailable) as error:
            return f"cannot be started: {error}"
        return problem

    async def _rise(self, warm: Channel) -> str:
        """Until its namespaces and limits are there, and its program may start."""
        if self._closed.is_set():
            return self._why()
        self._begin(warm)
        if await self._first(self._hello):
            return self._why()
        hello = self._hello.result()
        if len(hello.fds) != len(self._start.doors):
            return "has other doors than it was told to have"
        self._pid = hello.pid
        self._pidfd = os.pidfd_open(hello.pid)
        self._group = self._groups.make(str(self.id), self._start.limits)
        self._group.add(hello.pid)
        for fd, (host, port) in zip(hello.fds, self._start.doors, strict=True):
            await self._relay.door(socket.socket(fileno=fd), host, port)
        if self._channel is not None:
            self._channel.send(Go())
        return ""

    async def _serve(self) -> str:
        if await self._first(asyncio.ensure_future(self._up.wait())):
            return self._why()
        if self._start.port:
            await self._relay.port(self._socket, self._line, self._start.port)
        return ""

    async def _first(self, wanted: asyncio.Future) -> bool:  # type: ignore[type-arg]
        """Whether the cell ended before that."""
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((wanted, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        return not wanted.done()

    def _why(self) -> str:
        over = self._over
        if over is None:
            return "was killed before it was ready"
        how = over.problem or (f"signal {over.signal}" if over.signal else f"exit code {over.code}")
        return f"ended before it was ready ({how})"

    def ask(self, task: Exec | File, fds: Sequence[int]) -> None:
        try:
            if self._channel is None:
                raise Unavailable("it has not begun")
            self._channel.send(task, fds)
            self._asking.add(task.id)
        except Unavailable:
            self._tell(Done(id=task.id, problem="its cell has ended"))

    def kill(self) -> None:
        """Everything in it. Repeating is harmless."""
        if self._pidfd >= 0:
            if self._group is not None and self._over is None:
                # Its first process tells of those it ends; this time it cannot.
                self._more = max(self._more, self._group.processes() - OWN)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            # It has not begun: without us it will not.
            if self._channel is not None:
                self._channel.close()
            self._closed.set()

    async def bury(self) -> tuple[bool, tuple[str, ...]]:
        """Nothing of it is left afterwards; says what its limits had to prevent."""
        self.kill()
        if self._channel is not None:
            self._channel.close()
        for task in self._asking:
            self._tell(Done(id=task, problem="its cell has ended"))
        self._asking.clear()
        await self._relay.close()
        self._socket.unlink(missing_ok=True)
        oom, notes = False, ()
        if self._pidfd >= 0:
            ended = await _ended(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            notes = () if ended else (f"pid {self._pid} was killed and had not ended after {DYING_S:g} s",)
        if self._group is not None:
            oom, reached = self._group.notes()
            notes += reached
            until = asyncio.get_running_loop().time() + SETTLE_S
            while not self._group.remove() and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.01)
            self._group = None
        if self._more:
            notes += (f"{self._more} process(es) beside the agent's own were killed with it",)
            self._more = 0
        notes += self._relay.notes()
        self._write_down(notes)
        return oom, notes

    def _write_down(self, notes: Sequence[str]) -> None:
        if notes:
            with Path(self._start.log).open("a") as log:
                log.writelines(f"[cell] {note}\n" for note in notes)

    def _told(self, received: Received) -> None:
        match received.message:
            case Hello() if not self._hello.done():
                self._hello.set_result(received)
            case Up():
                self._up.set()
            case Over() as over:
                self._over = over
            case Line() if len(received.fds) == 1:
                self._lined(received)
            case Done() as done if done.id in self._asking:
                self._asking.discard(done.id)
                self._tell(done)
            case _:
                for fd in received.fds:
                    os.close(fd)

    async def _line(self) -> socket.socket:
        """An unconnected socket of the cell's own network."""
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        if self._channel is None:
            raise ConnectionError("the cell has not begun")
        try:
            self._channel.send(Line(id=self.id))
        except Unavailable as error:
            raise ConnectionError(str(error)) from error
        self._lines.append(future)
        async with asyncio.timeout(LINE_S):
            return await future

    def _lined(self, received: Received) -> None:
        made = socket.socket(fileno=received.fds[0])
        future = self._lines.popleft() if self._lines else None
        if future is None or future.done():
            made.close()
        else:
            future.set_result(made)


async def _ended(pidfd: int) -> bool:
    """False when it was killed and yet has not ended in all that time; the others must not wait for it."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, gone.set)
    try:
        async with asyncio.timeout(DYING_S):
            return await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
