"""OpenAI Responses with the official SDK against a real gateway: streaming and not, the same forest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.types import Budget, FinishReason, Sampling
from support.gateways import running, vocabulary

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}}
PRICE = {"name": "get_price", "description": "The price of an item.", "parameters": PARAMETERS}
FLAT: list[Any] = [{"type": "function", "strict": False, **PRICE}]
NESTED: list[Any] = [{"type": "function", "function": PRICE}]


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


def calls(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def respond(client: openai.AsyncOpenAI, stream: bool, **body: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", **body)
    async with client.responses.stream(model="m", **body) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == sorted(set(numbers))
        return await events.get_final_response()


def echo(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


def results(response: Any) -> list[Any]:
    call_ids = [item.call_id for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": each, "output": f"{n}"} for n, each in enumerate(call_ids)
    ]


TALK = [
    said("<think>\nTwo?\n</think>\n\nI look. " + calls("get_price", item="x") + calls("get_price", item="ü")),
    said(calls("get_price", item="z"), chunks=(2,)),
    said("All done."),
    said("Bye."),
]
FIELDS = ("parent", "delta_ids", "token_ids", "logprobs", "tier", "messages")


async def through_responses(folder: Path, stream: bool, **body: Any) -> list[Any]:
    engine = ScriptedEngine(list(TALK))
    async with running(engine, folder) as up:
        client = await up.agent()
        items: list[Any] = [{"role": "user", "content": "Prices?"}]
        for n in range(4):
            response = await respond(
                client, stream, input=items, instructions="Be brief.", tools=FLAT, **body
            )
            items += echo(response) + results(response)
            items += [{"role": "user", "content": "Thanks."}] if n == 2 else []
        record = await up.client.finalize("r.1")
    return [[getattr(turn, name) for name in FIELDS] for turn in record.turns]


async def through_chat(folder: Path) -> list[Any]:
    engine = ScriptedEngine(list(TALK))
    async with running(engine, folder) as up:
        client = await up.agent()
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Prices?"},
        ]
        for n in range(4):
            completion = await client.chat.completions.create(model="m", messages=messages, tools=NESTED)
            message = completion.choices[0].message
            messages.append(message)
            ids = [call.id for call in message.tool_calls or ()]
            messages += [
                {"role": "tool", "tool_call_id": each, "content": f"{i}"} for i, each in enumerate(ids)
            ]
            messages += [{"role": "user", "content": "Thanks."}] if n == 2 else []
        record = await up.client.finalize("r.1")
    return [[getattr(turn, name) for name in FIELDS] for turn in record.turns]


async def test_tool_session_records_the_same_tree_as_chat(tmp_path: Path) -> None:
    in_chat = await through_chat(tmp_path / "chat")
    assert [turn[0] for turn in in_chat] == [None, "t1", "t2", "t3"]
    assert await through_responses(tmp_path / "whole", stream=False) == in_chat
    assert await through_responses(tmp_path / "stream", stream=True) == in_chat
    sealed: Any = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
    }
    assert await through_responses(tmp_path / "sealed", stream=True, **sealed) == in_chat


@pytest.mark.parametrize("stream", [False, True])
async def test_previous_response_id_continues_the_conversation(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(list(TALK))
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        rest: Any = {"instructions": "Be brief.", "tools": FLAT}
        response = await respond(client, stream, input="Prices?", **rest)
        for _ in range(2):
            told = results(response)
            response = await respond(client, stream, input=told, previous_response_id=response.id, **rest)
        assert response.output_text == "All done."
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]


@pytest.mark.parametrize("whole_calls", [False, True])
async def test_item_references_keep_tool_results(tmp_path: Path, whole_calls: bool) -> None:
    """As the Vercel AI SDK writes it: what a turn sampled is referred to, its results are sent."""
    engine = ScriptedEngine(list(TALK))
    async with running(engine, tmp_path / "references") as up:
        client = await up.agent()
        items: list[Any] = [{"role": "user", "content": "Prices?"}]
        for n in range(4):
            response = await respond(
                client, False, input=items, instructions="Be brief.", tools=FLAT, store=True
            )
            items += [
                item if whole_calls and item.type == "function_call" else refer(item)
                for item in response.output
            ]
            items += results(response)
            items += [{"role": "user", "content": "Thanks."}] if n == 2 else []
        record = await up.client.finalize("r.1")
    referred = [[getattr(turn, name) for name in FIELDS] for turn in record.turns]
    assert referred == await through_chat(tmp_path / "chat")


def refer(item: Any) -> Any:
    return {"type": "item_reference", "id": item.id}


async def test_unknown_previous_response_has_its_error_code(tmp_path: Path) -> None:
    async with running(ScriptedEngine(list(TALK)), tmp_path) as up:
        client = await up.agent()
        for name in ("resp_t9", "resp_elsewhere"):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="Hi", previous_response_id=name)
            assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_and_namespaced_tools_work(tmp_path: Path, stream: bool) -> None:
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
    tools: list[Any] = [
        {"type": "custom", "name": "patch", "description": "Edit."},
        {"type": "namespace", "name": "agents", "description": "Others.", "tools": [spawn]},
        {"type": "web_search"},
    ]
    script = [said(calls("patch", input="*** ü") + calls("spawn", role="r")), said("Done.")]
    async with running(ScriptedEngine(script), tmp_path) as up:
        client = await up.agent()
        items: list[Any] = [{"role": "user", "content": "Go"}]
        first = await respond(client, stream, input=items, tools=tools)
        patch, spawned = first.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** ü")
        assert (spawned.name, spawned.namespace) == ("spawn", "agents")
        items += [*echo(first), {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"}]
        items += [{"type": "function_call_output", "call_id": spawned.call_id, "output": "ok"}]
        second = await respond(client, stream, input=items, tools=tools)
        assert second.output_text == "Done."
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1"]
    assert record.turns[0].tags == ("overridden:tools.web_search", "empty-schema:spawn")


async def test_usage_and_ids_are_recorded_values(tmp_path: Path) -> None:
    engine = ScriptedEngine([said("Hello.")])
    async with running(engine, tmp_path) as up:
        client = await up.agent()
        counted = await client.responses.input_tokens.count(model="m", input="Hi")
        response = await client.responses.create(model="m", input="Hi", extra_body={"return_token_ids": True})
    (entry,) = engine.recorded
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens == len(entry.prompt_ids)
    assert response.usage.output_tokens == len(entry.token_ids)
    extra = response.model_extra or {}
    assert (extra["prompt_token_ids"], extra["token_ids"]) == (list(entry.prompt_ids), list(entry.token_ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_response_at_the_token_limit_is_incomplete(tmp_path: Path, stream: bool) -> None:
    async with running(ScriptedEngine([said("Hello there.")]), tmp_path) as up:
        client = await up.agent(sampling=Sampling(max_tokens=2))
        if not stream:
            made = await client.responses.create(model="m", input="Hi")
        else:
            events = [e async for e in await client.responses.create(model="m", input="Hi", stream=True)]
            assert events[-1].type == "response.incomplete"
            made = events[-1].response
        assert made.status == "incomplete" and made.incomplete_details
        assert made.incomplete_details.reason == "max_output_tokens"
        (turn,) = (await up.client.finalize("r.1")).turns
    assert turn.finish_reason is FinishReason.LENGTH


async def test_context_overflow_error_makes_clients_compact(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        client = await up.agent(budget=Budget(context=8))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="word " * 50)
        assert caught.value.code == "context_length_exceeded"
        stream = await client.responses.create(model="m", input="word " * 50, stream=True)
        events = [event async for event in stream]
        assert [e.type for e in events] == ["response.created", "response.in_progress", "response.failed"]
        last = events[-1]
        assert last.type == "response.failed" and last.response.error
        assert last.response.error.code == "context_length_exceeded"
        assert (await up.client.finalize("r.1")).turns == ()


async def test_engine_failure_fails_the_stream(tmp_path: Path) -> None:
    broken = ScriptedReply(token_ids=tuple(VOCAB.encode("Hel")), fail="unavailable")
    async with running(ScriptedEngine([broken]), tmp_path) as up:
        client = await up.agent()
        events = [e async for e in await client.responses.create(model="m", input="Hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed" and last.response.error
    assert last.response.error.code == "server_error"


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"input": 3},
        {"input": "Hi", "background": True},
        {"input": "Hi", "tools": [{"type": "function", "name": 5}]},
        {"input": "Hi", "max_output_tokens": "many"},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}
            ]
        },
    ],
)
async def test_malformed_request_raises_in_the_sdk(tmp_path: Path, body: Any) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        client = await up.agent()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", **body)
        assert caught.value.type == "invalid_request_error"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").responses.create(model="m", input="Hi")
