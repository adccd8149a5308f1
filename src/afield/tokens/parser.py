"""Sampled ids to a reply, as they come.

Promises: any way of cutting the ids into pieces gives the same events in sum and the same reply; a
character cut between ids is held back until it is whole; stop tokens and other control tokens never
show as text; each id costs the same whatever came before. Markers are found in the text, so a marker
that is one token and one spelled in several are the same. A malformed call stays text exactly as
sampled. Blanks between text and a call belong to neither.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from afield.tokens.events import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.tokens.formats import CallReader, Status, ToolFormat
from afield.tokens.vocab import Vocabulary
from afield.types import Message, ToolCall

THINK, END_THINK = "<think>", "</think>"


class Parser:
    """Ids in, events out; one per model call."""

    def __init__(self, vocab: Vocabulary, hidden: frozenset[int], reader: ReplyReader) -> None:
        self._vocab = vocab
        self._hidden = hidden
        self._reader = reader
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> list[Event]:
        spelled = b"".join(self._vocab.piece(token) for token in ids if token not in self._hidden)
        return self._reader.feed(self._utf8.decode(spelled))

    def finish(self) -> list[Event]:
        """What was held back. Nothing may be fed afterwards."""
        return self._reader.feed(self._utf8.decode(b"", final=True)) + self._reader.finish()

    @property
    def reply(self) -> Message:
        """What is known so far; calls appear when they are closed, with empty ids."""
        return self._reader.reply


class ReplyReader:
    """The same for text: reasoning, then text and calls."""

    def __init__(
        self, *, reasoning: bool, thinking: bool, tool_format: ToolFormat | None, hold_calls: bool
    ) -> None:
        self._format = tool_format
        self._hold_calls = hold_calls
        self._held = ""
        self._state = "reasoning" if thinking else "start" if reasoning else "text"
        self._events: list[Event] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._drop_newlines = False
        self._blanks = ""
        self._after_call = False
        self._call: _OpenCall | None = None
        self._started = 0

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._held and self._step():
            pass
        return self._drain()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._call is not None:
            self._withdraw(self._call, held)
        elif self._state == "reasoning":
            self._think(held)
        else:
            self._say(held)
        if self._blanks and not self._after_call:
            self._emit_text(self._blanks)
        self._blanks = ""
        return self._drain()

    @property
    def reply(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Takes from what is held; False when more text is needed first."""
        if self._call is not None:
            return self._read_call(self._call)
        if self._state == "text":
            return self._read_text()
        return self._read_start() if self._state == "start" else self._read_reasoning()

    def _read_start(self) -> bool:
        begin = self._held.lstrip()
        if len(begin) < len(THINK) and THINK.startswith(begin):
            return False
        if begin.startswith(THINK):
            self._state, self._held = "reasoning", begin[len(THINK) :]
        else:
            self._state = "text"
        return True

    def _read_reasoning(self) -> bool:
        thought, end, rest = self._held.partition(END_THINK)
        if end:
            self._think(thought.rstrip("\n"))
            self._state, self._held, self._drop_newlines = "text", rest, True
            return True
        keep = len(thought) - partial(thought, END_THINK)
        keep = len(thought[:keep].rstrip("\n"))
        self._think(thought[:keep])
        self._held = thought[keep:]
        return False

    def _think(self, text: str) -> None:
        if not self._reasoning:
            text = text.lstrip("\n")
        if text:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))

    def _read_text(self) -> bool:
        if self._format is None:
            self._say(self._held)
            self._held = ""
            return False
        text, opening, rest = self._held.partition(self._format.opening)
        if opening:
            self._say(text)
            self._held = rest
            self._call = _OpenCall(self._format, self._started)
            return True
        keep = len(text) - partial(text, self._format.opening)
        self._say(text[:keep])
        self._held = text[keep:]
        return False

    def _say(self, text: str) -> None:
        if self._drop_newlines:
            text = text.lstrip("\n")
            self._drop_newlines = not text
        if self._format is None:
            self._emit_text(text)
            return
        body = text.rstrip()
        if not body:
            self._blanks += text
            return
        said = self._blanks + body
        if self._after_call and not self._content:
            said = said.lstrip()
        self._blanks, self._after_call = text[len(body) :], False
        self._emit_text(said)

    def _emit_text(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._events.append(TextDelta(text))

    def _read_call(self, call: _OpenCall) -> bool:
        self._held = self._held[call.feed(self._held) :]
        if call.status is Status.BROKEN:
            self._withdraw(call, "")
            return True
        if call.status is Status.OPEN:
            if not self._hold_calls:
                self._report(call)
            return False
        self._report(call)
        self._events.append(ToolEnd(call.index))
        self._calls.append(call.finished)
        self._call, self._after_call = None, True
        return True

    def _report(self, call: _OpenCall) -> None:
        self._events.extend(call.news())
        if call.started:
            self._started = call.index + 1

    def _withdraw(self, call: _OpenCall, rest: str) -> None:
        if not self._hold_calls:
            self._report(call)
        self._call = None
        self._say(call.sampled + rest)


class _OpenCall:
    """A call being read, and the text it was read from."""

    def __init__(self, tool_format: ToolFormat, index: int) -> None:
        self.index = index
        self.started = False
        self._reader: CallReader = tool_format.reader()
        self._sampled = [tool_format.opening]
        self._arguments: list[str] = []

    @property
    def status(self) -> Status:
        return self._reader.status

    @property
    def sampled(self) -> str:
        return "".join(self._sampled)

    @property
    def finished(self) -> ToolCall:
        return ToolCall("", self._reader.name or "", "".join(self._arguments))

    def feed(self, text: str) -> int:
        taken = self._reader.feed(text)
        self._sampled.append(text[:taken])
        return taken

    def news(self) -> list[Event]:
        """What became known since the last time."""
        events: list[Event] = []
        if self._reader.name is not None and not self.started:
            self.started = True
            events.append(ToolStart(self.index, self._reader.name))
        if text := self._reader.take():
            self._arguments.append(text)
            events.append(ToolArguments(self.index, text))
        return events


def partial(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    for n in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-n:]):
            return n
    return 0
