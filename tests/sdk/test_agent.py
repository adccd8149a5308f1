"""The SDK as an agent's author meets it: decorators, results and failures."""

import math
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import anyio
import httpx
import numpy as np
import openai
import pytest

import afield
from afield.errors import PolicyFailure, UsageError, VerifierFailure
from afield.runtimes.inline import InlineRuntime
from afield.sdk.classify import attributed
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Failure, FailureKind, Reason
from afield.wire import OutcomeRecord
from agents.invoking import invocation, payload
from agents.places import waiting_for
from agents.running import run_inline

pytestmark = pytest.mark.anyio


async def failure_of(agent: Callable[..., Any]) -> Failure:
    record = await run_inline(agent)
    assert record.outcome.failure is not None
    return record.outcome.failure


def returning(value: object, **options: Any) -> Callable[..., Any]:
    @afield.agent(**options)
    def agent(task: dict) -> object:
        return value

    return agent


def raising(error: BaseException) -> Callable[..., Any]:
    @afield.agent
    def agent(task: dict) -> float:
        raise error

    return agent


# --- the package ---------------------------------------------------------------------------------


def test_the_sdk_imports_nothing_heavy() -> None:
    code = (
        "import sys, afield, afield.sdk.serve, afield.sdk.deliver; afield.agent, afield.App, afield.Reward;"
        "heavy = {'torch', 'boto3', 'botocore', 'transformers', 'aiohttp', 'bedrock_agentcore', 'openai',"
        " 'starlette', 'numpy', 'pydantic'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_importing_afield_loads_no_submodule() -> None:
    code = "import sys, afield; print([m for m in sys.modules if m.startswith('afield.')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_can_be_loaded_and_an_unknown_one_lists_them() -> None:
    assert all(getattr(afield, name) for name in afield.__all__)
    with pytest.raises(AttributeError, match="it has: App, Context"):
        _ = afield.Agent  # type: ignore[attr-defined]


# --- the decorator -------------------------------------------------------------------------------


async def test_a_decorated_function_is_still_a_plain_function() -> None:
    @afield.agent
    def double(task: dict) -> float:
        return task["n"] * 2

    assert double({"n": 2}) == 4
    assert (await run_inline(double, {"n": 3})).outcome.reward == 6


async def test_the_task_is_the_row_without_rollout_and_the_context_is_the_second_parameter() -> None:
    seen: list[Any] = []

    @afield.agent
    async def agent(task: dict, rollout: afield.Context) -> float:
        seen.extend([task, rollout])
        return 1.0

    await run_inline(agent, {"question": "?"})
    task, rollout = seen
    assert task == {"question": "?"}
    assert rollout.openai_base_url == "http://127.0.0.1:9/s/r.1/v1"
    assert (rollout.session_id, rollout.input_id, rollout.api_key) == ("r.1", "t", "secret-key")
    assert "secret-key" not in repr(rollout)


async def test_a_second_parameter_with_a_default_stays_the_authors_own() -> None:
    def agent(task: dict, retries: int = 3) -> float:
        return retries

    assert (await run_inline(agent)).outcome.reward == 3


@pytest.mark.parametrize("wrong", [lambda: 1, lambda a, b, c: 1, lambda task, *, key: 1])
def test_a_function_that_cannot_be_called_as_an_agent_is_refused_where_it_is_written(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"an agent takes \(task\) or \(task, rollout\)"):
        afield.agent(wrong)


@pytest.mark.parametrize("aggregate", ["median", 3, {"a": float("nan")}])
def test_a_wrong_aggregate_is_refused_where_it_is_written(aggregate: Any) -> None:
    with pytest.raises(UsageError, match="aggregate"):
        afield.agent(aggregate=aggregate)


async def test_the_echo_is_the_row_as_it_came_and_holds_no_key() -> None:
    @afield.agent
    def agent(task: dict) -> float:
        task["added"] = object()
        task["list"].append(1)
        return 1.0

    record = await run_inline(agent, {"list": []})
    assert record.payload == {"list": []}
    assert 0 < record.started <= record.ended


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        ({"reward": 0.5}, 0.5),
        ({"rewards": 0.5}, 0.5),
        ({"rewards": [0.5]}, 0.5),
        ({"rewards": [1, 0.25]}, 0.25),
        ([1, 0.25], 0.25),
        ((0, np.float32(0.5)), 0.5),
        ({"rewards": {"correct": 0.5}}, 0.5),
        ({"reward": 0.1, "rewards": {"a": 1, "b": 2}}, 0.1),
    ],
)
async def test_what_counts_as_a_reward(value: object, reward: float) -> None:
    assert (await run_inline(returning(value))).outcome.reward == reward


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            "1.0",
            math.nan,
            math.inf,
            1j,
            [],
            ["high"],
            [[1.0]],
            object(),
            10**400,
            np.array([1.0]),
            np.complex128(1),
        ),
        *({"reward": None}, {"reward": "high"}, {"score": 1.0}, {}),
        *({"rewards": {"a": math.nan}}, {"rewards": []}, {"rewards": {}}),
        *({"rewards": {"a": 1, "b": 2}}, {"rewards": [1, math.nan]}),
        *({"reward": 1, "metrics": {"x": "fast"}}, {"reward": 1, "metrics": {"x": math.inf}}),
        {"reward": 1, "metrics": 3},
    ],
)
async def test_what_is_no_reward_is_a_verifier_failure(value: object) -> None:
    failure = await failure_of(returning(value))
    assert (failure.kind, failure.reason) == (FailureKind.VERIFIER, Reason.REWARD)


async def test_the_failure_shows_the_value_that_was_no_number() -> None:
    assert "'1.0'" in (await failure_of(returning("1.0"))).message
    assert "nan" in (await failure_of(returning(math.nan))).message
    assert "score" in (await failure_of(returning({"score": 1.0}))).message


@pytest.mark.parametrize(
    ("aggregate", "reward"),
    [
        ("mean", 2.0),
        ("sum", 4.0),
        ("min", 1.0),
        ("max", 3.0),
        ({"a": 2, "b": 0.5}, 3.5),
        (lambda rewards: rewards["b"] - rewards["a"], 2.0),
    ],
)
async def test_several_rewards_are_aggregated_the_way_the_author_says(aggregate: Any, reward: float) -> None:
    outcome = (await run_inline(returning({"rewards": {"a": 1, "b": 3}}, aggregate=aggregate))).outcome
    assert outcome.reward == reward
    assert outcome.rewards == {"a": 1.0, "b": 3.0}


async def test_the_last_of_a_list_of_rewards_counts_unless_the_author_says_otherwise() -> None:
    outcome = (await run_inline(returning([1, 0.5, 0.25]))).outcome
    assert (outcome.reward, outcome.rewards) == (0.25, {"0": 1.0, "1": 0.5, "2": 0.25})
    assert (await run_inline(returning([1, 0], aggregate="mean"))).outcome.reward == 0.5


@pytest.mark.parametrize(
    "aggregate", [{"a": 1}, {"a": 1, "b": 1, "c": 1}, lambda r: 1 / 0, lambda r: math.nan]
)
async def test_an_aggregation_that_does_not_work_out_is_a_verifier_failure(aggregate: Any) -> None:
    failure = await failure_of(returning({"rewards": {"a": 1, "b": 3}}, aggregate=aggregate))
    assert failure.kind is FailureKind.VERIFIER


async def test_several_rewards_without_an_aggregation_say_what_to_do() -> None:
    assert "aggregate=" in (await failure_of(returning({"rewards": {"a": 1, "b": 3}}))).message


async def test_metrics_stop_reason_and_extra_are_kept_and_the_records_own_fields_protected() -> None:
    value = {"reward": 1, "metrics": {"steps": 3}, "stop_reason": "solved", "session_id": "forged", "v": 99}
    record = await run_inline(returning({**value, "notes": ["a", {"b": None}]}))
    assert record.outcome.metrics == {"steps": 3.0}
    assert record.outcome.stop_reason == "solved"
    assert record.session_id == "r.1" and record.v == 1
    assert record.extra == {"session_id": "forged", "v": 99, "notes": ["a", {"b": None}]}


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [object(), math.nan, {"deep": [math.inf]}, cyclic(), "\ud800"])
async def test_an_extra_that_json_cannot_hold_is_a_typed_failure_that_names_it(value: object) -> None:
    failure = await failure_of(returning({"reward": 1, "notes": value}))
    assert (failure.kind, failure.reason) == (FailureKind.TASK, Reason.UPLOAD)
    assert "notes" in failure.message


# --- failures ------------------------------------------------------------------------------------


class Panic(BaseException):
    """Not an Exception, as those of native extensions are not."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("boom"), SystemExit(3), KeyboardInterrupt(), Panic("native"), Unprintable()),
        *(GeneratorExit(), RuntimeError("\ud800 lone"), RuntimeError("x" * 100_000)),
        ConnectionError("a tool's own"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_an_agent_raises_is_a_task_failure_with_its_traceback(
    error: BaseException, is_async: bool
) -> None:
    @afield.agent
    async def later(task: dict) -> float:
        raise error

    failure = await failure_of(later if is_async else raising(error))
    assert (failure.kind, failure.reason) == (FailureKind.TASK, Reason.RAISED)
    assert type(error).__name__ in failure.message
    assert "test_agent.py" in failure.traceback


async def test_a_task_of_an_async_agent_that_exits_does_not_take_the_others_along() -> None:
    import asyncio

    async def leave() -> None:
        raise SystemExit(1)

    @afield.agent
    async def agent(task: dict) -> float:
        if task["leave"]:
            await asyncio.create_task(leave())
        await asyncio.sleep(0.2)
        return 1.0

    attempts = [Attempt(name, 1) for name in ("stays", "leaves")]
    async with MemoryTransport() as transport, InlineRuntime(agent, transport.deliver) as runtime:
        with anyio.fail_after(60):
            for attempt in attempts:
                row = {"leave": attempt.rollout_id == "leaves"}
                await runtime.launch(attempt, payload(row, invocation(attempt.rollout_id)))
            for attempt in attempts:
                await runtime.wait(attempt)
        stays, leaves = [await transport.decision(waiting_for(attempt)) for attempt in attempts]
    assert isinstance(stays, OutcomeRecord) and stays.outcome.reward == 1.0
    assert isinstance(leaves, OutcomeRecord) and leaves.outcome.failure


@pytest.mark.parametrize(
    "error",
    [
        afield.PolicyFailure("looped"),
        afield.VerifierFailure("no tests"),
        afield.TaskFailure("no file"),
        afield.InfrastructureFailure("tool server", Reason.TIMEOUT),
    ],
)
async def test_a_rollout_failure_keeps_its_kind(error: afield.RolloutFailure) -> None:
    failure = await failure_of(raising(error))
    assert (failure.kind, failure.reason) == (error.kind, error.reason)


REQUEST = httpx.Request("POST", "http://gateway/v1/chat/completions")


def status_error(status: int, **body: str) -> openai.APIStatusError:
    response = httpx.Response(status, request=REQUEST, json={"error": body})
    client = openai.OpenAI(api_key="k", base_url="http://gateway/v1")
    return client._make_status_error_from_response(response)


def wrapped(error: BaseException) -> BaseException:
    outer = RuntimeError("the framework gave up")
    outer.__cause__ = error
    return outer


INFRASTRUCTURE = (FailureKind.INFRASTRUCTURE, Reason.ENGINE)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (openai.APIConnectionError(request=REQUEST), INFRASTRUCTURE),
        (openai.APITimeoutError(request=REQUEST), INFRASTRUCTURE),
        (openai.APIError("broke off", REQUEST, body=None), INFRASTRUCTURE),
        (status_error(503, message="engine down"), INFRASTRUCTURE),
        (status_error(429, message="slow down"), INFRASTRUCTURE),
        (wrapped(status_error(500)), INFRASTRUCTURE),
        (ExceptionGroup("tasks", [wrapped(status_error(500))]), INFRASTRUCTURE),
        (status_error(429, code="budget_exhausted"), (FailureKind.POLICY, Reason.BUDGET)),
        (status_error(400, type="budget_exhausted"), (FailureKind.POLICY, Reason.BUDGET)),
        (status_error(400, code="context_length_exceeded"), (FailureKind.POLICY, Reason.CONTEXT)),
        (wrapped(status_error(400, code="context_length_exceeded")), (FailureKind.POLICY, Reason.CONTEXT)),
        (status_error(400, code="bad_request"), (FailureKind.TASK, Reason.RAISED)),
        (status_error(401, code="invalid_api_key"), (FailureKind.TASK, Reason.RAISED)),
    ],
)
async def test_a_model_that_does_not_answer_is_not_blamed_on_the_agent(error: Any, expected: Any) -> None:
    failure = await failure_of(raising(error))
    assert (failure.kind, failure.reason) == expected


@pytest.mark.parametrize(
    "error",
    [
        status_error(400, code="context_length_exceeded"),
        status_error(429, code="budget_exhausted"),
        wrapped(status_error(400, code="context_length_exceeded")),
        openai.APIConnectionError(request=REQUEST),
    ],
)
async def test_what_a_graders_own_model_does_wrong_is_the_graders_failure(error: Any) -> None:
    """The policy does not run there: a judge that overflows its context says nothing about it."""

    class Judged(afield.Reward):
        def __call__(self) -> float:
            raise error

    @afield.agent
    def agent(task: dict) -> float:
        return graded()

    graded = Judged()
    failure = await failure_of(agent)
    assert failure.kind is FailureKind.VERIFIER and str(error) in failure.message
    with pytest.raises(VerifierFailure, match="Error"), attributed(VerifierFailure):
        raise error


async def test_a_verifier_may_say_that_it_was_the_policys_doing() -> None:
    with pytest.raises(PolicyFailure, match="cheated"), attributed(VerifierFailure):
        raise PolicyFailure("it cheated")
