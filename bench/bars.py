"""What was asked for and what was seen; and how the parts of `make accept` run commands and tests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
OF_A_RUN = (":!bench/results", ":!docs/benchmarks.md")  # what a run itself writes


class Absent(Exception):
    """A part needs something that is not here. It measured nothing, and nothing of it was met."""


class Bars:
    """What was asked for, what was seen."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, seen: Any, ok: bool, bar: str) -> None:
        self.rows.append({"name": name, "seen": seen, "bar": bar, "ok": ok})
        print(f"  {'ok  ' if ok else 'MISS'} {name}: {seen} (bar: {bar})", flush=True)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


# --- commands ------------------------------------------------------------------------------------


def last_line(command: list[str], cwd: Path) -> dict[str, Any]:
    """What a command says in its last line; it may take long, so its progress is shown."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, timeout=3600, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} and said nothing")
    return json.loads(lines[-1])


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no", "--", ".", *OF_A_RUN) else ""
    return git("rev-parse", "--short=12", "HEAD") + dirty


# --- tests ---------------------------------------------------------------------------------------


def passes(bars: Bars, name: str, file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "real or not real", file]
    done = subprocess.run(command, cwd=ROOT, check=False)
    bars.check(name, done.returncode, done.returncode == 0, "pass")


class Tested(NamedTuple):
    """How many tests passed, failed and were skipped, and the largest of each number that they recorded."""

    passed: int
    failed: int
    skipped: int
    numbers: dict[str, float]

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not self.failed and not self.skipped

    @property
    def said(self) -> str:
        rest = [f"{n} {what}" for n, what in ((self.failed, "failed"), (self.skipped, "skipped")) if n]
        return ", ".join([f"{self.passed} passed", *rest])


def tested(
    *arguments: object, python: object = sys.executable, environment: Mapping[str, str] | None = None
) -> Tested:
    """Run tests; those that are skipped have shown nothing. What they `record_property` comes back."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        told = ("--junitxml", report, "-o", "junit_family=xunit1")  # the family that has properties
        command = [python, "-m", "pytest", "-q", "-m", "real or not real", *told, *arguments]
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=False)
        if not report.is_file():
            return Tested(0, 1, 0, {})
        return counted(report, done.returncode)


def counted(report: Path, code: int) -> Tested:
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    numbers: dict[str, float] = {}
    for told in (one for case in cases for one in case.iter("property")):
        name, value = told.attrib["name"], float(told.attrib["value"])
        numbers[name] = max(value, numbers.get(name, value))
    broken = max(failed, 1) if code not in (0, 5) else failed
    return Tested(len(cases) - failed - skipped, broken, skipped, numbers)
