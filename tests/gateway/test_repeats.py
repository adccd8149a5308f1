"""Requests that are asked again: which answer they get, and which answers are trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway import repeats
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Link, Message, Sampling, Turn, TurnStatus, VersionSpan
from support.dialect_clients import LAST
from support.dialect_session import answering, place, said, user
from support.gateways import POLICY, running, vocabulary

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP: Any = VOCAB.id_of("<|im_end|>")
AGAIN = {"x-stainless-retry-count": "1"}


# --- which answer a retry gets --------------------------------------------------------------------


async def test_client_retries_never_return_another_sample(tmp_path: Path) -> None:
    calls = iter(range(100))

    def script(_: Any) -> ScriptedReply:
        n = next(calls)
        fails = {"fail": "unavailable"} if n in (1, 3, 4) else {}
        return said(f"Sample {n}.", n, **fails)

    async with running(ScriptedEngine(script), tmp_path) as up:
        client = await up.agent(max_retries=5)
        ask: Any = [{"role": "user", "content": "Hi"}]
        many = (client.chat.completions.create(model="m", messages=ask) for _ in range(6))
        answers = [made.choices[0].message.content for made in await asyncio.gather(*many)]
        record = await up.client.finalize("r.1")
    assert len(set(answers)) == 6
    assert {e.reason for e in record.excluded} == {"aborted"}
    assert sum(len(row.turns) for row in record.trajectories) == 6


async def test_retry_without_key_gets_only_undelivered_answers(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One."), said("Two."), said("Three.")) as there:
        client = await there.client()
        await client.say(user("Hi"), toolset=0)
        assert not (await client.send(user("Hi"), toolset=0, leaves_at=LAST)).whole
        assert (await client.say(user("Hi"), toolset=0, headers=AGAIN)).reply.content == "Two."
        assert (await client.say(user("Hi"), toolset=0, headers=AGAIN)).reply.content == "Three."


async def test_idempotency_key_survives_a_restart(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One."), said("Two."), said("Three.")) as there:
        client = await there.client()
        for key in ("k1", "k2"):
            await client.say(user("Hi"), toolset=0, headers={"idempotency-key": key})
        again = await client.say(user("Hi"), toolset=0, headers={"idempotency-key": "k1", **AGAIN})
        other = await client.say(user("Hi"), toolset=0, headers={"idempotency-key": "k3", **AGAIN})
        assert (again.reply.content, other.reply.content) == ("One.", "Three.")
    async with answering(tmp_path, said("Four.")) as there:
        client = await there.client()
        for key, text in (("k2", "Two."), ("k1", "One."), ("k2", "Two."), ("k4", "Four.")):
            heard = await client.say(user("Hi"), toolset=0, headers={"idempotency-key": key})
            assert heard.reply.content == text


async def test_idempotency_key_of_another_request_is_ignored(tmp_path: Path) -> None:
    async with answering(tmp_path, said("One."), said("Two.")) as there:
        client = await there.client()
        key = {"idempotency-key": "always the same"}
        assert (await client.say(user("Hi"), toolset=0, headers=key)).reply.content == "One."
        assert (await client.say(user("Ho"), toolset=0, headers=key)).reply.content == "Two."


# --- which answers are trained --------------------------------------------------------------------


def turn(n: int, parent: int | None = None, asked: str = "q", reply: str = "", **rest: Any) -> Turn:
    return Turn(
        id=f"t{n}",
        root="r",
        parent=f"t{parent}" if parent else None,
        delta_ids=(n,),
        token_ids=(1,),
        logprobs=(-1.0,),
        versions=(VersionSpan(0, 1, 0, 0),),
        finish_reason=rest.pop("finish", FinishReason.STOP),
        status=rest.pop("status", TurnStatus.COMMITTED),
        sampling=Sampling(max_tokens=rest.pop("room", 10)),
        messages=(
            Message(role="user", content=rest.pop("text", "?")),
            Message(role="assistant", content=reply),
        ),
        request_digest=asked,
        digest=f"d{n}",
        **rest,
    )


LONG = "The mug costs four dollars, all told."


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([turn(1), turn(2), turn(3, 2, "q2")], {"t1": "abandoned"}, id="one is continued"),
        pytest.param([turn(1), turn(2), turn(3, 1, "q2")], {"t2": "abandoned"}, id="the first is continued"),
        pytest.param([turn(1), turn(2)], {}, id="none is continued"),
        pytest.param([turn(1), turn(2), turn(3, 1, "a"), turn(4, 2, "b")], {}, id="each is continued"),
        pytest.param(
            [turn(1), turn(2), turn(3, 2, "q2", status=TurnStatus.ABORTED)],
            {"t1": "abandoned"},
            id="continued by a call that broke",
        ),
        pytest.param(
            [turn(1, reply=LONG), turn(2), turn(3, 2, "q2"), turn(4, None, "x", text=f"It said: {LONG}")],
            {},
            id="the other one is quoted",
        ),
        pytest.param(
            [
                *(turn(1, reply=LONG), turn(2, reply=LONG), turn(3, 2, "q2")),
                turn(4, None, "x", text=f"Summarise: {LONG}"),
            ],
            {"t1": "abandoned"},
            id="both said what is quoted",
        ),
        pytest.param(
            [turn(1), turn(2), turn(3, 2, "q2"), turn(4, None, "x", links=(Link("edit", "t1"),))],
            {},
            id="the other one was edited",
        ),
        pytest.param([turn(1), turn(2, tags=("retry",))], {"t1": "abandoned"}, id="a retry of the only one"),
        pytest.param(
            [turn(1), turn(2), turn(3, tags=("retry",))], {}, id="a retry of one of two, nobody knows which"
        ),
        pytest.param(
            [turn(1, finish=FinishReason.LENGTH), turn(2, room=20)], {"t1": "superseded"}, id="more room"
        ),
        pytest.param(
            [turn(1, finish=FinishReason.LENGTH), turn(2, room=20), turn(3, 1, "q2")],
            {"t2": "abandoned"},
            id="more room, and the one that was cut off is used",
        ),
        pytest.param([turn(1, asked="a"), turn(2, asked="b"), turn(3, 2, "c")], {}, id="other requests"),
    ],
)
def test_unused_answers_are_abandoned_next_to_a_used_one(turns: list[Turn], expected: dict[str, str]) -> None:
    assert repeats.excluded(TurnTree(turns)) == expected
    on_purpose = {key: reason for key, reason in expected.items() if reason == "superseded"}
    assert repeats.excluded(TurnTree(turns), "train") == on_purpose


def test_undelivered_answer_does_not_exclude_an_earlier_one() -> None:
    forest = TurnTree([turn(1), turn(2, tags=("retry",))])
    assert repeats.excluded(forest, recorded={"t2"}) == {}


@pytest.mark.parametrize("policy", ["exclude", "train"])
async def test_answer_lost_after_the_gateway_is_abandoned(tmp_path: Path, policy: Any) -> None:
    answers = iter([said("One."), said("Two."), said("Done.")])
    async with running(ScriptedEngine(lambda _: next(answers)), tmp_path, POLICY) as up:
        client = await up.agent(abandoned_answers=policy)
        ask: list[Any] = [{"role": "user", "content": "Hi"}]
        await client.chat.completions.create(model="m", messages=ask)
        second = (await client.chat.completions.create(model="m", messages=ask)).choices[0].message
        more: Any = {"role": "user", "content": "And?"}
        await client.chat.completions.create(model="m", messages=[*ask, second, more])  # pyright: ignore[reportArgumentType]
        record = await up.client.finalize("r.1")
    reasons = {e.turn: e.reason for e in record.excluded}
    assert reasons == ({"t1": "abandoned"} if policy == "exclude" else {})
    trained = {part.id for row in record.trajectories for part in row.turns}
    assert trained == ({"t2", "t3"} if policy == "exclude" else {"t1", "t2", "t3"})


async def test_sub_agents_with_equal_answers_continue_separately(tmp_path: Path) -> None:
    thoughts = iter(["<think>\nLeft?\n</think>\n\nYes.", "<think>\nRight?\n</think>\n\nYes."])

    def script(call: Any) -> ScriptedReply:
        return said(next(thoughts, "Done."))

    async with place(tmp_path, ScriptedEngine(script, max_context=8192)) as there:
        client = await there.client()
        first, second = [(await client.say(user("Hi"), toolset=0)).reply for _ in range(2)]
        assert first.content == second.content
        plain = Message(role="assistant", content="Yes.")
        for n in range(2):
            await client.say(user("Hi"), plain, user(f"Go on {n}."), toolset=0)
        seen = await there.look(client)
    assert [turn["parent"] for turn in seen.turns] == [None, None, "t2", "t1"]
    assert seen.linear["excluded"] == []


async def test_thread_names_separate_answers(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedEngine(lambda _: said("Yes."), max_context=8192)) as there:
        client = await there.client(dialect="anthropic")
        named = [{"x-claude-code-agent-id": name} for name in ("a1", "a2")]
        for headers in named:
            await client.say(user("Hi"), toolset=0, headers=headers)
        plain = Message(role="assistant", content="Yes.")
        for headers in (*named, *named):
            await client.say(user("Hi"), plain, user("Go on."), toolset=0, headers=headers)
        seen = await there.look(client)
    assert [turn["parent"] for turn in seen.turns] == [None, None, "t1", "t2", "t1", "t2"]


# --- plain completions ----------------------------------------------------------------------------


async def test_continued_completion_has_no_added_end_token(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*VOCAB.encode(" two"), STOP)))
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        text = (await client.completions.create(model="m", prompt="One")).choices[0].text
        await client.completions.create(model="m", prompt=f"One{text} three")
        await client.completions.create(model="m", prompt=f"One{text}<|im_end|> three")
        record = await up.client.finalize("r.1")
    assert VOCAB.decode(engine.recorded[1].prompt_ids) == "One two three"
    assert VOCAB.decode(engine.recorded[2].prompt_ids) == "One two<|im_end|> three"
    assert [turn.parent for turn in record.turns] == [None, None, "t1"]


async def test_truncated_completion_continues_by_its_ids(tmp_path: Path) -> None:
    ids = (*VOCAB.encode("o"), *VOCAB.encode("n"), *VOCAB.encode("e"))
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*ids, STOP)))
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        text = (await client.completions.create(model="m", prompt="Say ", max_tokens=3)).choices[0].text
        await client.completions.create(model="m", prompt=f"Say {text} more")
        record = await up.client.finalize("r.1")
    assert record.turns[1].parent == "t1"
    assert engine.recorded[1].prompt_ids[: len(engine.recorded[0].prompt_ids) + 3][-3:] == ids
