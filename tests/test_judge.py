"""Rewards that a verifier gives: after the agent, apart from it, and it alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.engines.scripted import ScriptedEngine
from afield.errors import PolicyFailure
from afield.ledger import Ledger
from afield.runtimes.inline import InlineRuntime
from afield.sdk.context import Context
from afield.transports.memory import MemoryTransport
from afield.types import FailureKind, Finished, Reason
from collecting import YES, Bench, ask_model
from gateways import running

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def court(
    tmp_path: Path, agent: Callable[..., Any], grade: Callable[..., Any]
) -> AsyncIterator[tuple[Bench, InlineRuntime]]:
    """A gateway that brings outcomes to the store; agents and verifiers that only know the gateway."""
    transport = MemoryTransport()
    agents, verifiers = InlineRuntime(agent), InlineRuntime(grade)
    engine = ScriptedEngine(lambda _: YES)
    async with (
        transport,
        running(engine, tmp_path / "gateway", outlet=transport) as up,
        agents,
        verifiers,
    ):
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            yield Bench(tmp_path, up, transport, ledger, agents), verifiers


async def judged(
    tmp_path: Path, agent: Callable[..., Any], grade: Callable[..., Any], **plan: Any
) -> tuple[list[Finished], Bench]:
    async with court(tmp_path, agent, grade) as (bench, verifiers):
        plan = {"deliver": "gateway", "judged": True, "verifiers": verifiers, "retries": {}, **plan}
        groups = await bench.collect(**plan)
        return [finished for group in groups for finished in group.finished], bench


async def hand_in(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    return {"answer": await ask_model(rollout), "metrics": {"turns": 1.0}}


def half(payload: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 0.5 * (payload["submission"]["answer"] == "Yes."), "metrics": {"passed": 3.0}}


async def test_the_verifiers_reward_counts_and_is_given_for_what_was_handed_in(tmp_path: Path) -> None:
    finished, _ = await judged(tmp_path, hand_in, half)
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]
    assert all(one.outcome.metrics["passed"] == 3.0 for one in finished)
    assert all(one.trajectories for one in finished)


async def test_a_reward_that_the_agent_returns_is_not_its_to_give(tmp_path: Path) -> None:
    async def greedy(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        return {"answer": await ask_model(rollout), "reward": 100.0}

    finished, _ = await judged(tmp_path, greedy, half)
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]


async def test_a_forged_reward_is_refused_and_the_verifiers_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[int] = []

    async def forger(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {rollout.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for path, body in (
                ("reward", {"reward": 9}),
                ("outcome", {"reward": 9}),
                ("complete", {"reward": 9}),
            ):
                async with http.post(f"{rollout.base_url}/{path}", json=body) as response:
                    answers.append(response.status)
        return await hand_in(task, rollout)

    finished, _ = await judged(tmp_path, forger, half)
    assert set(answers) == {403}
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]
    assert "tried to give itself the reward" in caplog.text


async def test_the_agent_has_ended_before_its_verifier_starts(tmp_path: Path) -> None:
    running_now: set[str] = set()
    met: list[bool] = []

    async def agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        running_now.add(rollout.session_id)
        try:
            return await hand_in(task, rollout)
        finally:
            running_now.discard(rollout.session_id)

    def grade(payload: dict[str, Any], rollout: Context) -> float:
        met.append(rollout.session_id in running_now)
        return 1.0

    await judged(tmp_path, agent, grade)
    assert met == [False, False]


async def test_a_verifier_that_raises_is_its_own_kind_of_failure_and_no_reward(tmp_path: Path) -> None:
    def broken(payload: dict[str, Any]) -> float:
        raise RuntimeError("the grader broke")

    finished, _ = await judged(tmp_path, hand_in, broken)
    for one in finished:
        assert one.outcome.reward is None and one.outcome.failure
        assert one.outcome.failure.kind is FailureKind.VERIFIER
        assert "the grader broke" in one.outcome.failure.message


async def test_a_failed_verdict_is_tried_again_within_its_budget(tmp_path: Path) -> None:
    tries: list[str] = []

    def moody(payload: dict[str, Any], rollout: Context) -> float:
        tries.append(rollout.session_id)
        if rollout.session_id.endswith(".1"):
            raise RuntimeError("not today")
        return 1.0

    finished, _ = await judged(tmp_path, hand_in, moody, retries={FailureKind.VERIFIER: 1})
    assert [one.outcome.reward for one in finished] == [1.0, 1.0]
    assert len(tries) == 4


async def test_an_agent_that_fails_is_not_judged(tmp_path: Path) -> None:
    graded: list[str] = []

    async def agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        await ask_model(rollout)
        raise PolicyFailure("it looped", Reason.BUDGET)

    def grade(payload: dict[str, Any], rollout: Context) -> float:
        graded.append(rollout.session_id)
        return 1.0

    finished, _ = await judged(tmp_path, agent, grade)
    assert [one.outcome.failure.kind for one in finished if one.outcome.failure] == [FailureKind.POLICY] * 2
    assert graded == []


async def test_a_verifier_that_hangs_is_given_up_as_its_own_failure(tmp_path: Path) -> None:
    async def hang(payload: dict[str, Any]) -> float:
        await asyncio.sleep(600)
        return 1.0

    finished, _ = await judged(tmp_path, hand_in, hang, grade_s=0.5, watch_s=0.1)
    for one in finished:
        assert one.outcome.failure and one.outcome.failure.kind is FailureKind.VERIFIER
        assert "no verdict in 0.5 s" in one.outcome.failure.message


async def test_what_was_handed_in_is_graded_by_a_collector_that_comes_later(tmp_path: Path) -> None:
    """The first one dies after the agent has handed in, before the verdict."""

    async def never(payload: dict[str, Any]) -> float:
        await asyncio.sleep(600)
        return 0.0

    launches: list[str] = []

    async def agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        launches.append(rollout.session_id)
        return await hand_in(task, rollout)

    async with court(tmp_path, agent, never) as (bench, verifiers):
        plan = {"deliver": "gateway", "judged": True, "retries": {}}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await bench.collect(**plan, verifiers=verifiers)
        async with InlineRuntime(half) as others:
            groups = await bench.collect(**plan, verifiers=others)
    assert [one.outcome.reward for group in groups for one in group.finished] == [0.5, 0.5]
    assert len(launches) == 2
