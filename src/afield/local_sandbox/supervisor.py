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

from msgspec.structs import replace

from afield.errors import Unavailable
from afield.local_sandbox import cgroups
from afield.local_sandbox.cgroups import Cgroup, CgroupParents
from afield.local_sandbox.messages import (
    Channel,
    ExecCommand,
    KillSandbox,
    LoadProgram,
    Message,
    NamespacesReady,
    OpenForkServer,
    OpenSocket,
    PortReady,
    ProgramExited,
    ProgramLoaded,
    Received,
    SandboxExited,
    SandboxStarted,
    StartProgram,
    StartSandbox,
    TaskDone,
    TransferFile,
    pair,
    transmit,
)
from afield.local_sandbox.relay import ConnectionRelay
from afield.settings.runtimes import ResourceLimits

GROUP_REMOVAL_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 60.0
OWN_PROCESSES = 2  # processes of every sandbox: init and the program
SOCKET_TIMEOUT_S = 10.0


class SupervisedProcess:
    """Sandbox from its request until it is cleaned up.

    `send` sends messages to the controller: SandboxStarted once, SandboxExited once after a successful start,
    and TaskDone for each task.
    """

    def __init__(
        self,
        start: StartSandbox,
        directory: Path,
        groups: CgroupParents,
        send: Callable[[Message], None],
    ) -> None:
        self.id = start.id
        self._start = start
        self._socket = directory / f"{start.id}.sock"
        self._groups = groups
        self._send = send
        self._relay = ConnectionRelay()
        self._group: Cgroup | None = None
        self._channel: Channel | None = None
        self._pid = 0
        self._pidfd = -1
        self._extra_processes = 0
        self._program_exit: ProgramExited | None = None
        self._closed = asyncio.Event()
        self._namespaces_ready: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.Event()
        self._socket_requests: deque[asyncio.Future[socket.socket]] = deque()
        self._task_ids: set[int] = set()

    def _request_fork(self, fork_parent: Channel) -> None:
        log = os.open(self._start.log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        ours, theirs = pair()
        self._channel = Channel(ours, self._on_message, self._closed.set, credentials=True)
        start = replace(self._start, rlimit_memory="memory" not in self._groups.kinds)
        fork_parent.send(start, [theirs.detach(), log])

    async def run(self, fork_parent: Channel, start_slots: asyncio.Semaphore) -> None:
        """Run the sandbox from start to cleanup.

        `start_slots` limits concurrent starts; the start timeout counts from the moment it is acquired.
        """
        problem = await self._wait_ready(fork_parent, start_slots)
        if problem:
            self.kill()
        else:
            self._send(SandboxStarted(id=self.id, pid=self._pid, socket=str(self._socket)))
            await self._closed.wait()
        oom, notes = await self.clean_up()
        if problem:
            self._send(SandboxStarted(id=self.id, problem="; ".join((problem, *notes))))
            return
        program_exit = self._program_exit or ProgramExited()
        self._send(
            SandboxExited(
                id=self.id, code=program_exit.code, signal=program_exit.signal, oom=oom, notes=notes
            )
        )

    async def _wait_ready(self, fork_parent: Channel, start_slots: asyncio.Semaphore) -> str:
        """Wait until the port accepts connections; returns the problem, empty on success."""
        try:
            async with start_slots:
                deadline = asyncio.get_running_loop().time() + self._start.timeout_s
                async with asyncio.timeout_at(deadline):
                    problem = await self._prepare(fork_parent)
            if not problem:
                async with asyncio.timeout_at(deadline):
                    problem = await self._wait_serving()
        except TimeoutError:
            return f"was not ready within {self._start.timeout_s:g} s"
        except (OSError, Unavailable) as error:
            return f"cannot be started: {error}"
        return problem

    async def _prepare(self, fork_parent: Channel) -> str:
        """Wait until namespaces and limits exist, and let the program start.

        Returns the problem, empty on success.
        """
        if self._closed.is_set():
            return self._start_error()
        self._request_fork(fork_parent)
        if await self._ended_before(self._namespaces_ready):
            return self._start_error()
        ready = self._namespaces_ready.result()
        if len(ready.fds) != len(self._start.allow):
            return "did not open a socket for each allowed address"
        self._pid = ready.pid
        self._pidfd = os.pidfd_open(ready.pid)
        self._group = self._groups.create(str(self.id), self._start.limits)
        self._group.add(ready.pid)
        for fd, (host, port) in zip(ready.fds, self._start.allow, strict=True):
            await self._relay.forward_out(socket.socket(fileno=fd), host, port)
        if self._channel is not None:
            self._channel.send(StartProgram())
        return ""

    async def _wait_serving(self) -> str:
        if await self._ended_before(asyncio.ensure_future(self._serving.wait())):
            return self._start_error()
        if self._start.port:
            await self._relay.forward_in(self._socket, self._request_socket, self._start.port)
        return ""

    async def _ended_before(self, wanted: asyncio.Future) -> bool:  # type: ignore[type-arg]
        """Whether the sandbox ended before the future was done."""
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((wanted, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        return not wanted.done()

    def _start_error(self) -> str:
        program_exit = self._program_exit
        if program_exit is None:
            return "was killed before it was ready"
        how = program_exit.problem or (
            f"signal {program_exit.signal}" if program_exit.signal else f"exit code {program_exit.code}"
        )
        return f"ended before it was ready ({how})"

    def forward(self, task: ExecCommand | TransferFile, fds: Sequence[int]) -> None:
        try:
            if self._channel is None:
                raise Unavailable("the sandbox has not started")
            self._channel.send(task, fds)
            self._task_ids.add(task.id)
        except Unavailable:
            self._send(TaskDone(id=task.id, problem="its sandbox has ended"))

    def kill(self) -> None:
        """Kill all processes of the sandbox. Repeating is harmless."""
        if self._pidfd >= 0:
            if self._group is not None and self._program_exit is None:
                # Count processes here: a killed init process cannot report them.
                self._extra_processes = max(self._extra_processes, self._group.processes() - OWN_PROCESSES)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            # The program has not started, and does not start once the channel is closed.
            if self._channel is not None:
                self._channel.close()
            self._closed.set()

    async def clean_up(self) -> tuple[bool, tuple[str, ...]]:
        """Kill the sandbox and remove its sockets and groups.

        Returns whether memory ran out, and messages about limits.
        """
        self.kill()
        if self._channel is not None:
            self._channel.close()
        for task in self._task_ids:
            self._send(TaskDone(id=task, problem="its sandbox has ended"))
        self._task_ids.clear()
        await self._relay.close()
        self._socket.unlink(missing_ok=True)
        oom, notes = False, ()
        if self._pidfd >= 0:
            ended = await _wait_exit(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            notes = (
                () if ended else (f"pid {self._pid} was killed but had not ended after {KILL_TIMEOUT_S:g} s",)
            )
        if self._group is not None:
            oom, reached = self._group.reached_limits()
            notes += reached
            until = asyncio.get_running_loop().time() + GROUP_REMOVAL_TIMEOUT_S
            while not self._group.remove() and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.01)
            self._group = None
        if self._extra_processes:
            notes += (f"killed {self._extra_processes} other process(es) of the agent",)
            self._extra_processes = 0
        notes += self._relay.notes()
        self._append_to_log(notes)
        return oom, notes

    def _append_to_log(self, notes: Sequence[str]) -> None:
        if notes:
            with Path(self._start.log).open("a") as log:
                log.writelines(f"[sandbox] {note}\n" for note in notes)

    def _on_message(self, received: Received) -> None:
        match received.message:
            case NamespacesReady() if not self._namespaces_ready.done():
                self._namespaces_ready.set_result(received)
            case PortReady():
                self._serving.set()
            case ProgramExited() as program_exit:
                self._program_exit = program_exit
            case OpenSocket() if len(received.fds) == 1:
                self._on_socket(received)
            case TaskDone() as done if done.id in self._task_ids:
                self._task_ids.discard(done.id)
                self._send(done)
            case _:
                for fd in received.fds:
                    os.close(fd)

    async def _request_socket(self) -> socket.socket:
        """Request an unconnected socket of the sandbox's network."""
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        if self._channel is None:
            raise ConnectionError("the sandbox has not started")
        try:
            self._channel.send(OpenSocket(id=self.id))
        except Unavailable as error:
            raise ConnectionError(str(error)) from error
        self._socket_requests.append(future)
        async with asyncio.timeout(SOCKET_TIMEOUT_S):
            return await future

    def _on_socket(self, received: Received) -> None:
        inner = socket.socket(fileno=received.fds[0])
        future = self._socket_requests.popleft() if self._socket_requests else None
        if future is None or future.done():
            inner.close()
        else:
            future.set_result(inner)


async def _wait_exit(pidfd: int) -> bool:
    """Wait until a process has ended; returns False after DYING_S seconds."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, gone.set)
    try:
        async with asyncio.timeout(KILL_TIMEOUT_S):
            return await gone.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)


MAX_CONCURRENT_STARTS = 16  # maximum number of concurrent starts
FORK_PARENT_LIMITS = ResourceLimits(cpus=None, memory_mb=None, pids=16_384, disk_mb=None, files=None)


class Supervisor:
    """Manages the fork parent and sandboxes of one fork server."""

    def __init__(self, controller: socket.socket) -> None:
        self._done = asyncio.Event()
        self._controller = Channel(controller, self._on_controller_message, self._done.set)
        self._fork_parent: Channel | None = None
        self._bubblewrap: Process | None = None
        self._ready = False
        self._groups = cgroups.find_groups()
        self._directory: Path | None = None
        self._sandboxes: dict[int, SupervisedProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_slots = asyncio.Semaphore(MAX_CONCURRENT_STARTS)

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
                await asyncio.gather(*(sandbox.clean_up() for sandbox in self._sandboxes.values()))
        self._groups.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._controller.close()

    def _on_controller_message(self, received: Received) -> None:
        match received.message:
            case OpenForkServer() as request:
                self._task(self._open(request))
            case StartSandbox() as start:
                self._start(start)
            case KillSandbox() as kill:
                if sandbox := self._sandboxes.get(kill.id):
                    sandbox.kill()
            case ExecCommand() | TransferFile() as task:
                if sandbox := self._sandboxes.get(task.sandbox):
                    sandbox.forward(task, received.fds)
                else:
                    self._send(TaskDone(id=task.id, problem="its sandbox has ended"))
                    _close(received.fds)
            case _:
                _close(received.fds)

    # --- fork parent -----------------------------------------------------------------------------

    async def _open(self, request: OpenForkServer) -> None:
        self._directory = Path(request.directory)
        self._groups.remove_stale()
        ours, theirs = pair()
        command = [part.replace("{fd}", str(theirs.fileno())) for part in request.bwrap.command]
        # Inherits standard output and error: the log of the fork server.
        self._bubblewrap = await asyncio.create_subprocess_exec(
            *command,
            env=dict(request.env),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._task(self._watch_bubblewrap(self._bubblewrap))
        with contextlib.suppress(OSError):
            self._groups.create("fork-parent", FORK_PARENT_LIMITS).add(self._bubblewrap.pid)
        with contextlib.suppress(OSError):  # if bubblewrap has ended, `_watch_bubblewrap` reports it
            transmit(ours, LoadProgram(program=request.program, bwrap=request.bwrap))
        self._fork_parent = Channel(ours, self._on_fork_parent_message, lambda: None)

    def _on_fork_parent_message(self, received: Received) -> None:
        if isinstance(loaded := received.message, ProgramLoaded):
            self._ready = not loaded.problem
            pid = self._bubblewrap.pid if self._bubblewrap else 0
            self._send(replace(loaded, pid=pid, limits=self._groups.kinds))

    async def _watch_bubblewrap(self, bubblewrap: Process) -> None:
        code = await bubblewrap.wait()
        if not self._ready:
            self._send(ProgramLoaded(problem=f"the fork parent ended with {code} before it was ready"))
        self._done.set()

    # --- sandboxes -------------------------------------------------------------------------------

    def _start(self, start: StartSandbox) -> None:
        if self._fork_parent is None or not self._ready or self._directory is None:
            self._send(SandboxStarted(id=start.id, problem="the fork server is not ready"))
            return
        sandbox = SupervisedProcess(start, self._directory, self._groups, self._send)
        self._sandboxes[start.id] = sandbox
        self._task(self._run_sandbox(sandbox, self._fork_parent))

    async def _run_sandbox(self, sandbox: SupervisedProcess, fork_parent: Channel) -> None:
        await sandbox.run(fork_parent, self._start_slots)
        self._sandboxes.pop(sandbox.id, None)

    def _send(self, message: Message) -> None:
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
