"""Hosts of session programs: plain processes, or sandboxes.

1. `ProcessHosts`: plain processes share everything with this machine except their environment. Each serves a
socket that was opened for it, instead of the port that it asks for. It ends with this server, including its
daemons.
2. `SandboxHosts`: sandboxed programs see the system, the Python environment and their own folder read-only,
and reach only allowed addresses. One fork server per image forks them.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, Self

from msgspec import Struct

from afield.agentcore_local.http import Stream
from afield.agentcore_local.images import AgentImage
from afield.errors import AfieldError, InfrastructureFailure
from afield.local_sandbox.fork_server import ForkServer
from afield.local_sandbox.messages import Program
from afield.local_sandbox.process import SandboxProcess
from afield.settings.runtimes import ResourceLimits
from afield.types import Reason
from afield.utils.process_tree import signal_group

PIECE = 16 * 1024
WATCHER_S = 3.0
CONTAINER_ENV = {"DOCKER_CONTAINER": "1"}  # set by AgentCore images
BASE_ENV = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED": "1",
    **CONTAINER_ENV,
}


class HostError(Exception):
    """A program cannot be started; the message contains its output."""


class CommandOutput(Struct, frozen=True):
    """Piece of a command's output."""

    channel: Literal["stdout", "stderr"]
    """Stream that it came from."""
    text: str
    """Decoded text."""


class CommandExit(Struct, frozen=True):
    """End of a command."""

    exit_code: int
    """Exit code; 128 plus the signal number if a signal ended it, -1 after a timeout."""
    timed_out: bool = False
    """Whether the command reached its time limit and was killed."""


class ProgramHost(Protocol):
    """Runs the program of one session."""

    where: str
    """Location for operators, such as `pid 4711`."""
    log: Path
    """Log file of the program."""

    async def connect(self) -> Stream:
        """Connect to the program's port; raises OSError while the program does not serve."""
        ...

    async def ended(self) -> str:
        """Wait until the program has ended; returns its exit code or signal in words."""
        ...

    def kill(self) -> None:
        """Kill the program and all its descendants. Repeating is harmless."""
        ...

    def run(self, command: str, timeout_s: float) -> AsyncGenerator[CommandOutput | CommandExit]:
        """Run a shell command next to the program; yields its output, then a CommandExit.

        Raises HostError if the host is gone.
        """
        ...


class ProgramHosts(Protocol):
    """Factory of hosts."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def prepare(self, image: AgentImage) -> None:
        """Check that an image can be started, as far as possible; raises HostError if not."""
        ...

    async def start(self, image: AgentImage, name: str, env: Mapping[str, str]) -> ProgramHost:
        """Start a fresh host for one session; raises HostError if that fails."""
        ...


class ProcessHosts:
    """Runs programs as plain processes."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._alive: set[ProcessHost] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for host in self._alive:
            host.kill()
        for host in list(self._alive):
            await host.ended()

    async def prepare(self, image: AgentImage) -> None:
        check_file(image)

    async def start(self, image: AgentImage, name: str, env: Mapping[str, str]) -> ProcessHost:
        try:
            host = await self._start_process(image, self._logs / f"{name}.log", env)
        except OSError as error:
            raise HostError(f"{image} cannot be started: {error}") from error
        self._alive.add(host)
        host.gone.add_done_callback(lambda _: self._alive.discard(host))
        return host

    async def _start_process(self, image: AgentImage, log: Path, env: Mapping[str, str]) -> ProcessHost:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket())
            # A command cannot inherit the socket and finds its port in PORT. The bound socket reserves the
            # port while the command lives; a server that sets SO_REUSEADDR can bind it too.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            if not image.argv:
                listener.listen(128)
            port = listener.getsockname()[1]
            host = ProcessHost(log, port, {**BASE_ENV, "HOME": "/tmp", "PORT": str(port), **env})
            await host.start(_command(image, listener), () if image.argv else (listener.fileno(),))
            if image.argv:
                reserved = stack.pop_all()
                host.gone.add_done_callback(lambda _: reserved.close())
        return host


def check_file(image: AgentImage) -> None:
    """Raise HostError if the image's file has been removed since the server started."""
    path = image.script or (image.target.rpartition(":")[0] if ".py:" in image.target else "")
    if path and not Path(path).is_file():
        raise HostError(f"there is no file {path}")


def _command(image: AgentImage, listener: socket.socket) -> list[str]:
    program = [sys.executable, "-u", "-m", "afield.agentcore_local.program"]
    if image.argv:
        return [*program, "--command", *image.argv]
    kind, program_path = ("--target", image.target) if image.target else ("--script", image.script)
    return [*program, "--listener", str(listener.fileno()), kind, program_path]


class ProcessHost:
    """Program that runs as a plain process."""

    def __init__(self, log: Path, port: int, env: Mapping[str, str]) -> None:
        self.log, self.where = log, ""
        self._port, self._env = port, env
        self._commands: set[Process] = set()
        self.gone: asyncio.Future[str]

    async def start(self, argv: list[str], passed: tuple[int, ...]) -> None:
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=PIPE,
                stdout=output,
                stderr=output,
                env=self._env,
                pass_fds=passed,
                start_new_session=True,
            )
        self.where = f"pid {self._process.pid}"
        self.gone = asyncio.ensure_future(self._wait())

    async def _wait(self) -> str:
        code = await self._process.wait()
        signal_group(self._process.pid, signal.SIGKILL)  # its descendants may survive it
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    async def connect(self) -> Stream:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ended(self) -> str:
        return await asyncio.shield(self.gone)

    def kill(self) -> None:
        for process in (*self._commands, *([] if self.gone.done() else [self._process])):
            _end(process)

    async def run(self, command: str, timeout_s: float) -> AsyncGenerator[CommandOutput | CommandExit]:
        argv = [sys.executable, "-m", "afield.agentcore_local.program", "--command", "sh", "-c", command]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=self._env, start_new_session=True
            )
        except OSError as error:
            raise HostError(f"no command can be started: {error}") from error
        self._commands.add(process)
        try:
            async for event in stream_output(process, timeout_s):
                yield event
        finally:
            _end(process)
            await process.wait()
            self._commands.discard(process)


async def stream_output(process: Process, timeout_s: float) -> AsyncGenerator[CommandOutput | CommandExit]:
    """Stream the output of a process, then its exit, or a timeout after `timeout_s` seconds."""
    assert process.stdout is not None
    assert process.stderr is not None
    queue: asyncio.Queue[CommandOutput | None] = asyncio.Queue(maxsize=16)
    pumps = [
        asyncio.create_task(_pump(process.stdout, "stdout", queue)),
        asyncio.create_task(_pump(process.stderr, "stderr", queue)),
    ]
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        open_channels = len(pumps)
        while open_channels:
            async with asyncio.timeout_at(deadline):
                piece = await queue.get()
            if piece is None:
                open_channels -= 1
            else:
                yield piece
        async with asyncio.timeout_at(deadline):
            code = await process.wait()
        yield CommandExit(code if code >= 0 else 128 - code)
    except TimeoutError:
        yield CommandExit(-1, timed_out=True)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    reader: asyncio.StreamReader,
    channel: Literal["stdout", "stderr"],
    queue: asyncio.Queue[CommandOutput | None],
) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while piece := await reader.read(PIECE):
        await queue.put(CommandOutput(channel, decoder.decode(piece)))
    await queue.put(None)


def _end(process: Process) -> None:
    """Kill a program and all its descendants.

    Its watcher (`afield.sdk.parent_watch`) does so when stdin closes. SIGTERM ends a process that has no
    watcher yet; after WATCHER_S seconds its process group is killed.
    """
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    asyncio.get_running_loop().call_later(
        WATCHER_S, lambda: process.returncode is None and signal_group(process.pid, signal.SIGKILL)
    )


Address = tuple[str, int]


class SandboxHosts:
    """Runs programs in sandboxes, forked from one fork server per image."""

    def __init__(
        self,
        logs: Path,
        limits: ResourceLimits,
        *,
        allow: Sequence[Address],
        mounts: tuple[str, ...],
        warm: tuple[str, ...],
        init_s: float,
    ) -> None:
        self._logs, self._limits, self._allow = logs, limits, allow
        self._mounts, self._warm = mounts, warm
        self._init_s = init_s
        self._fork_servers: dict[AgentImage, _ForkServerTask] = {}

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for image in list(self._fork_servers):
            self._fork_servers.pop(image).stop.set()
        await self._group.__aexit__(None, None, None)

    async def prepare(self, image: AgentImage) -> None:
        check_file(image)
        await asyncio.shield(self._fork_server(image).ready)

    def _fork_server(self, image: AgentImage) -> _ForkServerTask:
        """Fork server of an image, shared by its sessions. A failed start is retried by the next call."""
        task = self._fork_servers.get(image)
        if task is None:
            task = self._fork_servers[image] = _ForkServerTask()
            self._group.create_task(self._serve(image, task))
        return task

    async def _serve(self, image: AgentImage, task: _ForkServerTask) -> None:
        """Run the fork server of an image until it is stopped."""
        program = Program(
            target=image.target,
            script=image.script,
            argv=image.argv,
            mounts=self._mounts,
            warm=self._warm,
        )
        try:
            with tempfile.TemporaryDirectory(
                prefix=f"afield-agentcore-{os.getpid()}-", ignore_cleanup_errors=True
            ) as directory:
                server = ForkServer(program, self._limits, directory=Path(directory), log_dir=self._logs)
                async with server:
                    task.ready.set_result(server)
                    await task.stop.wait()
        except (AfieldError, OSError) as error:
            if task.ready.done():
                raise
            self._discard(image, task)
            task.ready.set_exception(HostError(f"{image} cannot be started: {error}"))

    async def start(self, image: AgentImage, name: str, env: Mapping[str, str]) -> SandboxHost:
        task = self._fork_server(image)
        server = await asyncio.shield(task.ready)
        try:
            env = {**CONTAINER_ENV, **env}
            return SandboxHost(await server.start(name, allow=self._allow, env=env, timeout_s=self._init_s))
        except AfieldError as error:
            if isinstance(error, InfrastructureFailure) and error.reason is Reason.DIED:
                self._discard(image, task)  # the next session starts a new fork server
            raise HostError(str(error)) from error

    def _discard(self, image: AgentImage, task: _ForkServerTask) -> None:
        """Stop a fork server that has died, unless another session already replaced it."""
        task.stop.set()
        if self._fork_servers.get(image) is task:
            del self._fork_servers[image]


class _ForkServerTask:
    """Fork server that a task runs: `ready` with the server, until `stop`."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[ForkServer] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, since no session may be waiting for it.
        self.ready.add_done_callback(lambda ready: ready.exception())
        self.stop = asyncio.Event()


class SandboxHost:
    """Program that runs in a sandbox."""

    def __init__(self, process: SandboxProcess) -> None:
        self._process = process
        self.where, self.log = f"pid {process.pid}", process.log

    async def connect(self) -> Stream:
        return await self._process.connect()

    async def ended(self) -> str:
        return str(await self._process.ended())

    def kill(self) -> None:
        self._process.kill()

    async def run(self, command: str, timeout_s: float) -> AsyncGenerator[CommandOutput | CommandExit]:
        """Run a shell command; its output comes when it has ended."""
        try:
            result = await self._process.exec(command, timeout=timeout_s)
        except AfieldError as error:
            raise HostError(str(error)) from error
        if result.stdout:
            yield CommandOutput("stdout", result.stdout)
        if result.stderr:
            yield CommandOutput("stderr", result.stderr)
        yield CommandExit(-1 if result.exit_code is None else result.exit_code, result.timed_out)
