"""Fork servers for tests, and the processes and control groups that they leave."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from afield.local_sandbox.cgroups import PREFIX
from afield.local_sandbox.fork_server import ForkServer, new_socket_directory
from afield.local_sandbox.messages import Program
from afield.settings.runtimes import ResourceLimits

if shutil.which("bwrap") is None and os.environ.get("CI"):
    raise RuntimeError("CI runs the tests of sandboxes: install bubblewrap")

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap on this machine")


@asynccontextmanager
async def fork_server(
    tmp_path: Path, program: Program, limits: ResourceLimits | None = None, timeout_s: float = 60.0
) -> AsyncIterator[ForkServer]:
    server = ForkServer(
        program,
        limits or ResourceLimits(),
        directory=new_socket_directory(),
        log_dir=tmp_path / "logs",
        start_timeout_s=timeout_s,
    )
    async with server:
        yield server


def write_program(folder: Path, source: str, name: str = "agent.py") -> Path:
    """A program in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(source)
    return folder / name


def all_command_lines() -> list[bytes]:
    """The command lines of all processes of this machine."""
    found: list[bytes] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((entry / "cmdline").read_bytes())
    return found


def leftover_groups(supervisor: int) -> list[Path]:
    """Control groups that a supervisor has created and not removed."""
    homes = {Path("/sys/fs/cgroup")}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        homes.add(Path("/sys/fs/cgroup", kind, path.lstrip("/")))
    return [left for home in homes for left in home.glob(f"{PREFIX}{supervisor}-*")]


def supervisor_of(controller: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == controller
                and b"afield.local_sandbox.supervisor" in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
    raise AssertionError(f"{controller} has no supervisor")
