"""Programs in cells: fresh namespaces of their own, forked from a warm parent for each image.

They see the system, the Python environment and their own folder, read-only, the runtime's environment
variables and the addresses that were allowed; nothing else. Nothing of them outlives the server.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Self

from afield.agentcore_local.hosts import LIKE_A_CONTAINER, Broken, Ended, Output, check_file
from afield.agentcore_local.http_client import Stream
from afield.agentcore_local.images import Image
from afield.errors import AfieldError, InfrastructureFailure
from afield.options import Limits
from afield.sandbox.fork_server import ForkServer
from afield.sandbox.messages import Program
from afield.sandbox.process import SandboxProcess
from afield.types import Reason

Address = tuple[str, int]


class CellPlaces:
    def __init__(
        self,
        logs: Path,
        limits: Limits,
        *,
        allow: Sequence[Address],
        mounts: tuple[str, ...],
        warm: tuple[str, ...],
        init_s: float,
    ) -> None:
        self._logs, self._limits, self._allow = logs, limits, allow
        self._mounts, self._warm = mounts, warm
        self._init_s = init_s
        self._nests: dict[Image, asyncio.Future[ForkServer]] = {}
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing.set()
        await self._group.__aexit__(None, None, None)

    async def prepare(self, image: Image) -> None:
        check_file(image)
        await self._nest(image)

    async def _nest(self, image: Image) -> ForkServer:
        """The warm parent of an image, one for all its sessions. One that failed is tried anew."""
        opening = self._nests.get(image)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = self._nests[image] = asyncio.get_running_loop().create_future()
            opening.add_done_callback(lambda done: done.exception())
            self._group.create_task(self._keep(image, opening))
        return await asyncio.shield(opening)

    async def _keep(self, image: Image, opening: asyncio.Future[ForkServer]) -> None:
        program = Program(
            target=image.target,
            script=image.script,
            argv=image.argv,
            mounts=self._mounts,
            warm=self._warm,
        )
        try:
            with tempfile.TemporaryDirectory(
                prefix=f"afield-acr-{os.getpid()}-", ignore_cleanup_errors=True
            ) as made:
                nest = ForkServer(program, self._limits, directory=Path(made), log_dir=self._logs)
                async with nest:
                    opening.set_result(nest)
                    await self._closing.wait()
        except (AfieldError, OSError) as error:
            if opening.done():
                raise
            opening.set_exception(Broken(f"{image} cannot be started: {error}"))

    async def start(self, image: Image, name: str, env: Mapping[str, str]) -> CellPlace:
        nest = await self._nest(image)
        try:
            env = {**LIKE_A_CONTAINER, **env}
            return CellPlace(await nest.start(name, allow=self._allow, env=env, timeout_s=self._init_s))
        except AfieldError as error:
            if isinstance(error, InfrastructureFailure) and error.reason is Reason.DIED:
                self._forget(image, nest)
            raise Broken(str(error)) from error

    def _forget(self, image: Image, nest: ForkServer) -> None:
        """The next session gets a new warm parent, unless another has done so already."""
        opening = self._nests.get(image)
        if opening is not None and opening.done() and not opening.exception() and opening.result() is nest:
            del self._nests[image]


class CellPlace:
    def __init__(self, cell: SandboxProcess) -> None:
        self._cell = cell
        self.where, self.log = f"pid {cell.pid}", cell.log

    async def connect(self) -> Stream:
        return await self._cell.connect()

    async def ended(self) -> str:
        return str(await self._cell.ended())

    def kill(self) -> None:
        self._cell.kill()

    async def run(self, command: str, timeout_s: float) -> AsyncGenerator[Output | Ended]:
        """A cell tells what a command said when it has ended."""
        try:
            ran = await self._cell.exec(command, timeout=timeout_s)
        except AfieldError as error:
            raise Broken(str(error)) from error
        if ran.stdout:
            yield Output("stdout", ran.stdout)
        if ran.stderr:
            yield Output("stderr", ran.stderr)
        yield Ended(-1 if ran.exit_code is None else ran.exit_code, ran.timed_out)
