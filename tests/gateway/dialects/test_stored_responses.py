"""OpenAI Responses with the official SDK: whole objects, stored responses, log-probabilities, compaction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.types import Sampling, TurnStatus
from support.gateways import Running, running, vocabulary

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>") or 0
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_price", "parameters": PARAMETERS},
    {"type": "custom", "name": "patch", "description": "Free text."},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SUMMARY = "The user wants prices. x costs 1."
REQUIRED = set(Response.model_fields) | {"presence_penalty", "frequency_penalty", "store"}


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def answers(call: GenerateRequest) -> ScriptedReply:
    prompt = VOCAB.decode(call.prompt_ids)
    if "Write the summary only." in prompt[-300:]:
        return said(SUMMARY)
    if "Prices?" in prompt[-60:]:
        return said("<think>\nTwo?\n</think>\n\nI look. " + PRICE_X, chunks=(2, 1))
    return said("It is ünïque 😀.", chunks=(3,))


PRICE_X = call("get_price", item="x")


async def agent(up: Running, session: str = "r.1", **spec: Any) -> openai.AsyncOpenAI:
    return await up.agent(session, **spec)


async def raw(up: Running, method: str, path: str, body: Any = None, session: str = "r.1") -> tuple[int, Any]:
    return await up.ask(method, f"/s/{session}/v1/responses{path}", body)


def checked(response: dict[str, Any]) -> dict[str, Any]:
    """Every field is there, and the SDK's own types take it."""
    assert set(response) >= REQUIRED, REQUIRED - set(response)
    Response.model_validate(response)
    return response


# --- whole objects --------------------------------------------------------------------------------

BODY: dict[str, Any] = {
    "model": "m",
    "input": "Prices?",
    "instructions": "Be brief.",
    "tools": TOOLS,
    "temperature": 0.3,
    "metadata": {"a": "b"},
    "user": "u1",
    "safety_identifier": "s1",
    "prompt_cache_key": "p1",
    "prompt_cache_retention": "24h",
    "max_tool_calls": 3,
    "max_output_tokens": 100,
}


async def test_response_objects_are_complete(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        await agent(up, sampling=Sampling(temperature=0.7, top_p=0.9))
        _, whole = await raw(up, "POST", "", BODY)
        checked(whole)
        assert (whole["temperature"], whole["top_p"]) == (0.7, 0.9)  # the trainer's, not the client's
        for name in ("metadata", "user", "safety_identifier", "prompt_cache_key", "max_tool_calls"):
            assert whole[name] == BODY[name]
        function, custom = whole["tools"]
        assert function["strict"] is False and function["description"] is None
        assert custom == TOOLS[1]
        assert whole["completed_at"] >= whole["created_at"]
        assert whole["service_tier"] == "default" and whole["truncation"] == "disabled"
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_stream_events_have_complete_objects(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        async with client.responses.stream(**BODY) as stream:
            seen = [event async for event in stream]
            final = await stream.get_final_response()
        for event in seen:
            if (response := getattr(event, "response", None)) is not None:
                checked(response.model_dump())
        assert final.status == "completed"
        _, fetched = await raw(up, "GET", f"/{final.id}")
        assert [item.type for item in final.output] == [item["type"] for item in fetched["output"]]


# --- stored responses -----------------------------------------------------------------------------


async def test_stored_responses_survive_a_restart_and_can_be_deleted(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        first = await client.responses.create(**BODY, store=True)
        asked = next(item for item in first.output if item.type == "function_call")
        told: Any = [{"type": "function_call_output", "call_id": asked.call_id, "output": "1"}]
        rest = {key: BODY[key] for key in ("model", "instructions", "tools")}
        second = await client.responses.create(**rest, input=told, previous_response_id=first.id)
        unstored = await client.responses.create(model="m", input="Hi", store=False)
        assert await client.responses.retrieve(second.id) == second
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        assert await client.responses.retrieve(first.id) == first
        assert await client.responses.retrieve(second.id) == second
        with pytest.raises(openai.NotFoundError, match="is not stored in this session"):
            await client.responses.retrieve(unstored.id)
        assert await client.responses.delete(first.id) is None
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="is not one of this session"):
            await client.responses.create(model="m", input="x", previous_response_id=first.id)
        assert await client.responses.retrieve(second.id) == second
        record = await up.client.finalize("r.1")
        assert [turn.status for turn in record.turns] == [TurnStatus.COMMITTED] * 3
        assert {turn.id for turn in record.turns} == {"t1", "t2", "t3"}
        assert not record.excluded  # what was deleted is trained
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        with pytest.raises(openai.NotFoundError):
            await (await agent(up)).responses.retrieve(first.id)
        status, _ = await raw(up, "GET", f"/{second.id}")
        assert status == 200


async def test_responses_of_other_sessions_get_404(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        one, other = await agent(up), await agent(up, "r.2")
        response = await one.responses.create(model="m", input="Hi")
        await other.responses.create(model="m", input="Hi")
        for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(response.id)
        for wrong in ("resp_x", "t1", response.id + "9"):
            with pytest.raises(openai.NotFoundError):
                await one.responses.retrieve(wrong)


async def test_input_items_are_listed_in_pages(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        first = await client.responses.create(**BODY)
        asked = next(item for item in first.output if item.type == "function_call")
        items: Any = [
            {"role": "user", "content": "Prices?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": asked.call_id, "output": "1"},
            {"type": "custom_tool_call", "call_id": "c9", "name": "patch", "input": "abc"},
            {"type": "custom_tool_call_output", "call_id": "c9", "output": "done"},
            {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        ]
        rest = {key: BODY[key] for key in ("model", "instructions", "tools")}
        second = await client.responses.create(**rest, input=items)
        listed = await client.responses.input_items.list(second.id, order="asc")
        kinds = [item.type for item in listed.data]
        assert kinds == [
            *("message", "reasoning", "message", "function_call", "function_call_output"),
            *("custom_tool_call", "custom_tool_call_output", "message"),
        ]
        assert len({item.id for item in listed.data}) == len(kinds)
        assert listed.data[1:4] == [
            type(mine).model_validate(sent.model_dump())
            for mine, sent in zip(listed.data[1:4], first.output, strict=True)
        ]
        paged = [item async for item in client.responses.input_items.list(second.id, limit=3)]
        assert [item.id for item in paged] == [item.id for item in listed.data][::-1]
        page = await client.responses.input_items.list(second.id, limit=3)
        assert page.has_more and len(page.data) == 3
        for query, named in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
            status, answer = await raw(up, "GET", f"/{second.id}/input_items?{query}")
            assert status == 400 and named in answer["error"]["message"]


async def test_unsupported_requests_get_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        response = await client.responses.create(model="m", input="Hi")
        with pytest.raises(openai.BadRequestError, match="background=true"):
            await client.responses.cancel(response.id)
        with pytest.raises(openai.BadRequestError, match="without stream"):
            await client.responses.retrieve(response.id, stream=True, starting_after=1)
        with pytest.raises(openai.BadRequestError, match="background=True is not supported; wait"):
            await client.responses.create(model="m", input="Hi", background=True)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="m", input="Hi", conversation="conv_1")
        upgrade = {
            "authorization": f"Bearer {client.api_key}",
            "upgrade": "websocket",
            "connection": "upgrade",
        }
        status, answer = await up.ask("GET", "/s/r.1/v1/responses", headers=upgrade)
        assert status == 404 and "POST v1/responses over HTTP" in answer["error"]["message"]


def test_synchronous_client_works(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(ScriptedEngine(answers), tmp_path / "s") as up:
            ticket = await up.client.open(SessionSpec(id="r.1"))

            def work() -> None:
                with openai.OpenAI(base_url=ticket.openai_base_url, api_key=ticket.api_key) as client:
                    response = client.responses.create(**BODY)
                    assert client.responses.retrieve(response.id) == response
                    assert [item.type for item in client.responses.input_items.list(response.id)] == [
                        "message"
                    ]
                    window = client.responses.compact(model="m", previous_response_id=response.id)
                    assert window.object == "response.compaction"
                    client.responses.delete(response.id)

            await asyncio.to_thread(work)

    asyncio.run(main())


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["It is ünïque 😀.", "<think>\nHm.\n</think>\n\nYes. " + PRICE_X])
async def test_logprobs_cover_the_text(tmp_path: Path, text: str) -> None:
    engine = ScriptedEngine(lambda _: said(text, chunks=(2,)))
    async with running(engine, tmp_path / "s") as up:
        client = await agent(up)
        ask: Any = {"model": "m", "input": "Hi", "tools": TOOLS, "top_logprobs": 2}
        ask["include"] = ["message.output_text.logprobs"]
        whole = await client.responses.create(**ask)
        part = next(item for item in whole.output if item.type == "message").content[0]
        assert part.type == "output_text" and part.logprobs
        spelled = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
        assert spelled.strip() == part.text.strip()
        assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in part.logprobs)
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
        deltas: list[Any] = []
        done: list[Any] = []
        async with client.responses.stream(**ask) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    deltas += event.logprobs
                elif event.type == "response.output_text.done":
                    done += event.logprobs
            final = await stream.get_final_response()
        expected = [(entry.token, entry.logprob) for entry in part.logprobs]
        assert [(entry.token, entry.logprob) for entry in deltas] == expected
        assert [(entry.token, entry.logprob) for entry in done] == expected
        streamed = next(item for item in final.output if item.type == "message").content[0]
        assert streamed.model_dump(exclude={"parsed"}) == part.model_dump()
        assert final.top_logprobs == 2
        stored = await client.responses.retrieve(whole.id, include=ask["include"])
        assert next(item for item in stored.output if item.type == "message").content == [part]
        key = {"extra_headers": {"Idempotency-Key": "k"}}
        again = [await client.responses.create(**ask, **key) for _ in range(2)]
        assert again[0] == again[1]
        plain = await client.responses.retrieve(whole.id)
        assert next(item for item in plain.output if item.type == "message").content[0].logprobs == []
        with pytest.raises(openai.BadRequestError, match="top_logprobs=21"):
            await client.responses.create(**ask | {"top_logprobs": 21})


# --- compaction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("left_to_us", [False, True])
async def test_compaction_uses_the_tools_of_its_conversation(tmp_path: Path, left_to_us: bool) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        rest: Any = {key: BODY[key] for key in ("instructions", "tools")}
        first = await client.responses.create(model="m", input="Hi", **rest)
        echoed: Any = [item.model_dump(exclude_none=True) for item in first.output]
        items: Any = [{"role": "user", "content": "Hi"}, *echoed]
        given: Any = {"previous_response_id": first.id} if left_to_us else {"input": items}
        await client.responses.compact(model="m", instructions=rest["instructions"], **given)
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1"]


@pytest.mark.parametrize("left_to_us", [False, True])
async def test_compacted_conversation_continues_and_is_trained(tmp_path: Path, left_to_us: bool) -> None:
    engine = ScriptedEngine(answers)
    async with running(engine, tmp_path / "s") as up:
        client = await agent(up)
        rest: Any = {key: BODY[key] for key in ("instructions", "tools")}
        first = await client.responses.create(model="m", input="Prices?", **rest)
        asked = next(item for item in first.output if item.type == "function_call")
        result: Any = {"type": "function_call_output", "call_id": asked.call_id, "output": "1"}
        echoed: Any = [item.model_dump(exclude_none=True) for item in first.output]
        items: Any = [{"role": "user", "content": "Prices?"}, *echoed, result]
        given: Any = {"input": items}
        if left_to_us:
            given = {"input": [result], "previous_response_id": first.id}
        window = await client.responses.compact(
            model="m", instructions=rest["instructions"], extra_body={"tools": TOOLS}, **given
        )
        assert window.object == "response.compaction"
        assert window.usage.output_tokens == len(VOCAB.encode(SUMMARY)) + 1
        assert [item.type for item in window.output] == ["message", "compaction"]
        compacted: Any = [item.model_dump(exclude_none=True, warnings=False) for item in window.output]
        assert compacted[0]["role"] == "user" and compacted[0]["content"][0]["text"] == "Prices?"
        follow: Any = {"role": "user", "content": "Is that all?"}
        last = await client.responses.create(model="m", input=[*compacted, follow], **rest)
        assert last.output_text == "It is ünïque 😀."
        prompt = VOCAB.decode(engine.recorded[-1].prompt_ids)
        assert SUMMARY in prompt and "Prices?" in prompt and "I look." not in prompt
        again = await client.responses.compact(model="m", input=[*compacted, follow], **rest_of(rest))
        assert [item.type for item in again.output] == ["message", "message", "compaction"]
        with pytest.raises(openai.BadRequestError, match="not made by this gateway"):
            alien: Any = [{"type": "compaction", "encrypted_content": "gAAAA"}, follow]
            await client.responses.create(model="m", input=alien)
        record = await up.client.finalize("r.1")
    turns = {turn.id: turn for turn in record.turns}
    assert turns["t2"].tags == ("compaction",) and turns["t2"].parent == "t1"
    assert [(link.type, link.to) for link in turns["t3"].links] == [("compaction", "t2")]
    assert not record.excluded


def rest_of(rest: dict[str, Any]) -> dict[str, Any]:
    return {"instructions": rest["instructions"], "extra_body": {"tools": rest["tools"]}}


async def test_compaction_without_summary_fails(tmp_path: Path) -> None:
    async with running(ScriptedEngine(lambda _: ScriptedReply(token_ids=(STOP,))), tmp_path / "s") as up:
        client = await agent(up)
        with pytest.raises(openai.InternalServerError, match="wrote no summary"):
            await client.responses.compact(model="m", input="Hi")


async def test_compaction_needs_a_model(tmp_path: Path) -> None:
    async with running(ScriptedEngine(answers), tmp_path / "s") as up:
        client = await agent(up)
        with pytest.raises(openai.BadRequestError, match="needs a model"):
            await client.responses.compact(model=None, input="Hi")
