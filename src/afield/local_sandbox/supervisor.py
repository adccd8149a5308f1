"""Supervisor process of a fork server: starts, limits and cleans up sandboxes.

1. It starts the fork parent in bubblewrap, applies limits, relays connections and reports exits.
2. It is a process of its own, so that hundreds of busy sandboxes do not load the controller's event loop, and
so that sandboxes, control groups and sockets are cleaned up if the controller is killed.
3. If the supervisor is killed, the kernel ends all sandboxes, and the next supervisor removes the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import sys
import traceback
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from afield.errors import Unavailable
from afield.local_sandbox import cgroups
from afield.local_sandbox.cgroups import Group, Groups
from afield.local_sandbox.messages import (
    Channel,
    Done,
    Exec,
    File,
    Go,
    Gone,
    Hello,
    Kill,
    Line,
    Load,
    Message,
    Open,
    Over,
    Received,
    Start,
    Started,
    Up,
    Warm,
    pair,
    transmit,
)
from afield.local_sandbox.relay import Relay
from afield.settings.runtimes import ResourceLimits

SETTLE_S = 5.0
DYING_S = 60.0
OWN = 2  # processes of every sandbox: init and the program
LINE_S = 10.0


class SupervisedProcess:
    """Sandbox from its request until it is cleaned up.

    `tell` sends messages to the controller: Started once, Gone once after a successful start, and Done for
    each task.
    """

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
        """Run the sandbox from start to cleanup.

        `turn` limits concurrent starts; the start timeout counts from the moment it is acquired.
        """
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
        """Wait until the port accepts connections; returns the problem, empty on success."""
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
        """Wait until namespaces and limits exist, and let the program start.

        Returns the problem, empty on success.
        """
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
        """Whether the sandbox ended before the future was done."""
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
        """Kill all processes of the sandbox. Repeating is harmless."""
        if self._pidfd >= 0:
            if self._group is not None and self._over is None:
                # Count processes here: a killed init process cannot report them.
                self._more = max(self._more, self._group.processes() - OWN)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            # The program has not started, and does not start once the channel is closed.
            if self._channel is not None:
                self._channel.close()
            self._closed.set()

    async def bury(self) -> tuple[bool, tuple[str, ...]]:
        """Kill the sandbox and remove its sockets and groups.

        Returns whether memory ran out, and messages about limits.
        """
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
        """Request an unconnected socket of the sandbox's network."""
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
    """Wait until a process has ended; returns False after DYING_S seconds."""
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


AT_ONCE = 16  # maximum number of concurrent starts
NEST = ResourceLimits(cpus=None, memory_mb=None, pids=16_384, disk_mb=None, files=None)


class Supervisor:
    """Manages the fork parent and sandboxes of one fork server."""

    def __init__(self, controller: socket.socket) -> None:
        self._done = asyncio.Event()
        self._controller = Channel(controller, self._asked, self._done.set)
        self._warm: Channel | None = None
        self._bubblewrap: Process | None = None
        self._ready = False
        self._timeout_s = 60.0
        self._groups = cgroups.found()
        self._directory: Path | None = None
        self._cells: dict[int, SupervisedProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Serve until the controller or the fork parent has ended, then clean up."""
        parent = os.pidfd_open(os.getppid())
        asyncio.get_running_loop().add_reader(parent, self._done.set)
        try:
            await self._done.wait()
        finally:
            await self._clean_up()

    async def _clean_up(self) -> None:
        if self._bubblewrap is not None:
            with contextlib.suppress(ProcessLookupError):
                self._bubblewrap.kill()
            await self._bubblewrap.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.gather(*(cell.bury() for cell in self._cells.values()))
        self._groups.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._controller.close()

    def _asked(self, received: Received) -> None:
        match received.message:
            case Open() as opening:
                self._task(self._open(opening))
            case Start() as start:
                self._start(start)
            case Kill() as kill:
                if cell := self._cells.get(kill.id):
                    cell.kill()
            case Exec() | File() as task:
                if cell := self._cells.get(task.cell):
                    cell.ask(task, received.fds)
                else:
                    self._tell(Done(id=task.id, problem="its cell has ended"))
                    _close(received.fds)
            case _:
                _close(received.fds)

    # --- fork parent -----------------------------------------------------------------------------

    async def _open(self, opening: Open) -> None:
        self._directory = Path(opening.directory)
        self._timeout_s = opening.timeout_s
        self._groups.sweep()
        ours, theirs = pair()
        command = [part.replace("{fd}", str(theirs.fileno())) for part in opening.command]
        # Inherits standard output and error: the log of the fork server.
        self._bubblewrap = await asyncio.create_subprocess_exec(
            *command,
            env=dict(opening.env),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._task(self._outlive(self._bubblewrap))
        with contextlib.suppress(OSError):
            self._groups.make("nest", NEST).add(self._bubblewrap.pid)
        load = Load(
            program=opening.program,
            mounted=opening.mounted,
            sealed=opening.sealed,
            hidden=opening.hidden,
        )
        transmit(ours, load)
        self._warm = Channel(ours, self._warmed, lambda: None)

    def _warmed(self, received: Received) -> None:
        if isinstance(warm := received.message, Warm):
            self._ready = not warm.problem
            pid = self._bubblewrap.pid if self._bubblewrap else 0
            self._tell(Warm(problem=warm.problem, pid=pid, limits=self._groups.kinds))

    async def _outlive(self, bubblewrap: Process) -> None:
        code = await bubblewrap.wait()
        if not self._ready:
            self._tell(Warm(problem=f"the warm parent ended with {code} before it was ready"))
        self._done.set()

    # --- sandboxes -------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        if self._warm is None or not self._ready or self._directory is None:
            self._tell(Started(id=start.id, problem="the nest is not ready"))
            return
        cell = SupervisedProcess(start, self._directory, self._groups, self._tell)
        self._cells[start.id] = cell
        self._task(self._live(cell, self._warm))

    async def _live(self, cell: SupervisedProcess, warm: Channel) -> None:
        await cell.live(warm, self._turn)
        self._cells.pop(cell.id, None)

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(Unavailable):
            self._controller.send(message)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            traceback.print_exception(error)
            self._done.set()


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def main() -> None:
    controller = socket.socket(fileno=int(sys.argv[1]))
    # Each sandbox needs several descriptors.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main(controller))


async def _main(controller: socket.socket) -> None:
    await Supervisor(controller).run()


if __name__ == "__main__":
    main()
