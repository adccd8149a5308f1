"""Harbor environment of the harness terminus-2: its commands, without the harbor package."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import afield
from support.processes import alive

HARNESSES = Path(afield.__file__).parent / "harnesses"
BASE = """
from typing import NamedTuple

class ExecResult(NamedTuple):
    stdout: str
    stderr: str
    return_code: int

class BaseEnvironment: ...
"""
SCRIPT = """
import asyncio, sys
from harbor_environment import LocalEnvironment

async def main(command):
    environment = LocalEnvironment()
    await environment.start(False)
    try:
        result = await environment.exec(command, timeout_sec=float(sys.argv[2]))
        print(repr(result.stdout), result.return_code)
    except TimeoutError:
        print("out of time")
    finally:
        await environment.stop(True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    """Import path of the environment, and of the part of Harbor's interface that it needs."""
    base = tmp_path / "harbor" / "environments" / "base.py"
    base.parent.mkdir(parents=True)
    base.write_text(BASE)
    return f"{tmp_path}:{HARNESSES}"


def run(command: str, folder: Path, python_path: str, timeout_s: float = 60.0) -> str:
    words = [sys.executable, "-c", SCRIPT, command, str(timeout_s)]
    env = os.environ | {"PYTHONPATH": python_path}
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_command_that_runs_out_of_time_ends_with_everything_it_started(
    tmp_path: Path, python_path: str
) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $! $$ > {pids}; wait"
    assert run(command, tmp_path, python_path, timeout_s=0.5) == "out of time"
    left = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    deadline = time.monotonic() + 10.0
    while any(map(alive, left)):  # the kernel ends them after the signal
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_output_that_is_no_text_does_not_fail_a_command(tmp_path: Path, python_path: str) -> None:
    assert run("printf 'a\\377'; exit 3", tmp_path, python_path) == "'a\ufffd' 3"
