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
from afield.local_sandbox.init import run_sandbox
from afield.local_sandbox.messages import LoadProgram, Program, ProgramLoaded, StartSandbox, receive, transmit
from afield.local_sandbox.namespaces import USER
from afield.types import Failure, FailureKind, Reason


def main(fd: int) -> NoReturn:
    supervisor = socket.socket(fileno=fd)
    received = receive(supervisor)
    if received is None or not isinstance(received.message, LoadProgram):
        os._exit(2)
    load = received.message
    try:
        _hide_sockets(load)
        _drop_privileges()
    except OSError as error:
        transmit(supervisor, ProgramLoaded(problem=f"namespaces cannot be made here: {error}"))
        os._exit(2)
    problem, app = _load_program(load.program)
    gc.collect()
    gc.freeze()
    transmit(supervisor, ProgramLoaded(problem=problem))
    if problem:
        os._exit(2)
    if place := load.program.script or load.program.target.rpartition(":")[0]:
        prewarm(place)
    # Sandboxes are reparented to bubblewrap's init process, which reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _serve(supervisor, load, app)


def _serve(supervisor: socket.socket, load: LoadProgram, app: Any) -> NoReturn:
    while True:
        received = receive(supervisor)
        if received is None:
            os._exit(0)
        if isinstance(received.message, StartSandbox) and os.fork() == 0:
            supervisor.close()
            channel, log = received.fds
            run_sandbox(received.message, load, app, socket.socket(fileno=channel), log)
        for fd in received.fds:
            os.close(fd)


def _hide_sockets(load: LoadProgram) -> None:
    """Remount directories through an overlay, which makes their Unix sockets unreachable.

    On kernels without this feature, only sockets that exist at the start are covered; the log says so.
    """
    flags = syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEV
    for place in load.bwrap.sealed:
        lower = place.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
        try:
            syscalls.mount("overlay", place, "overlay", flags, f"lowerdir={lower}:{EMPTY},userxattr")
        except OSError as error:
            sys.stderr.write(f"Unix sockets created below {place} from now on can be reached: {error}\n")
            continue
        for covered in load.bwrap.hidden:
            if Path(covered).is_relative_to(place):
                _hide(covered)


def _hide(place: str) -> None:
    if Path(place).is_dir():
        syscalls.mount(
            "hidden", place, "tmpfs", syscalls.READ_ONLY | syscalls.NO_SUID | syscalls.NO_DEV, "size=4k"
        )
    elif Path(place).exists():
        syscalls.mount("/dev/null", place, flags=syscalls.BIND)


def _drop_privileges() -> None:
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


def _load_program(program: Program) -> tuple[str, Any]:
    """Import the program. Returns an error message, empty on success, and the app of a target."""
    failures: list[Failure] = []
    try:
        with boundary(FailureKind.TASK, Reason.LAUNCH, failures.append):
            for name in program.warm:
                importlib.import_module(name)
            if program.script:
                _import_all(Path(program.script))
        if failures:
            return f"{failures[0].traceback}\n{failures[0].message}", None
        return "", serving.prepared(program.target) if program.target else None
    except UsageError as error:
        return str(error), None
    except SystemExit as error:
        return f"importing {program.name} ended with {error!r}", None


def _import_all(script: Path) -> None:
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
