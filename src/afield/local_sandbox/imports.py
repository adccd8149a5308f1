"""Import closure of an agent, and early imports before a fork.

1. `import_closure` reads an agent's source without running it: its own files, and the modules they import
anywhere, functions included. It does not find computed module names; `sandbox.mounts` makes their files
visible.
2. `prewarm` imports these modules before the fork, each after a successful trial in a throwaway process.
"""

from __future__ import annotations

import ast
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from afield.errors import boundary
from afield.types import FailureKind, Reason

MOST_FILES = 2_000


class Closure(Struct, frozen=True):
    """Files and imports of an agent."""

    files: tuple[str, ...]
    """Absolute paths of files and package directories."""
    sources: tuple[str, ...]
    """Absolute paths of the Python files that were read."""
    modules: tuple[str, ...]
    """Absolute names of imported modules."""


def import_closure(file: Path) -> Closure:
    """Import closure of a file that runs with its own folder first on sys.path, as with `python file.py`."""
    root = file.parent
    files: dict[str, None] = {str(file): None}
    sources: dict[Path, tuple[str, ...]] = {file: ()}
    modules: dict[str, None] = {}
    waiting = [file]
    while waiting and len(sources) <= MOST_FILES:
        source = waiting.pop()
        for name in imported_names(source, sources[source]):
            modules[name] = None
            top = name.partition(".")[0]
            for place in _beside(root, top):
                files[str(place)] = None
                for source_file, package in _sources(place, top):
                    if source_file not in sources:
                        sources[source_file] = package
                        waiting.append(source_file)
    return Closure(tuple(sorted(files)), tuple(sorted(map(str, sources))), tuple(sorted(modules)))


def imported_names(source: Path, package: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of modules that a file imports at any depth, except under TYPE_CHECKING.

    Empty if the file is not valid Python.
    """
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(node, package)
        elif isinstance(node, ast.If) and _type_checking(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _from(node: ast.ImportFrom, package: tuple[str, ...]) -> Iterator[str]:
    """Names in `from a import b`: both a and a.b, since b may be a module."""
    base = package[: len(package) - node.level + 1] if node.level else ()
    if node.level and not base:
        return
    name = ".".join((*base, *([node.module] if node.module else [])))
    if name:
        yield name
        yield from (f"{name}.{alias.name}" for alias in node.names if alias.name != "*")


def _type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _beside(root: Path, top: str) -> list[Path]:
    """Module or package with that name in `root`, as Python finds it there."""
    if (package := root / top).is_dir() and (_is_package(package)):
        return [package]
    modules = [path for path in (root / f"{top}.py",) if path.is_file()]
    return modules or sorted(root.glob(f"{top}.*.so"))


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() or any(folder.glob("*.py"))


def _sources(place: Path, top: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Python files of a module or package, each with the package that relative imports refer to."""
    if place.is_file():
        if place.suffix == ".py":
            yield place, ()
        return
    for number, path in enumerate(sorted(place.rglob("*.py"))):
        if number >= MOST_FILES:
            return
        yield path, (top, *path.parent.relative_to(place).parts)


PREWARM_S = 10.0
GOOD, BAD, THREAD = 1, 2, 3
LIBRARIES = tuple({str(Path(sysconfig.get_path(kind))) for kind in ("stdlib", "purelib", "platlib")})
# Modules that trigger the lazy imports of these libraries.
FIRST_USE = {"openai": "afield.sdk.prewarm_openai", "boto3": "afield.sdk.prewarm_aws"}


def prewarm(place: str, *, libraries_only: bool = False) -> None:
    """Import the modules that the code at `place`, a file or module name, imports later.

    A module is imported here only after a throwaway process has imported it: a module that fails, hangs or
    starts a thread is left to the sessions. `libraries_only` also leaves the agent's own modules to them.
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
    """Whether a.b may be a module: it is not if `a` already has an attribute b."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)) or "__main__" in parts:
        return False
    parent = sys.modules.get(name.rpartition(".")[0])
    return parent is None or parts[-1] not in vars(parent)


def _tried(names: Sequence[str], libraries_only: bool) -> list[str]:
    """Names that a throwaway process imports within PREWARM_S seconds.

    A module that ends the process is skipped.
    """
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
    """Import names in a child process, which is killed at the deadline.

    Returns one report byte per name.
    """
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
            if threading.active_count() > threads:  # threads do not survive a fork
                sys.stderr.write(f"{name} starts a thread: it and what follows is imported by each session\n")
                os.write(writing, bytes([THREAD]))
                break
            os.write(writing, bytes([GOOD if good else BAD]))
    finally:
        os._exit(0)


def _import(name: str) -> bool:
    """Import a module; errors are left to the session that needs it."""
    with contextlib.suppress(SystemExit), boundary(FailureKind.TASK, Reason.LAUNCH, lambda _: None):
        importlib.import_module(name)
        return True
    return False


def _of_library(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(LIBRARIES)
