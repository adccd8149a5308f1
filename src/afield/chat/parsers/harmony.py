"""Reader of harmony replies (gpt-oss), where every message has a channel.

1. `analysis` is reasoning; `final` and a preamble in `commentary` are text; a message to `functions.NAME` is
   a call.
2. A call is complete when its arguments are a JSON object and its message has ended; any other message to a
   tool is text.
3. `openai-harmony` is not used: it downloads a vocabulary and raises on malformed replies, which have to stay
   text here.
"""

from __future__ import annotations

import re

from afield.chat.parsers.base import CallState, Event, partial
from afield.chat.parsers.json_scanner import JsonScanner
from afield.chat.parsers.reply import OpenCall, ReplyBuilder
from afield.types import Message

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ANALYSIS = f"{START}assistant{CHANNEL}analysis{MESSAGE}"
MARKERS = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
_ENDS = (END, START, "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyReader:
    """Reader of harmony replies; without `tools`, messages to functions are text."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._out = ReplyBuilder()
        self._held = ""
        self._header: str | None = ""
        self._channel = ""
        self._call: OpenCall | None = None
        self._body: _Body | None = None

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._held and (self._read_header() if self._header is not None else self._read_body()):
            pass
        return self._out.drain()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._header is not None:
            head = self._header + held
            self._out.say("" if any(marker in head for marker in MARKERS) else head)
        else:
            self._take(held)
            self._end()
        return self._out.drain()

    @property
    def reply(self) -> Message:
        return self._out.message

    @property
    def thinking(self) -> bool:
        return self._header is None and self._call is None and self._channel == "analysis"

    @property
    def held(self) -> str:
        text = self._header is None and self._call is None and self._channel != "analysis"
        return self._held if text else ""

    def _read_header(self) -> bool:
        head, marker, rest = self._held.partition(MESSAGE)
        if not marker:
            keep = len(head) - partial(head, MESSAGE)
            self._header = f"{self._header}{head[:keep]}"
            self._held = head[keep:]
            return False
        header = f"{self._header}{head}".rpartition(START)[2]
        self._begin(header)
        self._header, self._held = None, rest
        return True

    def _begin(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        self._channel = channel.group(1) if channel else "final"
        recipient = _RECIPIENT.search(header)
        if recipient and self._tools:
            self._body = _Body(recipient.group(1))
            self._call = OpenCall(self._body, "")

    def _read_body(self) -> bool:
        at, end = min(((at, end) for end in _ENDS if (at := self._held.find(end)) >= 0), default=(-1, ""))
        if at < 0:
            keep = len(self._held) - max(partial(self._held, end) for end in _ENDS)
            self._take(self._held[:keep])
            self._held = self._held[keep:]
            return False
        self._take(self._held[:at])
        self._held = self._held[at + len(end) :]
        self._end()
        self._header = ""
        return True

    def _take(self, text: str) -> None:
        if self._call is not None:
            self._call.feed(text)
        elif self._channel == "analysis":
            self._out.think(text)
        else:
            self._out.say(text)

    def _end(self) -> None:
        if self._call is not None and self._body is not None:
            self._body.close()
            if self._call.status is CallState.CLOSED:
                self._out.add_call(self._call.finished)
            else:
                self._out.say(self._call.sampled)
        self._call = self._body = None


class _Body:
    """Call reader for the arguments of a message to a function."""

    def __init__(self, name: str) -> None:
        self.status = CallState.OPEN
        self.name: str | None = name
        self.id = ""
        self._scanner = JsonScanner()
        self._begun = False
        self._right = True
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        rest = text if self._begun else text.lstrip()
        if rest and not self._begun:
            self._begun = True
            self._right = rest[0] == "{"
        at = self._scanner.feed(rest, 0)
        self._arguments.append(rest[:at])
        self._right &= not self._scanner.failed and not rest[at:].strip()
        return len(text)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def close(self) -> None:
        self.status = CallState.CLOSED if self._right and self._scanner.done else CallState.BROKEN
