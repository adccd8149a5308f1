"""kill -9 of a gateway under load, in small."""

from __future__ import annotations

import json
import subprocess
import sys

from support.paths import ROOT


def test_completed_calls_are_neither_lost_nor_duplicated_by_kills() -> None:
    command = [sys.executable, "-m", "bench.gateway.crash_recovery", "--kills", "2", "--sessions", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["ok"]) == (0, True), result
    assert (result["lost"], result["duplicates"], result["odd"]) == (0, 0, 0)
    assert result["dangling"] >= 2
    assert result["calls"] == result["committed"] + result["aborted"] + result["dangling"]
