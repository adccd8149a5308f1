"""The tables of docs/deploy/sizing.md are those of the newest simulation."""

from __future__ import annotations

from bench import report, sizing
from support.pages import DOCS


def test_page_has_the_tables_of_the_newest_result() -> None:
    result = report.newest("sizing")
    assert result is not None and result["ok"]
    text = (DOCS / "deploy" / "sizing.md").read_text()
    assert sizing.with_tables(text, result) == text, "run .venv/bin/python bench/sizing.py"


def test_errors_of_the_simulation_are_within_the_stated_bound() -> None:
    result = report.newest("sizing")
    assert result is not None
    errors = [abs(row["error"]) for row in result["validation"] if row["required"]]
    assert len(errors) >= 5 and max(errors) <= sizing.TOLERANCE


def test_a_queue_without_load_adds_its_work_only() -> None:
    costs = sizing.Costs(1000, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    shape = sizing.Rollouts(stream=False, tool_sigma=0.1)
    load = sizing.simulate(2, 4, shape, costs, seconds=600)
    assert 0.99 < load.quantile(load.added_ms, 0.5) < 1.01
    assert abs(load.calls_per_s - 2 / (shape.tool_s + 6.001)) < 0.02


def test_a_full_queue_serves_at_its_rate() -> None:
    costs = sizing.Costs(1000, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    shape = sizing.Rollouts(stream=False, tool_median_s=0.0, token_s=0.0)
    load = sizing.simulate(50, 1, shape, costs, seconds=30)
    assert abs(load.calls_per_s / 1000 - 1) < 0.01 and load.utilisation > 0.99
    assert abs(load.quantile(load.call_ms, 0.5) - 50) < 1.5
