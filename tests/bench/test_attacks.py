"""Attacks of the security benchmark: blocked in a sandbox, effective in a plain process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bench.security.outcomes import Report
from support.paths import ROOT
from support.sandboxes import needs_bubblewrap


def attacks(attacker: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "bench.security.attacks", "--json", "--only", attacker]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@needs_bubblewrap
def test_every_attack_of_a_sandboxed_agent_is_blocked() -> None:
    code, lines = attacks("sandbox")
    assert (code, lines[-1]["broke"]) == (0, []), lines
    assert lines[-1]["tried"] >= 40


def test_attacks_without_a_promise_succeed_in_a_plain_process() -> None:
    code, lines = attacks("process")
    assert (code, lines[-1]["broke"]) == (0, []), lines
    worked = {line["attack"] for line in lines if line.get("seen") == "got"}
    assert {"read_the_signing_secret", "read_the_verifier", "read_all_tasks"} <= worked
    later = "connect_to_a_unix_socket_created_later"
    assert {f"{later}_in_its_folder", f"{later}_in_a_mount"} <= worked


def test_successful_attack_is_reported_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    report.add("somebody", "try_this", blocked=True)
    report.add("somebody", "try_that", blocked=False)
    assert report.end() == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"tried": 2, "blocked": 1, "broke": ["somebody: try that"]}
