"""Whether `make accept` can say no: what is skipped, missing or too slow is not met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT

BENCH = ROOT / "bench"
sys.path.append(str(BENCH))

import bars  # noqa: E402
import trained  # noqa: E402

import trainers  # noqa: E402

FORMS = ("merged", "varlen", "per_turn")


def shape(pace: float, **changed: Any) -> dict[str, Any]:
    """What bench/tree.py tells of one shape, `pace` times as fast as there are fewer tokens."""
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
    """What bench/publish.py tells: one engine, one setting, after 10 steps."""
    apart = {"stochastic_times_control": 1.1, "nearest_times_control": 4.2}
    return {
        "kept": {"vllm": {"whole 1e-05": {"10": {"stochastic": 0.998, "nearest": 0.31}}}},
        "logprob_diff": {"vllm": {"whole 1e-05": {"10": apart}}},
        "control": 0.012,
        "machine": {"device": "A GPU", "torch": "2", "vllm": "0.26"},
        "commit": "e" * 40,
    }


def smollm() -> dict[str, Any]:
    """What bench/gpu_smollm.py tells of one step."""
    step = {"step": 1.0, "reward": 0.25, "logprob_diff": 0.0123, "control": 0.0119, "times_control": 1.034}
    return {
        "steps": [step | {"update_kept": 0.99871}],
        "rollouts": 64,
        "turns": 4,
        "engine_dtype": "bfloat16",
        "machine": {"device": "A GPU"},
        "commit": "f" * 40,
    }


def missed(verdicts: list[trainers.Verdict]) -> list[str]:
    return [name for name, _, ok, _ in verdicts if not ok]


def test_a_tree_that_is_nearly_as_fast_as_its_tokens_are_fewer_is_enough() -> None:
    assert missed(trainers.tree_bars(tree(shape(0.9), shape(0.95)))) == []


def test_a_tree_that_is_slower_larger_or_inexact_in_either_shape_is_not() -> None:
    slow = trainers.tree_bars(tree(shape(1.0), shape(0.89)))
    assert missed(slow) == [f"sub-agents: faster than {form}" for form in FORMS]
    other = trainers.tree_bars(tree(shape(1.0, peak_ratio=1.01, grad_cosine=0.998), shape(1.0)))
    assert missed(other) == [
        "shared prompt: peak memory over merged rows'",
        "shared prompt: cosine of gradients",
    ]


@pytest.mark.parametrize(("afield", "generate", "ok"), [(5000, 1000, True), (4900, 1000, False)])
def test_the_engine_has_to_be_five_times_as_fast(afield: int, generate: int, ok: bool) -> None:
    assert (missed(trainers.engine_bars(engine(afield, generate))) == []) is ok


@pytest.mark.parametrize("rates", [(None, 1000), (5000, None)])
def test_what_was_not_measured_was_not_met(rates: tuple[int | None, int | None]) -> None:
    assert missed(trainers.engine_bars(engine(*rates))) == ["engine over generate"]


def suite(tmp_path: Path, code: str) -> bars.Tested:
    """What a test file comes to, with the project's own settings."""
    file = tmp_path / "test_given.py"
    file.write_text(f"import pytest\n\n{code}\n")
    return bars.tested(file, "-p", "no:cacheprovider")


def test_tests_tell_the_largest_of_what_they_record(tmp_path: Path) -> None:
    code = '@pytest.mark.parametrize("n", [1e-7, 3e-6])\ndef test_it(n, record_property):\n'
    told = suite(tmp_path, f'{code}    record_property("off", n)')
    assert told == bars.Tested(2, 0, 0, {"off": 3e-6}) and told.ok
    seen = bars.Bars()
    trainers.shown(seen, "near", told, "off", 1e-5)
    trainers.shown(seen, "too far", told, "off", 1e-6)
    trainers.shown(seen, "never recorded", told, "on", 1e-5)
    assert [row["ok"] for row in seen.rows] == [True, False, False]


@pytest.mark.parametrize(
    "code",
    [
        "def test_it():\n    assert False",
        "@pytest.mark.skip\ndef test_it(): pass",
        "def test_it(nobody_has_this): pass",
        "nothing = 1",
    ],
)
def test_tests_that_fail_are_skipped_or_are_not_there_have_shown_nothing(tmp_path: Path, code: str) -> None:
    assert not suite(tmp_path, code).ok


def test_the_page_tells_what_is_saved_and_how_to_measure_the_rest() -> None:
    told = trained.sections(None, tree(shape(1.0), shape(0.5)), engine(5000, 900), publish(), smollm())
    assert "`make accept PART=trainers` measures them" in told["learning"]
    assert told["tree"].count("**missed**") == 3 and "`cccccccccccc`" in told["tree"]
    assert "| embedded engine | 5,000 |" in told["engine"]
    assert "| vllm | whole 1e-05 | 10 | 0.998 | 0.31 | 1.1 | 4.2 |" in told["publish"]
    assert "| 1 | 0.25 | 0.0123 | 0.0119 | 1.03 | 0.9987 |" in told["smollm"]
    unmeasured = trained.sections(None, None, None, None, None)
    for name in ("tree", "engine", "publish", "smollm"):
        assert "`make accept PART=gpu` measures them" in unmeasured[name]
