"""Init process of a sandbox: sets up namespaces and starts the program.

It reaps processes, bounds the log, hands out sockets of the sandbox's network and runs commands on request.
Processes in the sandbox cannot signal, trace or read it. When it ends, the kernel ends all other processes in
the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from afield.local_sandbox import namespaces, serving
from afield.local_sandbox.bwrap import WORK
from afield.local_sandbox.exec import Tasks
from afield.local_sandbox.messages import (
    Exec,
    File,
    Go,
    Hello,
    Line,
    Load,
    Over,
    Received,
    Start,
    Up,
    receive,
    transmit,
)
from afield.local_sandbox.privileges import bear
from afield.local_sandbox.seccomp import Notices
from afield.local_sandbox.syscalls import PR_SET_DUMPABLE, prctl

POLL_S = 0.005
LOG_BYTES = 1024 * 1024
LOG_HEAD_BYTES = 64 * 1024
LOG_TAIL_BYTES = 256 * 1024
LISTENING = "0A"


class BoundedLog:
    """Log file of bounded size: keeps the beginning and the end. Only this process writes to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._left_out = 0
        self._size = 0

    def take(self, source: int) -> bool:
        """Copy available data from a non-blocking pipe; returns False if there is none."""
        try:
            data = os.read(source, 65_536)
        except BlockingIOError:
            return False
        if data:
            self.write(data)
        return bool(data)

    def write(self, data: bytes) -> None:
        os.write(self.fd, data)
        self._size += len(data)
        if self._size > LOG_BYTES:
            self._shorten()

    def _shorten(self) -> None:
        tail = os.pread(self.fd, LOG_TAIL_BYTES, self._size - LOG_TAIL_BYTES)
        self._left_out += self._size - LOG_HEAD_BYTES - LOG_TAIL_BYTES
        os.ftruncate(self.fd, LOG_HEAD_BYTES)
        os.lseek(self.fd, LOG_HEAD_BYTES, os.SEEK_SET)
        self._size = LOG_HEAD_BYTES
        note = f"\n[... about {self._left_out} bytes left out ...]\n".encode()
        for part in (note, tail):
            os.write(self.fd, part)
            self._size += len(part)


def live(start: Start, load: Load, app: Any, channel: socket.socket, log: int) -> None:
    """Set up a sandbox in a freshly forked process.

    Returns only in the program's process, after a script has ended.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        namespaces.keep_only({channel.fileno(), log})
        namespaces.enter()
        if os.fork():
            os._exit(0)
        first = InitProcess(start, load, channel, BoundedLog(log))
        listener = first.prepare()
    except OSError as error:
        with contextlib.suppress(OSError):
            transmit(channel, Over(problem=f"the cell cannot be made: {error}"))
        os._exit(1)
    if first.begin():
        _run(start, load, app, listener)


class InitProcess:
    """First process of a sandbox."""

    def __init__(self, start: Start, load: Load, channel: socket.socket, log: BoundedLog) -> None:
        self._start = start
        self._load = load
        self._channel = channel
        self._log = log
        self._main = 0
        self._up = False
        self._full = False
        self._tasks = Tasks(start, channel)
        self._reached: set[tuple[str, int]] = set()
        self._notices: Notices | None = None

    def prepare(self) -> socket.socket | None:
        """Set up network and mounts, and wait for the limits.

        Returns the listening socket for a target, else None.
        """
        prctl(PR_SET_DUMPABLE, 0)
        start, program = self._start, self._load.program
        hosts, doors = namespaces.hosts_and_doors(start.doors)
        self._reached = {door.getsockname()[:2] for door in doors}
        shown = program.mounts if program.root else self._load.mounted
        namespaces.furnish(start.limits, shown, hosts, image=bool(program.root))
        os.chdir(WORK)
        transmit(self._channel, Hello(), [door.fileno() for door in doors])
        for door in doors:
            door.close()
        received = receive(self._channel)
        if received is None or not isinstance(received.message, Go):
            os._exit(0)
        return namespaces.listener("127.0.0.1", start.port) if program.target else None

    def begin(self) -> bool:
        """Fork the program; returns True in its process. The init process never returns."""
        output, writing = os.pipe()
        woken, waking = os.pipe()
        told, telling = socket.socketpair()
        for fd in (output, woken, waking):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        if not self._load.program.empty:
            self._main = os.fork()
            if self._main == 0:
                signal.set_wakeup_fd(-1)
                for fd in (output, woken, waking, self._log.fd):
                    os.close(fd)
                told.close()
                self._channel.close()
                bear(self._start, output=writing, listener=telling)
                return True
        os.close(writing)
        telling.close()
        self._up_if_so()
        return self._watch(output, woken, told)

    def _watch(self, output: int, woken: int, told: socket.socket) -> NoReturn:
        poll = select.poll()
        for fd in (self._channel.fileno(), output, woken, told.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(None if self._up else POLL_S * 1000)}
            if output in ready and not self._log.take(output):
                poll.unregister(output)
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap(output)
            if self._channel.fileno() in ready:
                self._asked(receive(self._channel))
            if told.fileno() in ready:
                poll.unregister(told)
                self._hear(told, poll)
            if self._notices is not None and self._notices.fd in ready and not self._notices.answer():
                poll.unregister(self._notices.fd)
            if not self._up:
                self._up_if_so()
            self._tell_if_full()

    def _tell_if_full(self) -> None:
        room = os.statvfs(WORK)
        if not self._full and (room.f_bavail == 0 or room.f_ffree == 0):
            self._full = room.f_blocks > 0
            what = "disk_mb" if room.f_bavail == 0 else "files on disk that goes with disk_mb"
            self._log.write(f"[cell] the limit {what} was reached\n".encode())

    def _hear(self, told: socket.socket, poll: select.poll) -> None:
        """Receive the descriptor of the program's seccomp listener, which reports denied calls."""
        _, fds, _, _ = socket.recv_fds(told, 1, 1)
        if fds:
            self._notices = Notices(fds[0], self._reached, _listens, self._log.write)
            poll.register(fds[0], select.POLLIN)

    def _reap(self, output: int) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._main:
                self._end(output, os.waitstatus_to_exitcode(status))
            self._tasks.ended(pid, status)

    def _end(self, output: int, code: int) -> NoReturn:
        left = sum(entry.name.isdigit() for entry in os.scandir("/proc")) - 1
        if left > 0:
            self._log.write(f"[cell] {left} process(es) that it left behind are killed\n".encode())
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while self._log.take(output):
            pass
        self._tell_if_full()
        over = Over(code=code) if code >= 0 else Over(signal=-code)
        with contextlib.suppress(OSError):
            transmit(self._channel, over)
        os._exit(0)

    def _asked(self, received: Received | None) -> None:
        if received is None:
            os._exit(0)
        match received.message:
            case Line() as line:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as made:
                    transmit(self._channel, line, [made.fileno()])
            case Exec() | File() as task:
                self._tasks.begin(task, received.fds)
            case _:
                pass
        for fd in received.fds:
            os.close(fd)

    def _up_if_so(self) -> None:
        program = self._load.program
        if program.target or program.empty or not self._start.port or _listens(self._start.port):
            self._up = True
            transmit(self._channel, Up())


def _listens(port: int) -> bool:
    """Whether a process in the sandbox listens on the TCP port."""
    wanted = f"{port:04X}"
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), Path(f"/proc/net/{name}").open() as table:
            for line in table:
                fields = line.split()
                if fields[3] == LISTENING and fields[1].rpartition(":")[2] == wanted:
                    return True
    return False


def _run(start: Start, load: Load, app: Any, listener: socket.socket | None) -> None:
    program = load.program
    if isinstance(app, serving.Prepared) and listener is not None:
        serving.serve(app, listener, once=program.once)
    if program.script:
        sys.argv = [program.script]
        runpy.run_path(program.script, run_name="__main__")
        sys.exit(0)
    try:
        os.execvp(program.argv[0], program.argv)
    except OSError as error:
        sys.stderr.write(f"{program.argv[0]}: {error.strerror}\n")
        serving.leave(127)
