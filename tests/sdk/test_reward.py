"""Graders: finite numbers, or a failure that is the verifier's."""

from typing import Any

import pytest

import afield
from afield.types import FailureKind
from agents.running import run_inline

pytestmark = pytest.mark.anyio


class Exact(afield.Reward):
    def __call__(self, *, answer: str, expected: str) -> float:
        return answer == expected


class Judge(afield.Reward):
    name = "judge"

    async def __call__(self, **kwargs: Any) -> dict[str, float]:
        return {"clear": 1, "short": kwargs["short"]}


class Crashing(afield.Reward):
    def __call__(self, **kwargs: Any) -> float:
        return 1 / 0


async def test_a_grader_gives_finite_floats_sync_and_async() -> None:
    reward = Exact()(answer="4", expected="4")
    assert reward == 1.0 and isinstance(reward, float)
    assert await Judge()(short=True) == {"clear": 1.0, "short": 1.0}
    assert (Exact().name, Judge().name) == ("Exact", "judge")


async def test_a_grader_may_give_a_list_of_which_the_last_counts() -> None:
    class Steps(afield.Reward):
        def __call__(self, **kwargs: Any) -> list[float]:
            return kwargs["scores"]

    assert Steps()(scores=(True, 0.5)) == [1.0, 0.5]
    with pytest.raises(afield.VerifierFailure, match="'fast'"):
        Steps()(scores=[1, "fast"])

    @afield.agent
    def agent(task: dict) -> Any:
        return {"rewards": Steps()(scores=[1, 0.5])}

    outcome = (await run_inline(agent)).outcome
    assert (outcome.reward, outcome.rewards) == (0.5, {"0": 1.0, "1": 0.5})


async def test_a_grader_that_crashes_is_not_blamed_on_the_agent() -> None:
    with pytest.raises(afield.VerifierFailure, match="ZeroDivisionError"):
        Crashing()()
    with pytest.raises(afield.VerifierFailure, match="KeyError"):
        await Judge()()
    with pytest.raises(afield.VerifierFailure, match="'fast'"):
        await Judge()(short="fast")

    @afield.agent
    def agent(task: dict) -> float:
        return Crashing()(task=task)

    record = await run_inline(agent)
    assert record.outcome.failure and record.outcome.failure.kind is FailureKind.VERIFIER


def test_reward_class_without_call_raises_not_implemented() -> None:
    class Empty(afield.Reward):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define __call__"):
        Empty()()
