"""Sandbox: a fresh place to run commands in, apart from agents and from us; it ends with its `async with`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from msgspec import Struct


class Ran(Struct, frozen=True, kw_only=True):
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
    """Raises InfrastructureFailure when the place itself is broken or gone, never for what a command did."""

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
    ) -> Ran:
        """Run a command line (by `sh -c`) or an argument list. After `timeout` it is killed with all it
        started.
        """
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, with its folders. Repeating overwrites."""
        ...

    async def download(self, path: str) -> bytes:
        """Raises Missing where there is no such file."""
        ...
