"""Calls in the formats of model families: read back as rendered, however the ids arrive; never repaired."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from afield.chat import (
    ChatTokenizer,
    Event,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from afield.types import Message, ToolCall
from support.tokenizers import encode_text
from templates.models import QUESTION, sampled, write_model

SPEAKERS = [
    "tiny",
    "actions",
    "arrows",
    "brackets",
    "channels",
    "fenced",
    "headers",
    "headless",
    "invoked",
    "listed",
    "roles",
    "sections",
    "separated",
    "tagged",
]
TAGGED = {"headless", "invoked", "tagged"}
ONE_CALL = {"channels", "headers"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp("models") / name, name) for name in SPEAKERS}


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(path) for name, path in directories.items()}


def read(
    tokens: ChatTokenizer,
    ids: list[int],
    tools: list[Tool],
    *,
    cuts: Iterable[int] = (),
) -> tuple[Message, list[Event]]:
    parser = tokens.parser(tools=tools)
    events: list[Event] = []
    for start, end in pairwise([0, *sorted(cuts), len(ids)]):
        events += parser.feed(ids[start:end])
    events += parser.finish()
    return parser.reply, joined(events)


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of one thing put together."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if type(event) is type(last) and isinstance(event, TextDelta | ReasoningDelta):
            out[-1] = type(event)(last.text + event.text)
        elif (
            isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and event.index == last.index
        ):
            out[-1] = ToolArguments(last.index, last.text + event.text)
        else:
            out.append(event)
    return out


# --- round trips ---------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["<|im_end|>", '"', "\\", "\n", " x ", "7", "true", "null", "{}", "[TOOL_CALLS]", "</tool_call>", "```"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}


def tool_for(arguments: dict[str, Any]) -> Tool:
    """A tool whose schema says what each argument is."""
    properties = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    raw = {"type": "function", "function": {"name": "lookup", "description": "", "parameters": parameters}}
    return Tool("lookup", "", parameters, raw)


def spoken(tokens: ChatTokenizer, name: str, calls: list[dict[str, Any]], tool: Tool) -> list[int]:
    """What the model would have sampled for the calls, in the words of its template."""
    pattern = "functions.lookup:{}" if name == "sections" else "call0000{}"
    turn = Message(
        role="assistant",
        reasoning="Hm.",
        tool_calls=tuple(
            ToolCall(pattern.format(n), "lookup", json.dumps(arguments)) for n, arguments in enumerate(calls)
        ),
    )
    results = [
        Message(role="tool", content="42", tool_call_id=call.id, name="lookup") for call in turn.tool_calls
    ]
    prompt, whole = tokens.render([QUESTION], [tool]), tokens.render([QUESTION, turn, *results], [tool])
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) : next(n for n in range(len(prompt), len(whole)) if whole[n] in tokens.stop_ids)]


@pytest.mark.parametrize("name", SPEAKERS)
@given(calls=st.lists(st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=3), data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rendered_arguments_are_parsed_unchanged(
    models: dict[str, ChatTokenizer], name: str, calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    if name in ONE_CALL:
        calls = calls[:1]
    if name in TAGGED:
        # One schema for all calls; and a value cannot hold the tag that ends it.
        calls = [calls[0]] * len(calls)
        assume("</parameter>" not in str(calls))
    tool = tool_for({key: value for call in calls for key, value in call.items()})
    ids = spoken(models[name], name, calls, tool)
    reply, events = read(models[name], ids, [tool])
    assert [(c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [("lookup", c) for c in calls]
    assert reply.content == ""
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert read(models[name], ids, [tool], cuts=cuts) == (reply, events)
    assert read(models[name], ids, [tool], cuts=range(1, len(ids))) == (reply, events)


@pytest.mark.parametrize("depth", [100, 101])
@pytest.mark.parametrize("name", SPEAKERS)
def test_deeply_nested_arguments_are_read_alike_in_one_piece_and_streamed(
    directories: dict[str, Path], models: dict[str, ChatTokenizer], name: str, depth: int
) -> None:
    tokens, tool = models[name], tool_for({"a": []})
    nested = "[" * (depth - 1) + "]" * (depth - 1)  # the object of arguments is a level, too
    text = tokens.decode(spoken(tokens, name, [{"a": "DEEP"}], tool_for({"a": ""})))
    text = text.replace('"DEEP"', nested).replace("DEEP", nested)
    ids = sampled(directories[name], text)
    at_once = read(tokens, ids, [tool])
    assert read(tokens, ids, [tool], cuts=range(1, len(ids))) == at_once
    assert read(tokens, ids, [tool], cuts=[len(ids) // 2]) == at_once
    if name not in TAGGED:
        assert bool(at_once[0].tool_calls) is (depth <= 100)


def test_ids_that_the_model_spells_are_the_calls_ids(models: dict[str, ChatTokenizer]) -> None:
    tool = tool_for({})
    kimi = read(models["sections"], spoken(models["sections"], "sections", [{}, {}], tool), [tool])[0]
    assert [c.id for c in kimi.tool_calls] == ["functions.lookup:0", "functions.lookup:1"]
    mistral = read(models["brackets"], spoken(models["brackets"], "brackets", [{}], tool), [tool])[1]
    assert mistral == [ToolStart(0, "lookup", "call00000"), ToolArguments(0, "{}"), ToolEnd(0)]


# --- laws of reading -----------------------------------------------------------------------------

PIECES = {
    "tiny": ["<tool_call>", "\n \n", '{"name": "f", "arguments": ', '{"a": 1}', "}", "\n \n", "</tool_call>"],
    "actions": ["<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "f", "parameters": {}}', "[", "]", ", "],
    "arrows": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "abc", '{"a": 1}', "[THINK]", "[/THINK]"],
    "brackets": [
        "[TOOL_CALLS]",
        "[",
        "]",
        ",",
        '{"name": "f", "arguments": {"x": 1}, "id": "123456789"}',
        "{",
    ],
    "channels": [
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|start|>assistant",
        " to=functions.f<|channel|>commentary json<|message|>",
        '{"a": 1}',
        "<|end|>",
        "<|call|>",
        "<|message|>",
    ],
    "fenced": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "f",
        "\n```json\n",
        "{}",
        "\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
    "headers": ['{"name": "f", "parameters": ', "{}", "}", "; ", "<|python_tag|>", "{", " "],
    "headless": [
        "<tool_call>",
        "\n \n",
        "f\n",
        "<arg_key>a</arg_key>",
        "<arg_key>",
        "\n<arg_value>1</arg_value>",
        "</tool_call>",
        "<arg_value>",
    ],
    "invoked": [
        "<minimax:tool_call>",
        '<invoke name="f">',
        '<parameter name="a">',
        "1",
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
    ],
    "sections": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "{}",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ],
    "tagged": [
        "<tool_call>",
        "\n<function=f>",
        "<parameter=a>",
        "\n1\n",
        "</parameter>",
        "</function>",
        "\n</tool_call>",
        "</think>",
    ],
}
COMMON = [" ", "\n", "word", "é🐍", "<", "</", "[", '"']


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data(), whole=st.booleans())
@settings(max_examples=40, deadline=None)
def test_reply_does_not_depend_on_chunking(
    directories: dict[str, Path],
    models: dict[str, ChatTokenizer],
    name: str,
    data: st.DataObject,
    whole: bool,
) -> None:
    """In order for the most part, so that calls are made; `whole` is the format's own order."""
    pieces = PIECES[name]
    drawn = pieces if whole else data.draw(st.lists(st.sampled_from(pieces + COMMON), max_size=14))
    more = data.draw(st.lists(st.sampled_from(pieces + COMMON), max_size=4))
    text = "".join([*drawn, *more])
    tokens = models[name]
    ids = sampled(directories[name], text) if data.draw(st.booleans()) else encode_text(tokens, text)
    tools = [tool_for({"a": 1})]
    at_once = read(tokens, ids, tools)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert read(tokens, ids, tools, cuts=cuts) == at_once
    assert read(tokens, ids, tools, cuts=range(1, len(ids))) == at_once


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tagged", "</think><tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("tagged", "</think><tool_call>\n<function=f>\n</tool_call>"),
        ("tagged", "</think><tool_call>\n<function=>\n</function>\n</tool_call>"),
        (
            "tagged",
            "</think><tool_call>\n<function=f>\n<parameter=a>1</parameter>\n<parameter=a>2</parameter></function></tool_call>",
        ),
        ("headless", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
        ("headless", "<tool_call>\n</tool_call>"),
        ("invoked", '</think><minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</invoke>'),
        ("brackets", '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
        ("brackets", '[TOOL_CALLS] [{"name": "f"}]'),
        ("arrows", "[TOOL_CALLS]f{}"),
        ("arrows", "[TOOL_CALLS][ARGS]{}"),
        ("arrows", "[TOOL_CALLS]f[ARGS][]"),
        ("arrows", "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
        ("headers", '{"name": "f", "arguments": {}}'),
        ("headers", 'Here: {"name": "f", "parameters": {}}'),
        ("headers", '{"name": "f", "parameters": {}'),
        ("fenced", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{a}\n```"),
        ("fenced", "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"),
        (
            "sections",
            "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        ("listed", '<|tool_call|>{"name": "f", "arguments": {}}'),
    ],
)
def test_a_malformed_call_is_text_exactly_as_sampled(
    directories: dict[str, Path], models: dict[str, ChatTokenizer], name: str, text: str
) -> None:
    reply, events = read(models[name], sampled(directories[name], text), [tool_for({})])
    expected = text.removeprefix("</think>")
    assert reply == Message(role="assistant", content=expected)
    assert events == [TextDelta(expected)]


def test_the_calls_before_a_malformed_one_stay_calls(
    directories: dict[str, Path], models: dict[str, ChatTokenizer]
) -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": 1}]'
    reply, _ = read(models["brackets"], sampled(directories["brackets"], text), [tool_for({})])
    assert [c.name for c in reply.tool_calls] == ["f"]
    assert reply.content == ', {"name": "g", "arguments": 1}]'


# --- values without quotes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "true", "true"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "-0.5e3", -500.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/x"}]}, "[7]", [7]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "7", 7),
        ({}, "word", "word"),
        (None, '{"a": 1}', {"a": 1}),
    ],
)
def test_the_schema_says_what_a_value_is(
    directories: dict[str, Path], models: dict[str, ChatTokenizer], schema: Any, value: str, expected: Any
) -> None:
    properties = {} if schema is None else {"a": schema}
    tool = Tool("f", "", {"type": "object", "properties": properties}, {})
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    reply, _ = read(models["headless"], sampled(directories["headless"], text), [tool])
    assert [json.loads(c.arguments) for c in reply.tool_calls] == [{"a": expected}]


# --- harmony -------------------------------------------------------------------------------------


def test_channels_are_reasoning_text_and_calls(
    directories: dict[str, Path], models: dict[str, ChatTokenizer]
) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, look.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>"
        '{"key": "seven"}<|call|>'
    )
    reply, events = read(models["channels"], sampled(directories["channels"], text), [tool_for({})])
    assert reply == Message(
        role="assistant",
        reasoning="Hm, look.",
        content="One moment.",
        tool_calls=(ToolCall("", "lookup", '{"key": "seven"}'),),
    )
    assert events == [
        ReasoningDelta("Hm, look."),
        TextDelta("One moment."),
        ToolStart(0, "lookup"),
        ToolArguments(0, '{"key": "seven"}'),
        ToolEnd(0),
    ]


def test_truncated_message_to_a_tool_is_text(
    directories: dict[str, Path], models: dict[str, ChatTokenizer]
) -> None:
    text = '<|channel|>commentary to=functions.f<|message|>{"key": "sev'
    reply, _ = read(models["channels"], sampled(directories["channels"], text), [tool_for({})])
    assert reply == Message(role="assistant", content='{"key": "sev')
    text = "<|channel|>final<|message|>It is 42.<|return|>"
    reply, _ = read(models["channels"], sampled(directories["channels"], text), [])
    assert reply == Message(role="assistant", content="It is 42.")
