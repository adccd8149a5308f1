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
    ExecCommand,
    LoadProgram,
    NamespacesReady,
    OpenSocket,
    PortReady,
    ProgramExited,
    Received,
    StartProgram,
    StartSandbox,
    TransferFile,
    receive,
    transmit,
)
from afield.local_sandbox.privileges import become_program
from afield.local_sandbox.seccomp import SeccompListener
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

    def copy_from(self, source: int) -> bool:
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


def run_sandbox(start: StartSandbox, load: LoadProgram, app: Any, channel: socket.socket, log: int) -> None:
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
        init = InitProcess(start, load, channel, BoundedLog(log))
        listener = init.prepare()
    except OSError as error:
        with contextlib.suppress(OSError):
            transmit(channel, ProgramExited(problem=f"the sandbox cannot be created: {error}"))
        os._exit(1)
    if init.start_program():
        _run(load, app, listener)


class InitProcess:
    """First process of a sandbox."""

    def __init__(
        self, start: StartSandbox, load: LoadProgram, channel: socket.socket, log: BoundedLog
    ) -> None:
        self._start = start
        self._load = load
        self._channel = channel
        self._log = log
        self._main = 0
        self._serving = False
        self._full = False
        self._tasks = Tasks(start, channel)
        self._reached: set[tuple[str, int]] = set()
        self._seccomp_listener: SeccompListener | None = None

    def prepare(self) -> socket.socket | None:
        """Set up network and mounts, and wait for the limits.

        Returns the listening socket for a target, else None.
        """
        prctl(PR_SET_DUMPABLE, 0)
        start, program = self._start, self._load.program
        hosts, sockets = namespaces.listen_for(start.allow)
        self._reached = {sock.getsockname()[:2] for sock in sockets}
        mounts = program.mounts if program.root else self._load.bwrap.mounted
        namespaces.mount_all(start, mounts, hosts, image=bool(program.root))
        os.chdir(start.cwd or WORK)
        transmit(self._channel, NamespacesReady(), [sock.fileno() for sock in sockets])
        for sock in sockets:
            sock.close()
        received = receive(self._channel)
        if received is None or not isinstance(received.message, StartProgram):
            os._exit(0)
        return namespaces.listener("127.0.0.1", start.port) if program.target else None

    def start_program(self) -> bool:
        """Fork the program; returns True in its process. The init process never returns."""
        output, output_writer = os.pipe()
        wakeup, wakeup_writer = os.pipe()
        listener_socket, listener_sender = socket.socketpair()
        for fd in (output, wakeup, wakeup_writer):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        if not self._load.program.empty:
            self._main = os.fork()
            if self._main == 0:
                signal.set_wakeup_fd(-1)
                for fd in (output, wakeup, wakeup_writer, self._log.fd):
                    os.close(fd)
                listener_socket.close()
                self._channel.close()
                become_program(self._start, output=output_writer, listener=listener_sender)
                return True
        os.close(output_writer)
        listener_sender.close()
        self._report_if_serving()
        return self._watch(output, wakeup, listener_socket)

    def _watch(self, output: int, wakeup: int, listener_socket: socket.socket) -> NoReturn:
        poll = select.poll()
        for fd in (self._channel.fileno(), output, wakeup, listener_socket.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(None if self._serving else POLL_S * 1000)}
            if output in ready and not self._log.copy_from(output):
                poll.unregister(output)
            if wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap(output)
            if self._channel.fileno() in ready:
                self._on_message(receive(self._channel))
            if listener_socket.fileno() in ready:
                poll.unregister(listener_socket)
                self._receive_listener(listener_socket, poll)
            if (
                self._seccomp_listener is not None
                and self._seccomp_listener.fd in ready
                and not self._seccomp_listener.respond()
            ):
                poll.unregister(self._seccomp_listener.fd)
            if not self._serving:
                self._report_if_serving()
            self._log_full_disk()

    def _log_full_disk(self) -> None:
        room = os.statvfs(WORK)
        if not self._full and (room.f_bavail == 0 or room.f_ffree == 0):
            self._full = room.f_blocks > 0
            limit = "disk_mb" if room.f_bavail == 0 else "number of files (from disk_mb)"
            self._log.write(f"[sandbox] limit {limit} reached\n".encode())

    def _receive_listener(self, listener_socket: socket.socket, poll: select.poll) -> None:
        """Receive the descriptor of the program's seccomp listener, which reports denied calls."""
        _, fds, _, _ = socket.recv_fds(listener_socket, 1, 1)
        if fds:
            self._seccomp_listener = SeccompListener(fds[0], self._reached, _listens, self._log.write)
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
                self._exit(output, os.waitstatus_to_exitcode(status))
            self._tasks.on_exit(pid, status)

    def _exit(self, output: int, code: int) -> NoReturn:
        left = sum(entry.name.isdigit() for entry in os.scandir("/proc")) - 1
        if left > 0:
            self._log.write(f"[sandbox] killed {left} process(es) that the agent left behind\n".encode())
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while self._log.copy_from(output):
            pass
        self._log_full_disk()
        program_exit = ProgramExited(code=code) if code >= 0 else ProgramExited(signal=-code)
        with contextlib.suppress(OSError):
            transmit(self._channel, program_exit)
        os._exit(0)

    def _on_message(self, received: Received | None) -> None:
        if received is None:
            os._exit(0)
        match received.message:
            case OpenSocket() as line:
                with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as inner:
                    transmit(self._channel, line, [inner.fileno()])
            case ExecCommand() | TransferFile() as task:
                self._tasks.start(task, received.fds)
            case _:
                pass
        for fd in received.fds:
            os.close(fd)

    def _report_if_serving(self) -> None:
        program = self._load.program
        if program.target or program.empty or not self._start.port or _listens(self._start.port):
            self._serving = True
            transmit(self._channel, PortReady())


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


def _run(load: LoadProgram, app: Any, listener: socket.socket | None) -> None:
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
