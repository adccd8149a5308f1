"""A sample of mutants that conformance has to detect; `make accept PART=gateway` runs all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT

SAMPLE = ("nothing-trained", "system-message-dropped", "sampled-turn-tokenised-again", "lost-answer-trained")

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_conformance_detects_a_sample_of_mutants() -> None:
    command = [sys.executable, "-m", "bench.gateway.mutants", "--json", *SAMPLE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "skipped: " in done.stdout and not os.environ.get("CI"):
        pytest.skip(done.stdout)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result == {"mutants": 4, "killed": 4, "survived": [], "errors": []}, done.stdout
    assert done.returncode == 0
