"""What a template does with calls, reasoning, ids and dates, found out by rendering.

A tool format is a template's when its reader gives back, kind by kind, the calls that were rendered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from afield.chat.escape import BREAK, Escape
from afield.chat.parsers.formats import FORMATS, HARMONY, REASONING, ReasoningFormat, ToolFormat
from afield.chat.parsers.harmony import CHANNEL, MESSAGE, HarmonyReader
from afield.chat.parsers.reply import Reader, ReplyReader
from afield.chat.sample_conversations import ARGUMENTS, QUESTION, TOOL, call
from afield.chat.template import ChatTemplate, TemplateRefusal
from afield.chat.vocabulary import Vocabulary
from afield.types import Message

# The variables by which templates turn thinking on and off.
SWITCHES = ("enable_thinking", "thinking")
# What ids look like: ours, those of nine characters, those that hold the name.
_IDS = ("call_{n}_abcd", "call0000{n}", "functions.forecast:{n}")


def rendered(
    template: ChatTemplate, messages: Sequence[Message], *, tools: bool = False, generation: bool = False
) -> str | None:
    try:
        return template.render(messages, (TOOL,) if tools else (), generation=generation)
    except TemplateRefusal:
        return None


def speaks_harmony(template: ChatTemplate) -> bool:
    return CHANNEL in template.source and MESSAGE in template.source


def find_tool_format(template: ChatTemplate) -> tuple[str | None, bool]:
    """The name of the format, and whether a turn may have several calls.

    None also where the tools are not shown, without a system message or with one.
    """
    template = template.with_rules(template.rules - {"split-calls"})
    plain, headed = (
        rendered(template, messages, tools=True, generation=True)
        for messages in ([QUESTION], [Message(role="system", content="Be brief."), QUESTION])
    )
    if plain is None or TOOL.name not in plain or (headed is not None and TOOL.name not in headed):
        return None, False
    for count in (2, 1):
        for ids in _IDS:
            if name := _format_of(template, ids, count):
                return name, count == 2
    return None, False


def _format_of(template: ChatTemplate, ids: str, count: int) -> str | None:
    calls = tuple(call(ids.format(n=n), ({}, ARGUMENTS)[n]) for n in range(2))[-count:]
    text = rendered(template, [QUESTION, Message(role="assistant", tool_calls=calls)], tools=True)
    if text is None:
        return None
    wanted = [(call.name, json.loads(call.arguments)) for call in calls]
    text = text.replace(BREAK, "")
    tail = text[text.index(QUESTION.content) + len(QUESTION.content) :]
    if speaks_harmony(template):
        reader = HarmonyReader(tools=True, hold_calls=True)
        return HARMONY if _calls_read_by(reader, tail) == wanted else None
    return next((f.name for f in FORMATS if _calls_read_by(_reader(f), _begin(f, tail)) == wanted), None)


def _reader(tool_format: ToolFormat) -> Reader:
    return ReplyReader(
        reasoning=None, thinking=False, tool_format=tool_format, hold_calls=True, tools=(TOOL,)
    )


def _begin(tool_format: ToolFormat, tail: str) -> str:
    """Where a bare call would begin the reply: a template says who speaks before it."""
    return tail[tail.find("{") :] if tool_format.bare and tool_format.opening not in tail else tail


def _calls_read_by(reader: Reader, text: str) -> list[tuple[str, Any]]:
    reader.feed(text)
    reader.finish()
    return [(call.name, json.loads(call.arguments)) for call in reader.reply.tool_calls]


def find_reasoning(template: ChatTemplate, vocab: Vocabulary) -> ReasoningFormat | None:
    """The tags the template writes or reads reasoning in; those in the vocabulary where it has none."""
    thought = Message(role="assistant", content="Yes.", reasoning="It is cloudy.")
    text = rendered(template, [QUESTION, thought]) or ""
    for known in (text, template.source, vocab.control):
        for tags in REASONING:
            if tags.closing in known:
                return tags
    return None


def starts_thinking(template: ChatTemplate, tags: ReasoningFormat | None) -> bool:
    """Whether the generation prompt opens a block of reasoning and leaves it open."""
    prompt = rendered(template, [QUESTION], generation=True)
    if prompt is None or tags is None:
        return False
    tail = prompt[prompt.rfind(QUESTION.content) :]
    return tail.rfind(tags.opening) > tail.rfind(tags.closing)


class Switches(Struct, frozen=True):
    """How a template turns thinking on and off."""

    name: str | None
    """The variable that does; None where there is none."""
    default: bool
    """What the template does without it."""
    effort: bool
    """Whether it takes `reasoning_effort`."""


def find_switches(template: ChatTemplate, arguments: Mapping[str, Any]) -> Switches:
    def prompt(**more: Any) -> str | None:
        return rendered(template.with_variables(more), [QUESTION], generation=True)

    fixed = {name for name in SWITCHES if name in arguments}
    plain = rendered(template.without_variables(fixed), [QUESTION], generation=True)
    low, high = prompt(reasoning_effort="low"), prompt(reasoning_effort="high")
    effort = low is not None and high is not None and low != high
    for name in SWITCHES:
        on, off = prompt(**{name: True}), prompt(**{name: False})
        if on is not None and off is not None and on != off:
            return Switches(name, off != plain, effort)
    return Switches(None, True, effort)


def call_ids(template: ChatTemplate) -> str:
    """`free`: never shown; `rendered`: shown as they are; `nine`: shown, nine letters or digits each."""
    template = template.with_rules(template.rules - {"call-ids"})
    ours, nine, other = (_with_ids(template, ids) for ids in ("call_{n}_abcd", "call0000{n}", "cccc0000{n}"))
    if nine is None or nine == other:
        return "free"
    return "nine" if ours is None else "rendered"


def _with_ids(template: ChatTemplate, ids: str) -> str | None:
    result = Message(role="tool", content="Rain.", tool_call_id=ids.format(n=1))
    turn = Message(role="assistant", tool_calls=(call(result.tool_call_id, {"city": "Bern"}),))
    return rendered(template, [QUESTION, turn, result], tools=True)


def keeps_reasoning(template: ChatTemplate) -> bool:
    """Whether the reasoning of a last turn is rendered at all."""
    text = rendered(
        template, [QUESTION, Message(role="assistant", content="Yes.", reasoning="Cloudy, I think.")]
    )
    return text is not None and "Cloudy, I think." in text


def prints_date(template: ChatTemplate) -> bool:
    return "strftime_now" in template.source


def unsafe_literals(vocab: Vocabulary) -> Iterator[str]:
    """Control tokens that content can spell even where it is escaped."""
    escape = Escape(vocab.control)
    for literal, control in sorted(vocab.control.items()):
        if control in vocab.encode(escape(f"a{literal}b")):
            yield literal


def changed_by_escape(vocab: Vocabulary) -> str | None:
    """A literal whose text does not survive being encoded piece by piece."""
    escape = Escape(vocab.control)
    for literal, control in sorted(vocab.control.items()):
        ids = vocab.encode(escape(f"a{literal}b"))
        if control not in ids and vocab.decode(ids) != f"a{literal}b":
            return literal
    return None
