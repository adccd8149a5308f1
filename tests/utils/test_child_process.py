"""Child processes end: at SIGTERM, by themselves, or by SIGKILL when they do neither."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from afield.utils.child_process import terminate, wait_or_kill, wait_or_kill_popen

pytestmark = pytest.mark.anyio
SHORT_S = 0.01
STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
signal.pause()
"""


async def started(*command: str) -> Process:
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


async def stubborn() -> Process:
    """A process that ignores SIGTERM and the end of its input."""
    process = await started(sys.executable, "-c", STUBBORN)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    return process


async def test_a_process_ends_at_sigterm_and_repeating_is_harmless() -> None:
    process = await started("sleep", "600")
    for _ in range(2):
        await terminate(process)
        assert process.returncode == -signal.SIGTERM


async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process = await stubborn()
    await terminate(process, SHORT_S)
    assert process.returncode == -signal.SIGKILL


async def test_a_process_that_ends_by_itself_is_waited_for() -> None:
    process = await started("cat")
    assert process.stdin is not None
    process.stdin.close()
    await wait_or_kill(process)
    assert process.returncode == 0


async def test_a_process_that_does_not_end_is_killed_as_the_caller_says() -> None:
    process = await stubborn()
    await wait_or_kill(process, SHORT_S, lambda: process.send_signal(signal.SIGABRT))
    assert process.returncode == -signal.SIGABRT


def test_a_popen_that_does_not_end_is_killed() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        wait_or_kill_popen(process, SHORT_S)
        assert process.returncode == -signal.SIGKILL
