"""Stop strings, applied to the reply's text token by token.

A reply ends with the first token that completes a stop string. That token is recorded whole; later ones
are dropped. Reasoning and tool calls are not searched. Clients get the text before the string.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import structs

from afield.chat import Event, ReplyParser, TextDelta, ToolEnd
from afield.interfaces import Chunk, Engine, GenerateRequest
from afield.types import FinishReason, Message, VersionSpan


class StopStrings:
    """Finds stop strings in a token stream, and holds back text that may be part of one."""

    def __init__(self, stops: Sequence[str], parser: ReplyParser) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._parser = parser
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._looked = 0
        self._sent = 0
        self._calls = 0
        self._after = 0
        self.matched: str | None = None

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def feed(self, ids: Sequence[int]) -> tuple[int, list[Event]]:
        """Returns how many of the ids belong to the reply, and their events. Below 1, earlier ids are
        dropped too.
        """
        if not self._stops:
            return len(ids), self._parser.feed(ids)
        events: list[Event] = []
        for n, token in enumerate(ids, 1):
            events += self._filter(self._parser.feed((token,)))
            if not self.hit:
                self._find(self._parser.held)
            if self.hit:
                events += self._release(len(self._text))
                return n, events
        return len(ids), events

    def finish(self) -> list[Event]:
        """Returns held-back events, unless a stop string was found."""
        if self.hit:
            return []
        events = self._parser.finish()
        return self._filter(events) + self._release(len(self._text)) if self._stops else events

    def beyond(self, ids: Sequence[int]) -> int:
        """Returns how many of the last ids come after the stop string."""
        if not self.hit:
            return 0
        bytes_left, count = self._after, 0
        while count < len(ids) and bytes_left >= (size := self._parser.size(ids[-1 - count])):
            bytes_left -= size
            count += 1
        return count

    def cut(self, reply: Message) -> Message:
        """Returns the reply as the client gets it."""
        if not self.hit:
            return reply
        return structs.replace(reply, content=self._text, tool_calls=reply.tool_calls[: self._calls])

    def _filter(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if self.hit:
                self._after += len(event.text.encode()) if isinstance(event, TextDelta) else 0
            elif isinstance(event, TextDelta):
                self._text += event.text
                self._find("")
                passed += self._release(len(self._text) - (0 if self.hit else self._hold))
            else:
                passed += [*self._release(len(self._text)), event]
                self._calls += isinstance(event, ToolEnd)
        return passed

    def _find(self, held: str) -> None:
        """Finds the stop string that ends first, in the text and the held-back part."""
        text = self._text + held if held else self._text
        start = max(0, self._looked - self._hold)
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        self._looked = len(self._text)
        if matches:
            end, at, self.matched = min(matches)
            self._after = len(text[end:].encode("utf-8", "replace"))
            self._text = text[:at]

    def _release(self, upto: int) -> list[Event]:
        if upto <= self._sent:
            return []
        text, self._sent = self._text[self._sent : upto], upto
        return [TextDelta(text)]


async def sampled(engine: Engine, call: GenerateRequest, stops: StopStrings) -> AsyncGenerator[Chunk]:
    """Yields the chunks of a call with stop strings.

    Engines search everything that they sample. If one stops at a string outside the reply's text, the
    call continues without stop strings.
    """
    ids: list[int] = []
    last: Chunk | None = None
    async with aclosing(engine.generate(call)) as chunks:
        async for chunk in chunks:
            ids += chunk.token_ids
            if chunk.finish is not FinishReason.STOP or (ids and ids[-1] in call.stop_ids):
                yield chunk
                continue
            last = chunk
            yield structs.replace(chunk, finish=None)
    if last is None or stops.hit:
        return
    remaining = call.max_tokens - len(ids)
    if remaining < 1:
        last = structs.replace(last, token_ids=(), logprobs=(), top_logprobs=(), prompt_logprobs=None)
        yield structs.replace(last, finish=FinishReason.LENGTH)
        return
    rest = structs.replace(call, prompt_ids=(*call.prompt_ids, *ids), max_tokens=remaining, stop=())
    rest = structs.replace(rest, prompt_logprobs=None)
    async with aclosing(engine.generate(rest)) as chunks:
        async for chunk in chunks:
            spans = _joined(last.versions, chunk.versions, len(ids))
            yield structs.replace(chunk, prompt_ids=None, versions=spans)


def _joined(
    earlier: tuple[VersionSpan, ...] | None, spans: tuple[VersionSpan, ...] | None, start: int
) -> tuple[VersionSpan, ...] | None:
    if earlier is None or spans is None:
        return None
    moved = (VersionSpan(s.start + start, s.end + start, s.low, s.high) for s in spans)
    return (*earlier, *moved)
