"""One model under several policies: what becomes of reasoning, and of control tokens in content."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.chat import ChatTokenizer, TemplateRefusal
from afield.errors import UsageError
from afield.types import Message
from support.tokenizers import encode_text
from templates.models import ANSWER, CALLING, QUESTION, RESULT, SYSTEM, TOOL, oracle, sampled, write_model

USER = Message(role="user", content="And eight?")
EDITED = Message(role="assistant", content="It is 41.")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ["tiny", "thinking", "moving", "endless"]
    return {name: write_model(tmp_path_factory.mktemp("models") / name, name) for name in names}


@pytest.fixture(scope="module")
def tiny(directories: dict[str, Path]) -> ChatTokenizer:
    return ChatTokenizer.load(directories["tiny"])


@pytest.fixture(scope="module")
def thinking(directories: dict[str, Path]) -> ChatTokenizer:
    return ChatTokenizer.load(directories["thinking"], rules=False)


def test_tokenizer_of_a_policy_is_created_once(tiny: ChatTokenizer) -> None:
    other = tiny.under(thinking="template", escape="reject")
    assert other is tiny.under(thinking="template", escape="reject")
    assert tiny.under() is tiny
    assert other.under() is tiny


def test_each_policy_is_a_root_of_its_own(tiny: ChatTokenizer) -> None:
    keys = {
        tiny.under(thinking=thinking, escape=escape).root_key([])
        for thinking in ("preserve", "template", "per_turn")
        for escape in ("escape", "faithful", "reject")
    }
    assert len(keys) == 9
    assert tiny.root_key([]) in keys


@pytest.mark.parametrize("wrong", [{"thinking": "keep"}, {"escape": "no"}])
def test_an_unknown_policy_is_named_with_the_choices(tiny: ChatTokenizer, wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"unknown \w+ policy '(keep|no)'; choose one of: "):
        tiny.under(**wrong)


# --- thinking ------------------------------------------------------------------------------------


def test_policy_template_branches_where_reasoning_is_stripped(thinking: ChatTokenizer) -> None:
    assert thinking.append([USER], truncated=False) is not None
    assert thinking.under(thinking="template").append([USER], truncated=False) is None
    assert thinking.under(thinking="template").append([SYSTEM], truncated=False) is not None


def test_per_turn_never_appends(tiny: ChatTokenizer) -> None:
    tokens = tiny.under(thinking="per_turn")
    assert tokens.append([USER], truncated=False) is None
    assert tokens.splice([QUESTION, ANSWER], [USER], truncated=False) is None


# --- splicing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "new"),
    [
        ([QUESTION, ANSWER], [USER, EDITED, USER]),
        ([SYSTEM, QUESTION, CALLING], [RESULT, EDITED, USER]),
        ([QUESTION, CALLING, RESULT, ANSWER], [USER, CALLING, RESULT]),
    ],
)
def test_unsampled_turn_is_spliced_after_the_sampled_one(
    directories: dict[str, Path], tiny: ChatTokenizer, history: list[Message], new: list[Message]
) -> None:
    [end] = sampled(directories["tiny"], "<|im_end|>")
    whole = tiny.render([*history, *new], [TOOL])
    ids = tiny.splice(history, new, truncated=False, tools=[TOOL])
    assert ids is not None
    assert whole[-len(ids) :] == ids
    assert whole[-len(ids) - 1] == end
    spoken = tiny.decode(whole[: -len(ids) - 1])
    assert spoken.endswith("</tool_call>" if history[-1].tool_calls else history[-1].content)
    assert tiny.splice(history, new, truncated=True, tools=[TOOL]) == [end, *ids]


def test_changed_head_is_not_spliced(directories: dict[str, Path]) -> None:
    moving = ChatTokenizer.load(directories["moving"], rules=False)
    assert moving.splice([QUESTION, ANSWER], [USER], truncated=False, tools=[TOOL]) is None
    assert moving.splice([QUESTION, ANSWER], [USER], truncated=False) is not None
    assert moving.splice([QUESTION, ANSWER], [SYSTEM], truncated=False) is None
    endless = ChatTokenizer.load(directories["endless"])
    assert endless.splice([QUESTION, ANSWER], [USER], truncated=False) is None


def test_stripped_reasoning_is_a_change_only_under_policy_template(thinking: ChatTokenizer) -> None:
    new = [EDITED, USER]
    assert thinking.splice([QUESTION, ANSWER], new, truncated=False) is not None
    assert thinking.under(thinking="template").splice([QUESTION, ANSWER], new, truncated=False) is None


def test_a_conversation_that_spells_the_anchor_is_not_spliced(tiny: ChatTokenizer) -> None:
    message = Message(role="user", content="afieldanchor")
    assert tiny.splice([message, ANSWER], [USER], truncated=False) is None


# --- control tokens in content -------------------------------------------------------------------

SPELLED = Message(role="user", content="say <|im_end|> now")


def test_a_faithful_session_reads_control_tokens_in_content_as_transformers_does(
    directories: dict[str, Path], tiny: ChatTokenizer
) -> None:
    expected = oracle(directories["tiny"]).apply_chat_template(
        [{"role": "user", "content": SPELLED.content}], add_generation_prompt=True, return_dict=False
    )
    faithful = tiny.under(escape="faithful")
    assert faithful.render([SPELLED], []) == expected
    assert tiny.render([SPELLED], []) != expected
    assert encode_text(faithful, "<|im_end|>") == sampled(directories["tiny"], "<|im_end|>")


def test_a_rejecting_session_names_the_literal_and_the_message(tiny: ChatTokenizer) -> None:
    tokens = tiny.under(escape="reject")
    with pytest.raises(TemplateRefusal, match=r"\(user\) contains the control token '<\|im_end\|>'"):
        tokens.render([SYSTEM, SPELLED], [])
    assert tokens.append([SPELLED], truncated=False) is None
    assert tokens.render([SYSTEM, QUESTION], [TOOL]) == tiny.render([SYSTEM, QUESTION], [TOOL])
