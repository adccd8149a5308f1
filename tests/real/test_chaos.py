"""Chaos benchmark in small: kills of every process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.real


@pytest.mark.timeout(900)
def test_every_group_is_trained_once_whatever_is_killed() -> None:
    command = [sys.executable, "-m", "bench.chaos.kills", "--small", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=860, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["missed"]) == (0, []), result
    assert (result["trained_equals_dataset"], result["duplicates"], result["orphans"]) == (True, 0, 0)
    assert result["kills"] >= 8
