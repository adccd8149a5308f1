"""Import closure of an agent: its own files, and the modules that their code names.

Read from source, without running any of it:

1. `files`: the agent's file and the modules and packages beside it that it imports, directly or not.
2. `modules`: every module that these files import anywhere, functions included, in the order of their names.

A module whose name is computed while the agent runs is not found; `sandbox.mounts` shows its file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

MOST_FILES = 2_000


class Closure(Struct, frozen=True):
    """What an agent's code consists of."""

    files: tuple[str, ...]
    """Files and package directories, absolute."""
    sources: tuple[str, ...]
    """Every Python file of `files` that was read."""
    modules: tuple[str, ...]
    """Absolute names of imported modules."""


def import_closure(file: Path) -> Closure:
    """Of a file that is run with its own folder first on the path, as `python file.py` does."""
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
                for found, package in _sources(place, top):
                    if found not in sources:
                        sources[found] = package
                        waiting.append(found)
    return Closure(tuple(sorted(files)), tuple(sorted(map(str, sources))), tuple(sorted(modules)))


def imported_names(source: Path, package: tuple[str, ...] = ()) -> Iterator[str]:
    """Modules that a file imports at any depth, but not for type checkers alone. None if it is no Python."""
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
    """`from a import b` may name the module a.b; whether it does is seen when it is imported."""
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
    """The module or package of that name in `root`, as Python would find it there."""
    if (package := root / top).is_dir() and (_is_package(package)):
        return [package]
    found = [path for path in (root / f"{top}.py",) if path.is_file()]
    return found or sorted(root.glob(f"{top}.*.so"))


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() or any(folder.glob("*.py"))


def _sources(place: Path, top: str) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Python files of a module or package, each with the package that its relative imports count from."""
    if place.is_file():
        if place.suffix == ".py":
            yield place, ()
        return
    for number, path in enumerate(sorted(place.rglob("*.py"))):
        if number >= MOST_FILES:
            return
        yield path, (top, *path.parent.relative_to(place).parts)
