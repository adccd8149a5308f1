"""Reward functions: rewards of a group, after its rollouts have ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.orchestrator.test_kill_points import Killed, Life, Mortal

from afield.batches.groups import from_groups
from afield.engines.scripted import ScriptedEngine
from afield.errors import PolicyFailure, Unavailable
from afield.orchestrator.groups import DynamicSampling, GroupRunner, GroupSpec
from afield.orchestrator.reward_function import GroupRewards, RewardFunction
from afield.orchestrator.state import RolloutStore, RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from afield.types import Failure, FailureKind, Group, Reason, RolloutResult, Sampling, Split, Task
from support.gateways import running
from support.in_process_collection import YES, Collection, ask_model, collection

pytestmark = pytest.mark.anyio
SPEC = GroupSpec("exp-e0-t0", Task("t0", {"n": 0, "hidden": {"answer": "Yes."}}), 0)
NO_RETRIES: Any = {"retries": {}}


async def writer(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    assert "hidden" not in task
    return {"answer": await ask_model(rollout), "metrics": {"files": 1}}


def ranked(results: list[RolloutResult]) -> list[float]:
    return [n / 10 for n in range(len(results))]


async def collect(
    b: Collection, function: RewardFunction, spec: GroupSpec = SPEC, **options: Any
) -> tuple[Group, str | None]:
    """A group with rewards of the function, and why it is dropped."""
    options = {"reward_from": "caller", **options}
    async with b.runner(**options) as (config, runner):
        stores: Any = {"run_state": b.run_state, "rollout_store": b.rollout_store}
        async with GroupRewards(function, config, **stores) as rewards:
            groups = GroupRunner(config, runner, b.rollout_store, rewards)
            completed = await groups.start_group(spec)
            (group,) = await groups.collect([spec])
        assert [one.outcome for one in group.finished] == list(completed.outcomes)
        return group, completed.drop_reason


def rewards_of(group: Group) -> list[float | None]:
    return [one.outcome.reward for one in group.finished]


async def test_a_function_rewards_the_rollouts_of_a_group_together_and_once(tmp_path: Path) -> None:
    seen: list[list[RolloutResult]] = []

    def judge(results: list[RolloutResult]) -> list[float]:
        seen.append(results)
        right = [one.returned["answer"] == one.rollout.task.input["hidden"]["answer"] for one in results]
        return [n / 10 for n, _ in enumerate(right) if all(right)]

    async with collection(tmp_path, writer) as b:
        group, drop_reason = await collect(b, judge, rollouts=3)
        again, _ = await collect(b, judge, rollouts=3)
    assert drop_reason is None and rewards_of(group) == [0.0, 0.1, 0.2]
    assert again == group and len(seen) == 1
    assert all(one.turns and one.trajectories and one.outcome.metrics == {"files": 1.0} for one in seen[0])
    assert len(from_groups([group]).rows) == 3


async def test_an_async_function_gives_named_rewards_and_rewards_of_turns(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    async def judge(results: list[RolloutResult]) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        threads.append(threading.current_thread())
        return [
            {"reward": 1, "rewards": {"style": 0.5}, "turn_rewards": [n], "metrics": {"rank": n}}
            for n, _ in enumerate(results)
        ]

    async with collection(tmp_path, writer) as b:
        group, _ = await collect(b, judge)
    outcomes = [one.outcome for one in group.finished]
    assert [(o.reward, o.rewards, o.turn_rewards) for o in outcomes] == [
        (1.0, {"style": 0.5}, {"0": 0.0}),
        (1.0, {"style": 0.5}, {"0": 1.0}),
    ]
    assert [o.metrics for o in outcomes] == [{"files": 1.0, "rank": 0.0}, {"files": 1.0, "rank": 1.0}]
    threads[0].join()  # its event loop ends with the rewards


async def test_failed_rollouts_are_not_passed_and_get_no_reward(tmp_path: Path) -> None:
    numbers = itertools.count()

    async def mixed(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        number = next(numbers)
        await ask_model(rollout)
        if number == 0:
            raise ValueError("no such table")
        if number == 1:
            raise PolicyFailure("too long", Reason.BUDGET)
        return {}

    async with collection(tmp_path, mixed) as b:
        group, drop_reason = await collect(b, ranked, rollouts=4, **NO_RETRIES)
    outcomes = [one.outcome for one in group.finished]
    assert drop_reason is None
    kinds = {str(o.failure.kind) for o in outcomes if o.failure}
    assert kinds == {"task", "policy"} and all(o.reward is None for o in outcomes if o.failure)
    assert sorted(o.reward for o in outcomes if o.reward is not None) == [0.0, 0.1]
    assert sorted(o.reward_or_floor(0.0) or 0.0 for o in outcomes if not o.failure) == [0.0, 0.1]


def raising(results: list[RolloutResult]) -> list[float]:
    raise OSError("the judge does not answer")


def leaving(results: list[RolloutResult]) -> list[float]:
    raise SystemExit(3)


async def raising_later(results: list[RolloutResult]) -> list[float]:
    await asyncio.sleep(0)
    raise SystemExit("leaves the loop")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "OSError: the judge does not answer"),
        (leaving, "SystemExit: 3"),
        (raising_later, "SystemExit: leaves the loop"),
        (lambda _: [1.0], "1 rewards for 2 rollouts; return one reward per rollout, in order"),
        (lambda _: [1.0, 2.0, 3.0], "3 rewards for 2 rollouts"),
        (lambda _: None, "the rewards are a NoneType"),
        (lambda _: "11", "the rewards are a str"),
        (lambda _: {"a": 1.0, "b": 1.0}, "the rewards are a dict"),
        (lambda _: [1.0, math.nan], "reward of exp-e0-t0-r1: it is nan"),
        (lambda _: [math.inf, 1.0], "reward of exp-e0-t0-r0: it is inf"),
        (lambda _: [1.0, "0"], "reward of exp-e0-t0-r1: it is '0'"),
        (lambda _: [1.0, None], "reward of exp-e0-t0-r1: it is None"),
        (lambda _: [1.0, {"score": 1.0}], "its keys are ['score']; add 'reward' or 'rewards'"),
        (lambda _: [1.0, {"reward": 1.0, "why": "good"}], "unknown keys ['why']"),
        (lambda _: [1.0, {"reward": 1.0, "turn_rewards": {"t9": 1}}], "reward of exp-e0-t0-r1: "),
        (lambda _: [1.0, 1e9], "is beyond max_reward"),
    ],
)
async def test_a_function_that_fails_is_called_again_and_then_fails_its_rollouts(
    tmp_path: Path, function: RewardFunction, message: str
) -> None:
    calls: list[int] = []

    def counted(results: list[RolloutResult]) -> Any:
        calls.append(len(results))
        return function(results)

    async with collection(tmp_path, writer) as b:
        group, drop_reason = await collect(b, counted, retries={FailureKind.VERIFIER: 2})
    assert calls == [2, 2, 2] and drop_reason is not None
    assert rewards_of(group) == [None, None]
    for one in group.finished:
        failure = one.outcome.failure
        assert failure and failure.kind is FailureKind.VERIFIER and message in failure.message
        assert one.attempts == 1 and not one.outcome.reward_pending
        assert one.outcome.reward_or_floor(0.0) is None


async def test_a_function_that_recovers_gives_the_rewards(tmp_path: Path) -> None:
    calls = itertools.count(1)

    def flaky(results: list[RolloutResult]) -> list[float]:
        return ranked(results) if next(calls) > 1 else raising(results)

    async with collection(tmp_path, writer) as b:
        group, drop_reason = await collect(b, flaky)
    assert drop_reason is None and rewards_of(group) == [0.0, 0.1]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_that_does_not_return_is_a_timeout(tmp_path: Path, is_async: bool) -> None:
    release = threading.Event()
    cancelled = threading.Event()

    async def hang(results: list[RolloutResult]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    function: Callable[..., Any] = hang if is_async else lambda _: release.wait()
    async with collection(tmp_path, writer) as b:
        group, drop_reason = await collect(b, function, verifier_timeout_s=0.2, **NO_RETRIES)
    release.set()
    message = "the reward function did not return in 0.2 s (verifier_timeout_s)"
    expected = Failure(FailureKind.VERIFIER, Reason.TIMEOUT, message)
    assert [one.outcome.failure for one in group.finished] == [expected, expected]
    assert drop_reason is not None
    assert not is_async or cancelled.wait(30)


async def test_validation_groups_get_rewards_too(tmp_path: Path) -> None:
    spec = GroupSpec("exp-val0-t0", SPEC.task, 0, Split.VAL, Sampling(temperature=0))
    async with collection(tmp_path, writer) as b:
        group, drop_reason = await collect(b, lambda _: [0.5], spec, rewards=("style",))
    assert drop_reason is None and rewards_of(group) == [0.5]


async def test_extra_rollouts_are_cut_although_no_reward_is_given_yet(tmp_path: Path) -> None:
    blocked = asyncio.Event()

    async def one_hangs(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        await ask_model(rollout)
        if rollout.session_id.startswith("exp-e0-t0-r2"):
            await blocked.wait()
        return {}

    async with collection(tmp_path, one_hangs) as b:
        group, drop_reason = await collect(b, ranked, rollouts=2, extra=1)
    assert drop_reason is None and rewards_of(group) == [0.0, 0.1, None]


async def test_groups_with_equal_rewards_are_seen_after_the_function(tmp_path: Path) -> None:
    async with collection(tmp_path, writer) as b, b.runner(reward_from="caller") as (config, runner):
        stores: Any = {"run_state": b.run_state, "rollout_store": b.rollout_store}
        rule = DynamicSampling(max_refills=1)
        for name, function in (("equal", lambda _: [1, 1]), ("unequal", ranked)):
            groups = GroupRunner(config, runner, b.rollout_store, GroupRewards(function, config, **stores))
            completed = await groups.start_group(GroupSpec(f"exp-e0-{name}", SPEC.task, 0))
            assert rule.replaces(completed) == (name == "equal")


async def test_without_a_function_a_group_of_pending_rewards_is_dropped(tmp_path: Path) -> None:
    async with collection(tmp_path, writer) as b, b.runner(reward_from="caller") as (config, runner):
        completed = await GroupRunner(config, runner, b.rollout_store).start_group(SPEC)
    assert completed.drop_reason == "0 of 2 rollouts carry a reward (2 still to be given)"


@pytest.mark.parametrize("deliver", ["store", "gateway"])
async def test_an_outcome_without_a_reward_passes_the_gateway(tmp_path: Path, deliver: str) -> None:
    transport = MemoryTransport()
    agents = InlineRuntime(writer) if deliver == "gateway" else InlineRuntime(writer, transport.deliver)
    engine = ScriptedEngine(lambda _: YES)
    async with transport, running(engine, tmp_path / "gateway", outlet=transport) as up, agents:
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            b = Collection(tmp_path, up, transport, run_state, agents)
            group, _ = await collect(b, ranked, deliver=deliver)
    assert rewards_of(group) == [0.0, 0.1]
    assert all(one.returned == {"answer": "Yes."} for one in group.finished)


async def test_a_full_disk_delays_rewards_and_does_not_judge_again(tmp_path: Path) -> None:
    calls = itertools.count(1)

    def judge(results: list[RolloutResult]) -> list[float]:
        rewarded.set()
        return [float(next(calls)) for _ in results]

    class FullOnce(RolloutStore):
        failed = 0

        def put(self, result: RolloutResult) -> None:
            if rewarded.is_set() and not self.failed:
                self.failed += 1
                raise Unavailable("cannot write the rollout; free disk space")
            super().put(result)

    rewarded = threading.Event()
    async with collection(tmp_path, writer) as b:
        b.rollout_store = FullOnce(tmp_path / "full")
        group, drop_reason = await collect(b, judge)
        assert b.rollout_store.failed == 1
    assert drop_reason is None and rewards_of(group) == [1.0, 2.0]


async def test_dying_between_any_two_calls_keeps_one_judgement_per_group(tmp_path: Path) -> None:
    """All rewards of a group come from the same call, in run state and store, whenever the process dies."""
    judgements = itertools.count(1)

    def judge(results: list[RolloutResult]) -> list[float]:
        number = next(judgements)
        return [number + n / 10 for n in range(len(results))]

    async def life_of(b: Collection, spec: GroupSpec, life: Life) -> Group:
        run_state, store = Mortal(b.run_state, life), Mortal(b.rollout_store, life)
        async with b.runner(reward_from="caller") as (config, runner):
            stores: Any = {"run_state": run_state, "rollout_store": store}
            rewards = GroupRewards(judge, config, **stores)
            groups = GroupRunner(config, runner, b.rollout_store, rewards)
            completed = await groups.start_group(spec)
            b.run_state.begin_group(spec.id, number, 0)
            ids = completed.rollout_ids
            b.run_state.complete_group(spec.id, ids, completed.baseline, completed.drop_reason)
            return (await groups.collect([spec]))[0]

    async with collection(tmp_path, writer) as b:
        number, died = 0, True
        while died:
            number += 1
            spec = GroupSpec(f"exp-e0-k{number}", Task("t", {"n": 0}), 0)
            try:
                group, died = await life_of(b, spec, Life(number)), False
            except Killed:
                group, died = await life_of(b, spec, Life(float("inf"))), True
            rewards = rewards_of(group)
            where = f"killed after {number} calls: {rewards}"
            assert rewards == [int(rewards[0] or 0), int(rewards[0] or 0) + 0.1], where
            assert all(one.attempts == 1 for one in group.finished), where
            for one in group.finished:
                summary = b.run_state.rollout_summary(one.rollout.id)
                assert summary and summary.outcome == one.outcome, where
            assert b.run_state.unwritten_rewards() == set(), where
            judged = next(judgements)
            again = await life_of(b, spec, Life(float("inf")))
            assert again == group and next(judgements) == judged + 1, where
        assert number > 5
