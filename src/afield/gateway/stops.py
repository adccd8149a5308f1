"""Stop strings a client asks for: applied to the text it sees, never to the ids that were sampled."""

from __future__ import annotations

from msgspec import structs

from afield.tokens import Event, TextDelta, ToolEnd
from afield.types import Message


class StopStrings:
    """Feed it events; it holds text back while a stop string could still be forming."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._sent = 0
        self._calls = 0
        self.found: str | None = None

    @property
    def hit(self) -> bool:
        return self.found is not None

    def filter(self, events: list[Event], *, last: bool = False) -> list[Event]:
        if not self._stops:
            return events
        kept: list[Event] = []
        for event in events:
            if self.hit:
                break
            if isinstance(event, TextDelta):
                kept += self._take(event.text)
            else:
                kept += [*self._release(len(self._text)), event]
                self._calls += isinstance(event, ToolEnd)
        return kept + (self._release(len(self._text)) if last and not self.hit else [])

    def cut(self, reply: Message) -> Message:
        """The reply as the client saw it, whether or not more had been sampled in one go."""
        if not self.hit:
            return reply
        return structs.replace(reply, content=self._text, tool_calls=reply.tool_calls[: self._calls])

    def _take(self, text: str) -> list[Event]:
        self._text += text
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            self._text = self._text[:at]
            return self._release(len(self._text))
        return self._release(len(self._text) - self._hold)

    def _release(self, upto: int) -> list[Event]:
        if upto <= self._sent:
            return []
        text, self._sent = self._text[self._sent : upto], upto
        return [TextDelta(text)]
