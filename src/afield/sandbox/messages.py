"""What controller, keeper, warm parent and cells say to each other, over sockets that keep messages whole.

    controller <-> keeper        one socket per nest
    keeper     <-> warm parent   one socket per nest
    keeper     <-> cell          one socket per cell, held by its first process

A message is a JSON object with its `type`; descriptors travel beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import Struct

from afield.options import Limits
from afield.sandbox.program import Program

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
    limits: Limits = Limits()
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
