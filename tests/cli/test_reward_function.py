"""`--reward-function`: rewards of a group after its rollouts, in training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import RunCommand

from afield.factory.runtimes import hidden_files
from afield.orchestrator.state import RunDirectory
from afield.settings.train import TrainConfig
from support.gateways import POLICY
from support.pages import DOCS, blocks
from support.processes import afield, summary, unlearned, write_tasks

PAGE = DOCS / "how-to" / "rewards.md"
ROWS = [{"id": f"q{n}", "question": f"Question {n}?", "hidden": {"answer": "Yes."}} for n in range(4)]
JUDGE = """\
from pathlib import Path

CALLS = Path(__file__).with_name("calls")


def right(rollouts):
    with CALLS.open("a") as calls:
        calls.write(rollouts[0].rollout.group_id + "\\n")
    return [float(one.returned["answer"] == one.rollout.task.input["hidden"]["answer"]) for one in rollouts]


def broken(rollouts):
    raise OSError("the judge does not answer")
"""


def files(cwd: Path) -> list[object]:
    """The page's agent, a judge of its own, and tasks."""
    (cwd / "agent.py").write_text(next(code for code in blocks(PAGE, "python") if "def write(" in code))
    (cwd / "judge.py").write_text(JUDGE)
    write_tasks(cwd / "tasks.jsonl", ROWS)
    return ["--tasks", cwd / "tasks.jsonl", "--model", POLICY, "--json"]


def run_rewards(cwd: Path, name: str) -> list[Any]:
    return RunDirectory(cwd / "runs" / name).index.rollouts(order="id")


def test_the_command_of_the_page_trains_on_the_rewards_of_its_function(tmp_path: Path) -> None:
    files(tmp_path)
    code = next(code for code in blocks(PAGE, "python") if "def shorter_is_better(" in code)
    (tmp_path / "judge.py").write_text(code)
    (command,) = (c for c in blocks(PAGE, "console") if "--reward-function" in c)
    words = [str(POLICY) if word == "DIR" else word for word in command.split()[2:]]
    sizes = ("--steps", 2, "--tasks-per-step", 2, "--rollouts", 4, "--run", "judged", "--json")
    code, out, err = afield(tmp_path, *words, *sizes, *unlearned(tmp_path))
    assert code == 0, err
    assert summary(out)["rollouts"] == 16
    groups: dict[str, list[float]] = {}
    for row in run_rewards(tmp_path, "judged"):
        assert row.failure_kind is None and row.attempts == 1
        groups.setdefault(row.group_id, []).append(row.reward)
    assert len(groups) == 4
    # "Yes." is shorter than "Never!!", and nothing is shorter than the shortest.
    for rewards in groups.values():
        short = sum(reward > 0 for reward in rewards)
        assert sorted(rewards) == [0.0] * (4 - short) + [(4 - short) / 4] * short
    assert any(len(set(rewards)) == 2 for rewards in groups.values())


def test_a_function_that_fails_makes_verifier_failures_and_no_zeros(tmp_path: Path) -> None:
    arguments = files(tmp_path)
    function = ("--reward-function", f"{tmp_path / 'judge.py'}:broken", "--runtime", "inline")
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2, "--run", "broken")
    words = (f"{tmp_path / 'agent.py'}:write", *arguments, *function, *sizes, *unlearned(tmp_path))
    code, _, err = afield(tmp_path, "train", *words)
    assert code == 1 and "nothing was trained: of 4 rollouts 4 have no reward" in err
    rows = run_rewards(tmp_path, "broken")
    assert len(rows) == 4 and {row.reward for row in rows} == {None}
    assert {(row.failure_kind, row.attempts) for row in rows} == {("verifier", 1)}
    assert all("OSError: the judge does not answer" in row.failure_message for row in rows)


def test_an_evaluation_is_judged_and_continued_without_judging_again(
    tmp_path: Path, run_command: RunCommand
) -> None:
    arguments = files(tmp_path)
    engine = [word for word in unlearned(tmp_path) if word != "--freeze-weights"]
    function = ("--reward-function", f"{tmp_path / 'judge.py'}:right", "--runtime", "inline")
    code, out, err = run_command(
        "eval", f"{tmp_path / 'agent.py'}:write", *arguments, *function, *engine, "-k", 2, "--run", "judged"
    )
    assert code == 0, err
    result = json.loads(out)
    assert (result["attempts"], result["left_out"]) == (8, {})
    before = run_rewards(tmp_path, "judged")
    assert {row.reward for row in before} <= {0.0, 1.0}
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == len(set(calls)) == 4
    code, out, err = run_command("eval", "--run", "judged", "--json")
    assert code == 0, err
    assert json.loads(out)["reward"] == result["reward"]
    assert (tmp_path / "calls").read_text().split() == calls


def test_agents_in_a_sandbox_do_not_see_the_file_of_the_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files(tmp_path)
    judge, agent = tmp_path / "judge.py", tmp_path / "agent.py"
    values: Any = {"model": str(POLICY), "agent": f"{agent}:write", "reward_function": f"{judge}:right"}
    assert str(judge) in hidden_files(TrainConfig(**values))
    assert not caplog.text
    together = hidden_files(TrainConfig(**{**values, "reward_function": f"{agent}:write"}))
    assert str(agent) not in together
    assert f"agent and reward function are both in {agent}" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--reward-function", "judge.py:missing"), "judge.py has no 'missing', the reward function"),
        (("--reward-function", "none.py:judge"), "there is no file"),
        (("--reward-function", "judge.py:right", "--verifier", "judge.py:right"), "leave one of them out"),
        (("--reward-function", "judge.py:right", "--advantage", "remax"), "choose another advantage"),
    ],
)
def test_a_wrong_reward_function_is_refused_at_the_start(
    tmp_path: Path,
    run_command: RunCommand,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = files(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, err = run_command("train", "agent.py:write", *arguments, *options, "--run", "wrong")
    assert code == 2 and message in err
    assert not (tmp_path / "runs" / "wrong").exists()
