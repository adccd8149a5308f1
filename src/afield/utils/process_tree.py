"""Process trees on Linux: children, memory, start times, and killing descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_TIMEOUT_S = 5.0
NO_PROCESS = (FileNotFoundError, ProcessLookupError)


def adopt_orphans() -> None:
    """Make this process a child subreaper: orphaned descendants become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent` dies; exit at once if it is dead already."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of `pid`; empty if the process has ended."""
    pids: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except NO_PROCESS:
        return pids
    for thread in threads:
        with contextlib.suppress(*NO_PROCESS):
            pids += map(int, (thread / "children").read_text().split())
    return pids


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot; distinguishes reused process ids.

    Empty if the process does not exist, is a zombie, or the system has no /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def resident_mb(pid: int) -> int:
    """Resident memory of a process and all its descendants, in MB."""
    pages, pending = 0, [pid]
    while pending:
        process = pending.pop()
        pending += children(process)
        with contextlib.suppress(*NO_PROCESS):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def signal_process(pid: int, number: int) -> None:
    """Send a signal; ignores processes that have ended or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group `pid`; ignores a group that has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_children(spared: Set[int] = frozenset(), timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Kill and reap all descendants of this process, except `spared` and their descendants.

    Requires `adopt_orphans`: killed children hand over their own children, until none is left or `timeout_s`
    seconds have passed.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pids = [pid for pid in children(os.getpid()) if pid not in spared]
        if not pids:
            return
        for pid in pids:
            signal_process(pid, signal.SIGKILL)
        time.sleep(0.001)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
