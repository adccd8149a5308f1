"""OpenAI Chat Completions: what clients send besides the plain case, and the SDK's own helpers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.api_error import ApiError
from afield.gateway.dialects.chat import Chat
from afield.turn_tree import canonical
from afield.types import Message, ToolCall
from support.gateways import running, vocabulary
from support.tokenizers import load_tokenizer
from support.turns import STARTED, asked, done, pieces, read_events

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
DIALECT = Chat(load_tokenizer())
PARAMETERS = {
    "type": "object",
    "properties": {"item": {"type": "string"}},
    "required": ["item"],
    "additionalProperties": False,
}
PRICE: Any = {"type": "function", "function": {"name": "get_price", "parameters": PARAMETERS, "strict": True}}


def said(text: str) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP))


def messages(*wire: dict[str, Any]) -> tuple[Message, ...]:
    return DIALECT.decode(asked({"model": "m", "messages": list(wire)}))[0].messages


def test_empty_parts_and_unknown_fields_are_accepted() -> None:
    parts = [
        {"type": "text", "text": ""},
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
    ]
    (message,) = messages(
        {"role": "assistant", "content": parts, "reasoning": {"effort": "low"}, "audio": None}
    )
    assert (message.content, message.reasoning) == ("a", "")
    (thought,) = messages({"role": "assistant", "content": None, "reasoning_content": "hm"})
    assert (thought.content, thought.reasoning) == ("", "hm")


def test_request_without_a_model_is_accepted() -> None:
    assert DIALECT.decode(asked({"model": None, "messages": [USER]}))[0].model == ""


def test_legacy_function_calls_are_accepted() -> None:
    call = {"name": "f", "arguments": "{}"}
    first, second = messages(
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
    )
    assert first.tool_calls == (ToolCall("", "f", "{}"),)
    assert (second.role, second.name, second.content) == ("tool", "f", "1")


USER = {"role": "user", "content": "Hi"}
AUDIO: Any = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": [AUDIO]}]}, "input_audio"),
        ({"messages": [USER], "modalities": ["text", "audio"]}, "audio"),
        ({"messages": [USER], "functions": [{"name": "f"}]}, "functions"),
        ({"messages": [USER], "n": 2}, "n=2"),
        ({"messages": [USER], "seed": 2**63}, "seed"),
        ({"messages": [USER], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "empty"),
    ],
)
def test_unsupported_parameters_are_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named):
        DIALECT.decode(asked(body))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
arguments = st.dictionaries(texts, texts, max_size=2).map(json.dumps) | texts
calls = st.lists(arguments, max_size=3).map(
    lambda made: tuple(ToolCall(f"call_t3_{n}", "f", text) for n, text in enumerate(made))
)


@given(texts, texts, calls, st.lists(st.integers(1, 4), max_size=9))
def test_stream_equals_the_response_and_echoes_as_the_reply(
    content: str, reasoning: str, made: tuple[ToolCall, ...], cuts: list[int]
) -> None:
    reply = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)
    _, wish = DIALECT.decode(asked({"model": "m", "messages": [USER]}))
    view = DIALECT.stream(STARTED, wish)
    stream = view.begin() + b"".join(map(view.delta, pieces(reply, cuts))) + view.end(done(reply))
    (choice,) = DIALECT.response(STARTED, done(reply), wish)["choices"]
    folded: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in read_events(stream):
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            folded[name] += delta.get(name, "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                folded["tool_calls"].append(part | {"function": dict(part["function"])})
            else:
                folded["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    for echoed in (folded, choice["message"]):
        (message,) = messages(echoed)
        assert canonical(message) == canonical(reply)
        assert (message.reasoning, message.tool_calls) == (reasoning, made)


async def test_sdk_stream_helper_returns_the_reply(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "get_price", "arguments": {"item": "x"}}\n</tool_call>'
    engine = ScriptedEngine([said("<think>\nhm\n</think>\n\nI look." + call)])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        asking = client.chat.completions.stream(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[PRICE],
            logprobs=True,
            stream_options={"include_usage": True},
        )
        async with asking as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    choice = final.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (made,) = choice.message.tool_calls or []
    assert made.function.parsed_arguments == {"item": "x"}
    assert choice.logprobs and choice.logprobs.content
    assert [entry.logprob for entry in choice.logprobs.content] == list(engine.recorded[0].logprobs)
    assert final.usage and final.usage.completion_tokens == len(engine.recorded[0].token_ids)


class Price(BaseModel):
    item: str
    dollars: int


async def test_structured_output_is_parsed_when_the_model_gives_it(tmp_path: Path) -> None:
    async with running(ScriptedEngine([said('{"item": "mug", "dollars": 4}')]), tmp_path) as up:
        client = await up.agent()
        made = await client.chat.completions.parse(
            model="m", messages=[{"role": "user", "content": "Hi"}], response_format=Price
        )
        assert made.choices[0].message.parsed == Price(item="mug", dollars=4)
        (turn,) = (await up.client.finalize("r.1")).turns
    assert turn.tags == () and turn.constraint is not None


async def test_sdk_raises_bad_request(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        client = await up.agent()
        with pytest.raises(openai.BadRequestError, match="input_audio"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [AUDIO]}])


async def test_large_bodies_are_decoded_in_threads(tmp_path: Path) -> None:
    """They are read in threads, which must not touch what their session remembers."""
    async with running(ScriptedEngine([]), tmp_path) as up:
        await up.agent()
        path = "/s/r.1/v1/chat/completions"
        bodies = [
            {"messages": [{"role": "user", "content": "word " * size}]}
            for size in (200_000, 50_000)
            for _ in range(4)
        ]
        answers = await asyncio.gather(*(up.ask("POST", path, body) for body in bodies))
        assert {(status, told["error"]["code"]) for status, told in answers} == {
            (400, "context_length_exceeded")
        }
