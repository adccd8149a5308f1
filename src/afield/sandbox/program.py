"""What runs in cells, and how it ended: plain data."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from msgspec import Struct, field

from afield.errors import UsageError

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
