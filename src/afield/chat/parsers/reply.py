"""Streaming reply parser: splits a reply into reasoning, text and tool calls.

1. The parts do not depend on how the text is split into pieces.
2. A malformed call stays text unchanged; calls of the same section that were complete before it stay calls.
3. Blanks between text and a call belong to neither.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from afield.chat.parsers.base import (
    CallReader,
    CallState,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolEnd,
    ToolStart,
    matches,
    partial,
)
from afield.chat.parsers.formats import ReasoningFormat, ToolFormat
from afield.chat.parsers.json_scanner import skip_blank
from afield.chat.template import Tool
from afield.chat.vocabulary import Vocabulary
from afield.types import Message, ToolCall


class Reader(Protocol):
    """Incremental reader of a reply's text."""

    def feed(self, text: str) -> list[Event]:
        """Read text; returns the new events."""
        ...

    def finish(self) -> list[Event]:
        """End the reply; returns events for the text held back. No `feed` may follow."""
        ...

    @property
    def reply(self) -> Message:
        """Reply so far; contains complete calls only, with the ids that the model wrote."""
        ...

    @property
    def thinking(self) -> bool:
        """Whether the reader is inside reasoning."""
        ...

    @property
    def held(self) -> str:
        """Text held back because a marker may follow; it becomes text if the reply ends here."""
        ...


class ReplyBuilder:
    """Collects the parts of a reply and their events."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def message(self) -> Message:
        """Reply so far."""
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )

    @property
    def spoken(self) -> bool:
        """Whether the reply has text."""
        return bool(self._content)

    def drain(self) -> list[Event]:
        """Events since the previous `drain`."""
        events, self._events = self._events, []
        return events

    def say(self, text: str) -> None:
        """Add text."""
        if text:
            self._content.append(text)
            self._events.append(TextDelta(text))

    def think(self, text: str) -> None:
        """Add reasoning, without leading newlines of the block."""
        if not self._reasoning:
            text = text.lstrip("\n")
        if text:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))

    def add_call(self, call: ToolCall) -> None:
        """Add a complete tool call."""
        index = len(self._calls)
        self._events.append(ToolStart(index, call.name, call.id))
        if call.arguments:
            self._events.append(ToolArguments(index, call.arguments))
        self._events.append(ToolEnd(index))
        self._calls.append(call)


class OpenCall:
    """Tool call being read, with the text it was read from."""

    def __init__(self, reader: CallReader, before: str) -> None:
        self._reader = reader
        self._sampled = [before]

    @property
    def status(self) -> CallState:
        return self._reader.status

    @property
    def sampled(self) -> str:
        """Text of the call as sampled, with its opening."""
        return "".join(self._sampled)

    @property
    def finished(self) -> ToolCall:
        """The complete call."""
        return ToolCall(self._reader.id, self._reader.name or "", self._reader.arguments)

    def feed(self, text: str) -> int:
        taken = self._reader.feed(text)
        self._sampled.append(text[:taken])
        return taken


class ReplyReader:
    """Reader of replies with reasoning tags and a tool-call format.

    Args:
        reasoning: reasoning tags; None if the model has none.
        thinking: whether the prompt opened a block of reasoning.
        tool_format: tool-call format; None parses no calls.
        tools: tools of the call, whose schemas give the types of tagged arguments.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None,
        thinking: bool,
        tool_format: ToolFormat | None,
        tools: Sequence[Tool] = (),
    ) -> None:
        self.malformed = False
        self._tags = reasoning or ReasoningFormat("", "", "")
        self._format = tool_format
        self._tools = tools
        self._out = ReplyBuilder()
        self._held = ""
        self._state = "text" if reasoning is None else "reasoning" if thinking else "start"
        self._bare = tool_format is not None and tool_format.bare
        self._drop_newlines = False
        self._blanks = ""
        self._after_call = False
        self._section = ""
        self._call: OpenCall | None = None

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._held and self._step():
            pass
        return self._out.drain()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._call is not None:
            self._withdraw(self._call, held)
        elif self._state == "first":
            self._say(self._section + held)
        elif self._state == "reasoning":
            self._out.think(held)
        else:
            self._say(held)
        if self._blanks and not self._after_call:
            self._out.say(self._blanks)
        self._blanks = ""
        return self._out.drain()

    @property
    def reply(self) -> Message:
        return self._out.message

    @property
    def thinking(self) -> bool:
        return self._state == "reasoning"

    @property
    def held(self) -> str:
        if self._call is not None or self._state != "text":
            return ""
        return ("" if self._after_call else self._blanks) + self._held

    def _step(self) -> bool:
        """Process held text; False if more text is needed."""
        if self._call is not None:
            return self._read_call(self._call)
        if self._state == "text":
            return self._read_text()
        if self._state == "reasoning":
            return self._read_reasoning()
        if self._state == "start":
            return self._read_start()
        return self._format is not None and self._read_section(self._format)

    # --- reasoning ---

    def _read_start(self) -> bool:
        at = len(self._held) - len(self._held.lstrip())
        matched = matches(self._held, at, self._tags.opening)
        if matched:
            self._state, self._held = "reasoning", self._held[at + len(self._tags.opening) :]
        elif matched is False:
            self._state = "text"
        return matched is not None

    def _read_reasoning(self) -> bool:
        closing = self._tags.closing
        thought, end, rest = self._held.partition(closing)
        if end:
            self._out.think(thought.rstrip("\n"))
            self._state, self._held, self._drop_newlines = "text", rest, True
            return True
        keep = len(thought) - partial(thought, closing)
        keep = len(thought[:keep].rstrip("\n"))
        self._out.think(thought[:keep])
        self._held = thought[keep:]
        return False

    # --- text ---

    def _read_text(self) -> bool:
        if self._format is None:
            self._say(self._held)
            self._held = ""
            return False
        if self._bare:
            return self._read_beginning(self._format)
        text, opening, rest = self._held.partition(self._format.opening)
        if opening:
            self._say(text)
            self._state, self._section, self._held = "first", opening, rest
            return True
        keep = len(text) - partial(text, self._format.opening)
        self._say(text[:keep])
        self._held = text[keep:]
        return False

    def _read_beginning(self, tool_format: ToolFormat) -> bool:
        at = skip_blank(self._held, 0)
        if at == len(self._held):
            return False
        self._bare = False
        if self._held[at] == "{":
            self._say(self._held[:at])
            self._held = self._held[at:]
            self._open(tool_format, 0)
        return True

    def _say(self, text: str) -> None:
        if self._drop_newlines:
            text = text.lstrip("\n")
            self._drop_newlines = not text
        if self._format is None:
            self._out.say(text)
            return
        body = text.rstrip()
        if not body:
            self._blanks += text
            return
        spoken = self._blanks + body
        if self._after_call and not self._out.spoken:
            spoken = spoken.lstrip()
        self._blanks, self._after_call = text[len(body) :], False
        self._out.say(spoken)

    # --- calls ---

    def _read_section(self, tool_format: ToolFormat) -> bool:
        """Read what precedes the first call of a section, or separates two calls."""
        at = skip_blank(self._held, 0)
        if self._state == "first":
            return self._read_first(tool_format, at if tool_format.first else 0)
        ends = matches(self._held, at, tool_format.end) if tool_format.end else False
        begins = matches(self._held, at, tool_format.next or "")
        if ends:
            self._held = self._held[at + len(tool_format.end) :]
            self._leave()
        elif begins:
            self._open(tool_format, at + len(tool_format.next or ""))
        elif ends is False and begins is False:
            self._leave()
        else:
            return False
        return True

    def _read_first(self, tool_format: ToolFormat, at: int) -> bool:
        begins = matches(self._held, at, tool_format.first)
        if begins:
            self._open(tool_format, at + len(tool_format.first))
        elif begins is False:
            section = self._section
            self._leave()
            self._say(section)
        return begins is not None

    def _leave(self) -> None:
        self._state, self._section = "text", ""

    def _open(self, tool_format: ToolFormat, taken: int) -> None:
        before, self._held = self._section + self._held[:taken], self._held[taken:]
        self._call = OpenCall(tool_format.reader(self._tools), before)

    def _read_call(self, call: OpenCall) -> bool:
        self._held = self._held[call.feed(self._held) :]
        if call.status is CallState.BROKEN:
            self._withdraw(call, "")
            return True
        if call.status is CallState.OPEN:
            return False
        self._out.add_call(call.finished)
        self._call, self._after_call = None, True
        self._section, self._state = "", "text"
        if self._format is not None and self._format.next is not None:
            self._state = "next"
        return True

    def _withdraw(self, call: OpenCall, rest: str) -> None:
        self.malformed = True
        self._call = None
        self._leave()
        self._say(call.sampled + rest)


# --- token ids to events ---------------------------------------------------------------------------


class Spellings(dict[int, bytes]):
    """Cache of the bytes that each id adds to a reply, shared by all parsers of a model."""

    def __init__(self, vocab: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocab = vocab
        self._hidden = hidden

    def __missing__(self, id: int) -> bytes:
        piece = self[id] = b"" if id in self._hidden else self._vocab.piece(id)
        return piece


class ReplyParser:
    """Parser from token ids to events, for one model call."""

    def __init__(self, spellings: Spellings, reader: Reader) -> None:
        self._spell = spellings.__getitem__
        self._reader = reader
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> list[Event]:
        return self._reader.feed(self._utf8.decode(b"".join(map(self._spell, ids))))

    @property
    def held(self) -> str:
        """Text held back because a marker may follow; it becomes text if the reply ends here."""
        return self._reader.held

    def size(self, id: int) -> int:
        """Number of bytes that an id adds to a reply."""
        return len(self._spell(id))

    def thought(self, ids: Sequence[int]) -> int:
        """Number of reasoning ids, including the one that closes it. Needs a new parser, which it uses up."""
        count = 0
        for token in ids:
            count += self._reader.thinking
            self.feed((token,))
        return count

    def finish(self) -> list[Event]:
        """End the reply; returns events for the text held back. No `feed` may follow."""
        return self._reader.feed(self._utf8.decode(b"", final=True)) + self._reader.finish()

    @property
    def malformed(self) -> bool:
        """Whether the beginning of a call turned out malformed and stayed text."""
        return getattr(self._reader, "malformed", False)

    @property
    def reply(self) -> Message:
        """Reply so far; contains complete calls only, with the ids that the model wrote."""
        return self._reader.reply
