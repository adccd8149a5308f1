"""OpenAI Responses: decoding and showing, on bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from afield.gateway.api_error import ApiError, context_exceeded
from afield.gateway.dialects.responses import Responses
from afield.gateway.turn_ids import response_id
from afield.turn_tree import canonical
from afield.types import FinishReason, Message, ToolCall
from support.tokenizers import load_tokenizer
from support.turns import STARTED, asked, done, pieces, read_events

DIALECT = Responses(load_tokenizer())
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": {}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}],
}
TOOLS = [LOOK, PATCH, AGENTS]
SEALED = {"store": False, "include": ["reasoning.encrypted_content"]}


def decode(**body: Any) -> Any:
    return DIALECT.decode(asked({"model": "m", "input": "Hi", **body}))[0]


def turns(items: list[dict[str, Any]], **body: Any) -> tuple[Message, ...]:
    return decode(input=items, **body).messages


def said(text: str, **rest: Any) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
        **rest,
    }


def call(name: str, n: int = 0, **rest: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "call_id": f"c{n}", "arguments": "{}", **rest}


# --- requests -------------------------------------------------------------------------------------


def test_instructions_are_a_system_message() -> None:
    request = decode(instructions="Be brief.", max_output_tokens=7, stream=True)
    assert [(m.role, m.content) for m in request.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (request.max_tokens, request.stream, request.after) == (7, True, None)


def test_request_without_a_model_is_accepted() -> None:
    assert decode(input="Hi", model=None).model == ""


def test_items_of_a_turn_are_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    result = {
        "type": "function_call_output",
        "call_id": "c0",
        "output": [{"type": "input_text", "text": "1"}],
    }
    user = {"role": "user", "content": "Go"}
    messages = turns([user, thought, said("Yes."), call("look"), call("look", 1), result, said("Done.")])
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert (messages[1].content, messages[1].reasoning) == ("Yes.", "hm")
    assert [c.id for c in messages[1].tool_calls] == ["c0", "c1"]
    assert (messages[2].content, messages[2].tool_call_id) == ("1", "c0")


def test_items_are_separated_by_turn_ids() -> None:
    items = [said("A", id="msg_t1_0"), call("look", id="fc_t1_0"), call("look", 1, call_id="call_t2_0")]
    request = decode(input=items)
    assert [(m.content, len(m.tool_calls)) for m in request.messages] == [("A", 1), ("", 1)]
    assert request.hints == {"t1", "t2"}
    again = [said("A", id="msg_t1_0"), call("look", id="fc_t1_0"), said("B", id="msg_t1_1")]
    assert [(m.content, len(m.tool_calls)) for m in turns(again)] == [("AB", 1)]


def test_items_without_ids_are_separated_by_position() -> None:
    thought = {"type": "reasoning", "summary": []}
    assert [m.content for m in turns([said("A"), said("B")])] == ["A", "B"]
    assert [m.content for m in turns([said("A"), thought, said("B")])] == ["A", "B"]
    assert [m.content for m in turns([said("A"), call("look"), said("B")])] == ["AB"]


def test_message_type_is_optional() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b", "cache": 1}]
    items: list[Any] = [{"role": "developer", "content": parts}, {"role": "assistant", "content": "c"}]
    items.append({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})
    assert [(m.role, m.content) for m in turns(items)] == [
        ("system", "ab"),
        ("assistant", "c"),
        ("assistant", "no"),
    ]


def test_tools_are_rendered_in_chat_shape() -> None:
    request = decode(tools=[*TOOLS, {"type": "web_search"}])
    assert [tool.name for tool in request.tools] == ["look", "patch", "spawn"]
    assert request.tools[0].raw == {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {}},
    }
    text = request.tools[1].parameters["properties"]["input"]
    assert text["type"] == "string" and "start: LINE+" in text["description"]
    assert request.tags == ("overridden:tools.patch.format", "overridden:tools.web_search")


def test_equal_tool_names_in_namespaces_are_distinct() -> None:
    inner = {"type": "function", "name": "look", "parameters": {}}
    tools = [LOOK, {"type": "namespace", "name": "far", "tools": [inner]}]
    request = decode(tools=tools, input=[call("look", namespace="far"), call("look", 1)])
    assert [tool.name for tool in request.tools] == ["look", "far__look"]
    assert [c.name for c in request.messages[0].tool_calls] == ["far__look", "look"]


def test_unenforced_parameters_are_tagged() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    request = decode(
        text=form, tool_choice="required", tools=[LOOK], include=["message.output_text.logprobs"]
    )
    assert request.tags == ()
    assert request.by_token
    assert decode(tool_choice="none", tools=[LOOK]).may_call is False
    assert turns([{"type": "web_search_call", "id": "ws"}, {"role": "user", "content": "Hi"}])
    assert decode(input=[{"type": "web_search_call"}]).tags == ("unenforced:item:web_search_call",)


def test_stored_history_is_named_by_response_or_item() -> None:
    assert decode(previous_response_id=response_id("", "t4")).after == "t4"
    items = [{"role": "user", "content": "Go"}, {"type": "item_reference", "id": "msg_t2_0"}]
    request = decode(input=[*items, call("look", id="fc_t2_0"), {"role": "user", "content": "On"}])
    assert (request.after, [m.content for m in request.messages]) == ("t2", ["On"])


def referring(id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


def answered(call_id: str, output: str = "42") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


CALLED = call("look", id="fc_t2_0", call_id="call_t2_0")


@pytest.mark.parametrize(
    "items",
    [
        [referring("rs_t2"), CALLED, answered("call_t2_0")],
        [referring("rs_t2"), referring("fc_t2_0"), answered("call_t2_0")],
        [referring("fc_t2_0"), answered("call_t2_0"), referring("fc_t2_1")],
        [CALLED, answered("call_t2_0"), referring("msg_t2_0")],
        [referring("rs_t1"), answered("call_t1_0", "early"), referring("rs_t2"), answered("call_t2_0")],
        # Ids that a template shows to the model name no turn.
        [referring("rs_t2"), call("look", id="fc_t2_0", call_id="0a1b2c3d4"), answered("0a1b2c3d4")],
    ],
)
def test_call_output_after_a_reference_is_kept(
    items: list[dict[str, Any]],
) -> None:
    request = decode(input=[{"role": "user", "content": "Go"}, *items])
    assert request.after == "t2"
    assert [(m.role, m.content) for m in request.messages] == [("tool", "42")]


def test_parallel_call_outputs_after_a_reference_are_kept() -> None:
    outputs = [answered("call_t2_0", "a"), answered("call_t2_1", "b"), {"role": "user", "content": "On"}]
    request = decode(input=[referring("rs_t2"), referring("fc_t2_0"), referring("fc_t2_1"), *outputs])
    assert [m.content for m in request.messages] == ["a", "b", "On"]


def test_client_shell_output_is_a_result() -> None:
    output = {"type": "local_shell_call_output", "call_id": "c9", "output": "README.md"}
    (message,) = turns([output])
    assert (message.role, message.content, message.tool_call_id) == ("tool", "README.md", "c9")


def test_images_are_stored_by_digest() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}
    output["output"].append(picture)
    request = decode(input=[{"role": "user", "content": [picture]}, output])
    assert len(request.images) == 1
    assert [image.offset for message in request.messages for image in message.images] == [0, 1]


def test_codex_sub_agents_have_threads() -> None:
    main = {"thread-id": "a"}
    body = asked({"input": "Hi"}, main)
    assert DIALECT.decode(body)[0].thread == ""
    spawned = asked({"input": "Hi"}, main | {"x-codex-parent-thread-id": "b"})
    assert DIALECT.decode(spawned)[0].thread == "a"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "empty"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "wizard"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "compaction"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "name"),
    ({"input": [{"type": "item_reference", "id": "msg_other"}]}, "msg_other"),
    ({"tools": [{"type": "function"}]}, "name"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tool_choice": {"type": "web_search"}}, "web_search"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "resp_other"}, "resp_other"),
]


@pytest.mark.parametrize(("body", "named"), BAD, ids=[named for _, named in BAD])
def test_unsupported_content_gets_400(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named):
        decode(**body)


# --- answers --------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
objects = st.dictionaries(texts, texts | st.integers() | st.none(), max_size=2).map(json.dumps)
inputs = texts.map(lambda text: json.dumps({"input": text}))
sizes = st.lists(st.integers(1, 4), max_size=20)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    kinds = draw(st.lists(st.sampled_from(["look", "patch", "spawn"]), max_size=3))
    calls = [
        ToolCall(
            f"call_t3_{n}", name, draw(objects | inputs | texts if name != "patch" else objects | inputs)
        )
        for n, name in enumerate(kinds)
    ]
    return Message(role="assistant", content=draw(texts), reasoning=draw(texts), tool_calls=tuple(calls))


def shown(reply: Message, cuts: list[int], **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the answer without one."""
    _, wish = DIALECT.decode(asked({"model": "m", "input": "Hi", "tools": TOOLS, **body}))
    view = DIALECT.stream(STARTED, wish)
    stream = view.begin() + b"".join(map(view.delta, pieces(reply, cuts))) + view.end(done(reply))
    answer = msgspec.json.encode(DIALECT.response(STARTED, done(reply), wish))
    return read_events(stream), json.loads(answer)


SHOWN: list[dict[str, Any]] = [{}, SEALED, {"reasoning": {"summary": "auto"}}, {"include_reasoning": True}]


@given(replies(), sizes, st.sampled_from(SHOWN))
def test_stream_equals_the_response(reply: Message, cuts: list[int], body: dict[str, Any]) -> None:
    events, answer = shown(reply, cuts, **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        STREAM_EVENT.validate_python(event)
    Response.model_validate(answer)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == answer
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == answer["output"]
    spoken: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            spoken[event["item_id"]] = spoken.get(event["item_id"], "") + event["delta"]
    for item in finished:
        parts = item.get("content") or item.get("summary") or []
        text = "".join(part["text"] for part in parts)
        assert spoken.get(item["id"], "") == item.get("arguments", item.get("input", text))


@given(replies(), st.booleans())
def test_echoed_response_is_the_reply(reply: Message, through_the_sdk: bool) -> None:
    _, answer = shown(reply, [], include_reasoning=True)
    output = answer["output"]
    if through_the_sdk:
        output = [item.model_dump(mode="json") for item in Response.model_validate(answer).output]
    (echoed,) = turns(output, tools=TOOLS)
    assert canonical(echoed) == canonical(reply)
    assert echoed.reasoning == reply.reasoning
    assert [c.id for c in echoed.tool_calls] == [c.id for c in reply.tool_calls]


@given(replies())
def test_echo_without_ids_is_one_turn(reply: Message) -> None:
    _, answer = shown(reply, [])
    if any(item["id"].startswith("ctr_") for item in answer["output"]):
        return  # only the id says that the input of this call is all the model wrote
    output = [{k: v for k, v in item.items() if k != "id"} for item in answer["output"]]
    (echoed,) = turns(output, tools=TOOLS)
    assert canonical(echoed) == canonical(reply)


def test_custom_and_namespaced_calls_use_client_names() -> None:
    calls = (
        ToolCall("call_t3_0", "patch", '{"input": "*** Begin"}'),
        ToolCall("call_t3_1", "patch", '{"text": 1}'),
        ToolCall("call_t3_2", "spawn", "{}"),
    )
    _, answer = shown(Message(role="assistant", tool_calls=calls), [])
    first, second, third = answer["output"]
    assert (first["type"], first["input"], first["id"]) == ("custom_tool_call", "*** Begin", "ctc_t3_0")
    assert (second["type"], second["input"], second["id"]) == ("custom_tool_call", '{"text": 1}', "ctr_t3_1")
    assert (third["type"], third["name"], third["namespace"]) == ("function_call", "spawn", "agents")


def test_reasoning_is_returned_as_requested() -> None:
    reply = Message(role="assistant", content="Yes", reasoning="hm")
    events, hidden = shown(reply, [])
    assert hidden["output"][0]["summary"] == [] and "content" not in hidden["output"][0]
    assert "hm" not in json.dumps(events)
    _, plain = shown(reply, [], include_reasoning=True)
    assert plain["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert "encrypted_content" not in plain["output"][0]
    _, summary = shown(reply, [], reasoning={"summary": "auto"}, **SEALED)
    assert summary["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    sealed = {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": summary["output"][0]["encrypted_content"],
    }
    assert decode(input=[sealed, said("Yes")]).hints == {"t3"}


def test_keepalive_or_error_begins_the_stream() -> None:
    pretty = json.dumps({"model": "m", "input": "Hi", "tools": TOOLS}, indent=2).encode()
    _, wish = DIALECT.decode(asked(pretty))
    view = DIALECT.stream(STARTED, wish)
    stream = view.keepalive() + view.keepalive() + view.begin()
    kinds = [event["type"] for event in read_events(stream)]
    assert kinds == ["response.created", "response.in_progress", "response.in_progress"]
    refused = read_events(DIALECT.stream(STARTED, wish).error(context_exceeded(9, 8)))
    assert [event["type"] for event in refused][::2] == ["response.created", "response.failed"]
    assert refused[-1]["response"]["error"]["code"] == "context_length_exceeded"


def test_truncated_response_is_incomplete() -> None:
    _, wish = DIALECT.decode(asked({"model": "m", "input": "Hi"}))
    ended = done(Message(role="assistant", content="Hel"), FinishReason.LENGTH)
    answer = DIALECT.response(STARTED, ended, wish)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    (last,) = read_events(DIALECT.stream(STARTED, wish).end(ended))[-1:]
    assert last["type"] == "response.incomplete"
