"""Fork server: forks isolated sandboxes from a process with the loaded program.

1. Each sandbox has its own namespaces, sees the system, this Python and the agent's folder read-only, and
reaches only allowed addresses.
2. All its processes end with `async with`, and when this process is killed.
3. Opening fails with UsageError if no sandbox could work: bubblewrap is missing, the program cannot be
imported, or this machine does not allow user namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from afield.errors import InfrastructureFailure, Unavailable, UsageError
from afield.local_sandbox.bwrap import bwrap_args, environment
from afield.local_sandbox.messages import (
    PORT,
    Address,
    BwrapArgs,
    Channel,
    KillSandbox,
    Layer,
    OpenForkServer,
    ProcessExit,
    Program,
    ProgramLoaded,
    Received,
    SandboxExited,
    SandboxStarted,
    StartSandbox,
    TaskDone,
    pair,
)
from afield.local_sandbox.process import SandboxProcess
from afield.settings.runtimes import ResourceLimits
from afield.types import Reason
from afield.utils.log_tail import tail
from afield.utils.process_tree import start_time

CLOSE_S = 15.0
TAIL_BYTES = 4_000
SOCKET_PREFIX = "afield-sandbox-"
NO_NAMESPACES = ("namespaces cannot be made", "new namespace", "user namespace", "setting up uid map")
REMEDY = (
    "this machine does not allow user namespaces; check the settings user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
)
DIED = "died with its fork server"


def new_socket_directory() -> Path:
    """Create a temporary directory for sockets, named after this process.

    Removes the directories of dead processes.
    """
    parent = Path(tempfile.gettempdir())
    for directory in parent.glob(f"{SOCKET_PREFIX}*"):
        pid, _, rest = directory.name.removeprefix(SOCKET_PREFIX).partition("-")
        if pid.isdigit() and start_time(int(pid)) != rest.partition("-")[0]:
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{SOCKET_PREFIX}{os.getpid()}-{start_time(os.getpid())}-"))


class ForkServer:
    """Fork server for one program; use it with `async with`.

    `directory` holds sockets and is removed on close; its path must be short, because socket paths are
    limited to 107 bytes. A sandbox logs to `log_dir/NAME.log`, the fork parent to
    `log_dir/fork-server-PID.log`.
    """

    def __init__(
        self,
        program: Program,
        limits: ResourceLimits,
        *,
        directory: Path,
        log_dir: Path,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._program = program
        self._limits = limits
        self._directory = directory
        self._log_dir = log_dir
        self._timeout_s = start_timeout_s
        self._log = log_dir / f"fork-server-{os.getpid()}.log"
        self._ids = itertools.count(1)
        self._sandboxes: dict[int, SandboxProcess] = {}
        # sandbox, or the problem that prevented it
        self._starting: dict[int, asyncio.Future[SandboxProcess | str]] = {}
        self._names: dict[int, tuple[str, Path]] = {}
        self._tasks: dict[int, asyncio.Future[TaskDone]] = {}
        self._channel: Channel | None = None
        self._supervisor: Process | None = None
        self._loaded: asyncio.Future[ProgramLoaded] | None = None
        self.limited: frozenset[str] = frozenset()

    async def __aenter__(self) -> Self:
        """Wait until the program is loaded; raises UsageError with the reason if that fails."""
        self._loaded = asyncio.get_running_loop().create_future()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._open(await bwrap_args(self._program, self._directory))
            await self._wait_loaded(self._loaded)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self, bwrap: BwrapArgs) -> None:
        ours, theirs = pair()
        try:
            with self._log.open("ab") as log:
                self._supervisor = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "afield.local_sandbox.supervisor", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours, self._on_message, self._on_close)
        self._channel.send(
            OpenForkServer(
                program=self._program,
                bwrap=bwrap,
                env=environment(self._program),
                directory=str(self._directory),
            )
        )

    async def _wait_loaded(self, loading: asyncio.Future[ProgramLoaded]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                loaded = await loading
        except TimeoutError:
            message = f"{self._program.name} was not imported within {self._timeout_s:g} s"
            raise UsageError(f"{message}; its log ends: {tail(self._log, TAIL_BYTES)}") from None
        if loaded.problem:
            raise UsageError(
                f"{self._program.name} cannot be run in a sandbox: {self._explain(loaded.problem)}"
            )
        self.limited = frozenset(loaded.limits)

    def _explain(self, problem: str) -> str:
        log = tail(self._log, TAIL_BYTES)
        if any(sign in log or sign in problem for sign in NO_NAMESPACES):
            problem += f"; {REMEDY}"
        return f"{problem}; its log ends: {log}" if log else problem

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.open

    async def __aexit__(self, *exc: object) -> None:
        if self._channel is not None:
            self._channel.close()
        try:
            if self._supervisor is not None:
                await self._wait_supervisor(self._supervisor)
        finally:
            self._on_close()
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._log.exists() and self._log.stat().st_size == 0:
                self._log.unlink()

    async def _wait_supervisor(self, supervisor: Process) -> None:
        """Wait for the supervisor, which cleans up and exits once its channel is closed."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await supervisor.wait()
        except TimeoutError:  # killing it ends all sandboxes, but leaves control groups behind
            supervisor.kill()
            await supervisor.wait()
        except BaseException:
            supervisor.kill()
            await supervisor.wait()
            raise

    async def start(
        self,
        name: str,
        *,
        allow: Sequence[Address] = (),
        env: Mapping[str, str] | None = None,
        limits: ResourceLimits | None = None,
        timeout_s: float | None = None,
        layer: Layer | None = None,
        changes: bool = False,
    ) -> SandboxProcess:
        """Start a sandbox and wait until its port accepts connections.

        `allow` lists the addresses that it reaches, by the names given. `layer` is a directory in the
        program's `layers`; with `changes`, `/.changes` shows the files that the sandbox adds to it. Raises
        InfrastructureFailure with the log tail if it does not start.
        """
        number, log = next(self._ids), self._log_dir / f"{name}.log"
        allow = tuple(dict.fromkeys(allow))
        message = StartSandbox(
            id=number,
            name=name,
            log=str(log),
            allow=allow,
            env={**(layer.env if layer else {}), **(env or {})},
            limits=limits or self._limits,
            port=self._port(allow),
            timeout_s=timeout_s or self._timeout_s,
            layer=Path(layer.path).name if layer else "",
            cwd=layer.workdir if layer else "",
            changes=changes,
        )
        future = self._starting[number] = asyncio.get_running_loop().create_future()
        self._names[number] = name, log
        try:
            self._send(message)
            started = await future
        except asyncio.CancelledError:
            self._kill(number)
            raise
        finally:
            del self._starting[number], self._names[number]
        if isinstance(started, str):
            message = f"the sandbox of {name} {started}; its log ends: {tail(log, TAIL_BYTES)}"
            raise InfrastructureFailure(message, Reason.LAUNCH)
        return started  # may have ended already

    def _port(self, allow: Sequence[Address]) -> int:
        """Choose the program's port; 0 if it serves none.

        It must differ from all allowed ports, because the sandbox listens on those, too.
        """
        program, taken = self._program, {port for _, port in allow}
        if program.empty or not program.port:
            return 0
        if program.port not in taken:
            return program.port
        if not program.target:
            raise UsageError(
                f"{program.name} serves port {program.port} and cannot also connect to that port outside;"
                " start the gateway on another port (--port)"
            )
        return next(port for port in itertools.count(PORT + 1) if port not in taken)

    def _kill(self, id: int) -> None:
        with contextlib.suppress(InfrastructureFailure):
            self._send(KillSandbox(id=id))

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        try:
            if self._channel is None:
                raise RuntimeError("start sandboxes inside 'async with fork_server'")
            self._channel.send(message, fds)
        except Unavailable as error:
            log = tail(self._log, TAIL_BYTES)
            message = f"the fork server of {self._program.name} has died; its log ends: {log}"
            raise InfrastructureFailure(message, Reason.DIED) from error

    def _send_task(self, make: Any, fds: Sequence[int], **values: object) -> asyncio.Future[TaskDone]:
        number = next(self._ids)
        future = self._tasks[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._tasks.pop(number, None))
        try:
            self._send(make(id=number, **values), fds)
        except (InfrastructureFailure, UsageError):
            future.cancel()
            raise
        return future

    def _on_message(self, received: Received) -> None:
        match received.message:
            case ProgramLoaded() as loaded:
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(loaded)
            case SandboxStarted() as started:
                self._on_started(started)
            case SandboxExited() as exited:
                self._on_exited(exited)
            case TaskDone() as done:
                if (future := self._tasks.get(done.id)) and not future.done():
                    future.set_result(done)
            case _:
                pass

    def _on_started(self, started: SandboxStarted) -> None:
        future = self._starting.get(started.id)
        if future is None or future.done():
            return
        if started.problem or self._channel is None:
            future.set_result(started.problem or DIED)
            return
        name, log = self._names[started.id]
        sandbox = self._sandboxes[started.id] = SandboxProcess(
            started.id,
            name,
            pid=started.pid,
            log=log,
            socket=Path(started.socket),
            started=time.time(),
            channel=self._channel,
            send_task=self._send_task,
        )
        future.set_result(sandbox)

    def _on_exited(self, exited: SandboxExited) -> None:
        if sandbox := self._sandboxes.pop(exited.id, None):
            ended = ProcessExit(
                code=exited.code,
                signal=exited.signal,
                oom=exited.oom,
                log=tail(sandbox.log, TAIL_BYTES),
                notes=exited.notes,
            )
            sandbox.mark_dead(ended)

    def _on_close(self) -> None:
        """Fail all pending calls and sandboxes: they end with the supervisor."""
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(ProgramLoaded(problem="the supervisor ended"))
        for future in self._starting.values():
            if not future.done():
                future.set_result(DIED)
        for number, future in list(self._tasks.items()):
            if not future.done():
                future.set_result(TaskDone(id=number, problem="the fork server has died"))
        for sandbox in list(self._sandboxes.values()):
            sandbox.mark_dead(
                ProcessExit(log=tail(sandbox.log, TAIL_BYTES), notes=("its fork server ended",))
            )
        self._sandboxes.clear()
