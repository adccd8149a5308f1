"""OpenAI Completions with the official SDK against a real gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.api_error import ApiError
from afield.gateway.dialects.completions import Completions
from afield.types import Budget, Message
from support.gateways import running, vocabulary
from support.tokenizers import load_tokenizer
from support.turns import STARTED, asked, done, pieces, read_events

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
DIALECT = Completions(load_tokenizer())


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


async def complete(client: openai.AsyncOpenAI, stream: bool, **body: Any) -> Any:
    """The one choice of an answer; a stream is folded into what an answer would be."""
    if not stream:
        return (await client.completions.create(model="m", **body)).choices[0].model_dump()
    folded: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": None}
    async for chunk in await client.completions.create(model="m", stream=True, **body):
        for choice in chunk.choices:
            part = choice.model_dump()
            folded["text"] += part["text"]
            folded["finish_reason"] = part["finish_reason"]
            folded["token_ids"] += part.get("token_ids") or []
            folded["prompt_token_ids"] = folded.get("prompt_token_ids") or part.get("prompt_token_ids")
            if more := part["logprobs"]:
                known = folded["logprobs"] or {name: [] for name in more}
                folded["logprobs"] = {name: known[name] + more[name] for name in more}
    return folded


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_continue_the_turn_they_repeat(tmp_path: Path, stream: bool) -> None:
    # Nothing is parsed, and the split is one that no tokenizer would make.
    odd = ScriptedReply(
        token_ids=(*VOCAB.encode("<tool_call>"), *VOCAB.encode("I"), *VOCAB.encode("t"), STOP)
    )
    engine = ScriptedEngine([odd, said(" on"), said("!")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        first = await complete(client, stream, prompt="Say it: ")
        assert (first["text"], first["finish_reason"]) == ("<tool_call>It", "stop")
        second = await complete(client, stream, prompt=["Say it: " + first["text"] + "<|im_end|> and go"])
        assert second["text"] == " on"
        ids = [*engine.recorded[1].prompt_ids, *engine.recorded[1].token_ids, 20, 21]
        await complete(client, stream, prompt=[ids])
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
    assert engine.recorded[2].prompt_ids == tuple(ids)
    (row,) = record.trajectories
    assert row.token_ids == engine.recorded[2].prompt_ids + engine.recorded[2].token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_response_has_recorded_ids_and_logprobs(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine([said("Hello there.", chunks=(1, 2))])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        made = await complete(client, stream, prompt="Hi", logprobs=1, extra_body={"return_token_ids": True})
    (entry,) = engine.recorded
    assert made["text"] == "Hello there."
    assert (made["prompt_token_ids"], made["token_ids"]) == (list(entry.prompt_ids), list(entry.token_ids))
    assert made["logprobs"]["token_logprobs"] == list(entry.logprobs)
    tokens, offsets = made["logprobs"]["tokens"], made["logprobs"]["text_offset"]
    assert [made["text"][at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)][
        :-1
    ] == tokens[:-1]
    assert made["logprobs"]["top_logprobs"][0] == {tokens[0]: entry.logprobs[0]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say: ", list(VOCAB.encode("Say: "))])
async def test_echo_repeats_the_prompt(tmp_path: Path, stream: bool, prompt: Any) -> None:
    engine = ScriptedEngine([said("it")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        made = await complete(client, stream, prompt=prompt, echo=True, logprobs=0)
    (entry,) = engine.recorded
    assert made["text"] == "Say: it"
    given = len(entry.prompt_ids)
    assert made["logprobs"]["token_logprobs"] == [None] * given + list(entry.logprobs)
    assert made["logprobs"]["text_offset"][given] == len("Say: ")


async def test_stop_strings_length_and_usage(tmp_path: Path) -> None:
    engine = ScriptedEngine([said("one two three"), said("one two three")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        completion = await client.completions.create(model="m", prompt="Count: ", stop=[" two"])
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("one", "stop")
        options: Any = {"include_usage": True}
        stream = await client.completions.create(
            model="m", prompt="Count: ", max_tokens=2, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None and not chunks[-1].choices
    assert (usage.completion_tokens, usage.prompt_tokens) == (2, len(engine.recorded[1].prompt_ids))


async def test_unsupported_parameters_raise_in_the_sdk(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        client = await up.agent(budget=Budget(context=4))
        with pytest.raises(openai.BadRequestError, match="n=2"):
            await client.completions.create(model="m", prompt="Hi", n=2)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt="word " * 50)
        assert caught.value.code == "context_length_exceeded"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [[]]}, "empty"),
    ({"prompt": ["a", "b"]}, "2 prompts"),
    ({"prompt": [[1], [2]]}, "2 prompts"),
    ({"prompt": [1, "a"]}, "2 prompts"),
    ({"prompt": [3, -1]}, "-1"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("body", "named"), BAD)
def test_meaningless_parameters_get_400(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named):
        DIALECT.decode(asked(body))


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.lists(st.integers(1, 4), max_size=9)
)
def test_stream_equals_the_response(text: str, cuts: list[int]) -> None:
    reply = Message(role="assistant", content=text)
    _, wish = DIALECT.decode(asked({"model": "m", "prompt": "Hi", "echo": True}))
    view = DIALECT.stream(STARTED, wish)
    stream = view.begin() + b"".join(map(view.delta, pieces(reply, cuts))) + view.end(done(reply))
    (choice,) = DIALECT.response(STARTED, done(reply), wish)["choices"]
    told = "".join(event["choices"][0]["text"] for event in read_events(stream))
    assert told == choice["text"] == "Hi" + text
