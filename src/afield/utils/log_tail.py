"""Log tails, and the sections of shared logs by session."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

SHARED = "shared.jsonl"  # index of shared logs, in the log directory


def tail(log: Path, size: int, start: int = 0) -> str:
    """Return at most the last `size` bytes of a log, from offset `start` on; empty if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


class LogSlice(msgspec.Struct, frozen=True):
    """Section of a shared log that was written while a session ran.

    Concurrent sessions of the same process write to the same section.
    """

    session: str
    """Session id."""
    log: str
    """File name of the log in the log directory."""
    start: int
    """Byte offset of the first byte."""
    end: int
    """Byte offset after the last byte."""


def record_slice(directory: Path, part: LogSlice) -> None:
    """Append a section to the index. Write errors are ignored: a full disk must not end the run."""
    if part.end > part.start:
        with contextlib.suppress(OSError), (directory / SHARED).open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(part) + b"\n")


def read_slices(directory: Path) -> list[LogSlice]:
    """Read the index; empty if there is none."""
    try:
        lines = (directory / SHARED).read_bytes().splitlines()
    except OSError:
        return []
    slices: list[LogSlice] = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):  # incomplete last line of a killed process
            slices.append(msgspec.json.decode(line, type=LogSlice))
    return slices


def slice_text(directory: Path, part: LogSlice) -> str:
    """Read a section's text; empty if the log cannot be read."""
    with contextlib.suppress(OSError), (directory / part.log).open("rb") as file:
        file.seek(part.start)
        return file.read(part.end - part.start).decode("utf-8", "replace")
    return ""
