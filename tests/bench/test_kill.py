"""kill -9 of a real gateway under load, in small; `bench/kill.py` does it at length."""

from __future__ import annotations

import json
import subprocess
import sys

from support.paths import ROOT

BENCH = ROOT / "bench" / "kill.py"


def test_nothing_that_a_client_saw_the_end_of_is_lost_or_doubled_by_a_kill() -> None:
    command = [sys.executable, str(BENCH), "--kills", "2", "--sessions", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["ok"]) == (0, True), result
    assert (result["lost"], result["duplicates"], result["odd"]) == (0, 0, 0)
    assert result["dangling"] >= 2
    assert result["calls"] == result["committed"] + result["aborted"] + result["dangling"]
