"""Local sandbox: runs commands on this machine, isolated from agents and afield.

Commands see the system read-only, or an image's files with a writable layer, and may write to `/work` and
`/tmp`. They reach only allowed addresses. All their processes end with the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from afield.errors import UsageError
from afield.interfaces.sandbox import ExecResult
from afield.local_sandbox.fork_server import ForkServer, new_socket_directory
from afield.local_sandbox.messages import Layer, Program
from afield.local_sandbox.process import EXEC_S, SandboxProcess
from afield.settings.runtimes import SandboxOptions

PLAIN = SandboxOptions()


class LocalSandbox:
    """Sandbox on this machine.

    `image` is a directory with a root file system; empty uses this machine's system. With a `layer` over this
    system, all directories are writable. With `changes`, `/.changes` shows what the sandbox adds to it.
    """

    def __init__(
        self,
        image: str = "",
        options: SandboxOptions = PLAIN,
        *,
        layer: Layer | None = None,
        changes: bool = False,
    ) -> None:
        layers = str(Path(layer.path).parent) if layer else ""
        self._program = Program(root=image, mounts=options.mounts, env=options.env, layers=layers)
        self._layer = layer
        self._changes = changes
        self._options = options
        self._allow = tuple(address(text) for text in options.allow)
        self._stack = AsyncExitStack()
        self._sandbox: SandboxProcess | None = None

    async def __aenter__(self) -> Self:
        directory = new_socket_directory()
        fork_server = ForkServer(
            self._program, self._options.limits, directory=directory, log_dir=directory / "logs"
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fork_server)
            self._sandbox = await fork_server.start(
                "sandbox", allow=self._allow, layer=self._layer, changes=self._changes
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        self._sandbox = None

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = EXEC_S,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        return await self._running().exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

    async def upload(self, path: str, data: bytes) -> None:
        await self._running().upload(path, data)

    async def download(self, path: str) -> bytes:
        return await self._running().download(path)

    def _running(self) -> SandboxProcess:
        if self._sandbox is None:
            raise RuntimeError("a sandbox is used inside 'async with'")
        return self._sandbox


def address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; raises UsageError if it is invalid."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"allow: {text!r} must be HOST:PORT")
    return host.strip("[]"), int(port)
