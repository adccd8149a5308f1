"""Anthropic Messages: what a request says, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afield.gateway.api_error import ApiError
from afield.gateway.dialects.anthropic import Anthropic
from afield.gateway.dialects.base import RawRequest, encode
from afield.gateway.model_request import ModelRequest
from afield.gateway.turn_ids import seal

DIALECT = Anthropic()
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOLS: list[Any] = [{"name": "get_price", "description": "The price of an item.", "input_schema": SCHEMA}]
FUNCTION = {"name": "get_price", "description": "The price of an item.", "parameters": SCHEMA}
USER = {"role": "user", "content": "Hi"}


def decoded(messages: list[Any], headers: dict[str, str] | None = None, **body: Any) -> ModelRequest:
    raw = encode({"model": "m", "messages": messages, **body})
    return DIALECT.decode(RawRequest("/v1/messages", raw, {}, {}, headers or {}))[0]


def test_claude_code_metadata_does_not_change_the_root() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "x-anthropic-billing-header: v=1.a;"}, {"type": "text", "text": "S"}]
    other = [
        {"type": "text", "text": "x-anthropic-billing-header: v=1.b;"},
        {"type": "text", "text": "S", **mark},
    ]
    blocks = [{"type": "text", "text": "Hi", **mark}]
    note = {"role": "system", "content": [{"type": "text", "text": "Note", **mark}]}
    first = decoded([{"role": "user", "content": blocks}, note], system=system, thinking={"type": "adaptive"})
    again = decoded([USER, {"role": "system", "content": "Note"}], system=other, metadata={"user_id": "u"})
    assert first.messages == again.messages
    assert [m.role for m in first.messages] == ["system", "user", "system"]
    assert decoded([USER], system="x-anthropic-billing-header: v=1;\nS").messages[0].content == "S"


def test_anthropic_turn_decodes_to_one_message_and_separate_tool_results() -> None:
    use = {"type": "tool_use", "id": "call_t1_0", "name": "get_price", "input": {"item": "x"}}
    second = {**use, "id": "call_t1_1", "cache_control": {"type": "ephemeral"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": seal("t1")}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    results = [
        {"type": "text", "text": "Go on"},
        {"type": "tool_result", "tool_use_id": "call_t1_1", "content": "4", "is_error": False},
        {
            "type": "tool_result",
            "tool_use_id": "call_t1_0",
            "content": [{"type": "text", "text": "5"}, image],
        },
    ]
    whole = [thinking, {"type": "text", "text": "Two."}, use, second]
    request = decoded([USER, {"role": "assistant", "content": whole}, {"role": "user", "content": results}])
    split = decoded(
        [
            USER,
            {"role": "assistant", "content": whole[:2]},
            {"role": "assistant", "content": whole[2:]},
            {"role": "user", "content": results},
        ]
    )
    assert request.messages == split.messages
    _, turn, one, two, user = request.messages
    assert (turn.content, turn.reasoning, [c.id for c in turn.tool_calls]) == (
        "Two.",
        "hm",
        ["call_t1_0", "call_t1_1"],
    )
    assert [(m.role, m.tool_call_id, m.content) for m in (one, two, user)] == [
        ("tool", "call_t1_1", "4"),
        ("tool", "call_t1_0", "5"),
        ("user", "", "Go on"),
    ]
    assert [image.digest for image in two.images] == list(request.images)
    assert request.hints == {"t1"}


def test_tools_are_rendered_in_chat_shape() -> None:
    (tool,) = decoded([USER], tools=[{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]).tools
    assert tool.raw == {"type": "function", "function": FUNCTION}


def test_deferred_tool_keeps_the_root() -> None:
    late = {**TOOLS[0], "defer_loading": True}
    own = {"name": "search", "input_schema": SCHEMA}
    before = decoded([USER], tools=[own])
    use = {"type": "tool_use", "id": "call_t1_0", "name": "search", "input": {}}
    loaded = [{"type": "tool_reference", "tool_name": "get_price"}]
    result = {"type": "tool_result", "tool_use_id": "call_t1_0", "content": loaded}
    asked = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    after = decoded(asked, tools=[own, late])
    assert after.tools == before.tools
    assert json.loads(after.messages[-1].content) == {"type": "function", "function": FUNCTION}
    searched = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert len(decoded([USER], tools=[searched, late]).tools) == 1


def test_documents_are_text_and_server_blocks_are_tagged() -> None:
    plain = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    found = {"type": "search_result", "title": "F", "source": "u", "content": [{"type": "text", "text": "R"}]}
    served = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    got = {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"error_code": "x"}}
    asked = [
        {"role": "user", "content": [plain, found]},
        {"role": "assistant", "content": [served, got]},
        USER,
    ]
    request = decoded(asked)
    assert request.messages[0].content == "T\nD\nF\nu\nR\n"
    assert request.tags == ("unenforced:block:server_tool_use", "unenforced:block:web_search_tool_result")


def test_unenforced_parameters_are_tagged() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = [USER, {"role": "assistant", "content": "The answer is ("}]
    form = {"type": "json_schema", "schema": {}}
    request = decoded(asked, tools=[*TOOLS, web], tool_choice=choice, output_format=form)
    assert request.tags == (
        "overridden:tools.web_search",
        "unenforced:prefill",
    )
    assert not decoded([USER], tool_choice={"type": "none"}).may_call
    sub = decoded([USER], {"x-claude-code-agent-id": "a1", "x-stainless-retry-count": "1"})
    assert (sub.thread, sub.retry) == ("a1", True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role 'robot'"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens=0"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "'container_upload'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": [1]}]}]},
            "not an object",
        ),
        ({"messages": [USER], "tools": [{"input_schema": {}}]}, "a tool has no name"),
        (
            {
                "messages": [USER],
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "'web_search' is a tool that only the provider could run",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "a document with a source of type 'url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "an image with a source of type 'file'",
        ),
    ],
)
def test_unsupported_content_gets_400(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as refused:
        DIALECT.decode(RawRequest("/v1/messages", encode(body), {}, {}, {}))
    assert says in refused.value.message
    assert refused.value.status == 400


def test_invalid_utf8_gets_400() -> None:
    body = (
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"x","input":{"a":"\xff"}}]}]}'
    )
    with pytest.raises(ApiError, match="not UTF-8"):
        DIALECT.decode(RawRequest("/v1/messages", body, {}, {}, {}))


def test_tool_addition_is_rendered_in_place() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOLS[0]}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_price"}}
    request = decoded(
        [USER, {"role": "system", "content": [added]}, {"role": "system", "content": [removed]}]
    )
    _, one, two = request.messages
    assert json.loads(one.content)["function"] == FUNCTION
    assert two.content == "The tool get_price is no longer available.\n"
    assert not request.tools
    with pytest.raises(ApiError, match="not a tool"):
        decoded([{"role": "system", "content": [{**added, "tool": {"definition": {"name": 3}}}]}])


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_deep_nesting_is_accepted_or_gets_400(depth: int) -> None:
    inner = b'{"type":"document","source":{"type":"content","content":['
    body = b'{"messages":[{"role":"user","content":[' + inner * depth + b"]}}" * depth + b"]}]}"
    try:
        DIALECT.decode(RawRequest("/v1/messages", body, {}, {}, {}))
    except ApiError as refused:
        assert refused.status == 400
