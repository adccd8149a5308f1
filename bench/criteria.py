"""Acceptance criteria: measured against required, from commands and tests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from bench import ROOT

COMMAND_TIMEOUT_S = 3600


class RequirementMissing(Exception):
    """A part needs hardware or software that is not here; none of its criteria is met."""


class Criteria:
    """Collects and prints criteria with what was measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, measured: Any, ok: bool, required: str) -> None:
        self.rows.append({"name": name, "measured": measured, "required": required, "ok": ok})
        print(f"  {'ok  ' if ok else 'MISS'} {name}: {measured} (required: {required})", flush=True)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


# --- commands ------------------------------------------------------------------------------------


def run_json(command: list[str], cwd: Path = ROOT) -> dict[str, Any]:
    """The last line of a command's output, as JSON. Progress on stderr stays visible."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode} and printed nothing")
    return json.loads(lines[-1])


def run_benchmark(module: str, *arguments: str) -> dict[str, Any]:
    """The last line of `python -m bench.MODULE ARGUMENTS`, as JSON."""
    return run_json([sys.executable, "-m", f"bench.{module}", *arguments])


# --- tests ---------------------------------------------------------------------------------------


class TestReport(NamedTuple):
    """Outcome of a pytest run."""

    __test__ = False
    passed: int
    failed: int
    skipped: int
    numbers: dict[str, float]
    """Largest value of each number that a test passed to `record_property`."""

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not self.failed and not self.skipped

    @property
    def summary(self) -> str:
        rest = [f"{n} {state}" for n, state in ((self.failed, "failed"), (self.skipped, "skipped")) if n]
        return ", ".join([f"{self.passed} passed", *rest])


def check_tests(criteria: Criteria, name: str, file: str) -> None:
    """A criterion that is met when all tests of `file` pass; skipped tests are allowed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "real or not real", file]
    done = subprocess.run(command, cwd=ROOT, check=False)
    criteria.check(name, done.returncode, done.returncode == 0, "pass")


def run_tests(
    *arguments: object, python: object = sys.executable, environment: Mapping[str, str] | None = None
) -> TestReport:
    """Run pytest and read its report. A skipped test counts as not shown."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("--junitxml", report, "-o", "junit_family=xunit1")  # only this family has properties
        command = [python, "-m", "pytest", "-q", "-m", "real or not real", *options, *arguments]
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=False)
        if not report.is_file():
            return TestReport(0, 1, 0, {})
        return read_test_report(report, done.returncode)


def read_test_report(report: Path, exit_code: int) -> TestReport:
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    numbers: dict[str, float] = {}
    for recorded in (element for case in cases for element in case.iter("property")):
        name, value = recorded.attrib["name"], float(recorded.attrib["value"])
        numbers[name] = max(value, numbers.get(name, value))
    broken = max(failed, 1) if exit_code not in (0, 5) else failed
    return TestReport(len(cases) - failed - skipped, broken, skipped, numbers)
