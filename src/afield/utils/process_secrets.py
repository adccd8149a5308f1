"""Hides secrets in /proc/PID/cmdline and /proc/PID/environ (Linux).

All users can read the arguments of a process; processes of the same user can read its initial environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def hide_arguments(values: Collection[str]) -> None:
    """Overwrite these values in /proc/PID/cmdline. Does nothing on other systems than Linux."""
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
    """Overwrite the values of these variables in /proc/PID/environ, and remove them from the environment that
    children inherit by default. `os.environ` keeps them.
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
    """Start and end address of the arguments (45) or environment (47), from /proc/self/stat.

    These are fields 48 to 51 of proc(5); the list after the process name begins with field 3.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[field]), int(fields[field + 1])


def _words(start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the address and text of each NUL-terminated string."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        memory.seek(start)
        content = memory.read(end - start)
    at = start
    for word in content.split(b"\0"):
        yield at, word
        at += len(word) + 1


def _overwrite(at: int, length: int) -> None:
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(at)
        memory.write(b"*" * length)
