"""Sandbox interface: run commands and copy files in a fresh, isolated environment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from msgspec import Struct

from afield.errors import InfrastructureFailure, UsageError
from afield.types import Reason

MAX_DOWNLOAD_BYTES = 512 * 2**20
"""Size limit of `download`, in bytes; a sparse file can have any size."""


class ExecResult(Struct, frozen=True, kw_only=True):
    """Result of a command. A non-zero exit code and a timeout are results, not exceptions."""

    exit_code: int | None
    """Exit code; None after a timeout."""
    stdout: str = ""
    """Standard output."""
    stderr: str = ""
    """Standard error."""
    timed_out: bool = False
    """Whether the command was killed after its timeout."""
    truncated: bool = False
    """Whether output exceeded the limit and was cut in the middle."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Sandbox(Protocol):
    """Isolated environment that ends with its `async with`.

    Methods raise InfrastructureFailure if the sandbox fails, never because a command fails, and UsageError
    for arguments that the kernel rejects, such as a path with a NUL character.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 600.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command line (`sh -c`) or an argument list; kill its process tree after `timeout` s."""
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file and create its parent directories."""
        ...

    async def download(self, path: str) -> bytes:
        """Read a file; raises NotFound, or InfrastructureFailure above MAX_DOWNLOAD_BYTES."""
        ...


class OutputBuffer:
    """Output buffer of bounded size: keeps the first and the last part of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self.omitted = 0

    def add(self, data: bytes) -> None:
        room = self._limit // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._limit:
            self._trim()

    def _trim(self) -> None:
        over = len(self._tail) - (self._limit - self._limit // 2)
        if over > 0:
            self.omitted += over
            del self._tail[:over]

    @property
    def bytes(self) -> bytes:
        self._trim()
        return bytes(self._head + self._tail)

    @property
    def text(self) -> str:
        self._trim()
        between = f"\n... {self.omitted} bytes left out ...\n".encode() if self.omitted else b""
        return (bytes(self._head) + between + bytes(self._tail)).decode("utf-8", "replace")


def build_argv(
    command: str | Sequence[str], timeout: float, cwd: str | None, env: Mapping[str, str] | None
) -> list[str]:
    """Build the argument list of a command. Raises UsageError for invalid arguments."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    if not argv:
        raise UsageError("command: an empty list names no program; give a command line or its words")
    if math.isnan(timeout):
        raise UsageError("timeout = nan must be a number of seconds")
    for word in argv:
        check_text("command", word)
    check_text("cwd", cwd or "")
    for name, value in (env or {}).items():
        if not name or "=" in name:
            raise UsageError(f"env: {name!r} is not a variable name: it must not be empty or contain '='")
        check_text("env", name)
        check_text("env", value)
    return argv


def check_text(what: str, text: str) -> None:
    """Raise UsageError for text with a NUL character or a lone surrogate."""
    if "\0" in text:
        raise UsageError(f"{what}: {_shortened(text)} has a NUL character, which no system takes")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{what}: {_shortened(text)} is not Unicode ({error.reason}); send such bytes as a file"
        raise UsageError(message) from error


def check_path(path: str) -> None:
    """Raise UsageError for an empty or invalid path."""
    if not path:
        raise UsageError("path: it is empty; name a file")
    check_text("path", path)


def file_too_large(path: str, where: str, most: int = MAX_DOWNLOAD_BYTES) -> InfrastructureFailure:
    message = f"{path} in {where} has more than {most} bytes; split it, or compress it there"
    return InfrastructureFailure(message, Reason.UPLOAD)


def _shortened(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")
