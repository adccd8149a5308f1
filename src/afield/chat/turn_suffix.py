"""Prompt suffix after a sampled turn: renders only the new messages.

1. The template renders the new messages after a dummy conversation that ends in an assistant turn (the
   anchor); the text from the token that ends that turn is the suffix, including the separator after it.
2. The cost is that of the new messages alone.
3. Sampled ids are never rendered again, so a template cannot strip their reasoning (policy `preserve`).
4. `profile` checks each pattern of new messages against the full rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

from msgspec import Struct

from afield.chat.escape import BREAK
from afield.chat.parsers.formats import REASONING
from afield.chat.parsers.harmony import ANALYSIS, END
from afield.chat.template import ChatTemplate, TemplateRefusal, Tool
from afield.chat.vocabulary import Vocabulary
from afield.types import Message, ToolCall

ANCHOR = "afieldanchor"
# Not blank: blank reasoning would hide whether the template strips it.
_REASONING = "Think about it."
_THOUGHT = re.compile(
    "|".join(
        [rf"{re.escape(tags.opening)}.*?{re.escape(tags.closing)}\s*" for tags in REASONING]
        + [rf"{re.escape(ANALYSIS)}.*?{re.escape(END)}"]
    ),
    re.DOTALL,
)
QUESTION = Message(role="user", content="Question")


class SupportsRender(Protocol):
    """Renders messages and tools to text, as `ChatTemplate` does."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> str:
        """Render to escaped text; with `generation` it ends with the generation prompt."""
        ...


class TurnEnd(Struct, frozen=True):
    """Token that ends an assistant turn."""

    text: str
    """Literal of the token."""
    id: int
    """Token id."""
    direct: bool = True
    """Whether the token follows the content immediately."""


class Ends(Struct, frozen=True):
    """Tokens that end a turn of text and a turn of tool calls; usually the same."""

    text: TurnEnd | None = None
    """End of a turn of text; None if the template has none."""
    called: TurnEnd | None = None
    """End of a turn of tool calls; None if the template has none."""

    def before(self, new: Sequence[Message]) -> TurnEnd | None:
        """End of the turn that these new messages follow."""
        return self.called if any(message.role == "tool" for message in new) else self.text

    def of(self, turn: Message) -> TurnEnd | None:
        """End of an assistant turn."""
        return self.called if turn.tool_calls else self.text


def pattern_of(messages: Sequence[Message]) -> str:
    """Roles of new messages in order, with a plural for a run of one role: `tools+user`."""
    runs = [(role, len(list(run))) for role, run in groupby(message.role for message in messages)]
    return "+".join(role if length == 1 else f"{role}s" for role, length in runs)


def find_ends(template: ChatTemplate, vocab: Vocabulary, stop_ids: Sequence[int]) -> Ends:
    """Find the tokens that end a turn: of several in a row, the one in `stop_ids`, else the last.

    A template that ends a turn only by beginning the next one has none.
    """
    row = list(_control_tokens(_behind_anchor(template, ANCHORED), vocab))
    turn_end = None
    if row:
        at, literal = next((token for token in row if vocab.control[token[1]] in stop_ids), row[-1])
        turn_end = TurnEnd(literal, vocab.control[literal], direct=at == 0)
    tail = _behind_anchor(template, CALLING).rstrip()
    if turn_end and turn_end.text in tail:
        return Ends(turn_end, turn_end)
    for literal, control in vocab.control.items():
        if control in stop_ids and tail.endswith(literal):
            return Ends(turn_end, TurnEnd(literal, control))
    return Ends(turn_end)


def _behind_anchor(template: ChatTemplate, turn: Message) -> str:
    try:
        text = template.render([QUESTION, turn], (), generation=False)
    except TemplateRefusal:
        return ""
    return text.rpartition(ANCHOR)[2] if ANCHOR in text else ""


def _control_tokens(text: str, vocab: Vocabulary) -> Iterator[tuple[int, str]]:
    """Position and text of the control tokens at the beginning of a text, with optional blanks between."""
    # Longest first: a literal may be a prefix of another.
    literals = sorted(vocab.control, key=len, reverse=True)
    at = 0
    while True:
        at = len(text) - len(text[at:].lstrip())
        literal = next((literal for literal in literals if text.startswith(literal, at)), None)
        if literal is None:
            return
        yield at, literal
        at += len(literal)


def after_turn(text: str, marker: str, end: TurnEnd) -> int | None:
    """Position of the end token of the turn that contains the marker; None if there is none."""
    at = text.find(marker)
    at = text.find(end.text, at) if at >= 0 else -1
    return at if at >= 0 else None


def delta_text(template: SupportsRender, end: TurnEnd, new: Sequence[Message]) -> str | None:
    """Text from the end token of the anchor turn to the end of the generation prompt.

    None if the rendering lacks the anchor or its end token.
    """
    text = template.render([QUESTION, _anchor(new), *new], (), generation=True)
    at = after_turn(text, ANCHOR, end)
    return None if at is None else text[at:]


def splice_text(
    template: ChatTemplate,
    end: TurnEnd,
    history: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Tool],
    *,
    strict: bool,
) -> str | None:
    """`delta_text` after the real conversation; None if the new messages change the text before them.

    With `strict`, reasoning that the template strips counts as a change.
    """
    anchored = [*history[:-1], _in_place_of(history[-1])]
    before = template.render(anchored, tools, generation=False)
    whole = template.render([*anchored, *new], tools, generation=True)
    kept, cut = after_turn(before, ANCHOR, end), after_turn(whole, ANCHOR, end)
    # Gives up on a conversation that contains the anchor text itself.
    if kept is None or cut is None or before.count(ANCHOR) != 1 or whole.count(ANCHOR) != 1:
        return None
    same = before[:kept] == whole[:cut] or (not strict and unthought(before[:kept]) == unthought(whole[:cut]))
    return whole[cut:] if same and all(contains_content(message, whole[cut:]) for message in new) else None


def unthought(text: str) -> str:
    """Text without its reasoning blocks."""
    return _THOUGHT.sub("", text)


def contains_content(message: Message, text: str) -> bool:
    """Whether the text contains the message's content; templates may strip blanks."""
    words = message.content.strip()
    return not words or words in text.replace(BREAK, "")


def _anchor(new: Sequence[Message]) -> Message:
    """Assistant turn that the new messages can follow: it calls the tools whose results they contain."""
    results = [message for message in new if message.role == "tool"]
    calls = tuple(ToolCall(result.tool_call_id, result.name or "tool", "{}") for result in results)
    return _in_place_of(Message(role="assistant", tool_calls=calls))


def _in_place_of(turn: Message) -> Message:
    if not turn.tool_calls:
        return Message(role="assistant", content=ANCHOR, reasoning=_REASONING)
    first, *rest = turn.tool_calls
    anchored = ToolCall(first.id, first.name, json.dumps({"anchor": ANCHOR}))
    return Message(role="assistant", reasoning=_REASONING, tool_calls=(anchored, *rest))


ANCHORED = _in_place_of(Message(role="assistant"))
CALLING = _in_place_of(Message(role="assistant", tool_calls=(ToolCall("anchor001", "tool", "{}"),)))
