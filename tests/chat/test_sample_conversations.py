"""Every template beside this test, in every way a conversation goes on: what is appended is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afield.chat import ChatTokenizer, TemplateRefusal
from afield.types import Message
from templates.models import (
    ALL,
    ANSWER,
    QUESTION,
    SYSTEM,
    TOOL,
    call,
    oracle,
    write_model,
)

USER = Message(role="user", content="And eight?")
CALLING = Message(role="assistant", reasoning="I need it.", tool_calls=(call("seven", "call00001"),))
PARALLEL = Message(
    role="assistant",
    reasoning="I need both.",
    tool_calls=(call("seven", "call00001"), call("eight", "call00002")),
)
RESULT = Message(role="tool", content="forty-two", tool_call_id="call00001", name="lookup")
SECOND = Message(role="tool", content="forty-three", tool_call_id="call00002", name="lookup")
EMPTY = Message(role="tool", content="", tool_call_id="call00001", name="lookup")

# name -> the last turn, what is appended, whether the turn was cut off
APPENDS: dict[str, tuple[Message, list[Message], bool]] = {
    "tool": (CALLING, [RESULT], False),
    "two tools": (PARALLEL, [RESULT, SECOND], False),
    "tool and user": (CALLING, [RESULT, USER], False),
    "user": (ANSWER, [USER], False),
    "two users": (ANSWER, [USER, USER], False),
    "system": (ANSWER, [Message(role="system", content="Speak French.")], False),
    "cut off": (ANSWER, [USER], True),
    "empty result": (CALLING, [EMPTY], False),
}
CALLS = {"tool", "two tools", "tool and user", "empty result"}
SAYS = {"user", "two users", "system", "cut off"}
EVERYTHING = CALLS | SAYS

# What each template keeps the prefix for: written down, so that a change is seen.
KEEPS: dict[str, set[str]] = {
    "tiny": EVERYTHING,
    "actions": EVERYTHING - {"cut off"},
    "alternating": {"user", "cut off"},
    "arrows": EVERYTHING,
    "bridged": set(),
    "brackets": CALLS - {"tool and user"},
    "channels": CALLS,
    "counted": set(),
    "endless": set(),
    "fenced": EVERYTHING,
    "forgetful": EVERYTHING,
    "gathered": EVERYTHING - {"system"},
    "headers": EVERYTHING - {"two tools"},
    "headless": set(),
    "invoked": EVERYTHING,
    "listed": EVERYTHING,
    "moving": CALLS - {"tool and user"},
    "plain": SAYS,
    "roles": EVERYTHING,
    "sections": EVERYTHING,
    "separated": EVERYTHING,
    "spoken": SAYS,
    "tagged": EVERYTHING,
    "thinking": SAYS,
    "unthinking": EVERYTHING,
}
FORMATS = {
    "tiny": "hermes",
    "actions": "cohere",
    "arrows": "mistral_args",
    "brackets": "mistral_list",
    "channels": "harmony",
    "fenced": "deepseek_v3",
    "forgetful": "hermes",
    "gathered": "hermes",
    "headers": "llama_json",
    "headless": "glm",
    "invoked": "minimax",
    "listed": "json_list",
    "roles": "json_list",
    "sections": "kimi",
    "separated": "deepseek_v31",
    "tagged": "qwen_xml",
    "unthinking": "hermes",
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp("models") / name, name) for name in ALL}


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(path, rules=False) for name, path in directories.items()}


def test_at_least_twenty_templates_and_eight_patterns_are_tested() -> None:
    assert len(ALL) >= 20
    assert len(APPENDS) >= 8
    assert set(KEEPS) == set(ALL)


def before_and_after(tokens: ChatTokenizer, turn: Message, new: list[Message]) -> tuple[list[int], list[int]]:
    history = [SYSTEM, QUESTION]
    return tokens.render(history, [TOOL]), tokens.render([*history, turn, *new], [TOOL])


@pytest.mark.parametrize("way", APPENDS)
@pytest.mark.parametrize("name", ALL)
def test_suffix_is_the_end_of_the_full_rendering(
    models: dict[str, ChatTokenizer], name: str, way: str
) -> None:
    tokens = models[name]
    turn, new, truncated = APPENDS[way]
    appended = tokens.append(new, truncated=truncated)
    assert (appended is not None) == (way in KEEPS[name])
    if appended is None:
        return
    tier, ids = appended
    assert tier == "append"
    _, whole = before_and_after(tokens, turn, new)
    assert whole[-len(ids) :] == ids
    said = tokens.decode(whole[: -len(ids)])
    assert all(message.content in tokens.decode(ids) for message in new)
    assert new[0].content == "" or new[0].content not in said
    stop = ids[0] if truncated else whole[-len(ids) - 1]
    assert stop in tokens.stop_ids
    if not turn.tool_calls:
        assert turn.content in said


@pytest.mark.parametrize("way", [way for way in APPENDS if way != "cut off"])
@pytest.mark.parametrize("name", ALL)
def test_splice_is_the_end_of_the_full_rendering(
    models: dict[str, ChatTokenizer], name: str, way: str
) -> None:
    tokens = models[name]
    turn, new, _ = APPENDS[way]
    try:
        _, whole = before_and_after(tokens, turn, new)
    except TemplateRefusal:
        whole = []
    ids = tokens.splice([SYSTEM, QUESTION, turn], new, truncated=False, tools=[TOOL])
    if ids is None:
        assert tokens.append(new, truncated=False) is None
        return
    assert whole[-len(ids) :] == ids
    assert whole[-len(ids) - 1] in tokens.stop_ids


@pytest.mark.parametrize("name", [name for name in ALL if name not in {"thinking", "endless"}])
def test_each_template_is_rendered_as_transformers_renders_it(
    directories: dict[str, Path], models: dict[str, ChatTokenizer], name: str
) -> None:
    reference, text_only = oracle(directories[name]), name == "separated"
    for turn, new, _ in APPENDS.values():
        messages = [QUESTION, turn, *new]
        try:
            ours = models[name].render(messages, [TOOL])
        except TemplateRefusal:
            continue
        assert ours == reference.apply_chat_template(
            [plainly(message, text_only) for message in messages],
            tools=[TOOL.raw],
            add_generation_prompt=True,
            return_dict=False,
        )


def plainly(message: Message, text_only: bool) -> dict:
    out: dict = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = out["thinking"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": c.id,
                "function": {
                    "name": c.name,
                    "arguments": c.arguments if text_only else json.loads(c.arguments),
                },
            }
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"], out["name"] = message.tool_call_id, message.name
    return out


def test_each_format_is_found_by_a_round_trip(models: dict[str, ChatTokenizer]) -> None:
    found = {name: tokens.profile.tool_format for name, tokens in models.items()}
    assert {name: value for name, value in found.items() if value} == FORMATS


def test_profile_has_the_other_template_properties(models: dict[str, ChatTokenizer]) -> None:
    profiles = {name: tokens.profile for name, tokens in models.items()}
    assert {n for n, c in profiles.items() if not c.parallel_calls and c.tool_format} == {
        "headers",
        "channels",
    }
    assert {n: c.call_ids for n, c in profiles.items() if c.call_ids != "free"} == {
        "brackets": "nine",
        "sections": "rendered",
    }
    assert {n for n, c in profiles.items() if c.prints_date} == {"headers", "moving"}
    assert {n for n, c in profiles.items() if c.opens_thinking} == {"thinking", "tagged", "invoked"}
    assert {n for n, c in profiles.items() if c.named} == {"channels"}
    reasoning = {n: c.reasoning for n, c in profiles.items()}
    assert [reasoning[n] for n in ("arrows", "actions", "gathered", "channels", "tagged")] == [
        "THINK",
        "cohere",
        "seed",
        "harmony",
        "think",
    ]


def test_template_that_strips_reasoning_is_followed_only_by_policy_template(
    models: dict[str, ChatTokenizer],
) -> None:
    stripping = {n for n, t in models.items() if "user" in t.profile.strips} - {"bridged"}
    assert stripping == {"forgetful", "thinking", "unthinking", "invoked"}
    for name in stripping:
        assert models[name].append([USER], truncated=False) is not None
        assert models[name].under(thinking="template").append([USER], truncated=False) is None
    kept = models["forgetful"].under(thinking="template")
    assert kept.append([RESULT], truncated=False) is not None


def test_results_without_a_tool_name_are_not_appended(
    models: dict[str, ChatTokenizer],
) -> None:
    nameless = Message(role="tool", content="forty-two", tool_call_id="call00001")
    tokens = models["channels"]
    assert tokens.append([nameless], truncated=False) is None
    spliced = tokens.splice([QUESTION, CALLING], [nameless], truncated=False)
    appended = tokens.append([RESULT], truncated=False)
    assert appended is not None
    assert spliced == appended[1]
