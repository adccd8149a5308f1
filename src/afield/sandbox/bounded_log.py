"""A log that stays within its bound: its beginning and its end are kept, and what was left out is said."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

BOUND = 1024 * 1024
HEAD = 64 * 1024
TAIL = 256 * 1024
TOLD = 4_000


class BoundedLog:
    """Writes to a file that this process alone writes to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._left_out = 0
        self._size = 0

    def take(self, source: int) -> bool:
        """What a pipe that does not block has for us; False when it has nothing."""
        try:
            data = os.read(source, 65_536)
        except BlockingIOError:
            return False
        if data:
            self.write(data)
        return bool(data)

    def write(self, data: bytes) -> None:
        os.write(self.fd, data)
        self._size += len(data)
        if self._size > BOUND:
            self._shorten()

    def _shorten(self) -> None:
        tail = os.pread(self.fd, TAIL, self._size - TAIL)
        self._left_out += self._size - HEAD - TAIL
        os.ftruncate(self.fd, HEAD)
        os.lseek(self.fd, HEAD, os.SEEK_SET)
        self._size = HEAD
        note = f"\n[... about {self._left_out} bytes left out ...]\n".encode()
        for part in (note, tail):
            os.write(self.fd, part)
            self._size += len(part)


class Tail(Struct, frozen=True):
    """The end of a log, for whoever explains a death."""

    path: str

    def __str__(self) -> str:
        try:
            with Path(self.path).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TOLD))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""
