"""Where the tests with a real Ray run: an environment made once under the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afield.runtimes.ray.runtime import RayRuntime
from afield.settings.environment import Environment
from afield.settings.runtimes import RayOptions
from afield.utils.installations import python_environment
from support.paths import ROOT

TESTING = ("anyio", "hypothesis", "pytest", "pytest-timeout")


def ray_python() -> Path:
    """An interpreter that has Ray, afield with its demo, and what the tests need. Raises Unavailable."""
    wanted = ("-e", f"{ROOT}[demo,ray]", *TESTING)
    return python_environment(Environment.read().envs, "ray", wanted, constraints=ROOT / "constraints.txt")


def made(target: str, folder: str, name: str = "run", idle_s: float = 60.0, **options: Any) -> RayRuntime:
    """For the contract: also called by a controller in a process of its own."""
    values = RayOptions(**{"cpus": 0.1, **options})
    return RayRuntime(target, values, name=name, log_dir=Path(folder) / "logs", idle_s=idle_s)
