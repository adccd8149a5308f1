"""Finding out, by rendering, what a chat template does; nothing about it is taken on trust.

Deltas: for each pattern of new messages, realistic conversations are rendered whole, and what stands
after the last assistant turn has to be, id by id, what `delta` gives. What stands before has to stay
as it was without the new messages, except for reasoning: under `preserve` sampled ids are never
rendered again, so stripping is noted, not held against the pattern. Templates that raise, drop a
message or move anything else are not certified. Tools: a turn with two calls is rendered, and the
format whose reader gives both back is the template's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from afield.tokens.delta import TurnEnd, after_turn, delta_text, find_turn_end, unthought
from afield.tokens.escape import Escape
from afield.tokens.formats import FORMATS, ToolFormat
from afield.tokens.parser import END_THINK, THINK, ReplyReader
from afield.tokens.template import ChatTemplate, TemplateRefusal, Tool
from afield.tokens.vocab import Vocabulary
from afield.types import Message, ToolCall

PATTERNS = (
    "tool",
    "tools",
    "tool+user",
    "tools+user",
    "tool+system",
    "user",
    "users",
    "system",
    "system+user",
    "user+system",
    "developer",
    "developer+user",
)
TRUNCATED = "truncated"

_MARK = "zebra"
_ARGUMENTS = {"city": "Zürich ☂ 北京", "days": [1, 2.5, {"deep": {"er": None}}], "quote": 'a "b" }'}


class Certificate(Struct, frozen=True, kw_only=True):
    """What was found out about a model directory's template and tokenizer."""

    template_hash: str
    tokenizer_hash: str
    tool_format: str | None
    reasoning: bool
    appends: dict[str, bool]
    strips: tuple[str, ...]
    notes: tuple[str, ...]


class Findings(Struct, frozen=True, kw_only=True):
    certificate: Certificate
    end: TurnEnd | None
    tool_format: ToolFormat | None
    starts_thinking: bool

    @property
    def markers(self) -> tuple[str, ...]:
        """What structures a reply: read, not hidden, even where the tokenizer calls them special."""
        tags = (self.tool_format.opening, self.tool_format.closing) if self.tool_format else ()
        return (THINK, END_THINK, *tags)


def certify(template: ChatTemplate, vocab: Vocabulary) -> Findings:
    end = find_turn_end(template, vocab)
    notes: list[str] = []
    stripping: tuple[str, ...] = ()
    appends: dict[str, bool] = dict.fromkeys((*PATTERNS, TRUNCATED), False)
    if end is None:
        notes.append("the template has no token that ends an assistant turn: nothing is appended")
    else:
        checks = {pattern: _Check(template, vocab, end, pattern) for pattern in PATTERNS}
        appends = {pattern: check.passes() for pattern, check in checks.items()}
        appends[TRUNCATED] = any(appends.values()) and all(
            check.truncated for pattern, check in checks.items() if appends[pattern]
        )
        stripping = tuple(p for p in PATTERNS if appends[p] and checks[p].strips)
        if stripping:
            notes.append(
                f"the template strips earlier reasoning before {', '.join(stripping)}; it is preserved here"
            )
    notes.extend(_notes_on_escape(vocab))
    tool_format = _find_tool_format(template)
    return Findings(
        certificate=Certificate(
            template_hash=template.hash,
            tokenizer_hash=vocab.hash,
            tool_format=tool_format.name if tool_format else None,
            reasoning=END_THINK in template.source or END_THINK in vocab.control,
            appends=appends,
            strips=stripping,
            notes=tuple(notes),
        ),
        end=end,
        tool_format=tool_format,
        starts_thinking=_starts_thinking(template),
    )


# --- deltas --------------------------------------------------------------------------------------


class _Check:
    """One pattern against every conversation it can follow."""

    def __init__(self, template: ChatTemplate, vocab: Vocabulary, end: TurnEnd, pattern: str) -> None:
        self._template = template
        self._vocab = vocab
        self._end = end
        self._pattern = pattern
        self.strips = False
        self.truncated = True

    def passes(self) -> bool:
        checked = 0
        for history, new in _conversations(self._pattern):
            for tools in ((), (_TOOL,)):
                try:
                    before = self._template.render(history, tools, generation=False)
                except TemplateRefusal:
                    continue
                if _MARK not in before:
                    continue
                checked += 1
                if not self._appends(before, history, new, tools):
                    return False
        return checked > 0

    def _appends(
        self, before: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> bool:
        try:
            whole = self._template.render([*history, *new], tools, generation=True)
            delta = delta_text(self._template, self._end, new)
        except TemplateRefusal:
            return False
        cut = after_turn(whole, _MARK, self._end)
        kept = after_turn(before, _MARK, self._end)
        if delta is None or cut is None or kept is None:
            return False
        if not all(message.content in whole[cut:] for message in new):
            return False
        head, known = whole[:cut], before[:kept]
        self.strips |= head != known
        if unthought(head) != unthought(known):
            return False
        ids, added = self._vocab.encode(whole), self._vocab.encode(delta)
        self.truncated &= self._vocab.encode(head) + added == ids
        return added[:1] == [self._end.id] and self._vocab.encode(head + self._end.text) + added[1:] == ids


_TOOL = Tool(
    name="forecast",
    description="The weather of the next days.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
    raw={
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "The weather of the next days.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


def _conversations(pattern: str) -> Iterator[tuple[list[Message], list[Message]]]:
    """Conversations whose last turn carries the mark, and new messages of the pattern to follow them."""
    for result in ("12 degrees.", ""):
        new = _new(pattern, result)
        calls = tuple(_call(m.tool_call_id, {"city": f"{_MARK} {n}"}) for n, m in enumerate(_results(new)))
        for reasoning in ("", "The user wants the weather."):
            last = Message(
                role="assistant",
                content="" if calls else f"A {_MARK}.",
                reasoning=reasoning,
                tool_calls=calls,
            )
            for history in _histories(reasoning):
                yield [*history, last], new
        if not calls:
            return


def _histories(reasoning: str) -> Iterator[list[Message]]:
    system = Message(role="system", content="Be brief.")
    question = Message(role="user", content="Will it rain in Bern?")
    answer = Message(role="assistant", content="It will.", reasoning=reasoning)
    yield [question]
    yield [system, question, answer, Message(role="user", content="And in Basel?")]
    yield [
        system,
        question,
        Message(role="assistant", reasoning=reasoning, tool_calls=(_call("call00001", {"city": "Bern"}),)),
        Message(role="tool", content="Rain.", tool_call_id="call00001"),
        answer,
        Message(role="user", content="And in Basel?"),
    ]


def _new(pattern: str, result: str) -> list[Message]:
    messages: list[Message] = []
    for part in pattern.split("+"):
        role = part.removesuffix("s")
        for _ in range(2 if part == f"{role}s" else 1):
            messages.append(_one(role, len(messages), result))
    return messages


def _one(role: str, n: int, result: str) -> Message:
    if role == "tool":
        return Message(role="tool", content=result and f"{result} {n}", tool_call_id=f"call1000{n}")
    content = f"Remark {n}: thank you."
    return msgspec.convert({"role": role, "content": content}, Message)


def _results(new: Sequence[Message]) -> list[Message]:
    return [message for message in new if message.role == "tool"]


def _call(id: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(id, _TOOL.name, json.dumps(arguments, ensure_ascii=False))


# --- tools, reasoning, escape --------------------------------------------------------------------


def _find_tool_format(template: ChatTemplate) -> ToolFormat | None:
    question = Message(role="user", content="Will it rain?")
    calls = (_call("call00001", _ARGUMENTS), _call("call00002", {}))
    turn = Message(role="assistant", tool_calls=calls)
    try:
        prompt = template.render([question], (_TOOL,), generation=True)
        text = template.render([question, turn], (_TOOL,), generation=False)
    except TemplateRefusal:
        return None
    if _TOOL.name not in prompt:
        return None
    wanted = [(call.name, json.loads(call.arguments)) for call in calls]
    tail = text[text.index(question.content) :]
    return next((f for f in FORMATS if _calls_read_by(f, tail) == wanted), None)


def _calls_read_by(tool_format: ToolFormat, text: str) -> list[tuple[str, Any]]:
    reader = ReplyReader(reasoning=False, thinking=False, tool_format=tool_format, hold_calls=True)
    reader.feed(text)
    reader.finish()
    return [(call.name, json.loads(call.arguments)) for call in reader.reply.tool_calls]


def _starts_thinking(template: ChatTemplate) -> bool:
    """Whether the generation prompt opens a think block and leaves it open."""
    question = [Message(role="user", content="Will it rain?")]
    try:
        prompt = template.render(question, (), generation=True)
    except TemplateRefusal:
        return False
    tail = prompt[prompt.rfind(question[0].content) :]
    return tail.rfind(THINK) > tail.rfind(END_THINK)


def _notes_on_escape(vocab: Vocabulary) -> Iterator[str]:
    escape = Escape(vocab.control)
    for literal, control in sorted(vocab.control.items()):
        ids = vocab.encode(escape(f"a{literal}b"))
        if control in ids:
            yield f"content can spell the control token {literal!r}: one character cannot be escaped"
        elif vocab.decode(ids) != f"a{literal}b":
            yield f"escaped content is encoded piece by piece, which changes its text ({literal!r} for one)"
            return
