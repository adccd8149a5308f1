"""A process that ends with its parent, and takes everything it started with it.

The process splits in two: what was started becomes a guard, and its child goes on with the work. Daemons
that the work leaves behind become the guard's children (on Linux), so that the guard can end them too. It
does so when its stdin ends (whoever started it is gone, or wants no more of it), and when the work has ended,
whose exit code or signal it then takes as its own. SIGTERM is handed on to the work.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import NoReturn

from afield.process_tree import adopt_orphans, die_with_parent, kill_children

REAP_S = 10.0
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def end_with_stdin() -> None:
    """Returns in the process that does the work, which finds an empty stdin. To be called before any thread
    runs.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for one in WATCHED:
        signal.signal(one, lambda *_: None)
    adopt_orphans()
    us = os.getpid()
    work = os.fork()
    if work:
        _watch(work, wake, woken)
    signal.set_wakeup_fd(-1)
    for one in WATCHED:
        signal.signal(one, signal.SIG_DFL)
    # A guard that is killed outright takes at least the work with it.
    die_with_parent(us)
    os.close(wake)
    os.close(woken)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _watch(work: int, wake: int, woken: int) -> NoReturn:
    # A process, because a thread would wait for ever on an agent that holds the interpreter's lock.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _close_others(0, wake, woken)
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([0, wake], [], [])
        told = os.read(wake, 4096) if wake in ready else b""
        status = _collect().get(work)
        if status is None and signal.SIGTERM in told:
            os.kill(work, signal.SIGTERM)
        if status is None and 0 in ready and not os.read(0, 4096):
            os.kill(work, signal.SIGKILL)
            status = signal.SIGKILL
    kill_children(timeout_s=REAP_S)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _collect() -> dict[int, int]:
    """Children that have ended, with their statuses."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _close_others(*keep: int) -> None:
    """A descriptor kept open here would hide from others that the work has ended."""
    low = 0
    for kept in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        if low < kept:  # an empty range would be taken for all
            os.closerange(low, kept)
        low = kept + 1
