"""Acceptance criteria: skipped, missing or slow results are not met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import benchmarks_page, criteria
from bench.training import acceptance, tables

FORMS = ("merged", "varlen", "per_turn")


def shape(pace: float, **changed: Any) -> dict[str, Any]:
    """A result of bench/training/tree_attention.py with a speedup of `pace` times the token ratio."""
    ratio = {"merged": 2.0, "varlen": 2.0, "per_turn": 10.0}
    line = {
        "speedup": {form: round(pace * ratio[form], 3) for form in FORMS},
        "token_ratio": ratio,
        "peak_ratio": 0.9,
        "grad_cosine": 0.9995,
        "mfu": 0.5,
        "tflops": 350.0,
        "seconds": dict.fromkeys(("tree", *FORMS), 1.0),
        "peak_gib": dict.fromkeys(("tree", *FORMS), 40.0),
        "unique_tokens": 20_480,
    }
    return line | changed


def tree(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    about = {"parameters": 1_500_000_000, "ceiling_tflops": 700.0, "device": "A GPU", "commit": "c" * 40}
    return {**first, "forest": second, **about}


def engine(afield: int | None, generate: int | None) -> dict[str, Any]:
    apart = {"max": 0.2, "mean": 0.02}
    load = {"requests": 256, "prompt": 128, "new": 256, "batch_new": 64}
    about = {"device": "A GPU", "torch": "2", "transformers": "5", "parameters": 5e8, "load": load}
    return {
        "tok_s": {"afield": afield, "generate": generate, "generate_batch": 900},
        "logprob_diff": {"bfloat16": apart, "float32": apart, "trainer_own_rounding": apart},
        "failed": [] if afield and generate else ["generate"],
        "machine": about,
        "commit": "d" * 40,
    }


def publish() -> dict[str, Any]:
    """A result of bench/training/weight_rounding.py: one engine, one setting, after 10 steps."""
    apart = {"stochastic_times_control": 1.1, "nearest_times_control": 4.2}
    return {
        "kept": {"vllm": {"whole 1e-05": {"10": {"stochastic": 0.998, "nearest": 0.31}}}},
        "logprob_diff": {"vllm": {"whole 1e-05": {"10": apart}}},
        "control": 0.012,
        "machine": {"device": "A GPU", "torch": "2", "vllm": "0.26"},
        "commit": "e" * 40,
    }


def smollm() -> dict[str, Any]:
    """A result of bench/training/smollm.py with one step."""
    step = {"step": 1.0, "reward": 0.25, "logprob_diff": 0.0123, "control": 0.0119, "times_control": 1.034}
    return {
        "steps": [step | {"update_kept": 0.99871}],
        "rollouts": 64,
        "turns": 4,
        "engine_dtype": "bfloat16",
        "machine": {"device": "A GPU"},
        "commit": "f" * 40,
    }


def missed(verdicts: list[acceptance.Verdict]) -> list[str]:
    return [name for name, _, ok, _ in verdicts if not ok]


def test_tree_speedup_of_0_9_times_the_token_ratio_is_met() -> None:
    assert missed(acceptance.tree_criteria(tree(shape(0.9), shape(0.95)))) == []


def test_slow_large_or_inexact_tree_misses_its_criteria() -> None:
    slow = acceptance.tree_criteria(tree(shape(1.0), shape(0.89)))
    assert missed(slow) == [f"sub-agents: faster than {form}" for form in FORMS]
    other = acceptance.tree_criteria(tree(shape(1.0, peak_ratio=1.01, grad_cosine=0.998), shape(1.0)))
    assert missed(other) == [
        "shared prompt: peak memory over merged rows'",
        "shared prompt: cosine of gradients",
    ]


@pytest.mark.parametrize(("afield", "generate", "ok"), [(5000, 1000, True), (4900, 1000, False)])
def test_engine_must_be_five_times_as_fast_as_generate(afield: int, generate: int, ok: bool) -> None:
    assert (missed(acceptance.engine_criteria(engine(afield, generate))) == []) is ok


@pytest.mark.parametrize("rates", [(None, 1000), (5000, None)])
def test_missing_rate_is_not_met(rates: tuple[int | None, int | None]) -> None:
    assert missed(acceptance.engine_criteria(engine(*rates))) == ["engine over generate"]


SUITE = """
import pytest

@pytest.mark.parametrize("n", [1e-7, 3e-6])
def test_it(n, record_property):
    record_property("off", n)

def test_fails():
    assert False

@pytest.mark.skip
def test_skipped(): pass

def test_broken(no_such_fixture): pass
"""


def test_report_counts_tests_and_keeps_the_largest_recorded_number(tmp_path: Path) -> None:
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    report = criteria.run_tests(file, "-p", "no:cacheprovider")
    assert report == criteria.TestReport(2, 2, 1, {"off": 3e-6})


def test_largest_recorded_number_decides_a_criterion() -> None:
    report = criteria.TestReport(2, 0, 0, {"off": 3e-6})
    assert report.ok
    checked = criteria.Criteria()
    acceptance.check_report(checked, "near", report, "off", 1e-5)
    acceptance.check_report(checked, "too far", report, "off", 1e-6)
    acceptance.check_report(checked, "never recorded", report, "on", 1e-5)
    assert [row["ok"] for row in checked.rows] == [True, False, False]


@pytest.mark.parametrize("counts", [(3, 1, 0), (3, 0, 1), (0, 0, 0)])
def test_a_failed_skipped_or_empty_suite_is_not_ok(counts: tuple[int, int, int]) -> None:
    assert not criteria.TestReport(*counts, {}).ok


def test_page_shows_saved_results_and_the_command_for_missing_ones() -> None:
    sections = tables.sections(None, tree(shape(1.0), shape(0.5)), engine(5000, 900), publish(), smollm())
    assert "run `make accept PART=trainers`" in sections["learning"]
    assert sections["tree"].count("**missed**") == 3 and "`cccccccccccc`" in sections["tree"]
    assert "| embedded engine | 5,000 |" in sections["engine"]
    assert "| vllm | whole 1e-05 | 10 | 0.998 | 0.31 | 1.1 | 4.2 |" in sections["publish"]
    assert "| 1 | 0.25 | 0.0123 | 0.0119 | 1.03 | 0.9987 |" in sections["smollm"]
    unmeasured = tables.sections(None, None, None, None, None)
    for name in ("tree", "engine", "publish", "smollm"):
        assert "run `make accept PART=gpu`" in unmeasured[name]


def test_benchmarks_page_is_up_to_date_with_saved_results() -> None:
    page = benchmarks_page.PAGE.read_text()
    assert page == benchmarks_page.text(), "run `python -m bench.benchmarks_page`"
