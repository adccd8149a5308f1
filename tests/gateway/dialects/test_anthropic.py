"""Anthropic Messages: what is answered, and the official client against a real gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.api_error import ApiError, context_exceeded, engine_down
from afield.gateway.dialects.anthropic import Anthropic
from afield.gateway.dialects.base import RawRequest, ResponseOptions, encode
from afield.gateway.turn_ids import seal
from afield.interfaces import SessionSpec
from afield.turn_tree import TurnTree, canonical
from afield.types import FinishReason, Message, ToolCall
from support.gateways import Running, chat_session, running, vocabulary
from support.replies import REPLIES, STARTED, done, pieces

if TYPE_CHECKING:  # takes a second to import, which every worker would spend
    import anthropic

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
DIALECT = Anthropic()
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOLS: list[Any] = [{"name": "get_price", "description": "The price of an item.", "input_schema": SCHEMA}]
FUNCTION = {"name": "get_price", "description": "The price of an item.", "parameters": SCHEMA}
USER = {"role": "user", "content": "Hi"}


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


def call(**arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "get_price", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@asynccontextmanager
async def client_of(
    up: Running, session: str = "r.1", **spec: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    ticket = await up.client.open(SessionSpec(id=session, **spec))
    async with anthropic.AsyncAnthropic(
        base_url=ticket.base_url, api_key=ticket.api_key, max_retries=0
    ) as client:
        yield client


# --- answers -------------------------------------------------------------------------------------


def events_of(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    return events


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content a client makes of a stream."""
    content: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            delta = {key: value for key, value in event["delta"].items() if key != "type"}
            for key, value in delta.items():
                content[-1][key] = content[-1].get(key, "") + value
        elif event["type"] == "content_block_stop" and "partial_json" in content[-1]:
            content[-1]["input"] = json.loads(content[-1].pop("partial_json"))
    return content


def echoed(content: Any) -> Message:
    body = {"messages": [USER, {"role": "assistant", "content": content}, USER]}
    return DIALECT.decode(RawRequest("/v1/messages", encode(body), {}, {}, {}))[0].messages[1]


@given(REPLIES, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_echoed_response_or_stream_is_the_reply(reply: Message, sizes: list[int]) -> None:
    view = DIALECT.stream(STARTED, ResponseOptions(model="m"))
    stream = view.begin() + b"".join([view.delta(piece) for piece in pieces(reply, sizes)])
    stream += view.end(done(reply))
    answer = json.loads(encode(DIALECT.response(STARTED, done(reply), ResponseOptions(model="m"))))
    for content in (answer["content"], folded(events_of(stream))):
        back = echoed(content)
        assert canonical(back) == canonical(reply)
        assert back.reasoning == reply.reasoning
        assert [c.id for c in back.tool_calls] == [c.id for c in reply.tool_calls]
    start, *_, last, stop = events_of(stream)
    assert start["message"]["id"] == answer["id"]
    assert last["delta"] == {key: answer[key] for key in ("stop_reason", "stop_sequence")}
    assert last["usage"] == answer["usage"]
    assert stop == {"type": "message_stop"}


def test_a_call_without_arguments_has_an_empty_input() -> None:
    reply = Message(role="assistant", tool_calls=(ToolCall("call_t7_0", "bash", ""),))
    view = DIALECT.stream(STARTED, ResponseOptions())
    stream = b"".join([view.delta(piece) for piece in pieces(reply, [1])])
    answer = json.loads(encode(DIALECT.response(STARTED, done(reply), ResponseOptions())))
    assert answer["content"] == folded(events_of(stream))
    assert answer["content"][0]["input"] == {}


def test_each_end_has_its_anthropic_stop_reason() -> None:
    reply = Message(role="assistant", content="x")
    reasons = [
        DIALECT.response(STARTED, finished, ResponseOptions())["stop_reason"]
        for finished in (done(reply), done(reply, FinishReason.LENGTH), done(reply, stop="END"))
    ]
    assert reasons == ["end_turn", "max_tokens", "stop_sequence"]
    assert DIALECT.response(STARTED, done(reply, stop="END"), ResponseOptions())["stop_sequence"] == "END"


def test_each_status_has_its_anthropic_error_type() -> None:
    assert DIALECT.encode_error(context_exceeded(20, 10))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 20 tokens > 10 maximum",
    }
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: None}
    for status, kind in kinds.items():
        shown = DIALECT.encode_error(ApiError(status, "x", "y"))
        assert shown["error"]["type"] == (kind or "invalid_request_error")
    assert DIALECT.encode_error(engine_down("gone"))["error"]["type"] == "overloaded_error"
    assert DIALECT.encode_error(ApiError(500, "x", "y"))["error"]["type"] == "api_error"


# --- the official client -------------------------------------------------------------------------


async def ask(client: anthropic.AsyncAnthropic, messages: list[Any], stream: bool, **options: Any) -> Any:
    options = {"model": "m", "max_tokens": 200, "messages": messages, **options}
    if not stream:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as events:
        async for _ in events:
            pass
        return await events.get_final_message()


async def session(up: Running, stream: bool, name: str) -> list[Any]:
    """Two calls at once, their results, and a word of thanks; the messages as they were sent."""
    async with client_of(up, name) as client:
        messages: list[Any] = [{"role": "user", "content": "How much are x and y?"}]
        for more in ("4", "Thanks."):
            reply = await ask(client, messages, stream, tools=TOOLS, system="Be brief.")
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": more} for c in calls]
            messages.append({"role": "user", "content": results or more})
        await ask(client, messages, stream, tools=TOOLS, system="Be brief.")
        return messages


SCRIPT = [
    said("<think>\nhm</think>\n\nLet me see. " + call(item="x") + call(item="ü"), chunks=(1, 3)),
    said("Both cost 4."),
    said("Bye."),
]


async def test_all_client_methods_record_the_same_tree(tmp_path: Path) -> None:
    fields = ("id", "parent", "root", "delta_ids", "token_ids", "tier", "digest")
    shapes = []
    for stream in (False, True, None):
        engine = ScriptedEngine(list(SCRIPT))
        async with running(engine, tmp_path / str(stream)) as up:
            if stream is None:
                await chat_session(up, FUNCTION)
            else:
                await session(up, stream, "r.1")
            record = await up.client.finalize("r.1")
        shapes.append([[getattr(turn, name) for name in fields] for turn in record.turns])
        assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
        (row,) = record.trajectories
        assert row.token_ids == engine.recorded[-1].prompt_ids + engine.recorded[-1].token_ids
        assert sum(row.loss_mask) == sum(len(entry.token_ids) for entry in engine.recorded)
        assert len(TurnTree(record.turns)) == 3
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_reads_text_calls_and_usage(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(list(SCRIPT))
    async with running(engine, tmp_path) as up, client_of(up) as client:
        reply = await ask(client, [USER], stream, tools=TOOLS, thinking={"type": "adaptive"})
        thinking, text, *calls = reply.content
        assert (thinking.thinking, thinking.signature) == ("hm", seal("t1"))
        assert text.text == "Let me see."
        assert [(c.id, c.name, c.input) for c in calls] == [
            ("call_t1_0", "get_price", {"item": "x"}),
            ("call_t1_1", "get_price", {"item": "ü"}),
        ]
        assert reply.stop_reason == "tool_use"
        entry = engine.recorded[0]
        assert reply.usage.input_tokens == len(entry.prompt_ids)
        assert reply.usage.output_tokens == len(entry.token_ids)
        counted = await client.messages.count_tokens(model="m", messages=[USER], tools=TOOLS)
        assert counted.input_tokens == len(entry.prompt_ids)
        extra = {"return_token_ids": True, "logprobs": True}
        again = await ask(client, [USER], stream, tools=TOOLS, stop_sequences=["cost"], extra_body=extra)
        assert (again.content[0].text.strip(), again.stop_reason, again.stop_sequence) == (
            "Both",
            "stop_sequence",
            "cost",
        )
        if not stream:
            assert tuple(again.token_ids) == engine.recorded[1].token_ids
            assert tuple(again.logprobs) == engine.recorded[1].logprobs


async def test_client_raises_its_own_errors(tmp_path: Path) -> None:
    import anthropic

    script = [said("x" * 40, fail="unavailable", chunks=(2,)), ScriptedReply(fail="unavailable")]
    async with running(ScriptedEngine(script, max_context=200), tmp_path) as up, client_of(up) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await ask(client, [{"role": "user", "content": "long " * 300}], stream=True)
        assert isinstance(refused.value.body, dict)
        message = refused.value.body["error"]["message"]
        assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 200 maximum")
        with pytest.raises(anthropic.BadRequestError, match="role 'robot'"):
            await ask(client, [{"role": "robot", "content": "x"}], stream=False)
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            await ask(client, [USER], stream=True)
        with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
            await ask(client, [USER], stream=False)
        stranger = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            await ask(stranger, [USER], stream=False)
