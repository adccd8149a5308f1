"""pytest plugin: appends the outcome of every test to the file $AFIELD_SUITE_RESULTS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = Path(os.environ["AFIELD_SUITE_RESULTS"])
WORST = ("passed", "skipped", "failed")
outcomes: dict[str, tuple[str, str]] = {}
files: set[str] = set()


def _write(row: dict[str, Any]) -> None:
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    files.update(item.path.stem for item in session.items)


def _name(node: str) -> str:
    """Name of a test, with its file if there are several."""
    path, _, test = node.partition("::")
    test = test.rpartition("::")[2]
    return f"{Path(path).stem}/{test}" if len(files) > 1 else test


def _short(problem: object) -> str:
    return " ".join(str(problem).split())[:300]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test's outcome: the worst of setup, call and teardown."""
    detail = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        detail = _short(crash.message if crash else report.longrepr)
    elif report.skipped:
        longrepr: Any = report.longrepr
        detail = getattr(report, "wasxfail", "") or (str(longrepr[2]) if isinstance(longrepr, tuple) else "")
    name = _name(report.nodeid)
    previous, previous_detail = outcomes.get(name, ("passed", ""))
    worst = max(previous, report.outcome, key=WORST.index)
    outcomes[name] = (worst, detail if worst != previous or not previous_detail else previous_detail)
    if report.when == "teardown":
        outcome, text = outcomes[name]
        _write({"test": name, "outcome": outcome, "detail": text})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(
            {"test": f"collect {report.nodeid}", "outcome": "failed", "detail": str(report.longrepr)[-300:]}
        )


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus in (0, 1):
        _write({"finished": True})
