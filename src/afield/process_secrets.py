"""Secrets of this process that others could read in /proc: arguments and the first environment.

Every user may read the arguments of a process, and every process of the same user its environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def hide_from_proc(values: Iterable[str], names: Iterable[str] = ()) -> None:
    """Overwrite `values` where /proc/PID/cmdline and environ show them, and hand `names` on to no child.

    `os.environ` keeps what it has. Linux only; elsewhere nothing is done.
    """
    for name in names:
        os.unsetenv(name)
    secrets = [value.encode() for value in values if value]
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Fields 48 to 51 of proc(5); the first after the name is number 3.
        for start, end in ((int(fields[45]), int(fields[46])), (int(fields[47]), int(fields[48]))):
            _overwrite(start, end, secrets)


def _overwrite(start: int, end: int, secrets: Iterable[bytes]) -> None:
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        shown = memory.read(end - start)
        for secret in secrets:
            at = shown.find(secret)
            while at >= 0:
                memory.seek(start + at)
                memory.write(b"*" * len(secret))
                at = shown.find(secret, at + len(secret))
