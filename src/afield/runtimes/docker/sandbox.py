"""Docker sandbox: runs commands in a fresh container.

1. For verifiers or an agent's output. The image needs a shell and `cat`. Commands have no network unless the
options name one.
2. `async with` removes the container at its end. A container left by a killed process carries the run's
labels, and `afield cleanup` removes it like an agent's.
3. A command that times out is killed with all other processes of the container. While other commands run
there, only processes with the command's mark in their environment are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from afield.errors import AfieldError, InfrastructureFailure, NotFound
from afield.interfaces.sandbox import (
    MAX_DOWNLOAD_BYTES,
    ExecResult,
    OutputBuffer,
    build_argv,
    check_path,
    file_too_large,
)
from afield.runtimes.docker.engine import (
    DockerEngine,
    EngineRefused,
    check_library,
    container_labels,
    container_name,
    describe_exit,
)
from afield.settings.runtimes import ContainerOptions
from afield.types import Reason

if TYPE_CHECKING:
    from docker import APIClient

STDERR = 2  # stream number of standard error in the engine's output frames
KEPT = 4 * 2**20
CHUNK = 2**16
# Time for killed processes to disappear, in seconds; then the container is restarted.
GONE_S = 10.0
# Time to read remaining output after a command has ended, in seconds: its children may hold the stream open.
LAST_WORDS_S = 1.0
# Interval between checks of a command, in seconds: first value, also used once its output has ended, and
# maximum.
SOON_S, SELDOM_S = 0.05, 2.0
MARK = "AFIELD_COMMAND"
# Init process of the container: commands cannot kill it, and it reaps orphans. Without `command`, a shell
# exits when fork fails.
IDLE = "while :; do command eval 'sleep 86400'; done"
# Kills all processes of the container except init and this shell.
KILL_ALL = "kill -KILL -1 2>/dev/null; :"
# Repeats until none is left, because killed processes may have forked.
KILL_MARKED = """
for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  found=
  for entry in /proc/[0-9]*; do
    case "$(tr '\\0' '\\n' < $entry/environ 2>/dev/null)" in
      *"$1"*) kill -KILL "${entry#/proc/}" 2>/dev/null && found=yes ;;
    esac
  done
  [ "$found" ] || exit 0
done; :
"""
# Rejects named pipes, where opening for writing blocks until a reader appears.
WRITE = """
if [ -e "$1" ] && [ ! -f "$1" ]; then
  echo "it exists and is not a plain file" >&2; cat > /dev/null; exit 1
fi
mkdir -p -- "$(dirname -- "$1")" && cat > "$1"
"""
READ = '[ -f "$1" ] || exit 44; cat -- "$1"'
NO_FILE = 44


class CompleteOutput(OutputBuffer):
    """Output buffer that stops reading at the limit, for data that is useless if truncated."""

    def add(self, data: bytes) -> None:
        super().add(data)
        if self.omitted:
            raise ConnectionAbortedError("the output is larger than the part that is kept")


class _CommandResult(Struct, frozen=True):
    exit_code: int | None
    out: OutputBuffer
    err: OutputBuffer
    timed_out: bool


class ContainerSandbox:
    """Sandbox in a container.

    The network `bridge`, the default for agents, becomes `none`; name another network to allow one.
    `keep_bytes` limits the output kept per stream of a command, `most_bytes` the size of a downloaded file.
    """

    def __init__(
        self,
        image: str = "",
        options: ContainerOptions | None = None,
        *,
        name: str = "sandbox",
        keep_bytes: int = KEPT,
        most_bytes: int = MAX_DOWNLOAD_BYTES,
    ) -> None:
        chosen = options or ContainerOptions()
        network = "none" if chosen.network == "bridge" else chosen.network
        self._options = replace(chosen, image=image or chosen.image, network=network, init=False)
        self._engine = DockerEngine(self._options)
        self._run = name
        # In the form of a session id, so that `list` and `afield cleanup` handle it like a session.
        self._session_id = f"sandbox-{uuid4().hex}.1"
        self._name = container_name(self._session_id)
        self._keep_bytes, self._most_bytes = keep_bytes, most_bytes
        self._running = 0

    async def __aenter__(self) -> Self:
        check_library()
        await self._engine.__aenter__()
        try:
            labels = container_labels(self._run, self._session_id)
            idle: dict[str, Any] = {"entrypoint": ["/bin/sh", "-c", IDLE], "command": []}
            await self._engine.create(self._name, labels, serve=False, **idle)
            await self._engine.start(self._name)
        except BaseException as error:
            await asyncio.shield(self.__aexit__())
            if isinstance(error, EngineRefused):
                message = f"no sandbox of {self._options.image}: {error}"
                raise InfrastructureFailure(message, Reason.LAUNCH) from error
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            with contextlib.suppress(AfieldError):
                await asyncio.shield(self._engine.remove(self._name))
        finally:
            await self._engine.__aexit__()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 600.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        argv = build_argv(command, timeout, cwd, env)
        out = OutputBuffer(self._keep_bytes)
        ended = await self._exec(argv, timeout, cwd, dict(env or {}), stdin, out)
        stdout, stderr = ended.out.text, ended.err.text
        return ExecResult(
            exit_code=None if ended.timed_out else ended.exit_code,
            stdout=stdout,
            stderr=stderr,
            timed_out=ended.timed_out,
            truncated=bool(ended.out.omitted or ended.err.omitted),
        )

    async def upload(self, path: str, data: bytes) -> None:
        check_path(path)
        argv = ["/bin/sh", "-c", WRITE, "write", path]
        ended = await self._exec(argv, 600.0, None, {}, data, OutputBuffer(KEPT))
        if ended.exit_code != 0:
            raise InfrastructureFailure(f"{path} was not written: {ended.err.text.strip()}", Reason.UPLOAD)

    async def download(self, path: str) -> bytes:
        check_path(path)
        argv = ["/bin/sh", "-c", READ, "read", path]
        ended = await self._exec(argv, 600.0, None, {}, b"", CompleteOutput(self._most_bytes))
        content = ended.out.bytes
        if ended.out.omitted:
            raise file_too_large(path, "the sandbox", self._most_bytes)
        if ended.exit_code == NO_FILE:
            raise NotFound(f"there is no file {path} in the sandbox")
        if ended.exit_code != 0:
            raise InfrastructureFailure(f"{path} was not read: {ended.err.text.strip()}", Reason.UPLOAD)
        return content

    # --- commands --------------------------------------------------------------------------------

    async def _exec(
        self,
        argv: list[str],
        timeout: float,
        cwd: str | None,
        env: dict[str, str],
        stdin: bytes,
        out: OutputBuffer,
    ) -> _CommandResult:
        mark = uuid4().hex
        err = OutputBuffer(self._keep_bytes)
        self._running += 1
        try:
            running = await self._engine.call(
                lambda api: _EngineExec(api, self._name, argv, cwd, {**env, MARK: mark}, stdin)
            )
            talking = asyncio.create_task(self._engine.call(lambda _: running.talk(out, err)))
            try:
                code = await self._wait_exit(talking, running, timeout)
            except BaseException:
                await asyncio.shield(self._kill(mark, running, talking))
                raise
            if code is None:
                await self._kill(mark, running, talking)
        except EngineRefused as error:
            raise await self._sandbox_error(error) from error
        finally:
            self._running -= 1
        return _CommandResult(code, out, err, code is None)

    async def _wait_exit(
        self, talking: asyncio.Task[None], running: _EngineExec, timeout: float
    ) -> int | None:
        """Wait for the exit code; None on timeout.

        The output may end before the command does, or stay open after it in background processes.
        """
        end = time.monotonic() + timeout
        pause_s = SOON_S
        while (left := end - time.monotonic()) > 0:
            if talking.done():
                await asyncio.sleep(min(left, SOON_S))
            else:
                await asyncio.wait([talking], timeout=min(left, pause_s))
            pause_s = min(2 * pause_s, SELDOM_S)
            if (code := await self._engine.call(lambda _: running.exit_code())) is not None:
                await asyncio.wait([talking], timeout=LAST_WORDS_S)
                running.close()
                await talking
                return code
        return None

    async def _kill(self, mark: str, running: _EngineExec, talking: asyncio.Task[None]) -> None:
        """Kill a command. If that fails, restart the container, which ends all its processes."""
        if self._running > 1:
            argv = ["/bin/sh", "-c", KILL_MARKED, "kill", f"{MARK}={mark}"]
        else:
            argv = ["/bin/sh", "-c", KILL_ALL]
        killed = await self._engine.call(lambda api: _run(api, self._name, argv))
        end = time.monotonic() + GONE_S
        while killed and await self._engine.call(lambda _: running.exit_code()) is None:
            killed = time.monotonic() < end
            await asyncio.sleep(SOON_S)
        if not killed:
            await self._engine.call(lambda api: api.restart(self._name, timeout=0))
        await asyncio.wait([talking], timeout=LAST_WORDS_S)
        running.close()
        await talking

    async def _sandbox_error(self, why: object) -> InfrastructureFailure:
        container = await self._engine.inspect(self._name)
        if container is None:
            return InfrastructureFailure(
                "the sandbox is gone: another program removed its container", Reason.DIED
            )
        if not container["State"]["Running"]:
            message = describe_exit(container["State"], self._options.limits)
            return InfrastructureFailure(f"the sandbox {message}", Reason.DIED)
        return InfrastructureFailure(f"the sandbox takes no commands: {why}", Reason.DIED)


class _EngineExec:
    """Exec of the engine, with the connection for its input and output."""

    def __init__(
        self,
        api: APIClient,
        container: str,
        argv: list[str],
        cwd: str | None,
        env: dict[str, str],
        stdin: bytes,
    ) -> None:
        self._api = api
        self._stdin = memoryview(stdin)
        created = api.exec_create(container, argv, stdin=bool(stdin), environment=env, workdir=cwd)
        self._id = created["Id"]
        self._link: Any = api.exec_start(self._id, socket=True)
        # The library returns a file object around a socket for a local engine, and a socket for a remote one.
        self._socket: socket.socket = getattr(self._link, "_sock", self._link)
        self._socket.settimeout(None)

    def talk(self, out: OutputBuffer, err: OutputBuffer) -> None:
        """Copy output until the connection ends or `close` is called."""
        try:
            while header := self._read(8):
                stream, size = struct.unpack(">BxxxL", header)
                (err if stream == STDERR else out).add(self._read(size))
        except OSError:
            # The connection was closed here or by the container; `exit_code` tells how the command ended.
            pass
        finally:
            self._link.close()
            self._socket.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._feed()
            part = self._socket.recv(min(CHUNK, size - len(data)))
            if not part:
                return b""
            data += part
        return bytes(data)

    def _feed(self) -> None:
        """Send input until there is output to read, so that neither side blocks."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN | select.POLLOUT)
        while self._stdin:
            [(_, events)] = ready.poll()
            if events != select.POLLOUT:
                return
            try:
                sent = self._socket.send(self._stdin[:CHUNK], socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                sent = len(self._stdin)
            self._stdin = self._stdin[sent:]
            if not self._stdin:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def exit_code(self) -> int | None:
        """Exit code; None while the command runs."""
        state = self._api.exec_inspect(self._id)
        return None if state["Running"] else state["ExitCode"]

    def close(self) -> None:
        """End `talk`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _run(api: APIClient, container: str, argv: list[str]) -> bool:
    """Run a command; returns False if it fails, e.g. without free process ids or a shell."""
    from docker.errors import APIError

    try:
        created = api.exec_create(container, argv)
        api.exec_start(created["Id"])
        return api.exec_inspect(created["Id"])["ExitCode"] == 0
    except APIError:
        return False
