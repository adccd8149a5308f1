"""Rewards that the caller gives after the rollouts have ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import run_command

import afield
from afield.advantages import compute_advantages
from afield.batches.groups import from_groups
from afield.errors import Conflict, NotFound, TaskFailure, UsageError, VerifierFailure
from afield.orchestrator.reward_function import rewarded_outcomes
from afield.orchestrator.state import RolloutStore, RunDirectory, RunState
from afield.sdk.agent import Context
from afield.types import FailureKind, Reason, RolloutResult
from support.client_gateway import ThreadedGateway, threaded_gateway, yes_agent
from support.gateways import ADMIN
from support.processes import AGENTS

__all__ = ["run_command"]
CALLER: Any = {"run": "runs/exp", "reward_from": "caller", "retries": dict.fromkeys(FailureKind, 1)}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


def silent_agent(task: dict[str, Any], rollout: Context) -> None:
    """Answers the task and returns nothing."""
    if task.get("broken"):
        raise ValueError("no such table")
    yes_agent(task, rollout)


def writing_agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    yes_agent(task, rollout)
    return {"answer": task["question"], "metrics": {"files": 2}}


def test_a_rollout_without_a_reward_is_no_failure_and_gets_one_later(
    gateway: ThreadedGateway, run_command: Any, tmp_path: Path
) -> None:
    with gateway.client(writing_agent, **CALLER) as client:
        future = client.submit({"question": "Why?"}, input_id="q")
        pending = future.result(timeout=60)
        assert (pending.outcome.reward, pending.outcome.failure, pending.attempts) == (None, None, 1)
        assert pending.outcome.reward_pending and pending.returned == {"answer": "Why?"}
        assert pending.trajectories and client.tokens.untrained == {"reward_pending": 5}
        assert client.tokens.trained == 0

        code, out, err = run_command("show", "exp", pending.rollout.id)
        assert code == 0, err
        assert "reward   still to be given" in out and "trained  nothing yet" in out
        code, out, err = run_command("export", "exp", "--out", tmp_path / "none.jsonl", "--json")
        assert json.loads(out)["left_out"] == [
            "1 rollouts whose reward is still to be given; give it with RolloutClient.reward"
        ]

        rewarded = client.reward(pending, 0.5, style=1, length=0)
        assert rewarded.outcome.reward == 0.5
        assert rewarded.outcome.rewards == {"style": 1.0, "length": 0.0}
        assert rewarded.outcome.metrics == {"files": 2.0}
        assert future.result() == rewarded
        assert (client.tokens.trained, client.tokens.untrained) == (5, {})

    code, out, err = run_command("show", "exp", pending.rollout.id)
    assert "reward   0.5  {'style': 1.0, 'length': 0.0}" in out
    (row,) = RunDirectory(tmp_path / "runs/exp").index.rollouts()
    assert (row.reward, row.rewards, row.trained_tokens) == (0.5, {"style": 1.0, "length": 0.0}, 5)
    code, out, err = run_command("export", "exp", "--out", tmp_path / "all.jsonl", "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == 1 and "left_out" not in json.loads(out)
    code, out, err = run_command(
        "export", "exp", "--format", "sft", "--min-reward", 0.4, "--out", tmp_path / "sft.jsonl", "--json"
    )
    assert json.loads(out)["pairs"] == 1, err


def test_the_first_reward_counts_and_repeating_it_is_harmless(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        finished = client.submit({}, rollout_id="mine").result(timeout=60)
        first = client.reward(finished, 1)
        assert client.reward(finished, 1.0) == client.reward("mine", 1) == first
        with pytest.raises(Conflict, match=r"has the reward 1\.0, and a reward cannot be changed to 0\.0"):
            client.reward(finished, 0)
        with pytest.raises(Conflict, match=r"1\.0, .* cannot be changed to 1\.0 \{.style.: 0\.5\}"):
            client.reward(finished, 1, style=0.5)
    with gateway.client(silent_agent, **CALLER) as client:
        assert client.submit({}, rollout_id="mine").result(timeout=60).outcome == first.outcome
        assert client.reward("mine", 1) == first
        with pytest.raises(Conflict, match="a reward cannot be changed"):
            client.reward("mine", 0.5)


def test_a_later_program_gives_the_reward(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        assert client.submit({}, rollout_id="mine").result(timeout=60).outcome.reward_pending
    with gateway.client(silent_agent, **CALLER) as client:
        assert client.reward("mine", 0.25).outcome.reward == 0.25
        result = client.submit({}, rollout_id="mine").result(timeout=60)
        assert (result.outcome.reward, result.attempts) == (0.25, 1)


def test_a_reward_recorded_before_a_crash_reaches_the_rollout_store(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        pending = client.submit({}, rollout_id="mine").result(timeout=60)
    run = RunDirectory(gateway.root / "runs/exp")
    (outcome,) = rewarded_outcomes([pending], [0.75], client.config)
    with RunState(run.run_state) as run_state:  # the process dies before it writes the store
        assert run_state.give_rewards([outcome]) == [outcome]
        assert run_state.unwritten_rewards() == {"mine"}
    assert RolloutStore(run.rollout_store).get("mine").outcome.reward_pending
    with gateway.client(silent_agent, **CALLER) as client:
        assert client.submit({}, rollout_id="mine").result(timeout=60).outcome.reward == 0.75
    assert RolloutStore(run.rollout_store).get("mine").outcome == outcome
    assert [row.reward for row in run.index.rollouts()] == [0.75]
    with RunState(run.run_state) as run_state:
        assert run_state.unwritten_rewards() == set()


@pytest.mark.parametrize(
    ("value", "named", "error"),
    [
        (math.nan, {}, "it is nan; it must be a finite number"),
        (math.inf, {}, "it is inf; it must be a finite number"),
        (-math.inf, {}, "it is -inf"),
        ("1.0", {}, r"it is '1\.0'; it must be a finite number"),
        (None, {}, "it is None"),
        ([1.0], {}, r"it is \[1\.0\]"),
        (1e9, {}, r"1e\+09 .* is beyond max_reward"),
        (1.0, {"style": math.nan}, "reward 'style' is nan"),
        (1.0, {"style": "good"}, "reward 'style' is 'good'"),
    ],
)
def test_wrong_values_are_refused_and_leave_the_reward_pending(
    gateway: ThreadedGateway, value: Any, named: Any, error: str
) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        pending = client.submit({}, rollout_id="mine").result(timeout=60)
        with pytest.raises(UsageError, match=f"reward of mine: .*{error}"):
            client.reward(pending, value, **named)
        assert client.submit({}, rollout_id="mine").result(timeout=60).outcome.reward_pending
        assert client.reward(pending, True).outcome.reward == 1.0


def test_names_are_checked_when_the_reward_is_given(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER, rewards=("style",)) as client:
        pending = client.submit({}).result(timeout=60)
        with pytest.raises(UsageError, match="style"):
            client.reward(pending, 1.0)
        assert client.reward(pending, 1.0, style=0.5).outcome.rewards == {"style": 0.5}


def test_only_a_finished_rollout_without_a_failure_takes_a_reward(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        with pytest.raises(NotFound, match="rollout nobody has not ended"):
            client.reward("nobody", 1.0)
        failed = client.submit({"broken": True}, rollout_id="failed")
        with pytest.raises(TaskFailure):
            failed.result(timeout=60)
        with pytest.raises(UsageError, match=r"rollout failed has a task failure .*no such table"):
            client.reward(failed, 1.0)
        assert failed.finished().attempts == 2
    with pytest.raises(UsageError, match="the client is closed"):
        client.reward("failed", 1.0)
    with gateway.client(run="agents") as client:
        finished = client.submit({}).result(timeout=60)
        with pytest.raises(UsageError, match="agents give the rewards of this client"):
            client.reward(finished, 1.0)


def test_a_missing_reward_stays_a_verifier_failure_by_default(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, run="agents", retries={FailureKind.VERIFIER: 1}) as client:
        future = client.submit({})
        with pytest.raises(VerifierFailure, match="the agent returned None"):
            future.result(timeout=60)
        finished = future.finished()
        assert finished.attempts == 2 and not finished.outcome.reward_pending
        assert finished.outcome.failure and finished.outcome.failure.reason is Reason.REWARD


def test_a_reward_that_the_agent_returns_is_a_metric(gateway: ThreadedGateway) -> None:
    with gateway.client(yes_agent, **CALLER) as client:
        pending = client.submit({}).result(timeout=60)
        assert pending.outcome.reward_pending and pending.outcome.metrics == {"agent_reward": 1.0}
        assert client.reward(pending, 0.0).outcome.reward == 0.0


def ranked(results: list[RolloutResult]) -> list[float]:
    return [n / 10 for n in range(len(results))]


def test_groups_are_complete_once_all_their_rewards_are_given(gateway: ThreadedGateway) -> None:
    rows = [{"id": "a"}, {"id": "b", "broken": True}]
    with gateway.client(silent_agent, **CALLER) as client:
        groups = {group.task_id: group for group in client.run_groups(rows, rollouts=3)}
        group = groups["a"]
        assert group.unusable_because(2) == "0 of 3 rollouts carry a reward (3 still to be given)"
        with pytest.raises(
            UsageError, match="the rewards of 3 of 3 rollouts are still to be given, such as that of exp-a-r0"
        ):
            compute_advantages([group])
        client.reward(group.finished[1], 0.9)
        with pytest.raises(UsageError, match="are still to be given"):
            from_groups([group])

        seen: list[list[str]] = []

        def judge(results: list[RolloutResult]) -> list[float]:
            seen.append([result.rollout.id for result in results])
            return ranked(results)

        complete = client.reward_group(group, judge)
        assert seen == [["exp-a-r0", "exp-a-r2"]]
        assert [one.outcome.reward for one in complete.finished] == [0.0, 0.9, 0.1]
        assert complete.unusable_because(2) is None and len(compute_advantages([complete])) == 3
        assert client.reward_group(group, judge) == complete == client.reward_group(complete, judge)
        assert len(seen) == 1
        failed = groups["b"]
        assert client.reward_group(failed, judge) == failed and len(seen) == 1
    with gateway.client(silent_agent, **CALLER) as client:
        again = next(iter(client.run_groups(rows[:1], rollouts=3)))
        assert again == complete


def test_a_reward_function_that_fails_gives_no_rewards_at_all(gateway: ThreadedGateway) -> None:
    with gateway.client(silent_agent, **CALLER) as client:
        (group,) = client.run_groups([{"id": "a"}], rollouts=3)
        with pytest.raises(UsageError, match="2 rewards for 3 rollouts; return one reward per rollout"):
            client.reward_group(group, lambda results: [1.0, 2.0])
        with pytest.raises(UsageError, match="reward of exp-a-r2: it is nan"):
            client.reward_group(group, lambda results: [1.0, 2.0, math.nan])
        with pytest.raises(UsageError, match="the rewards are a float; return a list"):
            client.reward_group(group, lambda results: 1.0)
        with pytest.raises(ZeroDivisionError):
            client.reward_group(group, lambda results: [1 / 0])

        async def judge(results: list[RolloutResult]) -> list[float]:
            return ranked(results)

        with pytest.raises(UsageError, match="the reward function is async"):
            client.reward_group(group, judge)
        (same,) = client.run_groups([{"id": "a"}], rollouts=3)
        assert all(one.outcome.reward_pending for one in same.finished)


@pytest.mark.parametrize(("runtime", "transport"), [("inline", "files"), ("process", "files")])
def test_rewards_are_given_later_with_every_runtime(
    gateway: ThreadedGateway, runtime: str, transport: str
) -> None:
    with afield.RolloutClient.open(
        gateway=gateway.url,
        admin_key=ADMIN,
        exp_id="exp",
        directory=gateway.root / "runs" / "exp",
        agent=f"{AGENTS / 'unrewarded.py'}:agent",
        runtime=runtime,
        transport=transport,
        reward_from="caller",
    ) as client:
        pending = client.submit({"id": "q", "question": "Hi"}).result(60)
        assert pending.outcome.reward_pending and pending.returned == {"answer": "Yes."}
        assert client.reward(pending, 0.5).outcome.reward == 0.5


def test_a_verifier_or_a_baseline_is_refused(tmp_path: Path) -> None:
    values: Any = {
        "gateway": "http://127.0.0.1:1",
        "admin_key": "k",
        "directory": tmp_path,
        "agent": yes_agent,
    }
    with pytest.raises(UsageError, match="leave out baseline"):
        afield.RolloutClient.open(**values, reward_from="caller", baseline=True)
    values["reward_from"] = "nobody"
    with pytest.raises(UsageError, match="nobody"):
        afield.RolloutClient.open(**values)
