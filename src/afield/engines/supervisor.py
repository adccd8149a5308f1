"""Supervisor of an inference server: `python -m afield.engines.supervisor COMMAND...`.

1. Starts the command and exits with its status.
2. When standard input closes, because its owner stopped it or died, it ends the command: SIGTERM, then
   SIGKILL.
3. Whatever the command started ends with it, also processes in sessions of their own.
4. It is two processes that watch each other: some owners, such as Ray's workers, kill their children when
   they end. The inner one then ends the command; the outer one does so if the inner one is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from afield.utils.process_tree import adopt_orphans, die_with_parent, kill_children

TERM_S = 15.0
"""Seconds from SIGTERM to SIGKILL."""


def main(command: list[str]) -> int:
    adopt_orphans()
    outer = os.getpid()
    inner = os.fork()
    if not inner:
        return supervise(command, outer)
    _, status = os.waitpid(inner, 0)
    kill_children()
    return exit_status(os.waitstatus_to_exitcode(status))


def supervise(command: list[str], outer: int) -> int:
    """Run the command until it ends, standard input closes or the process `outer` dies."""
    adopt_orphans()
    own = os.getpid()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    die_with_parent(outer, signal.SIGTERM)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=lambda: die_with_parent(own)
    )

    def read() -> None:
        sys.stdin.buffer.read()
        ended.set()

    def end() -> None:
        ended.wait()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()

    for work in (read, end):
        threading.Thread(target=work, daemon=True).start()
    code = process.wait()
    kill_children()
    return exit_status(code)


def exit_status(code: int) -> int:
    """Exit status of a process; 128 plus the signal's number if a signal ended it, as in shells."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    # Exits without waiting for the threads.
    os._exit(main(sys.argv[1:]))
