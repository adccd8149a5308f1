"""What somebody sees who does it for the first time, and wrongly."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.cli.live_chart import Screen, describe
from afield.cli.main import main
from afield.cli.report import summarise
from afield.errors import TaskFailure, VerifierFailure
from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import StepMetrics
from afield.sdk.classify import attributed
from afield.sdk.results import read_result
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


def opened(tmp_path: Path) -> Screen:
    given = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl", "steps": 3}
    return Screen(train_config(None, given), RunDirectory(tmp_path / "runs" / "first"), to_stderr=False)


def failed(screen: Screen, n: int, message: str, kind: FailureKind = FailureKind.TASK) -> None:
    rollout = Rollout(id=f"r{n}", exp_id="exp", group_id="g", task=Task("t", {}))
    outcome = Outcome(rollout_id=rollout.id, attempt=1, failure=Failure(kind, Reason.RAISED, message))
    screen.attempt_ended(rollout, outcome, will_retry=False)


def test_a_wrong_option_is_answered_in_two_lines_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "agent.py:agent", "--stepz=3"])
    assert ended.value.code == 2
    told = "afield train: unknown argument --stepz=3; did you mean --steps?"
    assert capsys.readouterr().err.splitlines() == [told, "see afield train --help"]


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "train your agent" in told and "look at a run" in told


def test_rewards_that_never_differ_are_said_once_and_not_of_a_run_that_has_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = opened(tmp_path)
    screen.step_done(LINE)
    screen.step_done(structs.replace(LINE, step=2))
    assert capsys.readouterr().out.count("in no group do rewards differ") == 1


def test_a_run_that_has_learnt_may_have_a_step_without_a_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = opened(tmp_path)
    screen.step_done(structs.replace(LINE, reward=0.9, trainer={"grad_norm": 0.2}))
    screen.step_done(structs.replace(LINE, step=2, reward=1.0))
    assert "nothing to learn" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({}, True),
        ({"failures": {"policy": 8}}, False),  # its calls came, and were refused
        ({"failed": 8, "reward": None, "failures": {"task": 8}, "trained": 0}, False),
    ],
)
def test_agents_that_miss_the_gateway_are_told_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], warned: bool
) -> None:
    screen = opened(tmp_path)
    screen.step_done(structs.replace(LINE, turns_per_rollout=0.0, **change))
    assert ("rollout.openai_base_url" in capsys.readouterr().out) is warned


def test_the_same_failure_is_shown_once_and_others_up_to_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = opened(tmp_path)
    for n in range(4):
        failed(screen, n, "KeyError: 'answer'")
    assert capsys.readouterr().out == (
        "r0.1: task/raised: KeyError: 'answer' (left out; the same again is counted)\n"
    )
    for n in range(20):
        failed(screen, n, f"other {n}")
    assert len(capsys.readouterr().out.splitlines()) == 4
    failed(screen, 1, "too long", FailureKind.POLICY)
    assert "policy/raised: too long (trained;" in capsys.readouterr().out


def test_failures_that_train_are_not_counted_as_failed() -> None:
    line = structs.replace(LINE, failed=2, failures={"policy": 3, "task": 2})
    assert describe(line, 3).endswith("failed 2 (task 2)  policy failures 3")


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [([0.5], 0.5, 0.5), ([0.0, 1.0], 0.0, 1.0), ([0.0, 0.4, 0.6], 0.0, 0.5), ([0, 0, 0, 1, 1, 1], 0.0, 1.0)],
)
def test_the_first_steps_of_a_short_run_are_not_its_last(
    tmp_path: Path, rewards: list[float], first: float, last: float
) -> None:
    run = RunDirectory(tmp_path / "short")
    run.path.mkdir()
    for step, reward in enumerate(rewards, 1):
        run.append_metrics(structs.asdict(structs.replace(LINE, step=step, reward=float(reward))))
    given = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl"}
    told = summarise(run, train_config(None, given), wall_s=1.0)
    assert (told.first, told.last) == (first, last)


def test_a_traceback_is_the_agents_own() -> None:
    def agent() -> None:
        raise KeyError("answer")

    with pytest.raises(TaskFailure) as raised, attributed(TaskFailure):
        agent()
    told = raised.value.failure.traceback
    assert told.endswith("KeyError: 'answer'\n")
    assert "TaskFailure" not in told
    assert told == "".join(traceback.format_exception(raised.value.__cause__))


def test_a_failure_the_agent_raised_itself_has_its_whole_traceback() -> None:
    with pytest.raises(TaskFailure) as raised, attributed(TaskFailure):
        try:
            raise KeyError("answer")
        except KeyError as error:
            raise TaskFailure("the row has no answer") from error
    told = raised.value.failure.traceback
    assert "KeyError: 'answer'" in told and told.endswith("TaskFailure: the row has no answer\n")


def test_an_agent_that_returns_nothing_is_told_to_return_its_reward() -> None:
    with pytest.raises(VerifierFailure, match="returned None; return its reward"):
        read_result(None)
