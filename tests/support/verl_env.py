"""Where the tests with a real veRL run: an environment made once under the cache."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from afield.conformance.pins import VERL
from afield.errors import Unavailable
from afield.settings.environment import Environment
from afield.utils.installations import python_environment
from support.paths import ROOT

SOURCES = (ROOT / "src", ROOT / "tests", ROOT / "tests" / "verl_cpu")


def verl_python() -> Path:
    """An interpreter that has stock veRL, and afield from its sources. Raises Unavailable."""
    python = python_environment(Environment.read().envs, "verl", VERL)
    known = [python, "-c", "import importlib.metadata as m; m.version('afield')"]
    if subprocess.run(known, capture_output=True, check=False).returncode:
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"afield cannot be installed beside veRL: {done.stderr[-500:]}")
    return python


def verl_environment(**values: str) -> dict[str, str]:
    """For a process of that interpreter: afield from its sources, one thread, a Ray without passwords, which
    does not kill its workers when other programs of the machine use most of its memory.
    """
    settled = {
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **settled, **values}


def figures(script: Path) -> dict[str, float]:
    """What a script that compares us with veRL prints last. Skips without veRL; in `CI` it fails."""
    try:
        python = verl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    done = subprocess.run(
        [python, script], env=verl_environment(), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])
