"""What counts: outcomes, named rewards by weights, rewards of turns from agents to returns."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import afield
from afield.batches.groups import from_groups, to_groups
from afield.batches.jsonl import read_jsonl, write_jsonl
from afield.batches.parquet import read_parquet, write_parquet
from afield.batches.rewards import (
    turn_returns,
    turn_rewards,
    unused_turn_rewards,
    validated_outcome,
    weigh_rewards,
)
from afield.engines.scripted import ScriptedEngine
from afield.errors import UsageError
from afield.gateway.outcomes import GatewayLimits
from afield.interfaces import Chunk, GenerateRequest, PendingAttempt, SessionSpec
from afield.runtimes.inline import InlineRuntime
from afield.sdk.deliver import deliver
from afield.transports.stores.memory import MemoryTransport
from afield.types import (
    Attempt,
    Exclusion,
    FailureKind,
    FinishReason,
    Group,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    Task,
    TurnStatus,
)
from afield.wire import OutcomeRecord
from agents.invoking import invocation, payload
from agents.running import run_inline
from support.dialect_session import said
from support.gateways import running
from support.random_groups import branching, group, turn
from support.strategies import groups

# --- several named rewards -----------------------------------------------------------------------


def named(**rewards: float) -> list[Group]:
    return [group(branching("g-1", 0.0, rewards=rewards), branching("g-2", None))]


def test_named_rewards_are_weighed_and_failures_stay_failures() -> None:
    made = weigh_rewards(named(format=1.0, answer=0.5), {"format": 0.2, "answer": 0.8})
    assert [f.outcome.reward for f in made[0].finished] == [pytest.approx(0.6), None]
    assert made[0].finished[0].outcome.rewards == {"format": 1.0, "answer": 0.5}
    assert from_groups(made).rollouts[0].score == pytest.approx(0.6)
    greedy = [
        group(branching("g-1", 0.0, rewards={"a": 3.0}), baseline=branching("g-0", 9.0, rewards={"a": 2.0}))
    ]
    baseline = weigh_rewards(greedy, {"a": 0.5})[0].baseline
    assert baseline and baseline.outcome.reward == 1.0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"format": 1.0}, r"rollout g-1: reward 'answer' has no weight; give it one, 0 to leave it out"),
        (
            {"format": 1.0, "answer": 1.0, "style": 1.0},
            r"rollout g-1 has no reward named 'style'; it has: answer, format",
        ),
        ({}, "name each reward"),
        ({"format": float("nan")}, "weight nan of reward 'format'"),
    ],
)
def test_weighed_rewards_refuse_missing_and_unknown_names(weights: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        weigh_rewards(named(format=1.0, answer=0.5), weights)


# --- rewards of turns ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_rewards",
    [
        {"t1": 1.0, "t3": 2.0},
        {"chatcmpl-g-1.1-t1": 1.0, "msg_t3": 2.0},
        {"resp_1a2b3c4d5e6f_t1": 1.0, "cmpl-g-1.1-t3": 2.0},
        {"0": 1.0, "2": 2.0},
    ],
)
def test_a_turn_is_named_by_its_id_its_response_or_its_number(given_rewards: dict[str, float]) -> None:
    assert turn_rewards(branching("g-1", 0.0, turn_rewards=given_rewards)) == {"t1": 1.0, "t3": 2.0}


@pytest.mark.parametrize("name", ["t9", "3", "chatcmpl-g-1.1-t7", "nonsense"])
def test_a_reward_of_a_turn_that_does_not_exist_names_rollout_and_turn(name: str) -> None:
    finished = branching("g-1", 0.0, turn_rewards={name: 1.0})
    with pytest.raises(UsageError, match=rf"rollout g-1, turn '{name}' .* there are: t1, t2, t3"):
        turn_rewards(finished)
    with pytest.raises(UsageError, match="rollout g-1"):
        from_groups([group(finished)])


def test_two_rewards_for_one_turn_are_refused() -> None:
    with pytest.raises(UsageError, match=r"rollout g-1, turn '0' has two rewards: it is turn t1"):
        turn_rewards(branching("g-1", 0.0, turn_rewards={"t1": 1.0, "0": 1.0}))


def test_what_an_untrained_turn_got_counts_for_the_one_before_it() -> None:
    finished = branching("g-1", 0.0, turn_rewards={"t4": 5.0, "t1": 1.0})
    aborted = structs.replace(
        turn("t4", "t1", (9,), (9,)), status=TurnStatus.ABORTED, finish_reason=FinishReason.ABORTED
    )
    finished = structs.replace(
        finished, turns=(*finished.turns, aborted), excluded=(Exclusion("t4", 1, "aborted"),)
    )
    assert turn_rewards(finished) == {"t1": 1.0, "t3": 5.0}
    first = structs.replace(finished, turns=(aborted_root(), *finished.turns[:3]))
    assert turn_rewards(first) == {"t1": 1.0}


def aborted_root():
    made = turn("t4", None, (9,), (9,))
    return structs.replace(made, status=TurnStatus.ABORTED, finish_reason=FinishReason.ABORTED)


def test_returns_are_what_a_turn_led_to() -> None:
    made = [group(branching("g-1", 10.0, turn_rewards={"t1": 1.0, "t2": 2.0}), branching("g-2", None))]
    assert turn_returns(made, outcome="last") == {"g-1": {"t1": 13.0, "t2": 12.0, "t3": 10.0}}
    assert turn_returns(made, outcome="leave") == {"g-1": {"t1": 3.0, "t2": 2.0, "t3": 0.0}}
    assert turn_returns(made, outcome="last", discount=0.5) == {"g-1": {"t1": 4.5, "t2": 7.0, "t3": 10.0}}
    assert turn_returns(made, outcome="last", discount=0.0) == {"g-1": {"t1": 1.0, "t2": 2.0, "t3": 10.0}}


def test_the_floor_of_a_policy_failure_is_what_its_last_turn_got() -> None:
    lost = branching("g-1", None)
    failure = structs.replace(lost.outcome.failure, kind=FailureKind.POLICY)
    spent = structs.replace(lost, outcome=structs.replace(lost.outcome, failure=failure))
    assert turn_returns([group(spent)], outcome="last", floor=-1.0) == {
        "g-1": {"t1": -1.0, "t2": -1.0, "t3": -1.0}
    }


@pytest.mark.parametrize(
    ("wrong", "says"), [({"discount": 1.5}, "discount 1.5"), ({"outcome": "sum"}, "unknown outcome 'sum'")]
)
def test_wrong_settings_are_named(wrong: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        turn_returns([], **{"outcome": "last", **wrong})


@given(groups(), st.sampled_from(["linear", "per_turn"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_returns_survive_a_batch_in_any_form(made: list[Group], form, discount: float) -> None:
    """Whatever turns they were given for, in whatever order rows have them."""
    bare = [structs.replace(g, baseline=None) for g in made]
    before = turn_returns(bare, outcome="last", discount=discount)
    again = to_groups(from_groups(bare, form))
    assert turn_returns(again, outcome="last", discount=discount) == before


# --- rewards with a name and a turn --------------------------------------------------------------

BOTH = {"format": {"t1": 1.0, "2": 0.5}, "style": {"chatcmpl-g-1.1-t2": 4.0}}


def test_rewards_with_a_name_and_a_turn_count_by_their_weights() -> None:
    finished = branching(
        "g-1", 0.0, rewards={"format": 2.0}, turn_rewards={"t1": 0.25}, named_turn_rewards=BOTH
    )
    assert turn_rewards(finished) == {"t1": 0.25}
    ((made,),) = (one.finished for one in weigh_rewards([group(finished)], {"format": 0.5, "style": 0.1}))
    assert made.outcome.reward == 1.0
    assert turn_rewards(made) == {"t1": 0.75, "t2": pytest.approx(0.4), "t3": 0.25}
    returns = turn_returns([group(made)], outcome="last")["g-1"]
    assert returns == pytest.approx({"t1": 2.4, "t2": 1.65, "t3": 1.25})
    assert made.outcome.named_turn_rewards == BOTH


def test_a_named_reward_of_turns_needs_a_weight_like_any_other() -> None:
    finished = branching("g-1", 0.0, named_turn_rewards=BOTH)
    with pytest.raises(UsageError, match="rollout g-1: reward 'style' has no weight"):
        weigh_rewards([group(finished)], {"format": 1.0})
    with pytest.raises(UsageError, match="has no reward named 'answer'; it has: format, style"):
        weigh_rewards([group(finished)], {"format": 1.0, "style": 1.0, "answer": 1.0})
    stray = branching("g-1", 0.0, named_turn_rewards={"format": {"t9": 1.0}})
    refused = validated_outcome(stray)
    assert refused.failure and "turn 't9'" in refused.failure.message
    assert refused.named_turn_rewards == {}


@pytest.mark.parametrize("form", ["linear", "per_turn"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rewards_with_a_name_and_a_turn_are_exported_and_read_back(tmp_path: Path, form, kind: str) -> None:
    finished = branching("g-1", 0.5, named_turn_rewards=BOTH)
    batch = from_groups([group(finished)], form)
    write, read = {"jsonl": (write_jsonl, read_jsonl), "parquet": (write_parquet, read_parquet)}[kind]
    write(tmp_path / f"rows.{kind}", batch)
    (record,) = read(tmp_path / f"rows.{kind}").rollouts
    assert record.outcome.named_turn_rewards == {"format": {"t1": 1.0, "t3": 0.5}, "style": {"t2": 4.0}}


@pytest.mark.parametrize(
    ("credit", "weights", "unused"),
    [("outcome", {"format": 1.0}, 4), ("turns", {"format": 1.0}, 0), ("turns", {}, 3)],
)
def test_rewards_of_turns_that_are_not_learned_from_are_counted(credit, weights, unused: int) -> None:
    made = [group(branching("g-1", 0.0, turn_rewards={"t1": 1.0}, named_turn_rewards=BOTH))]
    assert unused_turn_rewards(made, credit=credit, weights=weights) == unused


async def test_an_agent_returns_rewards_with_a_name_and_a_turn() -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"reward": 1.0, "named_turn_rewards": {"format": [0.5, 1], "style": {"t2": 2}}}

    record = await run_inline(agent)
    assert record.outcome.named_turn_rewards == {"format": {"0": 0.5, "1": 1.0}, "style": {"t2": 2.0}}
    assert record.extra == {}


async def test_rewards_with_a_name_and_a_turn_come_by_reward_and_by_outcome(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        key = (await up.client.open(SPEC)).api_key
        asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        await up.ask("POST", "/s/r.1/v1/chat/completions", asked, key)
        sent = {"reward": 0.5, "turn": "t1", "name": "format"}
        assert (await up.ask("POST", "/s/r.1/reward", sent, key))[0] == 200
        assert (await up.ask("POST", "/s/r.1/reward", {**sent, "reward": 0.6}, key))[0] == 409
        body = {"reward": 1.0, "named_turn_rewards": {"style": {"0": 0.25}, "format": {"t1": 0.5}}}
        status, state = await up.ask("POST", "/s/r.1/outcome", body, key)
        assert status == 200 and sent in state["rewards"]
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord)
        assert found.outcome.named_turn_rewards == {"format": {"t1": 0.5}, "style": {"0": 0.25}}


# --- from an agent -------------------------------------------------------------------------------

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        ({"chatcmpl-r.1-t1": 0.5, "t2": 1}, {"chatcmpl-r.1-t1": 0.5, "t2": 1.0}),
        ([0.5, True], {"0": 0.5, "1": 1.0}),
        (None, {}),
    ],
)
async def test_an_agent_says_what_its_turns_got(returned: object, kept: dict[str, float]) -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"reward": 1.0, "turn_rewards": returned, "note": "kept"}

    record = await run_inline(agent)
    assert record.outcome.turn_rewards == kept
    assert record.extra == {"note": "kept"}


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"first": 1.0}, "has the key 'first'"),
        ({"t1": float("nan")}, "nan; it must be a finite number"),
        (3.0, "must be a dict or a list"),
    ],
)
async def test_rewards_of_no_turn_are_the_verifiers_failure(returned: object, says: str) -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"reward": 1.0, "turn_rewards": returned}

    failure = (await run_inline(agent)).outcome.failure
    assert failure and failure.kind is FailureKind.VERIFIER and says in failure.message


async def test_agent_that_returns_only_turn_rewards_fails() -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"turn_rewards": [1.0]}

    failure = (await run_inline(agent)).outcome.failure
    assert failure and "add 'reward' or 'rewards'" in failure.message


# --- over HTTP -----------------------------------------------------------------------------------

SPEC = SessionSpec(id="r.1", rollout_id="r", attempt=1, group_id="g", exp_id="exp", input_id="t")
WAITING = PendingAttempt(Rollout(id="r", exp_id="exp", group_id="g", task=Task("t", {})), Attempt("r", 1))


async def test_rewards_of_turns_come_by_reward_and_by_outcome(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        key = (await up.client.open(SPEC)).api_key
        asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        turn_id = (await up.ask("POST", "/s/r.1/v1/chat/completions", asked, key))[1]["id"].rpartition("-")[2]
        sent = {"reward": 0.5, "turn": turn_id}
        for _ in range(2):
            assert (await up.ask("POST", "/s/r.1/reward", sent, key))[0] == 200
        assert (await up.ask("POST", "/s/r.1/reward", {**sent, "reward": 0.6}, key))[0] == 409
        await up.ask("POST", "/s/r.1/v1/chat/completions", asked, key)
        body = {"reward": 1.0, "turn_rewards": {"1": 0.25}}
        assert (await up.ask("POST", "/s/r.1/outcome", body, key))[0] == 200
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord)
        assert (found.outcome.reward, found.outcome.turn_rewards) == (1.0, {turn_id: 0.5, "1": 0.25})


@pytest.mark.parametrize("name", ["t9", "1", "chatcmpl-r.1-t7", "nonsense", "9" * 5000])
async def test_a_reward_for_a_turn_that_does_not_exist_is_refused_at_once(tmp_path: Path, name: str) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        key = (await up.client.open(SPEC)).api_key
        asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        await up.ask("POST", "/s/r.1/v1/chat/completions", asked, key)
        for path, body in (
            ("reward", {"reward": 0.5, "turn": name}),
            ("outcome", {"reward": 1.0, "turn_rewards": {name: 0.5}}),
        ):
            status, answer = await up.ask("POST", f"/s/r.1/{path}", body, key)
            assert status == 400
            assert f"has no turn {name!r}; it has: t1; calls are numbered" in answer["error"]["message"]
        state = await up.client.state("r.1")
        assert state.phase == "open" and state.rewards == []  # nothing of it was taken
        assert (await up.ask("POST", "/s/r.1/outcome", {"reward": 1.0}, key))[0] == 200


async def test_a_turn_has_one_reward_however_it_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with running(engine, tmp_path) as up:
        key = (await up.client.open(SPEC)).api_key
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        _, reply = await up.ask("POST", "/s/r.1/v1/chat/completions", body, key)
        for name in ("t1", "0", reply["id"]):
            assert (await up.ask("POST", "/s/r.1/reward", {"reward": 0.5, "turn": name}, key))[0] == 200
        assert (await up.ask("POST", "/s/r.1/reward", {"reward": 0.7, "turn": "0"}, key))[0] == 409
        assert (await up.client.state("r.1")).rewards == [{"reward": 0.5, "turn": "t1"}]


async def test_a_call_that_still_runs_may_be_rewarded_and_repeating_it_is_harmless(tmp_path: Path) -> None:
    requested, go = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
            requested.set()
            await go.wait()
            async for chunk in super().generate(call):
                yield chunk

    async with running(Slow(lambda _: said("Yes.")), tmp_path) as up:
        key = (await up.client.open(SPEC)).api_key
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
        calling = asyncio.create_task(up.ask("POST", "/s/r.1/v1/chat/completions", body, key))
        await requested.wait()
        outcome = {"reward": 1.0, "turn_rewards": {"0": 0.5, "t1": 0.5}}
        refused = await up.ask("POST", "/s/r.1/outcome", {"turn_rewards": {"1": 0.5}}, key)
        assert refused[0] == 400
        assert (await up.ask("POST", "/s/r.1/outcome", outcome, key))[0] == 200
        calling.cancel()  # the call comes to nothing: there is no answered call 0 any more
        await asyncio.gather(calling, return_exceptions=True)
        go.set()
        async with asyncio.timeout(60):
            while (await up.client.state("r.1")).in_flight:
                await asyncio.sleep(0.01)
        assert (await up.ask("POST", "/s/r.1/outcome", outcome, key))[0] == 200


async def test_an_agent_whose_outcome_is_refused_leaves_the_verifiers_failure_in_its_place(
    tmp_path: Path,
) -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"reward": 1.0, "turn_rewards": {"t5": 1.0}}

    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        ticket = await up.client.open(SPEC)
        at = invocation(outcome_url=f"{ticket.base_url}/outcome")
        at = structs.replace(at, base_url=ticket.base_url, api_key=ticket.api_key)
        async with asyncio.timeout(60), InlineRuntime(agent) as agents:
            await agents.launch(WAITING.attempt, payload({}, at))
            await agents.wait(WAITING.attempt)
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord)
        failure = found.outcome.failure
        assert failure and (failure.kind, failure.reason) == (FailureKind.VERIFIER, Reason.REWARD)
        assert "has no turn 't5'" in failure.message


async def test_an_agent_that_gives_no_rewards_gives_none_for_turns(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        ticket = await up.client.open(structs.replace(SPEC, reward_from="verifier"))
        body = {"turn_rewards": {"t1": 1.0}}
        assert (await up.ask("POST", "/s/r.1/outcome", body, ticket.api_key))[0] == 403


async def test_the_sdk_brings_rewards_of_turns_through_the_gateway(tmp_path: Path) -> None:
    """And each of them is the reward of the call whose response the agent named."""
    engine = ScriptedEngine(lambda _: said("Yes."))
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet) as up:
        ticket = await up.client.open(SPEC)
        client = openai.AsyncOpenAI(base_url=ticket.openai_base_url, api_key=ticket.api_key)
        async with client:
            ask = client.chat.completions.create
            replies = [await ask(model="m", messages=[{"role": "user", "content": q}]) for q in ("a", "b")]
        at = invocation(outcome_url=f"{ticket.base_url}/outcome")
        at = structs.replace(at, base_url=ticket.base_url, api_key=ticket.api_key)
        outcome = Outcome(rollout_id="r", attempt=1, reward=1.0, turn_rewards={replies[1].id: 0.5})
        assert await asyncio.to_thread(deliver, at, OutcomeRecord.of(at, outcome))
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord) and found.outcome == outcome
        record = await up.client.finalize("r.1")
        finished = RolloutResult(
            rollout=WAITING.rollout,
            outcome=found.outcome,
            trajectories=record.trajectories,
            excluded=record.excluded,
            turns=record.turns,
        )
        assert turn_rewards(finished) == {record.turns[1].id: 0.5}
        assert len(record.turns) == 2


# --- how much ------------------------------------------------------------------------------------


async def test_a_session_submits_so_much_and_no_more(tmp_path: Path) -> None:
    limits = GatewayLimits(submission_bytes=1000, rewards=2)
    async with running(ScriptedEngine([]), tmp_path, limits=limits) as up:
        key = (await up.client.open(SPEC)).api_key
        large = {"reward": 1.0, "artifacts": {"patch": "x" * 1000}}
        packed = {"authorization": f"Bearer {key}", "content-encoding": "gzip"}
        bomb = gzip.compress(msgspec.json.encode(large))
        for status, answer in (
            await up.ask("POST", "/s/r.1/outcome", large, key),
            await up.ask("POST", "/s/r.1/outcome", bomb, headers=packed),
        ):
            assert status == 413 and "1000 are allowed" in answer["error"]["message"]
            assert "--max-submission-mb" in answer["error"]["hint"]
        for name in ("a", "b", "a"):  # the same again is not another
            assert (await up.ask("POST", "/s/r.1/reward", {"reward": 1.0, "name": name}, key))[0] == 200
        status, answer = await up.ask("POST", "/s/r.1/reward", {"reward": 1.0, "name": "c"}, key)
        assert status == 429 and "2 rewards" in answer["error"]["message"]
        assert (await up.ask("POST", "/s/r.1/outcome", {"rewards": {"c": 1.0, "d": 1.0}}, key))[0] == 429
        state = await up.client.state("r.1")
        assert (state.phase, len(state.rewards)) == ("open", 2)


async def test_an_agent_that_submits_too_much_has_failed_with_that_as_the_reason(tmp_path: Path) -> None:
    @afield.agent
    def agent(task: dict) -> dict:
        return {"reward": 1.0, "patch": "x" * 5000}

    engine, limits = ScriptedEngine([]), GatewayLimits(submission_bytes=4000)
    async with MemoryTransport() as outlet, running(engine, tmp_path, outlet=outlet, limits=limits) as up:
        ticket = await up.client.open(SPEC)
        at = invocation(outcome_url=f"{ticket.base_url}/outcome")
        at = structs.replace(at, base_url=ticket.base_url, api_key=ticket.api_key)
        async with asyncio.timeout(20), InlineRuntime(agent) as agents:
            await agents.launch(WAITING.attempt, payload({}, at))
            await agents.wait(WAITING.attempt)
        found = await outlet.decision(WAITING)
        assert isinstance(found, OutcomeRecord) and found.outcome.failure
        assert (found.outcome.failure.kind, found.outcome.failure.reason) == (FailureKind.TASK, Reason.UPLOAD)
        assert "413" in found.outcome.failure.message
