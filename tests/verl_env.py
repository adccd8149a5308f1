"""Where the tests with a real veRL run: an environment made once under the cache."""

from __future__ import annotations

import os
from pathlib import Path

from afield.config import Environment
from afield.conformance.environments import python_environment
from afield.conformance.pins import VERL

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src", ROOT / "tests", ROOT / "tests" / "verl_cpu")


def verl_python() -> Path:
    """An interpreter that has stock veRL and what afield needs. Raises Unavailable."""
    return python_environment(Environment.read().envs, "verl", VERL)


def verl_environment(**values: str) -> dict[str, str]:
    """For a process of that interpreter: afield from its sources, one thread, a Ray without passwords."""
    settled = {
        "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **settled, **values}
