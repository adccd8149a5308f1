"""The example of a training loop of one's own, run whole: it takes a minute of one core."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.real
LOOP = ROOT / "examples" / "own_loop" / "loop.py"


def test_example_loop_raises_the_reward(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, LOOP], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", done.stdout)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 >= sum(rewards[:3]) / 3 + 0.3
    assert (tmp_path / "weights" / "model.safetensors").is_file()
