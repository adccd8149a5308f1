"""What is appended after a sampled turn is what the template would have put there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.chat import ChatTokenizer
from afield.types import Message
from templates.models import (
    ANSWER,
    CALLING,
    CONVERSATION,
    NAMES,
    QUESTION,
    RESULT,
    SYSTEM,
    TOOL,
    call,
    sampled,
    write_model,
)

USER = Message(role="user", content="And eight?")
SECOND = Message(role="tool", content="", tool_call_id="call_2")
PARALLEL = Message(role="assistant", tool_calls=(call("seven"), call("eight", "call_2")))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp("models") / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(path, rules=False) for name, path in directories.items()}


def appended(tokens: ChatTokenizer, new: list[Message], *, truncated: bool) -> list[int] | None:
    found = tokens.append(new, truncated=truncated)
    if found is None:
        return None
    tier, ids = found
    assert tier == "append"
    return ids


@pytest.mark.parametrize(
    ("turn", "new"),
    [
        (CALLING, [RESULT]),
        (PARALLEL, [RESULT, SECOND]),
        (PARALLEL, [RESULT, SECOND, USER]),
        (CALLING, [RESULT, USER]),
        (CALLING, [Message(role="tool", content="")]),
        (ANSWER, [USER]),
        (ANSWER, [USER, USER]),
        (ANSWER, [SYSTEM]),
        (ANSWER, [SYSTEM, USER]),
    ],
    ids=lambda value: "+".join(m.role for m in value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_appending_gives_the_whole_rendering(
    directories: dict[str, Path],
    models: dict[str, ChatTokenizer],
    turn: Message,
    new: list[Message],
    tools: list,
) -> None:
    tokens = models["tiny"]
    history = [SYSTEM, QUESTION]
    prompt, whole = tokens.render(history, tools), tokens.render([*history, turn, *new], tools)
    end = sampled(directories["tiny"], "<|im_end|>")[0]
    spoken = whole[len(prompt) : whole.index(end, len(prompt))]

    delta = appended(tokens, new, truncated=False)
    assert delta is not None
    assert prompt + spoken + [end] + delta == whole
    assert appended(tokens, new, truncated=True) == [end, *delta]


def test_the_separator_behind_the_end_of_a_turn_is_part_of_the_delta(
    models: dict[str, ChatTokenizer],
) -> None:
    delta = appended(models["tiny"], [USER], truncated=False)
    assert delta is not None
    assert models["tiny"].decode(delta) == "\n<|im_start|>user\nAnd eight?<|im_end|>\n<|im_start|>assistant\n"


def test_a_separator_the_template_writes_only_between_turns_is_there(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>"
        "{% if not loop.last or add_generation_prompt %} ++ {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokens = ChatTokenizer.load(tmp_path)
    delta = appended(tokens, [USER], truncated=False)
    assert delta is not None
    assert tokens.decode(delta) == " ++ user: And eight?<|im_end|> ++ assistant: "


def test_template_that_rewrites_history_is_not_appended_to(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages | length }} messages\n"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    tokens = ChatTokenizer.load(tmp_path)
    assert appended(tokens, [USER], truncated=False) is None


def test_message_that_the_suffix_template_refuses_is_rendered_in_full(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ raise_exception('no') if m.content == 'bad' }}"
        "{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    tokens = ChatTokenizer.load(tmp_path)
    assert appended(tokens, [USER], truncated=False) is not None
    assert appended(tokens, [Message(role="user", content="bad")], truncated=False) is None


def test_template_that_strips_reasoning_appends_with_a_note(
    models: dict[str, ChatTokenizer],
) -> None:
    tokens = models["thinking"]
    delta = appended(tokens, [USER], truncated=False)
    assert delta is not None
    assert (
        tokens.decode(delta) == "\n<|im_start|>user\nAnd eight?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert any("strips earlier reasoning" in note for note in tokens.profile.notes)
    assert not models["tiny"].profile.notes


def test_template_that_moves_its_tools_appends_only_without_tools(
    models: dict[str, ChatTokenizer],
) -> None:
    tokens = models["moving"]
    assert appended(tokens, [USER], truncated=False) is None
    assert appended(tokens, [RESULT, USER], truncated=False) is None
    assert appended(tokens, [RESULT], truncated=False) is not None


def test_pattern_that_the_template_refuses_is_not_appended(models: dict[str, ChatTokenizer]) -> None:
    assert models["moving"].profile.appends["system"] is None
    assert appended(models["moving"], [SYSTEM], truncated=False) is None


def test_pattern_with_a_dropped_message_is_not_appended(models: dict[str, ChatTokenizer]) -> None:
    assert models["moving"].profile.appends["developer"] is None


def test_a_template_without_an_end_of_turn_appends_nothing(models: dict[str, ChatTokenizer]) -> None:
    tokens = models["endless"]
    assert appended(tokens, [USER], truncated=False) is None
    assert not any(tokens.profile.appends.values())
    assert "no token that ends an assistant turn" in tokens.profile.notes[0]


def test_unsampled_assistant_message_is_not_appended(models: dict[str, ChatTokenizer]) -> None:
    assert appended(models["tiny"], [ANSWER, USER], truncated=False) is None
    assert appended(models["tiny"], [], truncated=False) is None


def test_the_anchor_is_found_even_when_the_new_message_spells_it(models: dict[str, ChatTokenizer]) -> None:
    text = "afieldanchor<|im_end|>afieldanchor"
    delta = appended(models["tiny"], [Message(role="user", content=text)], truncated=False)
    assert delta is not None
    assert models["tiny"].decode(delta) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


NEW = st.sampled_from(["user", "system", "tool", "developer"])


@given(st.lists(st.tuples(NEW, st.text(max_size=20)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_random_suffix_is_the_end_of_the_full_rendering(
    models: dict[str, ChatTokenizer], parts: list[tuple[str, str]]
) -> None:
    tokens = models["tiny"]
    new = [Message(role=role, content=text) for role, text in parts]
    delta = appended(tokens, new, truncated=True)
    if delta is not None:
        whole = tokens.render([*CONVERSATION[:5], *new], [TOOL])
        assert whole[-len(delta) :] == delta
        assert tokens.decode(whole[: -len(delta)]).endswith("It is 42.")
