"""Early imports of a warm parent: modules of the agent's import closure.

Each is tried in a process of its own first. Which modules these are follows from the agent's source alone:
nothing that a session says or writes has any part in it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from afield.errors import boundary
from afield.sandbox.import_closure import import_closure, imported_names
from afield.types import FailureKind, Reason

PREWARM_S = 10.0
GOOD, BAD, THREAD = 1, 2, 3
LIBRARIES = tuple({str(Path(sysconfig.get_path(kind))) for kind in ("stdlib", "purelib", "platlib")})
# What these libraries load only when they are used, they load in these modules.
FIRST_USE = {"openai": "afield.sdk.prewarm_openai", "boto3": "afield.sdk.prewarm_aws"}


def prewarm(place: str, *, libraries_only: bool = False) -> None:
    """Import what the code at `place`, a file or a module's name, will import later.

    A module is imported here only after that went well in a process that is thrown away: one that fails,
    hangs or starts a thread is left to the sessions. `libraries_only` leaves the agent's own modules to them.
    """
    for name in _tried(_names(place), libraries_only):
        _import(name)
    gc.collect()
    gc.freeze()


def _names(place: str) -> list[str]:
    if place.endswith(".py"):
        names = import_closure(Path(place).resolve()).modules
    else:
        module = sys.modules.get(place)
        file = getattr(module, "__file__", None)
        package = tuple((getattr(module, "__package__", "") or "").split("."))
        names = tuple(imported_names(Path(file), package)) if file else ()
    more = [early for name, early in FIRST_USE.items() if any(n.partition(".")[0] == name for n in names)]
    return [name for name in (*dict.fromkeys(names), *more) if name not in sys.modules and _importable(name)]


def _importable(name: str) -> bool:
    """`from a import b` names a.b, which is a module only if `a` has no such attribute."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)) or "__main__" in parts:
        return False
    parent = sys.modules.get(name.rpartition(".")[0])
    return parent is None or parts[-1] not in vars(parent)


def _tried(names: Sequence[str], libraries_only: bool) -> list[str]:
    """Those that a process of its own could import in time. One that ends its process is passed over."""
    good: list[str] = []
    deadline = time.monotonic() + PREWARM_S
    while names:
        reports = _trial(names, libraries_only, deadline)
        good += [name for name, report in zip(names, reports, strict=False) if report == GOOD]
        if THREAD in reports:
            break
        culprit, names = names[len(reports) : len(reports) + 1], names[len(reports) + 1 :]
        if culprit:
            sys.stderr.write(f"{culprit[0]} cannot be imported early: each session imports it\n")
        if time.monotonic() > deadline:
            break
    return good


def _trial(names: Sequence[str], libraries_only: bool, deadline: float) -> bytes:
    """A byte for each name that was dealt with, from a process that is killed at the deadline."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _report(names, writing, libraries_only)
    os.close(writing)
    reports = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
        if not (data := os.read(reading, 65536)):
            break
        reports += data
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return reports


def _report(names: Iterable[str], writing: int, libraries_only: bool) -> NoReturn:
    threads = threading.active_count()
    try:
        for name in names:
            good = _importable(name) and _import(name) and (not libraries_only or _of_library(name))
            if threading.active_count() > threads:  # forks do not take threads along
                sys.stderr.write(f"{name} starts a thread: it and what follows is imported by each session\n")
                os.write(writing, bytes([THREAD]))
                break
            os.write(writing, bytes([GOOD if good else BAD]))
    finally:
        os._exit(0)


def _import(name: str) -> bool:
    """Whatever it raises, a session that needs it will tell."""
    with contextlib.suppress(SystemExit), boundary(FailureKind.TASK, Reason.LAUNCH, lambda _: None):
        importlib.import_module(name)
        return True
    return False


def _of_library(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(LIBRARIES)
