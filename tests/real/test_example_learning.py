"""Examples that learn and serve with real weights: they load torch three times, half a minute of one core."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.test_examples import train

from support.gateways import POLICY
from support.paths import ROOT
from support.ports import free_ports

pytestmark = pytest.mark.real
EXAMPLES = ROOT / "examples"


def test_the_langgraph_agent_learns_and_its_weights_are_served(tmp_path: Path) -> None:
    small = ("--tasks-per-step", 4, "--rollouts", 8, "--steps", 1, "--json")
    printed, run = train(EXAMPLES / "langgraph-tools", tmp_path, *small)
    assert (printed["rollouts"], printed["failed"]) == (32, 0)
    assert printed["tool_calls_per_rollout"] > 0.9 and 0 < printed["first"] < 1
    before, after = (POLICY / "model.safetensors", run / "weights" / "v1" / "model.safetensors")
    assert before.read_bytes() != after.read_bytes()
    program = (EXAMPLES / "serve" / "serve.py", after.parent, "How much is the teal lamp?", free_ports(1)[0])
    done = subprocess.run(
        [sys.executable, *map(str, program)], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d", done.stdout), done.stdout
