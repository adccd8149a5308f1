"""Tier bridge: a family's bridge appends what the template would write."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from afield.chat import ChatTokenizer
from afield.types import Message
from templates.models import ANSWER, QUESTION, SYSTEM, call, sampled, write_model

if find_spec("renderers") is None and not os.environ.get("CI"):
    pytest.skip("the package renderers is not installed", allow_module_level=True)

USER = Message(role="user", content="And eight?")
CALLING = Message(role="assistant", reasoning="I need it.", tool_calls=(call("seven"),))
RESULT = Message(role="tool", content="forty-two", tool_call_id="call_1")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bridged"), "bridged")


@pytest.fixture(scope="module")
def tokens(directory: Path) -> ChatTokenizer:
    return ChatTokenizer.load(directory, rules=False)


def stop(directory: Path, text: str) -> int:
    [token] = sampled(directory, text)
    return token


def test_the_family_is_found_by_comparing_renderings(tokens: ChatTokenizer) -> None:
    assert tokens.profile.family == "glm-4.5"
    assert tokens.profile.appends["tool"] == "bridge"
    assert tokens.profile.appends["user"] == "bridge"
    assert any("family glm-4.5" in note for note in tokens.profile.notes)


@pytest.mark.parametrize(
    ("turn", "new", "end"),
    [
        (CALLING, [RESULT], "<|observation|>"),
        (CALLING, [RESULT, RESULT], "<|observation|>"),
        (CALLING, [RESULT, USER], "<|observation|>"),
        (CALLING, [Message(role="tool", content="")], "<|observation|>"),
        (ANSWER, [USER], "<|user|>"),
        (ANSWER, [USER, USER], "<|user|>"),
        (ANSWER, [USER, SYSTEM], "<|user|>"),
    ],
)
def test_the_stop_that_was_sampled_is_the_beginning_of_the_next_message(
    directory: Path, tokens: ChatTokenizer, turn: Message, new: list[Message], end: str
) -> None:
    appended = tokens.append(new, truncated=False, stop=stop(directory, end))
    assert appended is not None
    tier, ids = appended
    whole = tokens.render([QUESTION, turn, *new], [])
    assert tier == "bridge"
    assert whole[-len(ids) - 1 :] == [stop(directory, end), *ids]


def test_nothing_is_bridged_behind_another_stop_or_none(directory: Path, tokens: ChatTokenizer) -> None:
    assert tokens.append([RESULT], truncated=False, stop=stop(directory, "<|user|>")) is None
    assert tokens.append([USER], truncated=False, stop=stop(directory, "<|endoftext|>")) is None
    assert tokens.append([USER], truncated=False) is None
    assert tokens.append([USER], truncated=True, stop=stop(directory, "<|user|>")) is None


def test_content_stays_content_across_a_bridge(directory: Path, tokens: ChatTokenizer) -> None:
    spelled = Message(role="tool", content="a <|user|> b")
    end = stop(directory, "<|observation|>")
    appended = tokens.append([spelled], truncated=False, stop=end)
    assert appended is not None
    assert stop(directory, "<|user|>") not in appended[1]
    assert "a <|user|> b" in tokens.decode(appended[1])
    faithful = tokens.under(escape="faithful").append([spelled], truncated=False, stop=end)
    assert faithful is not None
    assert stop(directory, "<|user|>") in faithful[1]
    assert tokens.under(escape="reject").append([spelled], truncated=False, stop=end) is None


def test_reasoning_that_the_template_strips_is_preserved_unless_asked_otherwise(
    directory: Path, tokens: ChatTokenizer
) -> None:
    end = stop(directory, "<|user|>")
    assert tokens.append([USER], truncated=False, stop=end) is not None
    assert tokens.under(thinking="template").append([USER], truncated=False, stop=end) is None
    assert tokens.under(thinking="template").append(
        [RESULT], truncated=False, stop=stop(directory, "<|observation|>")
    )


def test_a_template_that_no_family_writes_is_not_bridged(tmp_path: Path) -> None:
    tokens = ChatTokenizer.load(write_model(tmp_path, "headless"))
    assert tokens.profile.family is None
    assert any("no family of the package renderers" in note for note in tokens.profile.notes)
