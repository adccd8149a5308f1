"""Fork parent: imports the program inside bubblewrap and forks sandboxes on request.

1. It drops all privileges before it imports the agent, and ends with its supervisor.
2. Import-time effects of the agent happen here and are shared by all sessions: module variables must not hold
state of a session.
3. Early imports follow from the agent's source alone (see `imports.prewarm`); sessions cannot influence them.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from afield.errors import UsageError, boundary
from afield.local_sandbox import serving, syscalls
from afield.local_sandbox.bwrap import DEVICES, EMPTY, HIDDEN_PROC
from afield.local_sandbox.imports import prewarm
from afield.local_sandbox.init import live
from afield.local_sandbox.messages import Load, Program, Start, Warm, receive, transmit
from afield.local_sandbox.namespaces import USER
from afield.types import Failure, FailureKind, Reason


def main(fd: int) -> NoReturn:
    keeper = socket.socket(fileno=fd)
    received = receive(keeper)
    if received is None or not isinstance(received.message, Load):
        os._exit(2)
    load = received.message
    try:
        _seal(load)
        _give_up_privileges()
    except OSError as error:
        transmit(keeper, Warm(problem=f"namespaces cannot be made here: {error}"))
        os._exit(2)
    problem, app = _imported(load.program)
    gc.collect()
    gc.freeze()
    transmit(keeper, Warm(problem=problem))
    if problem:
        os._exit(2)
    if place := load.program.script or load.program.target.rpartition(":")[0]:
        prewarm(place)
    # Sandboxes are reparented to bubblewrap's init process, which reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _fork_on_demand(keeper, load, app)


def _fork_on_demand(keeper: socket.socket, load: Load, app: Any) -> NoReturn:
    while True:
        received = receive(keeper)
        if received is None:
            os._exit(0)
        if isinstance(received.message, Start) and os.fork() == 0:
            keeper.close()
            channel, log = received.fds
            live(received.message, load, app, socket.socket(fileno=channel), log)
        for fd in received.fds:
            os.close(fd)


def _seal(load: Load) -> None:
    """Remount directories through an overlay, which makes their Unix sockets unreachable.

    On kernels without this feature, only sockets that exist at the start are covered; the log says so.
    """
    flags = syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEV
    for place in load.sealed:
        lower = place.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        try:
            syscalls.mount("overlay", place, "overlay", flags, f"lowerdir={lower}:{EMPTY},userxattr")
        except OSError as error:
            sys.stderr.write(f"Unix sockets created below {place} from now on can be reached: {error}\n")
            continue
        for covered in load.hidden:
            if Path(covered).is_relative_to(place):
                _cover(covered)


def _cover(place: str) -> None:
    if Path(place).is_dir():
        syscalls.mount(
            "hidden", place, "tmpfs", syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEV, "size=4k"
        )
    elif Path(place).exists():
        syscalls.mount("/dev/null", place, flags=syscalls.BIND)


def _give_up_privileges() -> None:
    # The kernel allows a fresh /proc mount only while an unmasked one is visible; mount one out of reach.
    syscalls.mount(
        "proc", f"{HIDDEN_PROC}/proc", "proc", syscalls.NO_SUID | syscalls.NO_DEV | syscalls.NO_EXEC
    )
    syscalls.mount("none", HIDDEN_PROC, "tmpfs", syscalls.READ_ONLY, "size=4k")
    # Device nodes are shared with this machine, and the sandbox's user may be root outside, who could change
    # their modes.
    for name in DEVICES:
        syscalls.make_read_only(f"/dev/{name}")
    syscalls.unshare(syscalls.NEW_USER)
    syscalls.map_ids(USER, 0)
    syscalls.drop_privileges()


def _imported(program: Program) -> tuple[str, Any]:
    """Import the program. Returns an error message, empty on success, and the app of a target."""
    failures: list[Failure] = []
    try:
        with boundary(FailureKind.TASK, Reason.LAUNCH, failures.append):
            for name in program.warm:
                importlib.import_module(name)
            if program.script:
                _warm_up(Path(program.script))
        if failures:
            return f"{failures[0].traceback}\n{failures[0].message}", None
        return "", serving.prepared(program.target) if program.target else None
    except UsageError as error:
        return str(error), None
    except SystemExit as error:
        return f"importing {program.name} ended with {error!r}", None


def _warm_up(script: Path) -> None:
    """Import the script's top-level imports; a module that fails is left to the script."""
    sys.path.insert(0, str(script.parent))
    for name in _imports(script):
        with boundary(FailureKind.TASK, Reason.LAUNCH, lambda _: None):
            importlib.import_module(name)


def _imports(script: Path) -> Iterator[str]:
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
