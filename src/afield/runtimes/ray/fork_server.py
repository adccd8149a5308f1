"""Fork server of a Ray actor: forks a process per session.

`python -m afield.runtimes.ray.fork_server TARGET FD [--memory-mb N] [--log-dir DIR]` loads the agent once and
talks to its actor over the socket FD.

1. A session ends with all its descendants, including daemons: each session adopts its orphans, and this
process kills those that ended sessions leave.
2. When the socket closes, all sessions end.
3. Each session has its own log.
4. Threads do not survive a fork: `AgentLoaded` names the threads that the agent's module starts at import.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from afield.errors import Unavailable, UsageError, WireError, boundary
from afield.local_sandbox.imports import prewarm
from afield.runtimes.ray.messages import (
    FRAME,
    LOG_BYTES,
    AgentLoaded,
    Event,
    Order,
    SessionAccepted,
    SessionExited,
    StartSession,
    say,
)
from afield.sdk.runner import Runner
from afield.sdk.serve import load
from afield.types import Failure, FailureKind, Reason
from afield.utils.process_tree import adopt_orphans, children, die_with_parent, kill_children, resident_mb

WATCH_S = 0.1
MAX_ANSWER_BYTES = 1024 * 1024
_orders = msgspec.json.Decoder(Order)


class ForkedSession:
    """Forked process of a session."""

    def __init__(self, session_id: str, pid: int, answers: int, log: str, log_fd: int) -> None:
        self.id = session_id
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.answers: int | None = answers
        self.log = log
        self.log_fd = log_fd
        self.answer_line = b""
        self.taken = False
        self.died = ""

    def kill(self, died: str) -> None:
        self.died = self.died or died
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        for fd in (self.pidfd, self.log_fd, *([] if self.answers is None else [self.answers])):
            os.close(fd)
        self.answers = None

    def tail(self) -> str:
        size = os.fstat(self.log_fd).st_size
        start = max(0, size - LOG_BYTES)
        return os.pread(self.log_fd, size - start, start).decode("utf-8", "replace").strip()


class RayForkServer:
    """Single-threaded server, since a process with several threads cannot be forked safely."""

    def __init__(
        self, runner: Runner, actor_socket: socket.socket, memory_mb: int | None, log_dir: str
    ) -> None:
        self._runner = runner
        self._pid = os.getpid()
        self._actor_socket = actor_socket
        self._memory_mb = memory_mb
        self._log_dir = log_dir
        self._sessions: dict[str, ForkedSession] = {}
        self._initial_children = set(children(os.getpid()))  # started by the agent's module
        self._poll = select.poll()
        self._poll.register(actor_socket, select.POLLIN)
        self._handlers: dict[int, Callable[[], None]] = {}
        self._buffer = b""
        self._over = False

    def run(self) -> None:
        """Serve until the socket closes, then kill all sessions."""
        timeout_ms = WATCH_S * 1000 if self._memory_mb else None
        while not self._over:
            for fd, _ in self._poll.poll(timeout_ms):
                if fd == self._actor_socket.fileno():
                    self._read_commands()
                elif handler := self._handlers.get(fd):
                    handler()
            if self._memory_mb:
                self._watch(self._memory_mb)
        for session in self._sessions.values():
            session.kill("its actor is gone")
        self._sessions.clear()
        self._kill_leftovers()

    def _read_commands(self) -> None:
        data = self._actor_socket.recv(2**20)
        self._over = not data
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            (size,) = FRAME.unpack_from(self._buffer)
            if len(self._buffer) < FRAME.size + size:
                return
            frame, self._buffer = self._buffer[FRAME.size :][:size], self._buffer[FRAME.size + size :]
            order = _orders.decode(frame)
            if isinstance(order, StartSession):
                self._start(order)
            elif session := self._sessions.get(order.session_id):
                session.kill("it was stopped")

    def _say(self, event: Event) -> None:
        say(self._actor_socket, event)

    # --- session lifecycle -----------------------------------------------------------------------

    def _start(self, order: StartSession) -> None:
        log, log_fd = self._open_log(order.session_id)
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._actor_socket.close()
            for other in self._sessions.values():
                other.close()
            os.close(answers)
            _run_session(self._runner, order, answer, log_fd, self._pid)
        os.close(answer)
        session = self._sessions[order.session_id] = ForkedSession(
            order.session_id, pid, answers, log, log_fd
        )
        self._on_readable(answers, lambda: self._answered(session, answers))
        self._on_readable(session.pidfd, lambda: self._ended(session))

    def _open_log(self, session_id: str) -> tuple[str, int]:
        """Open the session's log; returns a path that other processes can read, and a descriptor.

        Without a log directory the file has no name.
        """
        if self._log_dir:
            path = str(Path(self._log_dir) / f"{session_id}.log")
            return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_APPEND)
        return f"/proc/{os.getpid()}/fd/{fd}", fd

    def _answered(self, session: ForkedSession, answers: int) -> None:
        """Read the session's one-line answer to its payload."""
        data = os.read(answers, 65536)
        session.answer_line += data
        if not data:
            self._forget_fd(answers)
            session.answers = None
            os.close(answers)
        line, end, _ = session.answer_line.partition(b"\n")
        if session.taken:
            session.answer_line = b""  # ignore further output of the agent
        elif end or len(session.answer_line) > MAX_ANSWER_BYTES:
            session.taken = True
            try:
                taken = msgspec.json.decode(line, type=SessionAccepted)
            except msgspec.MsgspecError:  # an agent can write to its parent's files
                session.kill("it wrote to the pipe of its parent process")
                return
            taken = msgspec.structs.replace(taken, session_id=session.id)
            self._say(msgspec.structs.replace(taken, pid=session.pid, log=session.log))

    def _ended(self, session: ForkedSession) -> None:
        _, status = os.waitpid(session.pid, 0)
        self._forget_fd(session.pidfd)
        del self._sessions[session.id]
        self._kill_leftovers()
        # All writers have ended, so this reads to the end.
        while session.answers is not None:
            self._answered(session, session.answers)
        died = session.died or _died(os.waitstatus_to_exitcode(status))
        self._say(SessionExited(session.id, died, session.tail()))
        session.close()

    def _kill_leftovers(self) -> None:
        """Kill processes that ended sessions left to this process."""
        kill_children(self._initial_children | {session.pid for session in self._sessions.values()})

    def _watch(self, most_mb: int) -> None:
        for session in self._sessions.values():
            used_mb = resident_mb(session.pid)
            if used_mb > most_mb and not session.died:
                session.kill(f"it ran out of memory: it used {used_mb} MB of {most_mb} MB; raise memory_mb")

    def _on_readable(self, fd: int, handler: Callable[[], None]) -> None:
        self._poll.register(fd, select.POLLIN)
        self._handlers[fd] = handler

    def _forget_fd(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._handlers[fd]


# --- session process -----------------------------------------------------------------------------


def _run_session(runner: Runner, order: StartSession, answer: int, log_fd: int, parent: int) -> NoReturn:
    """Run a session in its forked process; never returns."""
    code = 1
    try:
        with boundary(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, _print):
            os.setsid()
            adopt_orphans()
            die_with_parent(parent)
            with Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            for fd in (1, 2):
                os.dup2(log_fd, fd)
            os.close(log_fd)
            _reseed()
            _run_rollout(runner, order, answer)
            code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_rollout(runner: Runner, order: StartSession, answer: int) -> None:
    """Run the rollout. Answers and closes the pipe before the agent's code runs, which could write to it."""
    refused, busy = "", False
    begin = threading.Event()
    try:
        runner.accept(msgspec.json.decode(order.payload), begin=begin)
    except WireError as error:
        refused = str(error)
    except Unavailable as error:
        refused, busy = str(error), True
    _write(answer, msgspec.json.encode(SessionAccepted(order.session_id, 0, "", refused, busy)) + b"\n")
    os.close(answer)
    begin.set()
    pause_s = 0.001
    while runner.active:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _reseed() -> None:
    """Reseed numpy and torch, whose random state all forks share; `random` reseeds itself."""
    for name, reseed in (("numpy", lambda m: m.random.seed()), ("torch", lambda m: m.seed())):
        if module := sys.modules.get(name):
            reseed(module)


def _print(failure: Failure) -> None:
    sys.stderr.write(f"{failure.traceback}\n")


def _died(code: int) -> str:
    if code == 0:
        return ""
    if code > 0:
        return f"it ended with exit code {code}"
    name = signal.strsignal(-code)
    if code == -signal.SIGKILL:
        return f"it was killed (signal 9, {name}), as the kernel does when memory runs out"
    return f"it died with signal {-code} ({name})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m afield.runtimes.ray.fork_server")
    parser.add_argument("target", help="path/to/file.py:name or package.module:name")
    parser.add_argument("fd", type=int, help="descriptor of the socket to the actor")
    parser.add_argument("--memory-mb", type=int, help="maximum resident memory of a session, in MB")
    parser.add_argument(
        "--log-dir", default="", help="directory for session logs; empty keeps them in unnamed files"
    )
    options = parser.parse_args(argv)
    if parent := _guarded():
        os.close(options.fd)
        return _guard(parent)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("afield").setLevel(logging.INFO)
    with socket.socket(fileno=options.fd) as actor_socket:
        os.set_inheritable(options.fd, False)
        return _serve(actor_socket, options.target, options.memory_mb, options.log_dir)


def _guarded() -> int:
    """Fork the fork server; returns the child's process id in the guard and 0 in the child.

    A Ray worker that ends kills its children first, before they could end theirs. Its child is therefore only
    a guard, which kills the remaining processes after the fork server has ended; the fork server ends when
    its socket closes.
    """
    adopt_orphans()
    return os.fork()


def _guard(parent: int) -> int:
    """Wait for the fork server; returns its exit code, or 128 plus its signal number."""
    _, status = os.waitpid(parent, 0)
    kill_children()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _serve(actor_socket: socket.socket, target: str, memory_mb: int | None, log_dir: str) -> int:
    try:
        runner = load(target).runner
    except UsageError as error:
        say(actor_socket, AgentLoaded(str(error)))
        return 2
    assert runner is not None, "load refuses an app without an entrypoint"
    if log_dir:
        Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    prewarm(target.rpartition(":")[0], libraries_only=True)
    adopt_orphans()
    gc.freeze()
    extra = (thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    say(actor_socket, AgentLoaded(threads=tuple(extra)))
    RayForkServer(runner, actor_socket, memory_mb, log_dir).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
