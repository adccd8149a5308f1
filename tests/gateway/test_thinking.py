"""Thinking as requests ask for it: on, off, hidden; and conversations that come back without thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.chat import ChatTokenizer
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.api_error import ApiError
from afield.gateway.model_request import ModelRequest, Reasoning
from afield.gateway.thinking import template_arguments
from afield.interfaces import SessionSpec
from support.gateways import POLICY, Running, running, vocabulary
from support.invariants import STOP
from templates.models import template, write_template

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()

# --- the template's own switch -------------------------------------------------------------------

CLOSED = "<think>\n\n</think>\n\n"
SWITCHED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{%- endif %}"
)
DEEP = SWITCHED.replace("enable_thinking is defined and not enable_thinking", "not thinking | default(false)")
EFFORT = (
    "{{- '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium') + '<|im_end|>\\n' }}" + SWITCHED
)
PLAIN = SWITCHED.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "").replace("<think>", "")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    sources = {"switched": SWITCHED, "deep": DEEP, "effort": EFFORT, "fixed": template("thinking")}
    return {name: write_template(made / name, source, [], []) for name, source in sources.items()}


@pytest.fixture(scope="module")
def loaded(models: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(path) for name, path in models.items()}


def asking(name: str = "enable_thinking", **reasoning: Any) -> ModelRequest:
    names = {"reasoning": name, "effort": "reasoning_effort", "budget": "thinking_budget"}
    return ModelRequest(dialect="chat", reasoning=Reasoning(**reasoning), names=names)


def told(
    tokens: ChatTokenizer, ignore: bool = False, **reasoning: Any
) -> tuple[dict[str, Any], tuple[str, ...]]:
    return template_arguments(tokens, asking(**reasoning), ignore=ignore)


def test_reasoning_switch_is_detected_by_rendering(loaded: dict[str, ChatTokenizer]) -> None:
    found = {name: tokens.switches for name, tokens in loaded.items()}
    assert [(found[n].name, found[n].default, found[n].effort) for n in ("switched", "deep", "effort")] == [
        ("enable_thinking", True, False),
        ("thinking", False, False),
        ("enable_thinking", True, True),
    ]
    assert (found["fixed"].name, found["fixed"].effort) == (None, False)


def test_template_switches_reasoning(loaded: dict[str, ChatTokenizer]) -> None:
    assert told(loaded["switched"], enabled=False) == ({"enable_thinking": False}, ())
    assert told(loaded["switched"], enabled=True) == ({}, ())
    assert told(loaded["deep"], enabled=True) == ({"thinking": True}, ())
    assert told(loaded["deep"], enabled=False) == ({}, ())
    off = loaded["switched"].make_variant({"enable_thinking": False})
    assert off.decode(off.render([], [])).endswith(CLOSED)
    assert off is loaded["switched"].variant({"enable_thinking": False})
    assert loaded["switched"].variant({}) is loaded["switched"]


def test_template_without_switch_gets_400(loaded: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(ApiError, match=r"enable_thinking: the chat template of .* cannot turn thinking off"):
        told(loaded["fixed"], enabled=False)
    assert told(loaded["fixed"], ignore=True, enabled=False) == ({}, ("ignored:enable_thinking",))
    assert told(loaded["fixed"], enabled=True) == ({}, ())


def test_model_without_reasoning_accepts_disabled(tmp_path: Path) -> None:
    tokens = ChatTokenizer.load(without_tags(tmp_path))
    assert tokens.profile.reasoning is None
    assert told(tokens, enabled=False) == ({}, ())
    assert told(tokens, enabled=True) == ({}, ("overridden:enable_thinking",))


def without_tags(directory: Path) -> Path:
    made = write_template(directory, PLAIN, [], [])
    for path in made.glob("*.json"):
        path.write_text(path.read_text().replace("think>", "thynk>"))
    return made


def test_effort_goes_to_a_template_that_takes_it(loaded: dict[str, ChatTokenizer]) -> None:
    assert told(loaded["effort"], effort="low") == ({"reasoning_effort": "low"}, ())
    assert told(loaded["effort"], effort="max") == (
        {"reasoning_effort": "high"},
        ("overridden:reasoning_effort",),
    )
    assert told(loaded["switched"], effort="low") == ({}, ("overridden:reasoning_effort",))


def test_trainer_template_arguments_take_precedence(models: dict[str, Path]) -> None:
    tokens = ChatTokenizer.load(
        models["effort"], arguments={"enable_thinking": True, "reasoning_effort": "high"}
    )
    assert told(tokens, enabled=False) == ({}, ("overridden:enable_thinking",))
    assert told(tokens, enabled=True) == ({}, ())
    assert told(tokens, effort="low") == ({}, ("overridden:reasoning_effort",))
    assert told(tokens, effort="high") == ({}, ())


HI = [{"role": "user", "content": "Hi"}]
PATHS = {
    "chat": "v1/chat/completions",
    "responses": "v1/responses",
    "anthropic": "v1/messages",
    "gemini": "v1beta/models/m:generateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI},
    "responses": {"input": "Hi"},
    "anthropic": {"messages": HI, "max_tokens": 200},
    "gemini": {"contents": [{"parts": [{"text": "Hi"}]}]},
}
OFF = [
    ("chat", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("chat", {"enable_thinking": False}),
    ("chat", {"reasoning_effort": "none"}),
    ("chat", {"reasoning": {"enabled": False}}),
    ("chat", {"thinking": {"type": "disabled"}}),
    ("responses", {"reasoning": {"effort": "none"}}),
    ("anthropic", {"thinking": {"type": "disabled"}}),
    ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}),
]


async def test_every_dialect_can_turn_thinking_off(tmp_path: Path, models: dict[str, Path]) -> None:
    vocab = vocabulary(models["switched"])
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(*vocab.encode("Hello."), STOP)))
    async with running(engine, tmp_path, models["switched"]) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        for dialect, body in [*OFF, *((name, {}) for name in PATHS)]:
            status, answer = await up.ask(
                "POST", f"/s/r.1/{PATHS[dialect]}", {**BODIES[dialect], **body}, key
            )
            assert status == 200, answer
        record = await up.client.finalize("r.1")
    ended = [vocab.decode(entry.prompt_ids).endswith(CLOSED) for entry in engine.recorded]
    assert ended == [True] * len(OFF) + [False] * len(PATHS)
    assert {turn.messages[-1].content for turn in record.turns} == {"Hello."}
    assert not any(turn.tags for turn in record.turns)


async def test_unsupported_reasoning_parameter_is_named(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path, POLICY) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        for dialect, body in OFF:
            asked = {**BODIES[dialect], **body}
            status, answer = await up.ask("POST", f"/s/r.1/{PATHS[dialect]}", asked, key)
            (name,) = body if dialect != "gemini" else ("generationConfig.thinkingConfig.thinkingBudget",)
            assert status == 400
            assert name in answer["error"]["message"]
            assert "cannot turn thinking off" in answer["error"]["message"]


# --- hidden thoughts -----------------------------------------------------------------------------

SECRET = "zzqx"
FUNCTION = {"name": "get_price", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get_price", "arguments": {"item": "x"}}\n</tool_call>'
SAID = [
    f"<think>\n{SECRET}1\n</think>\n\nLet me see.\n{CALL}",
    f"<think>\n{SECRET}2\n</think>\n\nIt is 4.",
    f"<think>\n{SECRET}3\n</think>\n\nBye.",
]
ARGUMENTS = {"item": "x"}


def conversation(dialect: str) -> list[dict[str, Any]]:
    """Three requests in which the client repeats what it was shown: no thoughts."""
    named = "call_t1_0"
    if dialect == "chat":
        call = {
            "id": named,
            "type": "function",
            "function": {"name": "get_price", "arguments": json.dumps(ARGUMENTS)},
        }
        messages = [{"role": "user", "content": "How much?"}]
        first = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
        first_back = [first, {"role": "tool", "tool_call_id": named, "content": "4"}]
        then = [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Thanks."}]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        told: Any = {"tools": tools, "include_reasoning": False}
        return [
            {**told, "messages": m} for m in (messages, messages + first_back, messages + first_back + then)
        ]
    if dialect == "responses":
        messages = [{"role": "user", "content": "How much?"}]
        first_back = [
            {"role": "assistant", "content": "Let me see."},
            {
                "type": "function_call",
                "call_id": named,
                "name": "get_price",
                "arguments": json.dumps(ARGUMENTS),
            },
            {"type": "function_call_output", "call_id": named, "output": "4"},
        ]
        then = [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Thanks."}]
        tools = [{"type": "function", **FUNCTION}]
        return [
            {"tools": tools, "input": items}
            for items in (messages, messages + first_back, messages + first_back + then)
        ]
    if dialect == "anthropic":
        messages = [{"role": "user", "content": "How much?"}]
        use = {"type": "tool_use", "id": named, "name": "get_price", "input": ARGUMENTS}
        result = {"type": "tool_result", "tool_use_id": named, "content": "4"}
        first_back = [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
            {"role": "user", "content": [result]},
        ]
        then = [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Thanks."}]
        tools = [{"name": "get_price", "input_schema": FUNCTION["parameters"]}]
        told = {"tools": tools, "max_tokens": 200}
        return [
            {**told, "messages": m} for m in (messages, messages + first_back, messages + first_back + then)
        ]
    messages = [{"role": "user", "parts": [{"text": "How much?"}]}]
    call = {"functionCall": {"name": "get_price", "args": ARGUMENTS}}
    answer = {"functionResponse": {"name": "get_price", "response": {"result": "4"}}}
    first_back = [
        {"role": "model", "parts": [{"text": "Let me see."}, call]},
        {"role": "user", "parts": [answer]},
    ]
    then = [
        {"role": "model", "parts": [{"text": "It is 4."}]},
        {"role": "user", "parts": [{"text": "Thanks."}]},
    ]
    tools = [{"functionDeclarations": [FUNCTION]}]
    return [
        {"tools": tools, "contents": c}
        for c in (messages, messages + first_back, messages + first_back + then)
    ]


async def send(up: Running, key: str, dialect: str, body: dict[str, Any], stream: bool) -> str:
    path = PATHS[dialect]
    if stream and dialect == "gemini":
        path = "v1beta/models/m:streamGenerateContent?alt=sse"
    elif stream:
        body = {**body, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http,
        http.post(f"{up.url}/s/r.1/{path}", json=body) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_hidden_reasoning_is_recorded(tmp_path: Path, dialect: str, stream: bool) -> None:
    engine = ScriptedEngine(
        [ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), chunks=(2,)) for text in SAID]
    )
    async with running(engine, tmp_path) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        for body in conversation(dialect):
            text = await send(up, key, dialect, body, stream)
            assert SECRET not in text
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
    assert [turn.messages[-1].reasoning.strip() for turn in record.turns] == [
        f"{SECRET}{n}" for n in (1, 2, 3)
    ]
    (row,) = record.trajectories
    assert row.token_ids == engine.recorded[-1].prompt_ids + engine.recorded[-1].token_ids
    assert not any(turn.links for turn in record.turns)


SHOWING = {
    "chat": {},
    "responses": {"reasoning": {"summary": "auto"}},
    "anthropic": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "gemini": {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
async def test_requested_reasoning_is_returned(tmp_path: Path, dialect: str, stream: bool) -> None:
    script = [ScriptedReply(token_ids=(*VOCAB.encode(SAID[2]), STOP), chunks=(99,))]
    async with running(ScriptedEngine(script), tmp_path) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        text = await send(up, key, dialect, {**BODIES[dialect], **SHOWING[dialect]}, stream)
    assert f"{SECRET}3" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_omitted_thinking_block_keeps_its_signature(tmp_path: Path, stream: bool) -> None:
    script = [ScriptedReply(token_ids=(*VOCAB.encode(SAID[2]), STOP), chunks=(3,))]
    async with running(ScriptedEngine(script), tmp_path) as up:
        key = (await up.client.open(SessionSpec(id="r.1"))).api_key
        asked = {**BODIES["anthropic"], "thinking": {"type": "adaptive", "display": "omitted"}}
        text = await send(up, key, "anthropic", asked, stream)
    assert SECRET not in text and '"signature"' in text and '"type":"thinking"' in text
