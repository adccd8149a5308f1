"""What sessions printed: the end of a log, and which part of a shared one was written while one ran."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

SHARED = "shared.jsonl"  # beside the logs


def tail(log: Path, size: int, start: int = 0) -> str:
    """The last `size` bytes that were written after `start`; empty where there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


class LogSlice(msgspec.Struct, frozen=True):
    """Of the log with that name, what was written while a session ran; by others of that process, too."""

    session: str
    log: str
    start: int
    end: int


def record_slice(directory: Path, part: LogSlice) -> None:
    """For those who look after the session has ended. A full disk must not end a run for its sake."""
    if part.end > part.start:
        with contextlib.suppress(OSError), (directory / SHARED).open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(part) + b"\n")


def read_slices(directory: Path) -> list[LogSlice]:
    try:
        lines = (directory / SHARED).read_bytes().splitlines()
    except OSError:
        return []
    found: list[LogSlice] = []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):  # the last line of a killed collector
            found.append(msgspec.json.decode(line, type=LogSlice))
    return found


def slice_text(directory: Path, part: LogSlice) -> str:
    with contextlib.suppress(OSError), (directory / part.log).open("rb") as file:
        file.seek(part.start)
        return file.read(part.end - part.start).decode("utf-8", "replace")
    return ""
