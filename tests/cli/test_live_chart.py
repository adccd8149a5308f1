"""Progress display and summary of a run."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.cli.live_chart import Screen, describe
from afield.cli.main import replace_unknown_characters
from afield.cli.report import summarise
from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import StepMetrics
from afield.settings.train import train_config
from afield.types import Failure, FailureKind, Outcome, Reason, Rollout, Task

LINE = StepMetrics(
    step=1,
    version=1,
    reward=0.0,
    rollouts=8,
    trained=8,
    failed=0,
    failures={},
    retried=0,
    dropped_groups={},
    turns_per_rollout=1.0,
    tool_calls_per_rollout=0.0,
    sampled_tokens=80,
    wasted_tokens=0,
    staleness=0,
    collect_s=1.0,
    train_s=0.1,
    agent={},
    trainer={"tokens": 80.0},
)


def open_screen(tmp_path: Path) -> Screen:
    values = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl", "steps": 3}
    return Screen(train_config(None, values), RunDirectory(tmp_path / "runs" / "first"), to_stderr=False)


def report_failure(screen: Screen, n: int, message: str, kind: FailureKind = FailureKind.TASK) -> None:
    rollout = Rollout(id=f"r{n}", exp_id="exp", group_id="g", task=Task("t", {}))
    outcome = Outcome(rollout_id=rollout.id, attempt=1, failure=Failure(kind, Reason.RAISED, message))
    screen.attempt_ended(rollout, outcome, will_retry=False)


def test_equal_rewards_are_warned_about_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = open_screen(tmp_path)
    screen.step_done(LINE)
    screen.step_done(structs.replace(LINE, step=2))
    assert capsys.readouterr().out.count("rewards within each group are equal") == 1


def test_equal_rewards_are_not_warned_about_after_an_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = open_screen(tmp_path)
    screen.step_done(structs.replace(LINE, reward=0.9, trainer={"grad_norm": 0.2}))
    screen.step_done(structs.replace(LINE, step=2, reward=1.0))
    assert "no updates so far" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({}, True),
        ({"failures": {"policy": 8}}, False),  # its calls came, and were refused
        ({"failed": 8, "reward": None, "failures": {"task": 8}, "trained": 0}, False),
    ],
)
def test_a_step_without_model_calls_prints_where_the_gateway_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], warned: bool
) -> None:
    screen = open_screen(tmp_path)
    screen.step_done(structs.replace(LINE, turns_per_rollout=0.0, **change))
    assert ("rollout.openai_base_url" in capsys.readouterr().out) is warned


def test_a_step_whose_calls_were_all_refused_prints_the_refusal_once_and_not_the_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = open_screen(tmp_path)
    refused = {"context_length_exceeded": 24, "model_not_found": 1}
    line = structs.replace(
        LINE, turns_per_rollout=0.0, refused=refused, refusal="[at most] 4 tokens\nor less"
    )
    for step in (1, 2):
        screen.step_done(structs.replace(line, step=step))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("every model call was refused (context_length_exceeded 24, model_not_found 1):") == 1
    assert "[at most] 4 tokens" in out and "or less" not in out
    assert "rollout.openai_base_url" not in out


def test_equal_failures_are_printed_once_and_others_up_to_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = open_screen(tmp_path)
    for n in range(4):
        report_failure(screen, n, "KeyError: 'answer'")
    assert capsys.readouterr().out == (
        "r0.1: task/raised: KeyError: 'answer' (left out; repetitions are only counted)\n"
    )
    for n in range(20):
        report_failure(screen, n, f"other {n}")
    assert len(capsys.readouterr().out.splitlines()) == 4
    report_failure(screen, 1, "too long", FailureKind.POLICY)
    assert "policy/raised: too long (trained;" in capsys.readouterr().out


def test_policy_failures_are_counted_separately_from_failed_rollouts() -> None:
    line = structs.replace(LINE, failed=2, failures={"policy": 3, "task": 2})
    assert describe(line, 3).endswith("failed 2 (task 2)  policy failures 3")


def on_terminal(written: str) -> list[str]:
    """Lines that a terminal shows after this output: cursor up, erased lines and returns are followed."""
    lines, row = [""], 0
    for word in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if word == "\x1b[1A":
            row -= 1
        elif word == "\x1b[2K":
            lines[row] = ""
        elif word == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif not word.startswith(("\x1b", "\r")):
            lines[row] += word
    return lines


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_step_lines_stay_on_a_terminal_of_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    replace_unknown_characters()
    with pytest.raises(KeyboardInterrupt), open_screen(tmp_path) as screen:
        screen.ready()
        screen.step_done(structs.replace(LINE, reward=0.25))
        screen.step_done(structs.replace(LINE, step=2, reward=0.75))
        raise KeyboardInterrupt
    lines = on_terminal(written.getvalue().decode(encoding))
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/3", "2/3"]
    assert sum("mean reward per step" in line for line in lines) == 1
    assert "2/3" in lines[-4] and lines[-1] == ""


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(1, "(first 1 step) -> 0.500 (last 1 step) in 1 step,"), (6, "(last 3 steps) in 6 steps,")],
)
def test_the_summary_names_the_steps_of_its_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, printed: str
) -> None:
    screen = open_screen(tmp_path)
    run = RunDirectory(tmp_path / "short")
    run.path.mkdir()
    for step in range(1, steps + 1):
        run.append_metrics(structs.asdict(structs.replace(LINE, step=step, reward=0.5)))
    values = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl"}
    screen.finished(summarise(run, train_config(None, values), wall_s=1.0))
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [([0.5], 0.5, 0.5), ([0.0, 1.0], 0.0, 1.0), ([0.0, 0.4, 0.6], 0.0, 0.5), ([0, 0, 0, 1, 1, 1], 0.0, 1.0)],
)
def test_the_last_steps_of_a_short_run_exclude_its_first(
    tmp_path: Path, rewards: list[float], first: float, last: float
) -> None:
    run = RunDirectory(tmp_path / "short")
    run.path.mkdir()
    for step, reward in enumerate(rewards, 1):
        run.append_metrics(structs.asdict(structs.replace(LINE, step=step, reward=float(reward))))
    values = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl"}
    summary = summarise(run, train_config(None, values), wall_s=1.0)
    assert (summary.first, summary.last) == (first, last)
