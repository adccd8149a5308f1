"""A process and what came of it: its children, their memory, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Set
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 5.0
GONE = (FileNotFoundError, ProcessLookupError)


def adopt_orphans() -> None:
    """Descendants whose parent has died become this process's children, not init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Those of all its threads; a thread or a process that has just ended has none."""
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except GONE:
        return found
    for thread in threads:
        with contextlib.suppress(*GONE):
            found += map(int, (thread / "children").read_text().split())
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def resident_mb(pid: int) -> int:
    """Of a process and all that came of it."""
    pages, left = 0, [pid]
    while left:
        one = left.pop()
        left += children(one)
        with contextlib.suppress(*GONE):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def end_with_parent(parent: int) -> None:
    """Killed when the parent is, which may have happened already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def sweep(spared: Set[int] = frozenset()) -> None:
    """Kill our children and what they leave to us, until only the spared are left."""
    until = time.monotonic() + SWEEP_S
    while time.monotonic() < until:
        left = [pid for pid in children(os.getpid()) if pid not in spared]
        if not left:
            return
        for pid in left:
            kill(pid)
        time.sleep(0.001)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
