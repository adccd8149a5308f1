"""Where the tests and benchmarks with a real TRL run: an environment made once under the cache."""

from __future__ import annotations

import os
from pathlib import Path

from afield.conformance.pins import TRL
from afield.settings.environment import Environment
from afield.utils.installations import python_environment
from support.paths import ROOT


def trl_python() -> Path:
    """An interpreter that has stock TRL, and afield from this tree. Raises Unavailable."""
    return python_environment(Environment.read().envs, "trl", ("-e", f"{ROOT}[gateway]", *TRL))


def trl_environment(**more: str) -> dict[str, str]:
    """For programs there: one thread each, and the stand-ins for a GPU (`tests/trl_cpu`)."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT / "tests"), **more}
