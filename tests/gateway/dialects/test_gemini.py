"""Gemini: what is asked, what is answered, and the official client against a real gateway."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given
from hypothesis import strategies as st

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.api_error import ApiError, context_exceeded, engine_down
from afield.gateway.dialects.base import RawRequest, ResponseOptions, encode
from afield.gateway.dialects.gemini import Gemini
from afield.gateway.model_request import ModelRequest
from afield.gateway.turn_ids import seal
from afield.interfaces import SessionSpec
from afield.turn_tree import canonical
from afield.types import FinishReason, Message
from support.gateways import POLICY, Running, chat_session, running, vocabulary
from support.replies import REPLIES, STARTED, done, pieces
from support.tokenizers import load_tokenizer

# The client's own business with aiohttp.
QUIET = "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(QUIET)]
VOCAB = vocabulary()
STOP = VOCAB.id_of("<|im_end|>")
DIALECT = Gemini(load_tokenizer())
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
FUNCTION = {"name": "get_price", "description": "The price of an item.", "parameters": SCHEMA}
GOOGLE_SCHEMA = {"properties": {"item": {"type": "STRING"}}, "type": "OBJECT"}
TOOLS: list[Any] = [{"functionDeclarations": [{**FUNCTION, "parameters": GOOGLE_SCHEMA}]}]
USER = {"role": "user", "parts": [{"text": "Hi"}]}
PATH = {"model": "m", "method": "generateContent"}


def decoded(contents: Any, **body: Any) -> ModelRequest:
    return DIALECT.decode(RawRequest("", encode({"contents": contents, **body}), PATH, {}, {}))[0]


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


def call(**arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "get_price", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# --- requests ------------------------------------------------------------------------------------


def test_adjacent_model_contents_are_one_turn() -> None:
    calls = [
        {"functionCall": {"name": name, "args": {"item": "x"}, "id": call_id}}
        for name, call_id in (("get_price", "call_t1_0"), ("bash", "call_t1_1"), ("get_price", "call_t1_2"))
    ]
    chunks = [
        {"role": "model", "parts": [{"text": "h", "thought": True, "thoughtSignature": seal("t1")}]},
        {"role": "model", "parts": [{"text": "m", "thought": True}, {"text": "Th"}]},
        {"role": "model", "parts": [{"text": "ree."}, *calls, {"text": ""}]},
    ]
    names = ("get_price", "get_price", "bash")
    answers = [{"functionResponse": {"name": n, "response": {"result": str(i)}}} for i, n in enumerate(names)]
    request = decoded([USER, *chunks, {"role": "user", "parts": [{"text": "Go on"}, *answers]}])
    _, turn, *results, user = request.messages
    assert (turn.content, turn.reasoning, len(turn.tool_calls)) == ("Three.", "hm", 3)
    assert [(m.tool_call_id, m.content) for m in results] == [
        ("call_t1_0", "0"),
        ("call_t1_2", "1"),
        ("call_t1_1", "2"),
    ]
    assert user.content == "Go on"
    assert request.hints == {"t1"}


def test_tools_are_rendered_in_chat_shape() -> None:
    written = {"type": "function", "function": FUNCTION}
    (tool,) = decoded([USER], tools=TOOLS).tools
    assert encode(tool.raw) == encode(written)
    json_schema = {**FUNCTION, "parametersJsonSchema": SCHEMA}
    del json_schema["parameters"]
    (tool,) = decoded([USER], tools=[{"functionDeclarations": [json_schema]}]).tools
    assert encode(tool.raw) == encode(written)
    odd = {
        "type": "OBJECT",
        "properties": {"type": {"type": "ARRAY", "items": {"anyOf": [{"type": "STRING"}]}}},
    }
    (tool,) = decoded([USER], tools=[{"functionDeclarations": [{"name": "x", "parameters": odd}]}]).tools
    inner = {"type": "array", "items": {"anyOf": [{"type": "string"}]}}
    assert tool.parameters == {"type": "object", "properties": {"type": inner}}


def test_snake_case_fields_are_accepted_and_client_data_kept() -> None:
    declared = {"name": "bash", "parameters_json_schema": {"type": "object", "properties": {"a_b": {}}}}
    part = {"function_call": {"name": "bash", "args": {"a_b": 1}, "id": "c"}}
    contents = [{"parts": {"text": "Hi"}}, {"role": "model", "parts": [part]}, USER]
    request = decoded(
        contents,
        system_instruction={"parts": [{"text": "S"}]},
        tools=[{"function_declarations": [declared]}],
        generation_config={"max_output_tokens": 5, "stop_sequences": ["x"]},
    )
    assert request.messages[0] == Message(role="system", content="S")
    assert request.tools[0].parameters == declared["parameters_json_schema"]
    assert json.loads(request.messages[2].tool_calls[0].arguments) == {"a_b": 1}
    assert (request.max_tokens, request.stop) == (5, ("x",))


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


SETTINGS: dict[str, Any] = {
    "top_p": 0.5,
    "top_k": 7.0,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.75,
    "max_output_tokens": 5,
    "stop_sequences": ["x"],
    "response_mime_type": "application/json",
    "response_json_schema": {"type": "object"},
    "response_schema": {"type": "OBJECT"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_equal_in_snake_and_camel_case(name: str) -> None:
    snake, other = (
        decoded([USER], generationConfig={spelled: SETTINGS[name]}) for spelled in (name, camel(name))
    )
    assert snake == other
    assert snake != decoded([USER])


@pytest.mark.parametrize("name", ["candidate_count", "response_modalities"])
def test_refused_fields_are_refused_in_both_spellings(name: str) -> None:
    value = {"candidate_count": 2, "response_modalities": ["AUDIO"]}[name]
    for spelled in (name, camel(name)):
        with pytest.raises(ApiError, match=camel(name)):
            decoded([USER], generationConfig={spelled: value})


@pytest.mark.parametrize("schema", ["parameters_json_schema", "parametersJsonSchema"])
@pytest.mark.parametrize("tools", ["function_declarations", "functionDeclarations"])
def test_tool_schema_is_decoded_in_both_spellings(schema: str, tools: str) -> None:
    declared = {"name": "get_price", "description": FUNCTION["description"], schema: SCHEMA}
    (tool,) = decoded([USER], tools=[{tools: [declared]}]).tools
    assert tool.raw == {"type": "function", "function": FUNCTION}


def test_google_schema_becomes_json_schema() -> None:
    snake = {
        "type": "OBJECT",
        "properties": {"a_b": {"any_of": [{"type": "STRING", "max_length": 3}, {"type": "NULL"}]}},
        "additional_properties": {"type": "INTEGER"},
        "defs": {"x_y": {"type": "NUMBER"}},
    }
    (tool,) = decoded([USER], tools=[{"functionDeclarations": [{"name": "x", "parameters": snake}]}]).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {"a_b": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}},
        "additionalProperties": {"type": "integer"},
        "$defs": {"x_y": {"type": "number"}},
    }


def test_images_accept_both_base64_alphabets() -> None:
    raw = b"\xfb\xff\xfe picture"
    blob = {"inlineData": {"mimeType": "image/png", "data": base64.urlsafe_b64encode(raw).decode()}}
    plain = {"inlineData": {"mimeType": "text/plain", "data": base64.b64encode(b"note ").decode()}}
    file = {"fileData": {"mimeType": "image/png", "fileUri": "https://example.com/x.png"}}
    answer = {"functionResponse": {"name": "x", "response": {"a": 1}, "parts": [blob]}}
    request = decoded([{"parts": [plain, blob, file]}, {"parts": [answer]}])
    user, result = request.messages
    assert user.content == "note "
    assert [image.offset for image in user.images] == [5, 5]
    assert (result.content, result.images[0].digest) == ('{"a":1}', user.images[0].digest)
    assert request.images[user.images[0].digest].data == raw


def test_unenforced_parameters_are_tagged() -> None:
    request = decoded(
        [USER, {"role": "model", "parts": [{"executableCode": {"code": "1"}}, {"text": "x"}]}],
        tools=[{"googleSearch": {}, "functionDeclarations": [{"name": "look"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY"}},
        generationConfig={"responseMimeType": "application/json"},
        safetySettings=[],
    )
    assert request.tags == (
        "overridden:tools.googleSearch",
        "unenforced:part:executableCode",
        "unenforced:prefill",
    )
    assert not decoded([USER], toolConfig={"functionCallingConfig": {"mode": "NONE"}}).may_call


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "contents is empty"),
        ({"contents": [{"parts": [{"text": 3}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"role": "robot", "parts": [{"text": "x"}]}]}, "role 'robot'"),
        ({"contents": [{"parts": [{"videoMetadata": {}}]}]}, "nothing known"),
        ({"contents": [USER], "generationConfig": {"candidateCount": 2}}, "candidateCount=2"),
        ({"contents": [USER], "generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens=0"),
        ({"contents": [USER], "generationConfig": {"responseModalities": ["AUDIO"]}}, "['AUDIO']"),
        ({"contents": [USER], "cachedContent": "c/1"}, "'c/1'"),
        ({"contents": [USER], "tools": [{"functionDeclarations": [{}]}]}, "tools[0]"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": ""}}]}]}, "'audio/wav'"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {"args": [1]}}]}]}, "not an object"),
    ],
)
def test_unsupported_content_gets_400(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as refused:
        DIALECT.decode(RawRequest("", encode(body), PATH, {}, {}))
    assert says in refused.value.message
    assert refused.value.status == 400


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_deep_nesting_is_accepted_or_gets_400(depth: int) -> None:
    deep = b'{"items":' * depth + b"{}" + b"}" * depth
    body = (
        b'{"contents":[{"parts":{"text":"x"}}],"tools":[{"function_declarations":[{"name":"x","parameters":'
    )
    try:
        DIALECT.decode(RawRequest("", body + deep + b"}]}]}", PATH, {}, {}))
    except ApiError as refused:
        assert refused.status == 400


# --- answers -------------------------------------------------------------------------------------


def streamed(reply: Message, sizes: list[int], sse: bool) -> list[dict[str, Any]]:
    view = DIALECT.stream(STARTED, ResponseOptions(model="m", echo={"sse": sse}))
    stream = view.keepalive() + view.begin()
    for piece in pieces(reply, sizes):
        stream += view.delta(piece) + view.keepalive()
    stream += view.end(done(reply))
    if not sse:
        return json.loads(stream)
    return [json.loads(line.removeprefix("data: ")) for line in stream.decode().split("\n") if line]


@given(REPLIES, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_echoed_response_or_stream_is_the_reply(reply: Message, sizes: list[int], sse: bool) -> None:
    answer = json.loads(encode(DIALECT.response(STARTED, done(reply), ResponseOptions(model="m"))))
    chunks = streamed(reply, sizes, sse)
    for given_back in ([answer], chunks):
        contents = [chunk["candidates"][0]["content"] for chunk in given_back]
        back = decoded([USER, *contents, USER]).messages[1]
        assert canonical(back) == canonical(reply)
        assert back.reasoning == reply.reasoning
        assert [c.id for c in back.tool_calls] == [c.id for c in reply.tool_calls]
    assert chunks[-1]["usageMetadata"] == answer["usageMetadata"]
    assert chunks[-1]["candidates"][0]["finishReason"] == answer["candidates"][0]["finishReason"]
    assert {chunk["responseId"] for chunk in chunks} == {answer["responseId"]}


def test_each_end_has_its_gemini_finish_reason() -> None:
    reply = Message(role="assistant", content="x")
    ends = (done(reply), done(reply, FinishReason.LENGTH), done(reply, stop="END"))
    reasons = [
        DIALECT.response(STARTED, end, ResponseOptions())["candidates"][0]["finishReason"] for end in ends
    ]
    assert reasons == ["STOP", "MAX_TOKENS", "STOP"]


def test_each_error_has_its_gemini_status() -> None:
    over = DIALECT.encode_error(context_exceeded(20, 10))["error"]
    assert over["message"] == "The input token count (20) exceeds the maximum number of tokens allowed (10)."
    assert (over["code"], over["status"]) == (400, "INVALID_ARGUMENT")
    assert DIALECT.encode_error(engine_down("gone"))["error"]["status"] == "UNAVAILABLE"
    assert DIALECT.encode_error(ApiError(401, "x", "y"))["error"]["status"] == "UNAUTHENTICATED"
    view = DIALECT.stream(STARTED, ResponseOptions())
    stream = view.begin() + view.error(engine_down("gone"))
    assert json.loads(stream)[0]["error"]["code"] == 503


# --- the official client -------------------------------------------------------------------------


@asynccontextmanager
async def client_of(up: Running, key: str = "", **spec: Any) -> AsyncIterator[Any]:
    ticket = await up.client.open(SessionSpec(id="r.1", **spec))
    client = genai.Client(
        api_key=key or ticket.api_key, http_options=types.HttpOptions(base_url=ticket.base_url)
    )
    try:
        yield client.aio
    finally:
        await client.aio.aclose()
        client.close()


def config(**more: Any) -> types.GenerateContentConfig:
    off = types.AutomaticFunctionCallingConfig(disable=True)
    declared = types.FunctionDeclaration.model_validate({**FUNCTION, "parameters": GOOGLE_SCHEMA})
    tools: list[Any] = [types.Tool(function_declarations=[declared])]
    return types.GenerateContentConfig(tools=tools, automatic_function_calling=off, **more)


async def ask(chat: Any, message: Any, stream: bool) -> list[Any]:
    """The parts of the answer."""
    if not stream:
        return (await chat.send_message(message)).candidates[0].content.parts
    parts: list[Any] = []
    async for chunk in await chat.send_message_stream(message):
        parts += chunk.candidates[0].content.parts
    return parts


SCRIPT = [
    said("<think>\nhm</think>\n\nLet me see. " + call(item="x") + call(item="ü"), chunks=(1, 3)),
    said("Both cost 4."),
    said("Bye."),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_client_chat_records_the_same_as_chat_completions(tmp_path: Path, stream: bool) -> None:
    shapes = []
    for gemini in (True, False):
        engine = ScriptedEngine(list(SCRIPT))
        async with running(engine, tmp_path / str(gemini)) as up:
            await (gemini_session(up, stream) if gemini else chat_session(up, FUNCTION))
            record = await up.client.finalize("r.1")
        fields = ("id", "parent", "root", "delta_ids", "token_ids", "tier", "digest")
        shapes.append([[getattr(turn, name) for name in fields] for turn in record.turns])
        assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
        (row,) = record.trajectories
        assert row.token_ids == engine.recorded[-1].prompt_ids + engine.recorded[-1].token_ids
    assert shapes[0] == shapes[1]


async def gemini_session(up: Running, stream: bool) -> None:
    async with client_of(up) as client:
        thoughts = types.ThinkingConfig(include_thoughts=True)
        chat = client.chats.create(
            model="m", config=config(system_instruction="Be brief.", thinking_config=thoughts)
        )
        parts = await ask(chat, "How much are x and y?", stream)
        assert "".join(part.text for part in parts if part.thought) == "hm"
        assert "".join(part.text or "" for part in parts if not part.thought) == "Let me see."
        calls = [part.function_call for part in parts if part.function_call]
        assert [(c.id, c.args) for c in calls] == [("call_t1_0", {"item": "x"}), ("call_t1_1", {"item": "ü"})]
        results = [types.Part.from_function_response(name=c.name, response={"result": "4"}) for c in calls]
        await ask(chat, results, stream)
        await ask(chat, "Thanks.", stream)


async def test_the_client_reads_usage_counts_and_log_probabilities(tmp_path: Path) -> None:
    engine = ScriptedEngine([said("Yes.")])
    async with running(engine, tmp_path) as up, client_of(up) as client:
        reply = await client.models.generate_content(
            model="m", contents="Hi", config=config(response_logprobs=True, max_output_tokens=9)
        )
        (entry,) = engine.recorded
        chosen = reply.candidates[0].logprobs_result.chosen_candidates
        assert tuple(c.token_id for c in chosen) == entry.token_ids
        assert tuple(c.log_probability for c in chosen) == entry.logprobs
        assert reply.usage_metadata.prompt_token_count == len(entry.prompt_ids)
        assert reply.usage_metadata.candidates_token_count == len(entry.token_ids)
        assert (reply.text, reply.candidates[0].finish_reason) == ("Yes.", types.FinishReason.STOP)
        counted = await client.models.count_tokens(model="m", contents="Hi")
        assert 0 < counted.total_tokens < len(entry.prompt_ids)  # this request has no tools


def get_price(item: str, pieces: int = 1) -> str:
    """The price of an item."""
    return f"{item} {pieces}"


@pytest.mark.parametrize("as_schema", [False, True])
async def test_client_tools_are_rendered_with_parameters(tmp_path: Path, as_schema: bool) -> None:
    declared = types.FunctionDeclaration(name="get_price", parameters_json_schema=SCHEMA)
    tools: list[Any] = [types.Tool(function_declarations=[declared])] if as_schema else [get_price]
    off = types.AutomaticFunctionCallingConfig(disable=True)
    engine = ScriptedEngine([said("Yes.")])
    async with running(engine, tmp_path) as up, client_of(up) as client:
        generation = types.GenerateContentConfig(
            tools=tools, automatic_function_calling=off, top_p=0.5, top_k=7
        )
        await client.models.generate_content(model="m", contents="Hi", config=generation)
        record = await up.client.finalize("r.1")
    prompt = load_tokenizer().decode(engine.recorded[0].prompt_ids)
    assert '"item": {"type": "string"}' in prompt
    assert as_schema or '"pieces": {' in prompt
    assert {"overridden:top_p", "overridden:top_k"} <= set(record.turns[0].tags)


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_models_are_listed_for_both_versions(tmp_path: Path, version: str) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        options = types.HttpOptions(base_url=ticket.base_url, api_version=version)
        client = genai.Client(api_key=ticket.api_key, http_options=options)
        try:
            listed = [model.name async for model in await client.aio.models.list()]
            one = await client.aio.models.get(model="m")
        finally:
            await client.aio.aclose()
            client.close()
    assert listed == [f"models/{POLICY.name}"]
    assert one.name == "models/m"


async def test_stream_without_sse_is_a_json_array(tmp_path: Path) -> None:
    async with running(ScriptedEngine([said("Yes, I do.")]), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        url = f"{ticket.base_url}/v1beta/models/m:streamGenerateContent"
        async with (
            aiohttp.ClientSession(headers={"x-goog-api-key": ticket.api_key}) as http,
            http.post(url, json={"contents": [USER]}) as response,
        ):
            chunks = json.loads(await response.read())
    texts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "Yes, I do."


async def test_client_raises_its_own_errors(tmp_path: Path) -> None:
    script = [said("x" * 40, fail="unavailable", chunks=(2,)), ScriptedReply(fail="unavailable")]
    async with running(ScriptedEngine(script, max_context=200), tmp_path) as up, client_of(up) as client:
        models = client.models
        with pytest.raises(errors.ClientError, match="input token count") as refused:
            await models.generate_content(model="m", contents="long " * 300)
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
        with pytest.raises(errors.APIError, match="UNAVAILABLE"):
            async for _ in await models.generate_content_stream(model="m", contents="Hi"):
                pass
        with pytest.raises(errors.ServerError, match="UNAVAILABLE"):
            await models.generate_content(model="m", contents="Hi")
    async with running(ScriptedEngine([]), tmp_path / "other") as up, client_of(up, key="wrong") as client:
        with pytest.raises(errors.ClientError, match="UNAUTHENTICATED"):
            await client.models.generate_content(model="m", contents="Hi")
