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
from afield.local_sandbox.bwrap import BwrapArgs, environment, walls
from afield.local_sandbox.messages import (
    PORT,
    Address,
    Channel,
    Done,
    Gone,
    Kill,
    Open,
    ProcessExit,
    Program,
    Received,
    Start,
    Started,
    Warm,
    pair,
)
from afield.local_sandbox.process import SandboxProcess
from afield.log_tail import tail
from afield.process_tree import start_time
from afield.settings.runtimes import ResourceLimits
from afield.types import Reason

CLOSE_S = 15.0
TAIL_BYTES = 4_000
SOCKET_PREFIX = "afield-sandbox-"
NO_NAMESPACES = ("namespaces cannot be made", "new namespace", "user namespace", "setting up uid map")
REMEDY = (
    "this machine does not let us make user namespaces: see the settings user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns"
)
DIED = "died with its nest"


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
    limited to 107 bytes. A sandbox logs to `log_dir/NAME.log`, the fork parent to `log_dir/nest-PID.log`.
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
        self._log = log_dir / f"nest-{os.getpid()}.log"
        self._ids = itertools.count(1)
        self._cells: dict[int, SandboxProcess] = {}
        # sandbox, or the problem that prevented it
        self._starting: dict[int, asyncio.Future[SandboxProcess | str]] = {}
        self._named: dict[int, tuple[str, Path]] = {}
        self._asked: dict[int, asyncio.Future[Done]] = {}
        self._channel: Channel | None = None
        self._keeper: Process | None = None
        self._warm: asyncio.Future[Warm] | None = None
        self.limited: frozenset[str] = frozenset()

    async def __aenter__(self) -> Self:
        """Wait until the program is loaded; raises UsageError with the reason if that fails."""
        self._warm = asyncio.get_running_loop().create_future()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            await self._open(await walls(self._program, self._directory))
            await self._warmed(self._warm)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self, walled: BwrapArgs) -> None:
        ours, theirs = pair()
        try:
            with self._log.open("ab") as log:
                self._keeper = await asyncio.create_subprocess_exec(
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
        self._channel = Channel(ours, self._told, self._lost)
        self._channel.send(
            Open(
                program=self._program,
                command=walled.command,
                mounted=walled.mounted,
                sealed=walled.sealed,
                hidden=walled.hidden,
                env=environment(self._program),
                directory=str(self._directory),
                timeout_s=self._timeout_s,
            )
        )

    async def _warmed(self, warmed: asyncio.Future[Warm]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                warm = await warmed
        except TimeoutError:
            said = f"{self._program.name} was not imported within {self._timeout_s:g} s"
            raise UsageError(f"{said}; its log ends: {tail(self._log, TAIL_BYTES)}") from None
        if warm.problem:
            raise UsageError(
                f"{self._program.name} cannot be run in a sandbox: {self._explained(warm.problem)}"
            )
        self.limited = frozenset(warm.limits)

    def _explained(self, problem: str) -> str:
        said = tail(self._log, TAIL_BYTES)
        if any(sign in said or sign in problem for sign in NO_NAMESPACES):
            problem += f"; {REMEDY}"
        return f"{problem}; its log ends: {said}" if said else problem

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.open

    async def __aexit__(self, *exc: object) -> None:
        if self._channel is not None:
            self._channel.close()
        try:
            if self._keeper is not None:
                await self._bid_farewell(self._keeper)
        finally:
            self._lost()
            shutil.rmtree(self._directory, ignore_errors=True)
            if self._log.exists() and self._log.stat().st_size == 0:
                self._log.unlink()

    async def _bid_farewell(self, keeper: Process) -> None:
        """Wait for the supervisor, which cleans up and exits once its channel is closed."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await keeper.wait()
        except TimeoutError:  # killing it ends all sandboxes, but leaves control groups behind
            keeper.kill()
            await keeper.wait()
        except BaseException:
            keeper.kill()
            await keeper.wait()
            raise

    async def start(
        self,
        name: str,
        *,
        allow: Sequence[Address] = (),
        env: Mapping[str, str] | None = None,
        limits: ResourceLimits | None = None,
        timeout_s: float | None = None,
    ) -> SandboxProcess:
        """Start a sandbox and wait until its port accepts connections.

        `allow` lists the addresses that it reaches, by the names given. Raises InfrastructureFailure with the
        log tail if it does not start.
        """
        number, log = next(self._ids), self._log_dir / f"{name}.log"
        doors = tuple(dict.fromkeys(allow))
        message = Start(
            id=number,
            name=name,
            log=str(log),
            doors=doors,
            env=dict(env or {}),
            limits=limits or self._limits,
            port=self._port(doors),
            timeout_s=timeout_s or self._timeout_s,
        )
        future = self._starting[number] = asyncio.get_running_loop().create_future()
        self._named[number] = name, log
        try:
            self._send(message)
            started = await future
        except asyncio.CancelledError:
            self._abandon(number)
            raise
        finally:
            del self._starting[number], self._named[number]
        if isinstance(started, str):
            said = f"the cell of {name} {started}; its log ends: {tail(log, TAIL_BYTES)}"
            raise InfrastructureFailure(said, Reason.LAUNCH)
        return started  # may have ended already

    def _port(self, doors: Sequence[Address]) -> int:
        """Choose the program's port; 0 if it serves none.

        It must differ from all allowed ports, because the sandbox listens on those, too.
        """
        program, taken = self._program, {port for _, port in doors}
        if program.empty or not program.port:
            return 0
        if program.port not in taken:
            return program.port
        if not program.target:
            raise UsageError(
                f"{program.name} serves port {program.port} itself and may not reach the same port outside;"
                " let the gateway listen elsewhere (--port)"
            )
        return next(port for port in itertools.count(PORT + 1) if port not in taken)

    def _abandon(self, id: int) -> None:
        with contextlib.suppress(InfrastructureFailure):
            self._send(Kill(id=id))

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        try:
            if self._channel is None:
                raise RuntimeError("cells are started inside 'async with nest'")
            self._channel.send(message, fds)
        except Unavailable as error:
            said = f"the nest of {self._program.name} has died; its log ends: {tail(self._log, TAIL_BYTES)}"
            raise InfrastructureFailure(said, Reason.DIED) from error

    def _ask(self, make: Any, fds: Sequence[int], **values: object) -> asyncio.Future[Done]:
        number = next(self._ids)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        try:
            self._send(make(id=number, **values), fds)
        except (InfrastructureFailure, UsageError):
            future.cancel()
            raise
        return future

    def _told(self, received: Received) -> None:
        match received.message:
            case Warm() as warm:
                if self._warm is not None and not self._warm.done():
                    self._warm.set_result(warm)
            case Started() as started:
                self._risen(started)
            case Gone() as gone:
                self._bury(gone)
            case Done() as done:
                if (future := self._asked.get(done.id)) and not future.done():
                    future.set_result(done)
            case _:
                pass

    def _risen(self, started: Started) -> None:
        future = self._starting.get(started.id)
        if future is None or future.done():
            return
        if started.problem or self._channel is None:
            future.set_result(started.problem or DIED)
            return
        name, log = self._named[started.id]
        cell = self._cells[started.id] = SandboxProcess(
            started.id,
            name,
            pid=started.pid,
            log=log,
            socket=Path(started.socket),
            started=time.time(),
            channel=self._channel,
            ask=self._ask,
        )
        future.set_result(cell)

    def _bury(self, gone: Gone) -> None:
        if cell := self._cells.pop(gone.id, None):
            ended = ProcessExit(
                code=gone.code,
                signal=gone.signal,
                oom=gone.oom,
                said=tail(cell.log, TAIL_BYTES),
                notes=gone.notes,
            )
            cell.mark_dead(ended)

    def _lost(self) -> None:
        """Fail all pending calls and sandboxes: they end with the supervisor."""
        if self._warm is not None and not self._warm.done():
            self._warm.set_result(Warm(problem="the keeper of the nest ended"))
        for future in self._starting.values():
            if not future.done():
                future.set_result(DIED)
        for number, future in list(self._asked.items()):
            if not future.done():
                future.set_result(Done(id=number, problem="its nest has died"))
        for cell in list(self._cells.values()):
            cell.mark_dead(ProcessExit(said=tail(cell.log, TAIL_BYTES), notes=("its nest ended",)))
        self._cells.clear()
