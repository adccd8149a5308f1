"""Supervisor of inference servers: everything below ends with it, whichever of its processes is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from afield.utils.process_tree import children
from support.processes import alive

SERVER = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(json.dumps([os.getpid(), child.pid]), file=sys.stderr, flush=True)
time.sleep(600)
"""
BOUND_S = 60.0


@pytest.fixture
def supervised() -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A supervisor, and the processes of its server: one has a session of its own."""
    command = [sys.executable, "-m", "afield.engines.supervisor", sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        below = json.loads(process.stderr.readline())
        try:
            yield process, below
        finally:
            for pid in (process.pid, *below):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def wait_for_end(pids: list[int]) -> None:
    end = time.monotonic() + BOUND_S
    while any(map(alive, pids)):
        assert time.monotonic() < end, [pid for pid in pids if alive(pid)]
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_when_its_supervisor_is_killed(
    supervised: tuple[subprocess.Popen[bytes], list[int]], number: signal.Signals
) -> None:
    process, below = supervised
    process.send_signal(number)
    wait_for_end(below)
    assert process.wait() == -number


def test_the_server_ends_when_the_inner_process_is_killed(
    supervised: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, below = supervised
    (inner,) = children(process.pid)
    os.kill(inner, signal.SIGKILL)
    wait_for_end([inner, *below])
    assert process.wait() == 128 + signal.SIGKILL


def test_the_server_ends_when_standard_input_closes(
    supervised: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, below = supervised
    assert process.stdin is not None
    process.stdin.close()
    wait_for_end(below)
    assert process.wait() == 128 + signal.SIGTERM


def test_the_status_of_a_server_that_ends_is_passed_on(
    supervised: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, below = supervised
    os.kill(below[0], signal.SIGKILL)
    wait_for_end(below)
    assert process.wait() == 128 + signal.SIGKILL
