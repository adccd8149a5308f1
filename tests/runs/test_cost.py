"""Cost of runs: tokens, hours, successes and reward gained, at the prices of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.orchestrator.state import RunDirectory
from afield.runs.cost import Cost, cost_of, describe_cost
from afield.types import Split
from support.written_runs import results, write_run

REWARDS = {"a": [1.0, 0.0], "b": [0.5]}
"""Rewards of three rollouts, which have 7 prompt tokens and 2 sampled ones each."""


def cost(run: RunDirectory, pass_reward: float | None = None) -> Cost | None:
    with run.index as index:
        index.refresh()
        return cost_of(run.path, run.info.kind, index.query, pass_reward)


def test_tokens_and_hours_cost_what_the_settings_say(tmp_path: Path) -> None:
    prices = {"prompt_price": 1e6, "sampled_price": 10e6, "engine_price": 4.0}
    run = write_run(tmp_path / "e", "eval", val=REWARDS, prices=prices)
    found = cost(run)
    assert found == Cost(
        total=21 + 60 + 4,
        per_rollout=85 / 3,
        per_success=85.0,
        per_reward=None,
        prompt_tokens=21,
        sampled_tokens=6,
        hours=1.0,
    )
    assert found is not None and describe_cost(found, "eval") == "85, 28.33 per rollout, 85 per success"
    run.summary.write_text('{"pass_reward": 0.5}')
    again = cost(run)
    assert again is not None and again.per_success == 42.5
    none = cost(run, 2.0)
    assert none is not None and none.per_success is None and "no success" in describe_cost(none, "eval")


def test_hours_without_work_cost_nothing_and_shared_ones_count_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "t", "train", train=REWARDS, prices={"engine_price": 2.0})
    run.append_rollouts(2, results(REWARDS, Split.TRAIN, start=1800.0))
    run.append_rollouts(3, results(REWARDS, Split.TRAIN, start=100_000.0))
    found = cost(run)
    assert found is not None and found.hours == pytest.approx(1.5 + 1.0)
    assert found.total == pytest.approx(5.0)


def test_a_training_run_has_a_cost_per_point_of_reward(tmp_path: Path) -> None:
    run = write_run(tmp_path / "t", "train", train=REWARDS, prices={"sampled_price": 1e6})
    rewards = (0.2, 0.2, 0.4, 0.6, 0.8)
    for step, reward in enumerate(rewards, 1):
        line = {"step": step, "reward": reward, "rollouts": 4, "failed": 0, "dropped_groups": {}}
        run.append_metrics(line)
    found = cost(run)
    assert found is not None and found.per_reward == pytest.approx(6 / (0.6 - 0.2))
    assert "15 per point of mean reward gained" in describe_cost(found, "train")
    run.append_metrics({"step": 6, "reward": -9.0, "rollouts": 4, "failed": 0, "dropped_groups": {}})
    worse = cost(run)
    assert worse is not None and worse.per_reward is None
    assert "no reward gained" in describe_cost(worse, "train")


def test_without_prices_there_is_no_cost(tmp_path: Path) -> None:
    assert cost(write_run(tmp_path / "client", "client", train=REWARDS)) is None
    assert cost(write_run(tmp_path / "free", "eval", val=REWARDS, prices={})) is None
    assert cost(write_run(tmp_path / "empty", "eval", prices={"prompt_price": 1.0})) is None
