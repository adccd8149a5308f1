"""End of child processes: SIGTERM, a time to exit, SIGKILL."""

from __future__ import annotations

import asyncio
import subprocess
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress

TERM_S = 10.0
"""Seconds from SIGTERM, or from the close of a process's input, to SIGKILL."""


async def terminate(process: Process, timeout_s: float = TERM_S) -> None:
    """End a process: SIGTERM, then SIGKILL after `timeout_s` seconds. Repeating is harmless."""
    with suppress(ProcessLookupError):
        process.terminate()
    await wait_or_kill(process, timeout_s)


async def wait_or_kill(
    process: Process, timeout_s: float = TERM_S, kill: Callable[[], object] | None = None
) -> None:
    """Wait for the end of a process; after `timeout_s` seconds call `kill`, by default SIGKILL."""
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        with suppress(ProcessLookupError):
            (kill or process.kill)()
        await process.wait()


def wait_or_kill_popen(process: subprocess.Popen[bytes], timeout_s: float = TERM_S) -> None:
    """`wait_or_kill` for programs without an event loop."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
