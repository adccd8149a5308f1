"""Sandbox process as the controller sees it: commands, files, connections, kill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from afield.errors import InfrastructureFailure, NotFound, Unavailable
from afield.interfaces.sandbox import (
    MAX_DOWNLOAD_BYTES,
    ExecResult,
    OutputBuffer,
    build_argv,
    check_path,
    file_too_large,
)
from afield.local_sandbox.messages import (
    Channel,
    ExecCommand,
    KillSandbox,
    ProcessExit,
    TaskDone,
    TransferFile,
)
from afield.types import Reason

KEPT = 1024 * 1024
CHUNK = 65_536


async def read_into(buffer: OutputBuffer, fd: int) -> None:
    """Read a pipe to its end into `buffer`, then close it."""
    reader, transport = await _reader(fd)
    try:
        while data := await reader.read(CHUNK):
            buffer.add(data)
    finally:
        transport.close()


async def read_all(fd: int, most: int) -> bytes | None:
    """Read up to `most` bytes; None if there is more."""
    reader, transport = await _reader(fd)
    content = bytearray()
    try:
        while data := await reader.read(CHUNK):
            content += data
            if len(content) > most:
                return None
        return bytes(content)
    finally:
        transport.close()


async def feed(fd: int, data: bytes) -> None:
    """Write all data and close; ignores a reader that closes early."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        transport.close()


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    return reader, transport


EXEC_S = 600.0
FILE_S = 120.0
# Extra time for killing a command's processes, in seconds. A sandbox that dies reports it at once; this only
# detects one that hangs. Killing hundreds of processes on a busy machine takes long.
GRACE_S = 180.0
DRAIN_S = 0.5


class SendTask(Protocol):
    """Sends a task message of type `make` to the supervisor and returns the future of its result."""

    def __call__(
        self, make: type[ExecCommand] | type[TransferFile], fds: Sequence[int], **values: object
    ) -> asyncio.Future[TaskDone]: ...


class SandboxProcess:
    """Running sandbox.

    `pid` is the init process as seen from here; `started` is its start in seconds since the epoch. `socket`
    is the path of a Unix socket that leads to the program's port: use it with
    `aiohttp.UnixConnector(path=str(process.socket))` and any host name, or call `connect`.
    """

    def __init__(
        self,
        id: int,
        name: str,
        *,
        pid: int,
        log: Path,
        socket: Path,
        started: float,
        channel: Channel,
        send_task: SendTask,
    ) -> None:
        self.id = id
        self.name = name
        self.pid = pid
        self.log = log
        self.socket = socket
        self.started = started
        self._channel = channel
        self._send_task = send_task
        self._ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the program's port; raises OSError if the sandbox is gone."""
        return await asyncio.open_unix_connection(str(self.socket))

    async def ended(self) -> ProcessExit:
        """Wait until the sandbox has ended and is cleaned up. Any number of tasks may wait."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Kill all processes of the sandbox without waiting. Repeating is harmless."""
        if self.alive:
            # Without its fork server the sandbox is dead already.
            with contextlib.suppress(Unavailable):
                self._channel.send(KillSandbox(id=self.id))

    def mark_dead(self, ended: ProcessExit) -> None:
        """Record the exit; called by the fork server."""
        if self.alive:
            self._ended.set_result(ended)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = EXEC_S,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command as in `interfaces.sandbox`, with the program's user, limits and network."""
        argv = tuple(build_argv(command, timeout, cwd, env))
        (near_in, far_in), (far_out, near_out), (far_err, near_err) = os.pipe(), os.pipe(), os.pipe()
        values = {"argv": argv, "cwd": cwd or "", "env": dict(env or {}), "timeout_s": timeout}
        out, err = OutputBuffer(KEPT), OutputBuffer(KEPT)
        feeding = asyncio.ensure_future(feed(far_in, stdin))
        reading = [
            asyncio.ensure_future(read_into(buffer, fd)) for buffer, fd in ((out, far_out), (err, far_err))
        ]
        try:
            reply = await self._run_task(
                ExecCommand, [near_in, near_out, near_err], timeout + GRACE_S, values
            )
            # Background processes of the command may keep its output open.
            await asyncio.wait(reading, timeout=DRAIN_S)
        finally:
            for task in (feeding, *reading):
                task.cancel()
            await asyncio.gather(feeding, *reading, return_exceptions=True)
        return ExecResult(
            exit_code=reply.code,
            stdout=out.text,
            stderr=err.text,
            timed_out=reply.timed_out,
            truncated=bool(out.omitted or err.omitted),
        )

    async def upload(self, path: str, data: bytes) -> None:
        check_path(path)
        reading, writing = os.pipe()
        feeding = asyncio.ensure_future(feed(writing, data))
        try:
            reply = await self._run_task(TransferFile, [reading], FILE_S, {"path": path, "write_file": True})
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if reply.code:
            message = f"{path} cannot be written in {self.name}: {os.strerror(reply.code)}"
            raise InfrastructureFailure(message, Reason.UPLOAD)

    async def download(self, path: str) -> bytes:
        check_path(path)
        reading, writing = os.pipe()
        content = asyncio.ensure_future(read_all(reading, MAX_DOWNLOAD_BYTES))
        try:
            reply = await self._run_task(TransferFile, [writing], FILE_S, {"path": path, "write_file": False})
            if content.done() and content.result() is None:
                raise file_too_large(path, self.name)
            if reply.code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise NotFound(f"there is no file {path} in {self.name}")
            if reply.code:
                message = f"{path} cannot be read in {self.name}: {os.strerror(reply.code)}"
                raise InfrastructureFailure(message, Reason.UPLOAD)
            if (whole := await content) is None:
                raise file_too_large(path, self.name)
            return whole
        finally:
            content.cancel()
            await asyncio.gather(content, return_exceptions=True)

    async def _run_task(
        self,
        make: type[ExecCommand] | type[TransferFile],
        fds: list[int],
        timeout_s: float,
        values: Mapping[str, object],
    ) -> TaskDone:
        future = self._send_task(make, fds, sandbox=self.id, **values)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError as error:
            raise InfrastructureFailure(
                f"{self.name} did not answer within {timeout_s:g} s", Reason.DIED
            ) from error
        if reply.problem:
            raise InfrastructureFailure(f"{self.name}: {reply.problem}", Reason.DIED)
        return reply
