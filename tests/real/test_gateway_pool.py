"""Gateways on a real Ray: a lost node, and the demo with its gateways there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from afield.errors import Unavailable
from support.ray_env import ROOT, ray_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_memory_monitor_refresh_ms": "0"}


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return ray_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def last_line(cwd: Path, *command: object) -> dict[str, Any]:
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("store", [pytest.param("shared", marks=pytest.mark.long), "own"])
def test_no_rollout_is_lost_or_doubled_with_a_node(python: Path, store: str, tmp_path: Path) -> None:
    options = ("--sessions", 64, "--json", *(("--no-shared-store",) if store == "own" else ()))
    result = last_line(tmp_path, python, "-m", "bench.pool.node_loss", *options)
    assert (result["rollouts"], result["failed"], result["lost"], result["doubled"]) == (64, 0, 0, 0)
    assert result["lost_gateways"] >= 1
    assert result["kept"] + result["retried"] > 0


@pytest.mark.long
def test_the_demo_learns_with_gateways_on_ray(python: Path, tmp_path: Path) -> None:
    result = last_line(tmp_path, python, "-m", "afield", "demo", "--gateways", 2, "--on", "ray", "--json")
    assert result["first"] <= 0.35 and result["last"] >= 0.8 and result["failed"] == 0
