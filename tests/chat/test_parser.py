"""Sampled ids to a reply: the same reply and the same events however the ids arrive."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as models_of_tokenizers

from afield.chat import ChatTokenizer, Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.types import Message, ToolCall
from support.tiny_model import CONTROL, MARKERS
from support.tokenizers import encode_text
from templates.models import CALLING, NAMES, QUESTION, TOOL, call, sampled, write_model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp("models") / name, name) for name in NAMES}


@pytest.fixture(scope="module")
def models(directories: dict[str, Path]) -> dict[str, ChatTokenizer]:
    return {name: ChatTokenizer.load(path, rules=False) for name, path in directories.items()}


class Tiny:
    """The tiny model, and text as it would have sampled it."""

    def __init__(self, tokens: ChatTokenizer, directory: Path) -> None:
        self.tokens = tokens
        self.directory = directory

    def ids(self, text: str) -> list[int]:
        return sampled(self.directory, text)

    def read(
        self, ids: list[int], *, cuts: Iterable[int] = (), tools: bool = True
    ) -> tuple[Message, list[Event]]:
        parser = self.tokens.parser(tools=[TOOL] if tools else [])
        edges = [0, *sorted(cuts), len(ids)]
        events: list[Event] = []
        for start, end in pairwise(edges):
            events += parser.feed(ids[start:end])
        events += parser.finish()
        return parser.reply, joined(events)

    def reply(self, text: str, *, tools: bool = True) -> Message:
        return self.read(self.ids(text), tools=tools)[0]


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of one thing put together."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and last.index == event.index
        ):
            out[-1] = ToolArguments(last.index, last.text + event.text)
        else:
            out.append(event)
    return out


@pytest.fixture(scope="module")
def tiny(models: dict[str, ChatTokenizer], directories: dict[str, Path]) -> Tiny:
    return Tiny(models["tiny"], directories["tiny"])


CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "seven"}}\n</tool_call>'


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "f", "{}"),
        ('{"name": "f", "arguments": {"b" : 1,"a":[ {} ]}}', "f", '{"b" : 1,"a":[ {} ]}'),
        ('{"arguments": {"x": 1}, "name": "f"}', "f", '{"x": 1}'),
        ('{"id": [1, {"name": "g"}], "name": "f", "arguments": {}, "x": -1.5e3}', "f", "{}"),
        ('{"name": "f", "arguments": {"a": "}{\\"\\\\ </tool_call> <tool_call>"}}', "f", None),
        ('{"name": "f", "arguments": {"a": "é🐍\\u00e9"}}', "f", '{"a": "é🐍\\u00e9"}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "f", '{"x": 1}'),
        ('{"name": "f", "arguments": "not json"}', "f", "not json"),
        ('{"n\\u0061me": "\\u0066", "arguments": {}}', "f", "{}"),
        (' \n{ "name" :\t"f" , "arguments" : { } } \n', "f", "{ }"),
        ('{"name":"f","arguments":{"a":[true,false,null,0,-0.1,1E+2,[],""]}}', "f", None),
    ],
)
def test_a_call_keeps_its_arguments_as_sampled(
    tiny: Tiny, body: str, name: str, arguments: str | None
) -> None:
    if arguments is None:
        arguments = body[body.index('"arguments":') + len('"arguments":') : -1].strip()
    reply = tiny.reply(f"<tool_call>{body}</tool_call><|im_end|>")
    assert reply == Message(role="assistant", tool_calls=(ToolCall("", name, arguments),))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
        '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {}}\n</tool_ca',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 300,
        "</tool_call> <tool_cal <tool>",
    ],
)
def test_a_malformed_call_is_text_exactly_as_sampled(tiny: Tiny, text: str) -> None:
    assert tiny.reply(f"So: {text}<|im_end|>") == Message(role="assistant", content=f"So: {text}")


def test_a_call_after_a_malformed_one_is_a_call(tiny: Tiny) -> None:
    broken = '<tool_call>{"name": "f", "arguments": {}}\n'
    reply = tiny.reply(f"<tool_call>\n{broken}{CALL}")
    assert reply == Message(
        role="assistant", content=f"<tool_call>\n{broken}".rstrip(), tool_calls=(call("seven", ""),)
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Looking.\n{CALL}", "Looking.", 1),
        (f"\n{CALL}\n{CALL}\n", "", 2),
        (f"{CALL} done ", "done ", 1),
        (f"a \n{CALL}\n b {CALL}{CALL} c", "a \n\n b  c", 3),
        (" a \n", " a \n", 0),
        ("\n \n", "\n \n", 0),
        ("", "", 0),
    ],
)
def test_text_beside_calls_is_kept_without_the_blanks_next_to_them(
    tiny: Tiny, text: str, content: str, calls: int
) -> None:
    reply = tiny.reply(text)
    assert reply == Message(role="assistant", content=content, tool_calls=(call("seven", ""),) * calls)


def test_without_tools_everything_is_text(tiny: Tiny) -> None:
    assert tiny.reply(f" a {CALL}\n<|im_end|>", tools=False).content == f" a {CALL}\n"


def test_a_call_is_reported_when_it_is_complete(tiny: Tiny) -> None:
    parser = tiny.tokens.parser(tools=[TOOL])
    assert parser.feed(tiny.ids('<tool_call>{"name": "lookup", "arguments": {"key": "sev')) == []
    assert parser.feed(tiny.ids('en"}}')) == []
    assert parser.reply.tool_calls == ()
    events = [ToolStart(0, "lookup"), ToolArguments(0, '{"key": "seven"}'), ToolEnd(0)]
    assert parser.feed(tiny.ids("</tool_call>")) == events
    assert parser.reply.tool_calls == (call("seven", ""),)


def test_a_malformed_call_is_text_and_the_next_call_has_its_index(tiny: Tiny) -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": oops}}'
    ids = tiny.ids(broken + CALL)
    reply, events = tiny.read(ids, cuts=range(1, len(ids)))
    assert reply == Message(role="assistant", content=broken, tool_calls=(call("seven", ""),))
    start, arguments = ToolStart(0, "lookup"), ToolArguments(0, '{"key": "seven"}')
    assert events == [TextDelta(broken), start, arguments, ToolEnd(0)]


def test_a_marker_spelled_in_pieces_is_the_same_marker(tiny: Tiny) -> None:
    spelled = encode_text(tiny.tokens, CALL)
    assert len(spelled) > len(tiny.ids(CALL))
    assert tiny.read(spelled) == tiny.read(tiny.ids(CALL))


# --- reasoning -----------------------------------------------------------------------------------


def test_reasoning_and_answer_are_separated(tiny: Tiny) -> None:
    reply, events = tiny.read(tiny.ids("<think>\nHmm.\n\nYes.\n</think>\n\nIt is 42.<|im_end|>"))
    assert reply == Message(role="assistant", reasoning="Hmm.\n\nYes.", content="It is 42.")
    assert events == [ReasoningDelta("Hmm.\n\nYes."), TextDelta("It is 42.")]


def test_reasoning_opened_by_the_prompt_is_read_without_an_opening_tag(
    models: dict[str, ChatTokenizer], directories: dict[str, Path]
) -> None:
    thinking = Tiny(models["thinking"], directories["thinking"])
    assert thinking.tokens.profile.reasoning
    reply = thinking.reply("Hmm.\n</think>\n\n42<|im_end|>", tools=False)
    assert reply == Message(role="assistant", reasoning="Hmm.", content="42")


def test_reasoning_that_was_cut_off_is_reasoning(tiny: Tiny) -> None:
    assert tiny.reply("<think>\nHmm </thi") == Message(role="assistant", reasoning="Hmm </thi")


def test_a_call_inside_reasoning_is_a_thought(tiny: Tiny) -> None:
    reply = tiny.reply(f"<think>{CALL}</think>{CALL}")
    assert reply == Message(role="assistant", reasoning=CALL, tool_calls=(call("seven", ""),))


def test_a_think_tag_in_the_answer_is_text(tiny: Tiny) -> None:
    assert tiny.reply("The <think> tag.</think>").content == "The <think> tag.</think>"


def test_empty_reasoning_block_is_dropped(tiny: Tiny) -> None:
    assert tiny.reply("<think>\n\n</think>\n\nHi") == Message(role="assistant", content="Hi")


# --- laws ----------------------------------------------------------------------------------------

PIECES = [
    *CONTROL,
    *MARKERS,
    CALL,
    '{"name": "f", "arguments": ',
    '{"a": "\\u00e9}"}',
    '"x"',
    "}",
    ", ",
    "<",
    "</tool",
    " ",
    "\n",
    "🐍é",
    "word",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@given(text=TEXTS, spelled=st.booleans(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_reply_does_not_depend_on_chunking(tiny: Tiny, text: str, spelled: bool, data: st.DataObject) -> None:
    ids = encode_text(tiny.tokens, text) if spelled else tiny.ids(text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    at_once = tiny.read(ids)
    assert tiny.read(ids, cuts=cuts) == at_once
    assert tiny.read(ids, cuts=range(1, len(ids))) == at_once


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_events_add_up_to_the_reply(tiny: Tiny, text: str) -> None:
    reply, events = tiny.read(tiny.ids(text))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == reply.content
    assert "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == reply.reasoning
    names = [e.name for e in events if isinstance(e, ToolStart)]
    arguments = [e.text for e in events if isinstance(e, ToolArguments)]
    assert [(c.name, c.arguments) for c in reply.tool_calls] == list(zip(names, arguments, strict=True))


@given(ids=st.lists(st.integers(0, 399), max_size=30))
@settings(max_examples=100, deadline=None)
def test_random_ids_decode_as_the_tokenizer_decodes_them(tiny: Tiny, ids: list[int]) -> None:
    control = set(tiny.ids("".join(CONTROL + MARKERS)))
    plain = [token for token in ids if token not in control]
    reply, _ = tiny.read(plain, cuts=range(1, len(plain)), tools=False)
    assert reply.content == tiny.tokens.decode(plain)


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_random_text_is_decoded_unchanged(tiny: Tiny, text: str) -> None:
    assume(not text.lstrip().startswith("<think>"))
    ids = encode_text(tiny.tokens, text)
    assert tiny.read(ids, cuts=range(1, len(ids)), tools=False)[0].content == text


def test_incomplete_utf8_is_held_back(tiny: Tiny) -> None:
    parser = tiny.tokens.parser(tools=[])
    snake = encode_text(tiny.tokens, "🐍")
    assert len(snake) == 4
    assert [parser.feed([token]) for token in snake] == [[], [], [], [TextDelta("🐍")]]
    assert parser.feed(snake[:3]) == []
    assert parser.finish() == [TextDelta("\ufffd")]


def test_tokenizers_that_are_not_byte_level_stream_as_well(tmp_path: Path) -> None:
    """Words with a mark for the blank before them, and bytes for what is not among them."""
    words = ["▁the", "▁fox", "es", "▁"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        word: 256 + n for n, word in enumerate(words)
    }
    tokenizer = Tokenizer(models_of_tokenizers.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    tokens = ChatTokenizer.load(tmp_path)
    parser = tokens.parser(tools=[])
    events = [event for token in [256, 257, 258, *"é!".encode(), 260] for event in parser.feed([token])]
    assert joined(events + parser.finish()) == [TextDelta(" the foxesé!")]
    assert tokens.stop_ids == (260,)


def test_control_tokens_and_unknown_ids_never_show(tiny: Tiny) -> None:
    ids = tiny.ids("<|im_start|>a<|endoftext|>b<|im_end|>")
    assert tiny.read([*ids, 10**6])[0].content == "ab"


# --- round trips ---------------------------------------------------------------------------------


def test_the_tool_format_is_found_by_a_round_trip(models: dict[str, ChatTokenizer]) -> None:
    found = {name: tokens.profile.tool_format for name, tokens in models.items()}
    assert found == {"tiny": "hermes", "thinking": None, "moving": None, "endless": None}


@pytest.mark.parametrize(
    "turn",
    [
        CALLING,
        Message(role="assistant", tool_calls=(call("a", ""), call("b", ""))),
        Message(role="assistant", content="It is 42."),
        Message(role="assistant", content="It is 42.", reasoning="Found\n\nit."),
    ],
)
def test_rendered_reply_is_parsed_to_the_same_reply(tiny: Tiny, turn: Message) -> None:
    prompt = tiny.tokens.render([QUESTION], [TOOL])
    whole = tiny.tokens.render([QUESTION, turn, QUESTION], [TOOL])
    appended = tiny.tokens.append([QUESTION], truncated=False)
    assert appended is not None
    reply, _ = tiny.read(whole[len(prompt) : -len(appended[1])])
    without_ids = tuple(ToolCall("", c.name, c.arguments) for c in turn.tool_calls)
    assert reply == Message(
        role="assistant", content=turn.content, reasoning=turn.reasoning, tool_calls=without_ids
    )
