"""Stock TRL in an environment of its own: the tests of `trl_suite.py`, and a few steps of the example."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from afield.errors import Unavailable
from support.trl_env import ROOT, trl_environment, trl_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SUITE = Path(__file__).parent / "trl_suite.py"
EXAMPLE = ROOT / "examples" / "trl" / "train_async.py"
LIMITED = ROOT / "examples" / "trl" / "train_sync.py"
RUN_S = 1700
LEAST = 15


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return trl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def told(command: list[str | Path], cwd: Path) -> str:
    """What a program there prints, if it ends well."""
    environment = trl_environment()
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_trl_takes_rollouts_and_gives_weights_as_its_protocols_say(python: Path) -> None:
    output = told(
        [python, "-m", "pytest", SUITE, "-m", "real", "-q", "--timeout", "400", "-W", "default"], ROOT
    )
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) >= LEAST, output[-2000:]


def test_the_example_trains_with_the_samplers_own_log_probabilities(python: Path, tmp_path: Path) -> None:
    lines = tmp_path / "steps.jsonl"
    measured = [python, "-m", "trl_cpu", "--measure", lines, EXAMPLE]
    told([*measured, "--steps", "3", "--out", tmp_path / "out"], tmp_path)
    steps = [line for line in map(json.loads, lines.read_text().splitlines()) if "loss" in line]
    assert len(steps) == 3
    assert steps[0]["logprob_diff_max"] < 1e-4 and steps[0]["logprob_diff_mean"] < 1e-5
    assert abs(steps[0]["ratio"] - 1) < 1e-5
    assert steps[0]["sample/staleness_max"] == 0
    assert max(line["sample/staleness_max"] for line in steps) <= 1
    assert sum(line["rollout/failed_total"] for line in steps if "rollout/failed_total" in line) == 0
    assert all(0 < line["reward"] < 1 and line["grad_norm"] > 0 for line in steps)


def test_the_example_of_the_limited_mode_trains(python: Path, tmp_path: Path) -> None:
    output = told([python, LIMITED, "--steps", "1", "--out", tmp_path / "out"], tmp_path)
    assert re.search(r"'rewards/afield_reward/mean': '0\.\d+'", output), output[-2000:]
