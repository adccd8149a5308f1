"""A sample of wrong gateways that the conformance judge has to find; `make accept PART=gateway` tries all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SAMPLE = ("nothing-trained", "system-message-dropped", "sampled-turn-tokenised-again", "lost-answer-trained")

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_the_judge_finds_a_sample_of_wrong_gateways():
    command = [sys.executable, str(BENCH / "mutants.py"), "--json", *SAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "skipped: " in done.stdout and not os.environ.get("CI"):
        pytest.skip(done.stdout)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {"mutants": 4, "killed": 4, "survived": [], "errors": []}, done.stdout
    assert done.returncode == 0


def test_a_patch_for_a_function_that_is_gone_is_an_error(tmp_path: Path):
    code = (
        "import mutants, sys\n"
        "gone = mutants.Mutant('gone', 'nothing', 'assembly.py', 'linear = no_such_function\\n')\n"
        "outcome = mutants.tried(gone, mutants.ROOT)\n"
        "print(outcome)\n"
        "sys.exit(0 if outcome.error and not outcome.killed else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no_such_function" in done.stdout
