"""The benchmark of a pretrained model that learns: times, criteria and page, from made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import benchmarks_page
from bench.training import result, result_page


def estimate(step: int, success: float, seconds: float | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "seconds": seconds,
        "success": success,
        "low": success - 0.07,
        "high": success + 0.07,
    }


def line(*evaluations: dict[str, Any], parallel: int = 1, **more: Any) -> dict[str, Any]:
    machine = dict.fromkeys(("cores", *result.PACKAGES), "1.0") | {"device": "a GPU"}
    return {"evaluations": list(evaluations), "parallel": parallel, "wall_s": 90.0, "machine": machine} | more


def whole() -> dict[str, Any]:
    times = {
        "span_s": 80.0,
        "seconds": {"sampling": 40.0, "training": 20.0, "weights": 8.0, "tools": 4.0, "idle": 8.0},
        "busy": {"sampling": 0.9, "training": 0.3, "weights": 0.1, "tools": 0.2},
    }
    parts = {
        "embedded": {
            "0": line(estimate(0, 0.2, 0.0), estimate(10, 0.85, 30.0), estimate(20, 0.95, 60.0), **times)
        },
        "embedded-async": {"0": line(estimate(0, 0.2, 0.0), estimate(20, 0.9, 50.0), **times)},
        "frozen": {"0": line(estimate(0, 0.2, 0.0), estimate(20, 0.22))},
        "trl": {"0": line(estimate(0, 0.2, 0.0), estimate(20, 0.81, 100.0))},
    }
    settings = {**result.FULL._asdict(), "lr": 2e-5}
    return {"commit": "c" * 12, "settings": settings, "warm_start": {"conversations": 9}, "parts": parts}


def test_overlapping_spans_count_once() -> None:
    spans = result.union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)])
    assert spans == [(0.0, 4.0), (5.0, 6.0)] and result.length(spans) == 5.0


def test_criteria_compare_intervals_times_and_the_control() -> None:
    met = {each.name: (each.measured, each.ok) for each in result_page.criteria(whole())}
    assert met == {
        "afield, embedded engine, seed 0: held-out success rises": ("+0.750", True),
        "frozen control, seed 0: held-out success changes": ("+0.020", True),
        "afield, embedded engine: time to 0.8 held-out success, as a share of TRL's": ("0.30", True),
        "afield, embedded engine, async: time to 0.8 held-out success, as a share of TRL's": ("0.50", True),
        "afield, embedded engine, async, seed 0: engine busy": ("90.0 %", True),
    }
    worse = whole()
    worse["parts"]["embedded"]["0"] = line(estimate(0, 0.2, 0.0), estimate(20, 0.45, 60.0))
    worse["parts"]["frozen"]["0"]["evaluations"][-1] = estimate(20, 0.4)
    assert [each.ok for each in result_page.criteria(worse)] == [False, False, True, True]


def test_times_of_runs_that_shared_the_machine_are_not_compared() -> None:
    shared = whole()
    shared["parts"]["trl"]["0"]["parallel"] = 3
    assert result_page.time_to_target(shared, "trl") is None
    assert not any("share of TRL" in each.name for each in result_page.criteria(shared))


def test_the_page_shows_a_result_and_claims_nothing_without_one(tmp_path: Path) -> None:
    sections = result_page.sections(whole())
    assert (
        "| afield, embedded engine | 0 | 0.200 (0.130 to 0.270) | 0.950 (0.880 to 1.020) |"
        in sections["success"]
    )
    assert "| 50 % | 25 % | 10 % | 5 % | 10 % |" in sections["times"]
    assert "60 steps of 256 rollouts in groups of 16, learning rate 2e-05" in sections["origin"]
    assert result_page.sections(None) == {
        **dict.fromkeys(("success", "requirements", "times"), ""),
        "origin": result_page.UNMEASURED,
    }
    result_page.draw(whole(), tmp_path)
    assert (tmp_path / "result.svg").read_text().startswith("<?xml")


def test_the_page_is_up_to_date_with_the_saved_result() -> None:
    page = benchmarks_page.RESULTS_PAGE.read_text()
    assert page == benchmarks_page.results_text(), "run `python -m bench.benchmarks_page`"


def test_results_of_parts_are_merged_by_part_and_seed(tmp_path: Path) -> None:
    sizes = {**result.SMALL._asdict(), "lr": 1e-5}
    for name in ("embedded-async-1", "trl-0", "other-0"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**line(estimate(0, 0.2)), "sizes": sizes}))
    (tmp_path / "warm.json").write_text(json.dumps({"seconds": 1.0}))
    merged = result.merge(tmp_path)
    assert {part: list(seeds) for part, seeds in merged["parts"].items()} == {
        "embedded-async": ["1"],
        "trl": ["0"],
    }
    assert merged["settings"] == sizes and merged["warm_start"] == {"seconds": 1.0}


def test_a_share_has_its_interval() -> None:
    share = result.success({"a": [1.0], "b": [0.0], "c": [1.0], "d": [1.0]})
    assert share["success"] == pytest.approx(0.75) and share["low"] < 0.75 < share["high"]
