"""Commands and file transfers in a running sandbox, one supervising process each.

All descendants of a command stay below its supervising process, so that a timeout kills them all. Background
processes of a command that has ended continue to run. `process_tree.kill_children` is not used here: it can
lose against a fork bomb, where whole process groups must be killed at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from afield.local_sandbox.messages import ExecCommand, StartSandbox, TaskDone, TransferFile, transmit
from afield.local_sandbox.privileges import confine
from afield.local_sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl

CHUNK = 65_536
KILL_S = 3.0
ROUNDS = 50  # minimum number of rounds, since one may take seconds on a busy machine
REPORTED = 0


class Tasks:
    """Starts commands and file transfers; runs in the init process of a sandbox."""

    def __init__(self, start: StartSandbox, channel: socket.socket) -> None:
        self._start = start
        self._channel = channel
        self._running: dict[int, int] = {}

    def start(self, task: ExecCommand | TransferFile, fds: Sequence[int]) -> None:
        """Fork the process that runs or transfers; it reports the result itself."""
        try:
            pid = os.fork()
        except OSError as error:
            transmit(self._channel, TaskDone(id=task.id, problem=f"no process for it: {error}"))
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if isinstance(task, ExecCommand):
                self._supervise(task, fds)
            self._transfer(task, fds[0])
        self._running[pid] = task.id

    def on_exit(self, pid: int, status: int) -> None:
        """Handle the exit of a supervising process; reports the task if the process could not."""
        task = self._running.pop(pid, None)
        if task is None or status == REPORTED:
            return
        # The command killed its supervising process: kill the whole sandbox's processes.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        transmit(self._channel, TaskDone(id=task, code=128 + signal.SIGKILL))

    def _supervise(self, task: ExecCommand, fds: Sequence[int]) -> NoReturn:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        command = os.fork()
        if command == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            self._exec(task, fds)
        for fd in fds:
            os.close(fd)
        deadline = None if task.timeout_s is None else time.monotonic() + task.timeout_s
        code = _wait(command, deadline)
        if code is None:
            _kill_descendants(command)
        elif code < 0:
            code = 128 - code
        transmit(self._channel, TaskDone(id=task.id, code=code, timed_out=code is None))
        os._exit(REPORTED)

    def _exec(self, task: ExecCommand, fds: Sequence[int]) -> NoReturn:
        try:
            os.setsid()
            for fd, to in zip(fds, (0, 1, 2), strict=True):
                os.dup2(fd, to)
            if task.cwd:
                os.chdir(task.cwd)
            confine(self._start)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            environment = {**os.environ, **self._start.env, **task.env}  # noqa: TID251 - environment of the sandbox
            os.execvpe(task.argv[0], task.argv, environment)
        except OSError as error:
            os.write(2, f"{task.cwd or task.argv[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def _transfer(self, task: TransferFile, pipe: int) -> NoReturn:
        code = 0
        confine(self._start)
        try:
            (_write_file if task.write_file else _read_file)(task.path, pipe)
        except OSError as error:
            code = error.errno or errno.EIO
        os.close(pipe)
        transmit(self._channel, TaskDone(id=task.id, code=code))
        os._exit(REPORTED)


def _wait(pid: int, deadline: float | None) -> int | None:
    """Wait for the exit code; None at the deadline."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        left = 3600.0 if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return None
        signal.sigtimedwait({signal.SIGCHLD}, left)
        _reap_orphans(pid)


def _reap_orphans(pid: int) -> None:
    """Reap orphans of the command; the command itself is left to `_wait`."""
    for child in _children_by_parent().get(os.getpid(), ()):
        if child != pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _kill_descendants(command: int) -> None:
    """Kill all descendants. If they fork faster than they are found, kill every process in the sandbox."""
    # Kill the process group first: a fork bomb leaves little CPU time to search for each process.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command, signal.SIGKILL)
    until = time.monotonic() + KILL_S
    rounds = 0
    while time.monotonic() < until or rounds < ROUNDS:
        rounds += 1
        for pid in _descendants(os.getpid(), max(until, time.monotonic() + KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _reap_all():
            return
        time.sleep(0.005)
    os.kill(-1, signal.SIGKILL)
    until = time.monotonic() + KILL_S
    rounds = 0
    while not _reap_all() and (time.monotonic() < until or rounds < ROUNDS):
        rounds += 1
        time.sleep(0.005)


def _reap_all() -> bool:
    """Reap ended children; returns True if none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _descendants(pid: int, until: float) -> list[int]:
    children, descendants, pending = _children_by_parent(until), [], [pid]
    while pending:
        direct = children.get(pending.pop(), ())
        descendants += direct
        pending += direct
    return descendants


def _children_by_parent(until: float = math.inf) -> dict[int, list[int]]:
    """Map each process in the sandbox to its children; incomplete after `until`, a monotonic time."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        if time.monotonic() > until:
            break
        with contextlib.suppress(OSError):
            # Process names may contain parentheses.
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
    return children


def _write_file(path: str, pipe: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    while data := os.read(pipe, CHUNK):
        _write_all(fd, data)


def _read_file(path: str, pipe: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EISDIR, "not a plain file")
    while data := os.read(fd, CHUNK):
        _write_all(pipe, data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
