"""The process beside the controller that keeps a nest: it starts the warm parent within its walls, limits
each cell, carries its bytes, and tells how it ended.

It is apart so that hundreds of busy cells cost the controller's event loop nothing, and so that somebody
cleans up after a controller that was killed: cells, control groups, sockets. If the keeper itself is
killed the kernel ends all cells, and the next keeper removes the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import sys
import traceback
from asyncio.subprocess import Process
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from afield.errors import Unavailable
from afield.options import Limits
from afield.sandbox import cgroups
from afield.sandbox.channel import Channel, Received, pair, transmit
from afield.sandbox.messages import Done, Exec, File, Kill, Load, Message, Open, Start, Started, Warm
from afield.sandbox.supervised import SupervisedProcess

AT_ONCE = 16  # cells that are made at one time
NEST = Limits(cpus=None, memory_mb=None, pids=16_384, disk_mb=None, files=None)


class Supervisor:
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
        """Until the controller is gone, or the warm parent."""
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

    # --- the warm parent -------------------------------------------------------------------------

    async def _open(self, opening: Open) -> None:
        self._directory = Path(opening.directory)
        self._timeout_s = opening.timeout_s
        self._groups.sweep()
        ours, theirs = pair()
        command = [part.replace("{fd}", str(theirs.fileno())) for part in opening.command]
        # Its output goes where ours does: to the log of the nest.
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

    # --- cells -----------------------------------------------------------------------------------

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
    # Several descriptors for each of many cells.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_main(controller))


async def _main(controller: socket.socket) -> None:
    await Supervisor(controller).run()


if __name__ == "__main__":
    main()
