"""What controller, keeper, warm parent and cells say to each other, over sockets that keep messages whole.

    controller <-> keeper        one socket per nest
    keeper     <-> warm parent   one socket per nest
    keeper     <-> cell          one socket per cell, held by its first process

A message is a JSON object with its `type`; descriptors travel beside it.
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
    """Exactly one of `target`, `script` and `argv`; or none of them: an empty cell to run commands in.

    `target` (`file.py:name` or `package.module:name`) is imported once in the warm parent and served in each
    cell on 127.0.0.1. `script` is run as `__main__` in each cell, after the modules it imports were
    imported in the warm parent. `argv` is any command. The last two are expected to serve `port`
    themselves; 0 where they do not serve. What a target opened while it was imported is not shared: plain
    files are opened anew in each cell, anything else is closed there.

    `warm` are further modules to import beforehand, `mounts` further paths to read, `hidden` paths within any
    of them that stay out of sight. `once`: the cell of a target ends by itself when its one rollout has.
    `root` is a directory with a file system of its own to use in place of this machine's; what is written
    to it is kept in the cell alone.
    """

    target: str = ""
    script: str = ""
    argv: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    once: bool = False
    port: int = PORT
    root: str = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.target, self.script, self.argv))) > 1:
            raise UsageError("a program is one of target, script and argv, not several of them")
        if self.root and (self.target or self.script):
            raise UsageError(f"root {self.root!r} has no Python of ours: only commands run there")

    @property
    def name(self) -> str:
        return self.target or self.script or " ".join(self.argv) or "commands"

    @property
    def empty(self) -> bool:
        return not (self.target or self.script or self.argv)


class ProcessExit(Struct, frozen=True, kw_only=True):
    """How a cell ended. Both `code` and `signal` are None when it was killed from outside, or its nest died.

    `oom`: something in it was killed for want of memory. `said` is the end of its log, `notes` what its
    limits had to prevent.
    """

    code: int | None = None
    signal: int | None = None
    oom: bool = False
    said: str = ""
    notes: tuple[str, ...] = ()

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


class Open(Struct, frozen=True, kw_only=True, tag=True):
    """Controller to keeper, once. `directory` is for sockets and is removed in the end."""

    program: Program
    command: tuple[str, ...]
    mounted: tuple[str, ...]
    sealed: tuple[str, ...]
    hidden: tuple[str, ...]
    env: Mapping[str, str]
    directory: str
    timeout_s: float


class Load(Struct, frozen=True, kw_only=True, tag=True):
    """Keeper to warm parent, once."""

    program: Program
    mounted: tuple[str, ...]
    sealed: tuple[str, ...] = ()
    """Directories that are mounted once more so that no Unix socket in them can be reached."""
    hidden: tuple[str, ...] = ()
    """Paths that are covered, again after that."""


class Warm(Struct, frozen=True, kw_only=True, tag=True):
    """The warm parent, through the keeper: it takes cells, or what keeps it from that."""

    problem: str = ""
    pid: int = 0
    limits: tuple[str, ...] = ()


class Start(Struct, frozen=True, kw_only=True, tag=True):
    """A new cell; `id` names it from now on. Goes through the keeper to the warm parent."""

    id: int
    name: str
    log: str
    doors: tuple[Address, ...] = ()
    env: Mapping[str, str] = {}
    limits: ResourceLimits = ResourceLimits()
    port: int = 0
    timeout_s: float = 60.0
    rlimit_memory: bool = False


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """A cell's namespaces are made. The listening sockets of its doors come along."""


class Go(Struct, frozen=True, kw_only=True, tag=True):
    """Its limits are in place: it may start its program."""


class Up(Struct, frozen=True, kw_only=True, tag=True):
    """Its port takes connections."""


class Started(Struct, frozen=True, kw_only=True, tag=True):
    """Keeper to controller: the cell is up, or why not."""

    id: int
    pid: int = 0
    socket: str = ""
    problem: str = ""


class Over(Struct, frozen=True, kw_only=True, tag=True):
    """A cell's program has ended, and so does the cell; `problem` when it could not even be started."""

    code: int | None = None
    signal: int | None = None
    problem: str = ""


class Gone(Struct, frozen=True, kw_only=True, tag=True):
    """Keeper to controller: nothing of a cell is left."""

    id: int
    code: int | None = None
    signal: int | None = None
    oom: bool = False
    notes: tuple[str, ...] = ()


class Kill(Struct, frozen=True, kw_only=True, tag=True):
    id: int


class Line(Struct, frozen=True, kw_only=True, tag=True):
    """An unconnected socket of a cell's network is asked for, and comes along with the answer."""

    id: int


class Exec(Struct, frozen=True, kw_only=True, tag=True):
    """Run a command in a cell; its stdin, stdout and stderr come along. `cell` is for the keeper."""

    id: int
    cell: int
    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = {}
    timeout_s: float | None = None


class File(Struct, frozen=True, kw_only=True, tag=True):
    """Write a file (`put`) or read it; its content goes through the pipe that comes along."""

    id: int
    cell: int
    path: str
    put: bool


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """What came of an Exec or a File. `problem` when it could not be run at all."""

    id: int
    code: int | None = None
    timed_out: bool = False
    problem: str = ""


Message: TypeAlias = (
    Open | Load | Warm | Start | Hello | Go | Up | Started | Over | Gone | Kill | Line | Exec | File | Done
)
encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode


CREDENTIALS = struct.Struct("3i")
ANCILLARY = socket.CMSG_SPACE(4 * MAX_FDS) + socket.CMSG_SPACE(CREDENTIALS.size)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Received(Struct, frozen=True):
    """`pid` is the sender's as seen from here, where credentials were asked for."""

    message: Message
    fds: list[int]
    pid: int


def transmit(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    try:
        data = encode(message)
    except UnicodeEncodeError as error:
        # It would stay first in the queue, and keep all others from being sent.
        raise UsageError(f"a {type(message).__name__} with text that is not Unicode: {error}") from error
    if len(data) > MAX_BYTES:
        kind = type(message).__name__
        raise UsageError(f"a {kind} of {len(data)} bytes is over {MAX_BYTES}; send large data as a file")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def receive(sock: socket.socket) -> Received | None:
    """None when the other side is gone. Raises BlockingIOError where nothing is there yet."""
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
    """One end in an event loop. `told` gets each message, `closed` is called once."""

    def __init__(
        self,
        sock: socket.socket,
        told: Callable[[Received], None],
        closed: Callable[[], None],
        *,
        credentials: bool = False,
    ) -> None:
        self._sock = sock
        self._told = told
        self._closed = closed
        self._waiting: deque[tuple[Message, list[int]]] = deque()
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
        """Takes over `fds`. Raises Unavailable when the other side is gone."""
        if not self._open:
            _close(fds)
            raise Unavailable("the other side of the channel is gone")
        self._waiting.append((message, list(fds)))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._waiting:
            _close(fds)
        self._waiting.clear()

    def _write(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            try:
                transmit(self._sock, message, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError:
                self._end()
                return
            except UsageError:
                self._waiting.popleft()
                _close(fds)
                raise
            self._waiting.popleft()
            _close(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        # A few at a time: whoever talks much must not keep the loop from the others.
        for _ in range(16):
            try:
                received = receive(self._sock)
            except BlockingIOError:
                return
            except (OSError, MsgspecError):
                received = None  # Whoever does not speak our language is gone to us.
            if received is None:
                self._end()
                return
            self._told(received)
            if not self._open:
                return

    def _end(self) -> None:
        if self._open:
            self.close()
            self._closed()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
