"""Agents that fail: typed outcomes, dropped groups, and runs without any reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.orchestrator.state import RunDirectory
from support.gateways import POLICY
from support.processes import AGENTS, afield, summary, unlearned, write_tasks

HOWS = ("raises", "not_a_number", "not_even_numeric", "never_returns", "dies", "posts_garbage")
SIZES = ("--rollouts", 2, "--lr", 1e-4, "--json")


def train(cwd: Path, hows: list[str], *options: object) -> tuple[int, str, str]:
    tasks = write_tasks(cwd / "tasks.jsonl", [{"id": f"{i}-{how}", "how": how} for i, how in enumerate(hows)])
    target = f"{AGENTS / 'failing_agents.py'}:agent"
    options = (*SIZES, *unlearned(cwd), *options)
    return afield(cwd, "train", target, "--tasks", tasks, "--model", POLICY, *options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """One step in which each agent fails in another way, in a process of its own."""
    cwd = tmp_path_factory.mktemp("bad")
    options = ("--process-per-rollout", "--concurrency", 4, "--attempt-timeout", 5)
    options = (*options, "--set", "retries_infrastructure=1")
    code, out, err = train(cwd, list(HOWS), "--steps", 1, "--tasks-per-step", len(HOWS), *options)
    assert code == 0, err
    assert (summary(out)["rollouts"], summary(out)["failed"]) == (12, 10)
    return RunDirectory(Path(summary(out)["run"]))


@pytest.mark.parametrize(
    ("how", "kind", "says", "attempts"),
    [
        ("raises", "task/raised", "no such shelf", 2),
        ("not_a_number", "verifier/reward", "nan", 2),
        ("not_even_numeric", "verifier/reward", "very good", 2),
        ("never_returns", "infrastructure/timeout", "never called", 2),
        ("dies", "infrastructure/died", "exit code 7", 2),
    ],
)
def test_a_failed_agent_has_an_outcome_of_its_failure_kind(
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


def test_groups_without_rewards_are_dropped_with_a_reason_and_others_are_trained(run: RunDirectory) -> None:
    (line,) = run.read_metrics()
    assert len(line["dropped_groups"]) == 5
    assert all(why.startswith("0 of 2") for why in line["dropped_groups"].values())
    assert line["trained"] == 2


def test_invalid_requests_and_wrong_keys_leave_the_session_usable(run: RunDirectory) -> None:
    mine = [f for f in run.read_rollouts(1) if f.rollout.task.input["how"] == "posts_garbage"]
    assert [f.outcome.reward for f in mine] == [1.0, 1.0]


def test_a_run_ends_after_three_steps_without_a_reward(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, ["raises"] * 9, "--steps", 9, "--tasks-per-step", 1)
    assert code == 1
    assert summary(out)["steps"] == 3
    assert "3 steps without a single reward" in err and "no such shelf" in err
