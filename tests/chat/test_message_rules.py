"""Rules for conversations that a chat template refuses: every shape is rendered, and nothing moves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.chat import ChatTokenizer, TemplateRefusal
from afield.chat.message_rules import FILLER, LAST_RESORT, RULES, fold
from afield.chat.sample_conversations import PATTERNS, conversations
from afield.errors import UsageError
from afield.types import ImageRef, Message, ToolCall
from support.tokenizers import encode_text
from templates.models import ALL, ANSWER, QUESTION, SYSTEM, TOOL, call, write_model, write_template

LATER = Message(role="system", content="Speak French.")
USER = Message(role="user", content="And eight?")
CALLING = Message(role="assistant", tool_calls=(call("seven", "toolu_01"),))
PARALLEL = Message(role="assistant", tool_calls=(call("seven", "toolu_01"), call("eight", "toolu_02")))
RESULT = Message(role="tool", content="forty-two", tool_call_id="toolu_01")
SECOND = Message(role="tool", content="forty-three", tool_call_id="toolu_02")
DEVELOPER = Message(role="developer", content="No jokes.")
ODD = Message(role="assistant", tool_calls=(ToolCall("toolu_01", "lookup", "seven, please"),))

SHAPES: dict[str, list[Message]] = {
    "a later system message": [SYSTEM, QUESTION, LATER],
    "a system message after a turn": [SYSTEM, QUESTION, ANSWER, LATER],
    "a system message after a result": [QUESTION, CALLING, RESULT, LATER],
    "two system messages and two users": [SYSTEM, LATER, QUESTION, USER],
    "developer messages": [DEVELOPER, QUESTION, ANSWER, DEVELOPER, USER],
    "system and developer": [SYSTEM, DEVELOPER, QUESTION, USER],
    "users in a row": [QUESTION, USER, ANSWER, USER, USER],
    "nothing but a system message": [SYSTEM],
    "an assistant first": [ANSWER, USER],
    "turns in a row": [QUESTION, ANSWER, ANSWER, USER],
    "a turn last": [QUESTION, ANSWER],
    "a user after a result": [SYSTEM, QUESTION, CALLING, RESULT, USER],
    "a user before a result": [QUESTION, CALLING, USER, RESULT],
    "parallel calls": [QUESTION, PARALLEL, RESULT, SECOND, USER],
    "a result of no call": [QUESTION, RESULT],
    "arguments that are no object": [QUESTION, ODD, RESULT],
    "a result without a question": [SYSTEM, CALLING, RESULT],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: ChatTokenizer.load(write_model(folder / name, name)) for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_every_conversation_is_rendered_and_no_message_is_lost(
    models: dict[str, ChatTokenizer], name: str
) -> None:
    for tools in ([], [TOOL]):
        for shape, messages in SHAPES.items():
            text = models[name].decode(models[name].render(messages, tools))
            for message in messages:
                assert message.content in text, shape
            if tools:
                assert TOOL.name in text, shape


@pytest.mark.parametrize("name", ALL)
def test_suffix_after_rules_is_the_end_of_the_full_rendering(
    models: dict[str, ChatTokenizer], name: str
) -> None:
    tokens = models[name]
    for pattern in [p for p in PATTERNS if tokens.profile.appends[p] == "append"]:
        for history, new in conversations(pattern, named=True):
            appended = tokens.append(new, truncated=False)
            assert appended is not None
            whole = tokens.render([*history, *new], [TOOL])
            assert whole[-len(appended[1]) :] == appended[1], pattern
            prompt = tokens.render(history[:-1], [TOOL])
            if not history[-1].reasoning and pattern not in tokens.profile.strips:
                assert whole[: len(prompt)] == prompt, pattern


def test_each_template_needs_the_rules_it_was_written_for(models: dict[str, ChatTokenizer]) -> None:
    rules = {name: set(tokens.profile.rules) - {"developer-as-system"} for name, tokens in models.items()}
    assert rules["alternating"] == {
        "fold-tools",
        "merge-system",
        "fold-system",
        "merge-users",
        "add-first-user",
        "add-user-between",
    }
    assert rules["moving"] == {"fold-tools", "merge-system", "fold-system"}
    assert rules["brackets"] == {"merge-system", "fold-system", "call-ids", "add-first-user"}
    assert rules["headers"] == {"split-calls"}
    assert {name for name, needed in rules.items() if not needed} >= {
        "tiny",
        "forgetful",
        "roles",
        "channels",
    }
    announced = {name for name, needed in rules.items() if "fold-tools" in needed}
    assert announced == {
        "alternating",
        "bridged",
        "counted",
        "endless",
        "moving",
        "plain",
        "spoken",
        "thinking",
    }


def test_a_template_that_needs_no_rule_gets_none(models: dict[str, ChatTokenizer]) -> None:
    for messages in SHAPES.values():
        _, applied = models["tiny"].render_by_rules(messages, [TOOL])
        assert set(applied) <= {"developer-as-system"}


def test_calls_of_a_template_without_tools_are_read_back(models: dict[str, ChatTokenizer]) -> None:
    tokens = models["plain"]
    assert tokens.profile.tool_format == "hermes"
    parser = tokens.parser(tools=[TOOL])
    reply = '<tool_call>\n{"name": "lookup", "arguments": {"key": "seven"}}\n</tool_call>'
    parser.feed(encode_text(tokens, reply))
    parser.finish()
    assert [(c.name, c.arguments) for c in parser.reply.tool_calls] == [("lookup", '{"key": "seven"}')]


# --- strict --------------------------------------------------------------------------------------


def test_a_strict_session_refuses_what_a_rule_would_change_and_names_the_rule(
    models: dict[str, ChatTokenizer],
) -> None:
    strict = models["moving"].under(render="strict")
    with pytest.raises(
        TemplateRefusal, match=r"roles: system, user, system.*changes fold-system.*render = 'fold'"
    ):
        strict.render([SYSTEM, QUESTION, LATER], [])
    with pytest.raises(TemplateRefusal, match="fold-tools"):
        strict.render([QUESTION], [TOOL])
    assert strict.append([LATER], truncated=False) is None
    assert strict.splice([QUESTION, ANSWER], [LATER], truncated=False) is None


def test_a_conversation_that_needs_no_rule_is_the_same_under_both_policies(
    models: dict[str, ChatTokenizer],
) -> None:
    for tokens in models.values():
        strict = tokens.under(render="strict")
        plain = [SYSTEM, QUESTION, ANSWER, USER]
        _, applied = tokens.render_by_rules(plain, [])
        if not applied:
            assert strict.render(plain, []) == tokens.render(plain, [])
            assert strict.append([USER], truncated=False) == tokens.append([USER], truncated=False)
    assert models["tiny"].under(render="strict").render([DEVELOPER, QUESTION], []) == models["tiny"].render(
        [DEVELOPER, QUESTION], []
    )


def test_unknown_render_policy_is_refused_with_the_known_ones(models: dict[str, ChatTokenizer]) -> None:
    with pytest.raises(UsageError, match="unknown render policy 'maybe'; choose one of: fold, strict"):
        models["tiny"].under(render="maybe")


# --- templates with a mind of their own ----------------------------------------------------------

HERMES = """
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content }}
{%- if tools %}{{- '\nFunctions: ' + tools | tojson }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '\n<tool_call>\n' + said | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def test_tools_that_a_template_shows_only_with_a_system_message_are_shown_without_one(tmp_path: Path) -> None:
    tokens = ChatTokenizer.load(write_template(tmp_path, HERMES, [], []))
    assert tokens.profile.tool_format == "hermes"
    assert tokens.profile.rules == ("developer-as-system", "add-system")
    ids, applied = tokens.render_by_rules([QUESTION], [TOOL])
    assert "Look a key up" in tokens.decode(ids)
    assert applied == ("add-system",)
    assert tokens.render_by_rules([SYSTEM, QUESTION], [TOOL])[1] == ()
    assert tokens.render_by_rules([QUESTION], [])[1] == ()


MOODY = """
{%- for message in messages %}
{%- set late = message.role == 'user' and loop.index > 9 %}
{%- if late and loop.previtem.role == 'user' %}{{ raise_exception('too many') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def test_unforeseen_refusal_is_resolved_by_the_other_rules(tmp_path: Path) -> None:
    tokens = ChatTokenizer.load(write_template(tmp_path, MOODY, [], []))
    assert "merge-users" not in tokens.profile.rules
    messages = [QUESTION, ANSWER] * 5 + [QUESTION, USER]
    ids, applied = tokens.render_by_rules(messages, [])
    assert "merge-users" in applied
    assert all(message.content in tokens.decode(ids) for message in messages)
    with pytest.raises(TemplateRefusal, match="too many"):
        tokens.under(render="strict").render(messages, [])


PARTS = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content[0].type is undefined %}{{ raise_exception('content is a list of parts') }}{% endif %}
{%- for part in message.content %}{{- part.text if part.type == 'text' else '<image>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def test_content_is_a_list_of_parts_for_templates_that_take_no_text(tmp_path: Path) -> None:
    tokens = ChatTokenizer.load(write_template(tmp_path, PARTS, [], []))
    text = tokens.decode(tokens.render([SYSTEM, QUESTION, ANSWER, Message(role="user")], []))
    assert QUESTION.content in text
    assert tokens.append([USER], truncated=False) is not None


# --- the rules themselves ------------------------------------------------------------------------

WORDS = st.sampled_from(["", "yes", "no\nno", "<b>"])


@st.composite
def said(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(["system", "developer", "user", "assistant", "tool"]))
    more = {}
    if role == "assistant":
        ids = draw(st.lists(st.sampled_from(["a1", "b2", "call00001"]), max_size=2, unique=True))
        more["tool_calls"] = [
            {"id": i, "name": "f", "arguments": draw(st.sampled_from(["{}", "x"]))} for i in ids
        ]
        more["reasoning"] = draw(WORDS)
    if role == "tool":
        more["tool_call_id"] = draw(st.sampled_from(["a1", "b2", "call00001"]))
    return msgspec.convert({"role": role, "content": draw(WORDS), **more}, Message)


@given(st.lists(said(), max_size=9), st.sets(st.sampled_from(sorted(RULES))), st.booleans())
def test_rules_do_not_change_messages_before_a_turn(
    messages: list[Message], rules: set[str], tools: bool
) -> None:
    chosen = frozenset(rules)
    whole = fold(messages, [TOOL] * tools, chosen).messages
    for at, message in enumerate(messages):
        if message.role == "assistant":
            before = fold(messages[:at], [TOOL] * tools, chosen, generation=True).messages
            assert list(whole[: len(before)]) == list(before)


@given(st.lists(said(), max_size=9), st.sets(st.sampled_from(sorted(RULES))))
def test_folding_rules_keep_the_text_of_every_message(messages: list[Message], rules: set[str]) -> None:
    folded = fold(messages, [], frozenset(rules))
    text = "\n".join(f"{m.reasoning}\n{m.content}" for m in folded.messages)
    for message in messages:
        assert message.content in text
    assert not folded.applied or set(folded.applied) <= rules
    plain = fold(messages, [], frozenset())
    assert (list(plain.messages), plain.applied) == (messages, ())


@given(st.lists(said(), max_size=9))
def test_under_all_rules_users_and_turns_alternate(messages: list[Message]) -> None:
    folded = fold(messages, [TOOL], LAST_RESORT | {"fold-tools"}, generation=True).messages
    roles = [message.role for message in folded]
    assert roles[::2] == ["user"] * len(roles[::2])
    assert roles[1::2] == ["assistant"] * len(roles[1::2])
    assert roles and roles[-1] == "user"


def test_images_keep_their_places_in_texts_that_are_put_together() -> None:
    picture = ImageRef("d", 2)
    message = Message(role="user", content="a b", images=(picture,))
    result = Message(role="tool", content="r", tool_call_id="x", images=(ImageRef("e", 1),))
    (merged,) = fold([USER, message], [], frozenset({"merge-users"})).messages
    assert merged.content[merged.images[0].offset :] == "b"
    (answer,) = fold([result, message], [], frozenset({"user-in-result"}), begins=False).messages
    assert answer.content == "r\n\n<user>\na b\n</user>"
    assert [answer.content[image.offset :] for image in answer.images] == [
        "\n\n<user>\na b\n</user>",
        "b\n</user>",
    ]


def test_a_later_system_message_becomes_a_user_message_in_its_place() -> None:
    folded = fold(
        [SYSTEM, LATER, QUESTION, ANSWER, LATER, USER], [], frozenset({"merge-system", "fold-system"})
    )
    assert [(m.role, m.content) for m in folded.messages] == [
        ("system", "Be brief.\n\nSpeak French."),
        ("user", QUESTION.content),
        ("assistant", ANSWER.content),
        ("user", "<system>\nSpeak French.\n</system>"),
        ("user", USER.content),
    ]
    assert folded.applied == ("merge-system", "fold-system")
    (_, filler) = fold([SYSTEM], [], frozenset({"add-first-user"})).messages
    assert filler == Message(role="user", content=FILLER)
