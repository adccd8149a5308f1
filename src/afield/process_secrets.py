"""Secrets of this process that others could read in /proc: arguments and the first environment.

Every user may read the arguments of a process, and every process of the same user its environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def hide_arguments(values: Collection[str]) -> None:
    """Overwrite these where /proc/PID/cmdline shows them. Linux only; elsewhere nothing is done."""
    secrets = {value.encode() for value in values if value}
    with contextlib.suppress(OSError, ValueError, IndexError):
        start, end = _region(45)
        for at, word in _words(start, end):
            name, equals, value = word.partition(b"=")
            if word in secrets:
                _overwrite(at, len(word))
            elif equals and value in secrets:
                _overwrite(at + len(name) + 1, len(value))


def hide_variables(names: Collection[str]) -> None:
    """Overwrite these where /proc/PID/environ shows them, and hand them on to no child by default.

    `os.environ` keeps what it has.
    """
    for name in names:
        os.unsetenv(name)
    wanted = {name.encode() for name in names}
    with contextlib.suppress(OSError, ValueError, IndexError):
        start, end = _region(47)
        for at, word in _words(start, end):
            name, equals, value = word.partition(b"=")
            if equals and name in wanted:
                _overwrite(at + len(name) + 1, len(value))


def _region(field: int) -> tuple[int, int]:
    """Addresses of proc(5), /proc/PID/stat: fields 48 to 51. The first one after the name is number 3."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[field]), int(fields[field + 1])


def _words(start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Where each begins, and what it is."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(start)
        shown = memory.read(end - start)
    at = start
    for word in shown.split(b"\0"):
        yield at, word
        at += len(word) + 1


def _overwrite(at: int, length: int) -> None:
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(at)
        memory.write(b"*" * length)
