"""Agents on a real Ray: the tests of `ray_suite.py`, in an environment that has it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from afield.errors import Unavailable
from support.ray_env import ROOT, ray_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SUITE = Path(__file__).parent / "ray_suite.py"
RUN_S = 1700
# Else Ray ends its workers when other programs of the machine use most of its memory.
QUIET = {"RAY_memory_monitor_refresh_ms": "0"}
LEAST = 40


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return ray_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def test_agents_run_on_ray(python: Path) -> None:
    command = [python, "-m", "pytest", SUITE, "-m", "real", "-q", "--timeout", "400"]
    environment = {**os.environ, **QUIET}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= LEAST, done.stdout[-2000:]
