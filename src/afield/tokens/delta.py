"""What comes after a sampled turn: the ids of new messages, without rendering the conversation again.

The new messages are rendered behind a dummy conversation that ends in an assistant turn (the anchor),
and everything up to and including the token that ends that turn is cut off. So the cost is that of
the new messages, and the separator behind the end of a turn is part of the result. Sampled ids are
never rendered again: a template that would strip the reasoning of earlier turns does not get the
chance (the policy `preserve`), and only has to agree on what follows the last turn. `certify` checks
that it does, pattern by pattern.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from afield.tokens.template import ChatTemplate, TemplateRefusal
from afield.tokens.vocab import Vocabulary
from afield.types import Message, ToolCall

ANCHOR = "afieldanchor"
# Blank reasoning would hide what a template does to the reasoning of earlier turns.
_REASONING = "Think about it."
_QUESTION = Message(role="user", content="Question")


class TurnEnd(Struct, frozen=True):
    """The token a template ends an assistant turn with."""

    text: str
    id: int


def pattern_of(messages: Sequence[Message]) -> str:
    """The roles in order; a run of one role is a plural: `tools+user`."""
    runs = [(role, len(list(run))) for role, run in groupby(message.role for message in messages)]
    return "+".join(role if length == 1 else f"{role}s" for role, length in runs)


def find_turn_end(template: ChatTemplate, vocab: Vocabulary) -> TurnEnd | None:
    """None for a template that ends a turn only by beginning the next one."""
    try:
        text = template.render([_QUESTION, Message(role="assistant", content=ANCHOR)], (), generation=False)
    except TemplateRefusal:
        return None
    tail = text[text.rfind(ANCHOR) + len(ANCHOR) :] if ANCHOR in text else ""
    # The longest literal first: one may be the beginning of another.
    for literal in sorted(vocab.control, key=len, reverse=True):
        if tail.lstrip().startswith(literal):
            return TurnEnd(literal, vocab.control[literal])
    return None


def after_turn(text: str, marker: str, end: TurnEnd) -> int | None:
    """Where the end token of the turn that contains the marker begins."""
    at = text.find(marker)
    at = text.find(end.text, at) if at >= 0 else -1
    return at if at >= 0 else None


def delta_text(template: ChatTemplate, end: TurnEnd, new: Sequence[Message]) -> str | None:
    """From the end token of the anchor's turn to the end of the generation prompt."""
    text = template.render([_QUESTION, _anchor(new), *new], (), generation=True)
    at = after_turn(text, ANCHOR, end)
    return None if at is None else text[at:]


def _anchor(new: Sequence[Message]) -> Message:
    """An assistant turn that the new messages can follow: it called the tools whose results they are."""
    results = [message for message in new if message.role == "tool"]
    if not results:
        return Message(role="assistant", content=ANCHOR, reasoning=_REASONING)
    arguments = json.dumps({"anchor": ANCHOR})
    calls = tuple(ToolCall(result.tool_call_id, result.name or "tool", arguments) for result in results)
    return Message(role="assistant", reasoning=_REASONING, tool_calls=calls)
