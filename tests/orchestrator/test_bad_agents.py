"""Agents that go wrong give typed outcomes, and the run goes on where it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.orchestrator.state import RunDirectory
from support.gateways import POLICY
from support.processes import AGENTS, afield, summary, write_tasks

HOWS = ("raises", "not_a_number", "not_even_numeric", "never_returns", "dies", "posts_garbage")
SIZES = ("--rollouts", 2, "--lr", 1e-4, "--json")


def train(cwd: Path, hows: list[str], *options: object) -> tuple[int, str, str]:
    tasks = write_tasks(cwd / "tasks.jsonl", [{"id": f"{i}-{how}", "how": how} for i, how in enumerate(hows)])
    target = f"{AGENTS / 'failing_agents.py'}:agent"
    return afield(cwd, "train", target, "--tasks", tasks, "--model", POLICY, *SIZES, *options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step in which every agent goes wrong in another way, a fresh process each."""
    cwd = tmp_path_factory.mktemp("bad")
    alone = ("--process-per-rollout", "--concurrency", 4, "--attempt-timeout", 8)
    code, out, err = train(cwd, list(HOWS), "--steps", 1, "--tasks-per-step", len(HOWS), *alone)
    assert code == 0, err
    assert (summary(out)["rollouts"], summary(out)["failed"]) == (12, 10)
    return RunDirectory(Path(summary(out)["run"]))


@pytest.mark.parametrize(
    ("how", "kind", "says", "attempts"),
    [
        ("raises", "task/raised", "no such shelf", 2),
        ("not_a_number", "verifier/reward", "nan", 2),
        ("not_even_numeric", "verifier/reward", "very good", 2),
        ("never_returns", "infrastructure/timeout", "never called", 4),
        ("dies", "infrastructure/died", "exit code 7", 4),
    ],
)
def test_a_bad_agent_is_a_typed_outcome(
    run: RunDirectory, how: str, kind: str, says: str, attempts: int
) -> None:
    mine = [f for f in run.read_rollouts(1) if f.rollout.task.input["how"] == how]
    assert len(mine) == 2
    for finished in mine:
        failure = finished.outcome.failure
        assert failure and f"{failure.kind}/{failure.reason}" == kind
        assert says in failure.message
        assert finished.attempts == attempts
        assert finished.outcome.reward is None


def test_groups_without_rewards_are_dropped_with_a_reason_and_the_others_go_on(run: RunDirectory) -> None:
    (line,) = run.read_metrics()
    assert len(line["dropped_groups"]) == 5
    assert all(why.startswith("0 of 2") for why in line["dropped_groups"].values())
    assert line["trained"] == 2


def test_garbage_and_wrong_keys_do_no_harm(run: RunDirectory) -> None:
    mine = [f for f in run.read_rollouts(1) if f.rollout.task.input["how"] == "posts_garbage"]
    assert [f.outcome.reward for f in mine] == [1.0, 1.0]


def test_a_run_without_any_reward_is_given_up(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, ["raises"] * 9, "--steps", 9, "--tasks-per-step", 1)
    assert code == 1
    assert summary(out)["steps"] == 3
    assert "3 steps without a single reward" in err and "no such shelf" in err
