"""bench/attacks.py: what it tries can succeed, and what it reports is what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from support.paths import ROOT
from support.sandboxes import needs_bubblewrap

BENCH = ROOT / "bench"


def attacks(who: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, str(BENCH / "attacks.py"), "--json", "--only", who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@needs_bubblewrap
def test_a_hostile_agent_in_the_documented_layout_gets_nothing_in_a_sandbox() -> None:
    code, lines = attacks("sandbox")
    assert (code, lines[-1]["broke"]) == (0, []), lines
    assert lines[-1]["tried"] >= 40


def test_the_same_agent_gets_in_a_process_what_is_not_promised_and_nothing_else() -> None:
    code, lines = attacks("process")
    assert (code, lines[-1]["broke"]) == (0, []), lines
    worked = {line["attack"] for line in lines if line.get("seen") == "got"}
    assert {"read_the_signing_secret", "read_the_verifier", "read_all_tasks"} <= worked
    later = "connect_to_a_unix_socket_created_later"
    assert {f"{later}_in_its_folder", f"{later}_in_a_mount"} <= worked


def test_an_attack_that_works_is_told_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.append(str(BENCH))
    from attack_report import Report

    report = Report(as_json=True)
    report.add("somebody", "try_this", blocked=True)
    report.add("somebody", "try_that", blocked=False)
    assert report.end() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"tried": 2, "blocked": 1, "broke": ["somebody: try that"]}
