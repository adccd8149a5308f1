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
from afield.errors import InfrastructureFailure, PolicyFailure
from afield.interfaces import Exit, SessionSpec
from afield.orchestrator.state import RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Failure, FailureKind, Reason, RolloutResult
from afield.wire import OutcomeRecord
from support.gateways import running
from support.in_process_collection import YES, Collection, ask_model, waiting

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def verified_collection(
    tmp_path: Path, agent: Callable[..., Any], grade: Callable[..., Any]
) -> AsyncIterator[tuple[Collection, InlineRuntime]]:
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
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            yield Collection(tmp_path, up, transport, run_state, agents), verifiers


async def verified(
    tmp_path: Path, agent: Callable[..., Any], grade: Callable[..., Any], **plan: Any
) -> tuple[list[RolloutResult], Collection]:
    async with verified_collection(tmp_path, agent, grade) as (b, verifiers):
        plan = {
            "deliver": "gateway",
            "separate_verifier": True,
            "verifiers": verifiers,
            "retries": {},
            **plan,
        }
        groups = await b.collect(**plan)
        return [finished for group in groups for finished in group.finished], b


async def hand_in(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    return {"answer": await ask_model(rollout), "metrics": {"turns": 1.0}}


def half(payload: dict[str, Any]) -> dict[str, Any]:
    return {"reward": 0.5 * (payload["submission"]["answer"] == "Yes."), "metrics": {"passed": 3.0}}


async def test_the_verifier_rewards_the_submission_and_its_reward_counts(tmp_path: Path) -> None:
    finished, _ = await verified(tmp_path, hand_in, half)
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]
    assert all(one.outcome.metrics["passed"] == 3.0 for one in finished)
    assert all(one.trajectories for one in finished)


async def test_a_reward_of_the_agent_does_not_count_with_a_verifier(tmp_path: Path) -> None:
    async def greedy(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        return {"answer": await ask_model(rollout), "reward": 100.0}

    finished, _ = await verified(tmp_path, greedy, half)
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]


async def test_a_forged_reward_is_refused_and_the_verifiers_reward_counts(
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

    finished, _ = await verified(tmp_path, forger, half)
    assert set(answers) == {403}
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]
    assert "reward by the agent refused" in caplog.text


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

    await verified(tmp_path, agent, grade)
    assert met == [False, False]


async def test_a_verifier_that_raises_is_its_own_kind_of_failure_and_no_reward(tmp_path: Path) -> None:
    def broken(payload: dict[str, Any]) -> float:
        raise RuntimeError("the grader broke")

    finished, _ = await verified(tmp_path, hand_in, broken)
    for one in finished:
        assert one.outcome.reward is None and one.outcome.failure
        assert one.outcome.failure.kind is FailureKind.VERIFIER
        assert "the grader broke" in one.outcome.failure.message


async def counted(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    return {**await hand_in(task, rollout), "by": rollout.session_id}


async def test_a_failed_verdict_is_given_again_and_the_agent_does_not_run_again(tmp_path: Path) -> None:
    graded: list[str] = []

    def moody(payload: dict[str, Any]) -> float:
        graded.append(payload["submission"]["by"])
        if graded.count(graded[-1]) == 1:
            raise RuntimeError("not today")
        return 1.0

    finished, _ = await verified(tmp_path, counted, moody, retries={FailureKind.VERIFIER: 1})
    assert [one.outcome.reward for one in finished] == [1.0, 1.0]
    assert sorted(graded) == sorted(2 * [f"exp-e0-t0-r{n}.1" for n in range(2)])
    assert [one.attempts for one in finished] == [1, 1]
    assert all(one.trajectories for one in finished)


async def test_verdicts_that_keep_failing_are_the_verifiers_failure_after_their_budget(
    tmp_path: Path,
) -> None:
    graded: list[str] = []

    def broken(payload: dict[str, Any]) -> float:
        graded.append(payload["submission"]["by"])
        raise RuntimeError(f"the grader broke {len(graded)}")

    retries = {FailureKind.VERIFIER: 2, FailureKind.INFRASTRUCTURE: 2}
    finished, _ = await verified(tmp_path, counted, broken, retries=retries)
    assert len(graded) == 6 and {name.rpartition(".")[2] for name in graded} == {"1"}
    for one in finished:
        failure = one.outcome.failure
        assert one.attempts == 1 and failure and failure.kind is FailureKind.VERIFIER
        assert "the grader broke" in failure.message


async def test_a_verifier_whose_runtime_breaks_or_hangs_is_followed_by_another(tmp_path: Path) -> None:
    """The first place cannot be launched, the second one dies, the third one hangs, the fourth grades."""
    launched: list[Attempt] = []

    class Fragile(InlineRuntime):
        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            launched.append(attempt)
            if len(launched) == 1:
                raise InfrastructureFailure("no place today", Reason.LAUNCH)
            await super().launch(attempt, payload)

        async def wait(self, attempt: Attempt) -> Exit:
            if attempt == launched[1]:
                return Exit(Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "the machine is gone"))
            return await super().wait(attempt)

    async def grade(payload: dict[str, Any]) -> float:
        if len(launched) < 4:
            await asyncio.sleep(600)
        return 0.75

    async with verified_collection(tmp_path, counted, grade) as (b, _), Fragile(grade) as verifiers:
        plan = {
            "deliver": "gateway",
            "separate_verifier": True,
            "verifiers": verifiers,
            "rollouts": 1,
            "quorum": 1,
        }
        groups = await b.collect(**plan, retries={FailureKind.VERIFIER: 3}, verifier_timeout_s=2.0)
    (one,) = groups[0].finished
    assert (one.outcome.reward, one.attempts) == (0.75, 1)
    assert len(set(launched)) == 4 and {attempt.rollout_id for attempt in launched} == {one.rollout.id}


async def test_a_verifier_that_ends_without_a_result_is_followed_by_another(tmp_path: Path) -> None:
    class Mute(InlineRuntime):
        told = 0

        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            self.told += 1
            if self.told > 1:
                await super().launch(attempt, payload)

        async def wait(self, attempt: Attempt) -> Exit:
            return Exit() if self.told == 1 else await super().wait(attempt)

    async with verified_collection(tmp_path, counted, half) as (b, _), Mute(half) as verifiers:
        plan = {
            "deliver": "gateway",
            "separate_verifier": True,
            "verifiers": verifiers,
            "rollouts": 1,
            "quorum": 1,
        }
        groups = await b.collect(**plan, retries={FailureKind.VERIFIER: 1})
    (one,) = groups[0].finished
    assert (one.outcome.reward, one.attempts, verifiers.told) == (0.5, 1, 2)


async def test_a_failed_verdict_of_a_session_that_takes_several_decides_nothing(
    tmp_path: Path,
) -> None:
    names = {"id": "r.1", "rollout_id": "r", "attempt": 1, "group_id": "g", "exp_id": "exp", "input_id": "t"}
    spec = SessionSpec(**names, reward_from="verifier", verdicts=2)
    async with MemoryTransport() as outlet, running(ScriptedEngine([]), tmp_path, outlet=outlet) as up:
        ticket = await up.client.open(spec)
        assert (await up.ask("POST", "/s/r.1/outcome", {}, ticket.api_key))[0] == 200
        failed = {"status": "no idea"}
        for _ in range(2):  # said again, it is the same one
            status, state = await up.ask("POST", "/s/r.1/outcome", failed, ticket.verifier_key or "")
            assert (status, state["graded"]) == (200, False)
            assert [f["message"] for f in state["failed_verdicts"]] == ["the session ended without a reward"]
        assert await outlet.decision(waiting("r")) is None
        status, state = await up.ask("POST", "/s/r.1/outcome", {"reward": 0.5}, ticket.verifier_key or "")
        assert (status, state["graded"]) == (200, True)
        found = await outlet.decision(waiting("r"))
        assert isinstance(found, OutcomeRecord) and found.outcome.reward == 0.5


async def test_an_agent_that_fails_is_not_judged(tmp_path: Path) -> None:
    graded: list[str] = []

    async def agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        await ask_model(rollout)
        raise PolicyFailure("it looped", Reason.BUDGET)

    def grade(payload: dict[str, Any], rollout: Context) -> float:
        graded.append(rollout.session_id)
        return 1.0

    finished, _ = await verified(tmp_path, agent, grade)
    assert [one.outcome.failure.kind for one in finished if one.outcome.failure] == [FailureKind.POLICY] * 2
    assert graded == []


async def test_a_verifier_that_hangs_is_a_verifier_failure(tmp_path: Path) -> None:
    async def hang(payload: dict[str, Any]) -> float:
        await asyncio.sleep(600)
        return 1.0

    finished, _ = await verified(tmp_path, hand_in, hang, verifier_timeout_s=0.5, watch_interval_s=0.1)
    for one in finished:
        assert one.outcome.failure and one.outcome.failure.kind is FailureKind.VERIFIER
        assert "no verdict in 0.5 s" in one.outcome.failure.message


async def test_a_submission_is_graded_by_a_later_collector(tmp_path: Path) -> None:
    """The first one dies after the agent has handed in, before the verdict."""

    grading: list[str] = []

    async def never(payload: dict[str, Any], rollout: Context) -> float:
        grading.append(rollout.session_id)
        await asyncio.sleep(600)
        return 0.0

    launches: list[str] = []

    async def agent(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        launches.append(rollout.session_id)
        return await hand_in(task, rollout)

    async with verified_collection(tmp_path, agent, never) as (b, verifiers):
        plan = {"deliver": "gateway", "separate_verifier": True, "retries": {}}
        dying = asyncio.create_task(b.collect(**plan, verifiers=verifiers))
        async with asyncio.timeout(60):
            while len(grading) < 2:
                await asyncio.sleep(0.02)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        async with InlineRuntime(half) as others:
            groups = await b.collect(**plan, verifiers=others)
    assert [one.outcome.reward for group in groups for one in group.finished] == [0.5, 0.5]
    assert len(launches) == 2
