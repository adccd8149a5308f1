"""Sandbox: a fresh place to run commands in, apart from agents and from us; it ends with its `async with`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from msgspec import Struct

from afield.errors import InfrastructureFailure, UsageError
from afield.types import Reason

# Of a file that is downloaded: one with holes may be called larger than any memory.
MAX_DOWNLOAD_BYTES = 512 * 2**20


class ExecResult(Struct, frozen=True, kw_only=True):
    """What came of a command. A non-zero exit and a timeout are data; `exit_code` is None after a timeout.

    Output beyond the bound the sandbox keeps is cut in the middle, and `truncated` says so.
    """

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class Sandbox(Protocol):
    """Raises InfrastructureFailure when the place itself is broken or gone, never for what a command did;
    and UsageError for what no kernel takes, such as a path with a NUL character, before anything is done.
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
        """Run a command line (by `sh -c`) or an argument list. After `timeout` it is killed with all it
        started.
        """
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, with its folders. Repeating overwrites."""
        ...

    async def download(self, path: str) -> bytes:
        """Raises Missing where there is no such file, InfrastructureFailure beyond MOST_BYTES."""
        ...


def build_argv(
    command: str | Sequence[str], timeout: float, cwd: str | None, env: Mapping[str, str] | None
) -> list[str]:
    """What is to be run. Raises UsageError for what could not be passed to any program."""
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
            raise UsageError(f"env: {name!r} is no name of a variable; it must not be empty nor have an '='")
        check_text("env", name)
        check_text("env", value)
    return argv


def check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise UsageError(f"{what}: {_shortened(text)} has a NUL character, which no system takes")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        said = f"{what}: {_shortened(text)} is not Unicode ({error.reason}); send such bytes as a file"
        raise UsageError(said) from error


def check_path(path: str) -> None:
    if not path:
        raise UsageError("path: it is empty; name a file")
    check_text("path", path)


def file_too_large(path: str, where: str, most: int = MAX_DOWNLOAD_BYTES) -> InfrastructureFailure:
    said = f"{path} in {where} has more than {most} bytes; split it, or compress it there"
    return InfrastructureFailure(said, Reason.UPLOAD)


def _shortened(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")
