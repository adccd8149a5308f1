"""Messages between controller, supervisor, fork parent and sandboxes.

    controller <-> supervisor    one socket per fork server
    supervisor <-> fork parent   one socket per fork server
    supervisor <-> sandbox       one socket per sandbox, held by its init process

A message is a JSON object with a `type`, sent over a SOCK_SEQPACKET socket together with its file
descriptors.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec
from msgspec import MsgspecError, Struct, field

from afield.errors import Unavailable, UsageError
from afield.settings.runtimes import ResourceLimits

PORT = 8080


class Program(Struct, frozen=True, kw_only=True):
    """Program of a sandbox: at most one of `target`, `script` and `argv`.

    With none of them the sandbox only runs commands on request.
    """

    target: str = ""
    """`file.py:name` or `package.module:name`, imported once in the fork parent and served on 127.0.0.1 in
    each sandbox.

    Regular files that it opens at import are reopened read-only in each sandbox; its other descriptors are
    replaced by /dev/null.
    """
    script: str = ""
    """Python file that runs as `__main__` in each sandbox; the fork parent imports its top-level imports. It
    serves `port` itself.
    """
    argv: tuple[str, ...] = ()
    """Command line; the command serves `port` itself."""
    python: str = ""
    """Python interpreter, whose environment is visible; empty is the controller's own."""
    warm: tuple[str, ...] = ()
    """Names of further modules that the fork parent imports."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to add."""
    mounts: tuple[str, ...] = ()
    """Further paths of this machine that are visible, read-only."""
    hidden: tuple[str, ...] = ()
    """Paths within any mount that stay invisible."""
    once: bool = False
    """Whether the sandbox of a target ends after its first rollout."""
    port: int = PORT
    """TCP port that the program serves; 0 if it serves none."""
    root: str = ""
    """Directory with a root file system to use instead of this machine's; writes stay in the sandbox. Empty
    uses this machine's.
    """
    layers: str = ""
    """Directory of the layers that sandboxes may have; it is not visible in them."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.target, self.script, self.argv))) > 1:
            raise UsageError("a program has at most one of target, script and argv")
        if self.root and (self.target or self.script):
            raise UsageError(f"root {self.root!r}: a program in an image must be argv, not target or script")

    @property
    def name(self) -> str:
        return self.target or self.script or " ".join(self.argv) or "commands"

    @property
    def empty(self) -> bool:
        return not (self.target or self.script or self.argv)


class Layer(Struct, frozen=True, kw_only=True):
    """File system layer over this machine's system, with a writable one above it."""

    path: str
    """Directory with the files of the layer, as seen from the root directory."""
    workdir: str = "/"
    """Working directory of the sandbox."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to add."""


class ProcessExit(Struct, frozen=True, kw_only=True):
    """Exit of a sandbox.

    Both `code` and `signal` are None if it was killed from outside, or its fork server died.
    """

    code: int | None = None
    """Exit code of the program; None if a signal ended it."""
    signal: int | None = None
    """Number of the signal that ended the program; None if it exited."""
    oom: bool = False
    """Whether the kernel killed a process of the sandbox for lack of memory."""
    log: str = ""
    """Tail of the log."""
    notes: tuple[str, ...] = ()
    """Messages about limits that were reached and connections that failed."""

    @property
    def clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.code is not None:
            how = f"exit code {self.code}"
        elif self.signal is not None:
            how = f"signal {self.signal} ({signal.strsignal(self.signal)})"
        else:
            how = "killed"
        return "; ".join((how, *self.notes))


MAX_BYTES = 160 * 1024
MAX_FDS = 64
Address: TypeAlias = tuple[str, int]


class BwrapArgs(Struct, frozen=True):
    """Bubblewrap command of a fork server, and the paths it mounts."""

    command: tuple[str, ...]
    """Command line with the placeholder `{fd}` for the number of the control socket."""
    mounted: tuple[str, ...]
    """Visible paths of this machine."""
    sealed: tuple[str, ...] = ()
    """Directories of `mounted` in which Unix sockets are unreachable, including sockets created later."""
    hidden: tuple[str, ...] = ()
    """Paths within `mounted` that are covered by an empty mount."""


class OpenForkServer(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to supervisor, once: start the fork parent."""

    program: Program
    """Program to load."""
    bwrap: BwrapArgs
    """Bubblewrap command and its mounts."""
    env: Mapping[str, str]
    """Environment of the fork parent."""
    directory: str
    """Directory for sockets; the supervisor removes it at the end."""


class LoadProgram(Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to fork parent, once: load the program."""

    program: Program
    """Program to load."""
    bwrap: BwrapArgs
    """Mounts of the fork parent."""


class ProgramLoaded(Struct, frozen=True, kw_only=True, tag=True):
    """Fork parent to controller, through the supervisor: the program is loaded, or failed to load."""

    problem: str = ""
    """Reason of the failure; empty on success."""
    pid: int = 0
    """Process id of bubblewrap; set by the supervisor."""
    limits: tuple[str, ...] = ()
    """Kinds of limits that control groups enforce; set by the supervisor."""


class StartSandbox(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to fork parent, through the supervisor: start a sandbox."""

    id: int
    """Number of the sandbox in later messages."""
    name: str
    """Name of the sandbox."""
    log: str
    """Path of the log file."""
    allow: tuple[Address, ...] = ()
    """Addresses that the sandbox reaches, as host and port."""
    env: Mapping[str, str] = {}
    """Environment variables to add."""
    limits: ResourceLimits = ResourceLimits()
    """Resource limits of the sandbox."""
    port: int = 0
    """Port that the program serves; 0 if it serves none."""
    timeout_s: float = 60.0
    """Time limit until the port accepts connections, in seconds."""
    layer: str = ""
    """Name of a layer in `Program.layers`; empty for none."""
    cwd: str = ""
    """Working directory; empty uses `/work`."""
    changes: bool = False
    """Whether `/.changes` shows the files that the sandbox adds to its layer, and there are no scratch
    directories.
    """
    rlimit_memory: bool = False
    """Whether to limit memory per process, because control groups cannot; set by the supervisor."""


class NamespacesReady(Struct, frozen=True, kw_only=True, tag=True):
    """Sandbox to supervisor: the namespaces exist. Carries the listening sockets of the allowed addresses."""


class StartProgram(Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to sandbox: limits are in place, the program may start."""


class PortReady(Struct, frozen=True, kw_only=True, tag=True):
    """Sandbox to supervisor: the program's port accepts connections."""


class SandboxStarted(Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to controller: the sandbox is ready, or failed to start."""

    id: int
    """Number of the sandbox."""
    pid: int = 0
    """Process id of the init process, outside the sandbox; 0 on failure."""
    socket: str = ""
    """Path of the Unix socket that leads to the program's port; empty on failure."""
    problem: str = ""
    """Reason of the failure; empty on success."""


class ProgramExited(Struct, frozen=True, kw_only=True, tag=True):
    """Sandbox to supervisor: the program has ended, and with it the sandbox."""

    code: int | None = None
    """Exit code of the program; None if a signal ended it."""
    signal: int | None = None
    """Number of the signal that ended the program; None if it exited."""
    problem: str = ""
    """Why the program could not start; empty if it did."""


class SandboxExited(Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to controller: the sandbox has ended and is cleaned up."""

    id: int
    """Number of the sandbox."""
    code: int | None = None
    """Exit code of the program; None if it was killed."""
    signal: int | None = None
    """Number of the signal that ended the program; None if it exited or the sandbox was killed."""
    oom: bool = False
    """Whether the kernel killed a process of the sandbox for lack of memory."""
    notes: tuple[str, ...] = ()
    """Messages about limits that were reached and connections that failed."""


class KillSandbox(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to supervisor: kill a sandbox."""

    id: int
    """Number of the sandbox."""


class OpenSocket(Struct, frozen=True, kw_only=True, tag=True):
    """Supervisor to sandbox: request a socket of the sandbox's network.

    The sandbox answers with the same message, which carries an unconnected socket.
    """

    id: int
    """Number of the sandbox."""


class ExecCommand(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to sandbox: run a command. Carries its stdin, stdout and stderr."""

    id: int
    """Number of the task, repeated in `TaskDone`."""
    sandbox: int
    """Number of the sandbox."""
    argv: tuple[str, ...]
    """Command line."""
    cwd: str = ""
    """Working directory; empty uses `/work`."""
    env: Mapping[str, str] = {}
    """Environment variables to add."""
    timeout_s: float | None = None
    """Time limit in seconds; None for no limit."""


class TransferFile(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to sandbox: write or read a file. Carries the pipe for its content."""

    id: int
    """Number of the task, repeated in `TaskDone`."""
    sandbox: int
    """Number of the sandbox."""
    path: str
    """Path in the sandbox."""
    write_file: bool
    """True writes the file, False reads it."""


class TaskDone(Struct, frozen=True, kw_only=True, tag=True):
    """Sandbox to controller: result of a command or transfer."""

    id: int
    """Number of the task."""
    code: int | None = None
    """Exit code of a command, or errno of a transfer, 0 on success; None after a timeout."""
    timed_out: bool = False
    """Whether the command reached its time limit and was killed."""
    problem: str = ""
    """Why the task could not run; empty if it did."""


Message: TypeAlias = (
    OpenForkServer
    | LoadProgram
    | ProgramLoaded
    | StartSandbox
    | NamespacesReady
    | StartProgram
    | PortReady
    | SandboxStarted
    | ProgramExited
    | SandboxExited
    | KillSandbox
    | OpenSocket
    | ExecCommand
    | TransferFile
    | TaskDone
)
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode


CREDENTIALS = struct.Struct("3i")
ANCILLARY = socket.CMSG_SPACE(4 * MAX_FDS) + socket.CMSG_SPACE(CREDENTIALS.size)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Received(Struct, frozen=True):
    """Message with its descriptors."""

    message: Message
    """Decoded message."""
    fds: list[int]
    """File descriptors that came with the message; the receiver must close them."""
    pid: int
    """Sender's process id as seen from here; 0 unless the channel requests credentials."""


def transmit(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    kind = type(message).__name__
    try:
        data = encode(message)
    except UnicodeEncodeError as error:
        # Reject it here: in a channel's queue it would block all later messages.
        raise UsageError(f"a {kind} message has text that is not valid Unicode: {error}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"a {kind} message has {len(data)} bytes, over {MAX_BYTES}; send large data as a file"
        )
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def receive(sock: socket.socket) -> Received | None:
    """Receive one message; None if the other side has closed. Raises BlockingIOError if there is none yet."""
    data, ancillary, _, _ = sock.recvmsg(MAX_BYTES, ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds, pid = [], 0
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
            fds += received
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = CREDENTIALS.unpack(content[: CREDENTIALS.size])[0]
    return Received(decode(data), fds, pid) if data else None


class Channel:
    """End of a message socket in an event loop.

    `on_message` gets each message; `on_close` is called once, when the other side closes.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Received], None],
        on_close: Callable[[], None],
        *,
        credentials: bool = False,
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_close = on_close
        self._queue: deque[tuple[Message, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        sock.setblocking(False)
        if credentials:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def open(self) -> bool:
        return self._open

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and take over `fds`; raises Unavailable if the other side has closed."""
        if not self._open:
            _close(fds)
            raise Unavailable("the other side has closed the channel")
        self._queue.append((message, list(fds)))
        if len(self._queue) == 1:
            self._write()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._queue:
            _close(fds)
        self._queue.clear()

    def _write(self) -> None:
        while self._queue:
            message, fds = self._queue[0]
            try:
                transmit(self._sock, message, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:
                self._handle_close()
                return
            except UsageError:
                self._queue.popleft()
                _close(fds)
                raise
            self._queue.popleft()
            _close(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        # Limit the messages per call, so that a busy channel does not block the event loop.
        for _ in range(16):
            try:
                received = receive(self._sock)
            except BlockingIOError:
                return
            except (OSError, MsgspecError):
                received = None  # Treat a peer that sends invalid messages as gone.
            if received is None:
                self._handle_close()
                return
            self._on_message(received)
            if not self._open:
                return

    def _handle_close(self) -> None:
        if self._open:
            self.close()
            self._on_close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
