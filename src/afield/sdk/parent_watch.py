"""Ends a process and everything it started when its parent closes stdin.

1. The process forks: the parent half watches, the child half does the work.
2. Daemons that the work leaves become children of the watcher (on Linux), which kills them at the end.
3. The watcher ends the work when stdin closes, and exits with the code or signal of the work when that ends.
   It forwards SIGTERM.

`python -m afield.sdk.parent_watch PROGRAM [ARGUMENT ...]` runs a program in this way.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import NoReturn

from afield.utils.process_tree import adopt_orphans, die_with_parent, kill_children

REAP_S = 10.0
WATCHED = (signal.SIGTERM, signal.SIGCHLD)


def end_with_stdin() -> None:
    """Fork; returns in the process that does the work, with an empty stdin. Call before starting threads."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in WATCHED:
        signal.signal(number, lambda *_: None)
    adopt_orphans()
    watcher = os.getpid()
    work = os.fork()
    if work:
        _watch(work, wake, woken)
    signal.set_wakeup_fd(-1)
    for number in WATCHED:
        signal.signal(number, signal.SIG_DFL)
    # A watcher killed by SIGKILL takes at least the work with it.
    die_with_parent(watcher)
    os.close(wake)
    os.close(woken)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _watch(work: int, wake: int, woken: int) -> NoReturn:
    # A process, because an agent that holds the interpreter lock would block a thread forever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _close_others(0, wake, woken)
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([0, wake], [], [])
        signals = os.read(wake, 4096) if wake in ready else b""
        status = _collect().get(work)
        if status is None and signal.SIGTERM in signals:
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
    """Statuses of ended children, by pid."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _close_others(*keep: int) -> None:
    """Close inherited descriptors, so that others see the end of the work's pipes."""
    low = 0
    for kept in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        if low < kept:  # an empty range would close all
            os.closerange(low, kept)
        low = kept + 1


def main(argv: list[str]) -> NoReturn:
    end_with_stdin()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
