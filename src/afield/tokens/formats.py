"""Tool-call formats: how a model spells a call, one small reader per format.

A reader takes the text that follows the format's opening marker, in pieces, and says when the call is
closed or broken. It never repairs: what is not exactly the format is broken, and its text is the
reply's. To add a format, write its reader and list it in `FORMATS`; `certify` finds out by a round
trip which format a chat template uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from msgspec import Struct

from afield.tokens.jsonscan import JsonScanner, skip_blank


class Status(Enum):
    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"


class CallReader(Protocol):
    """Reads one call."""

    @property
    def status(self) -> Status: ...

    @property
    def name(self) -> str | None:
        """None until it is known."""
        ...

    def feed(self, text: str) -> int:
        """How much of the text was taken; the rest comes again, with more behind it."""
        ...

    def take(self) -> str:
        """The text of the arguments since the last time; nothing before the name is known."""
        ...


class ToolFormat(Struct, frozen=True):
    name: str
    opening: str
    closing: str
    reader: Callable[[], CallReader]


class HermesCall:
    """`{"name": ..., "arguments": {...}}` and the closing tag. Keys in any order; others are passed over."""

    closing = "</tool_call>"

    def __init__(self) -> None:
        self.status = Status.OPEN
        self.name: str | None = None
        self._state = "brace"
        self._key = ""
        self._seen: set[str] = set()
        self._scanner = JsonScanner()
        self._value: list[str] = []
        self._streams = False
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and self.status is Status.OPEN:
            if self._state in {"key", "value"}:
                at = self._scan(text, at)
                continue
            at = skip_blank(text, at)
            if self._state == "closing" and self._may_close(text[at:]):
                break
            if at < len(text):
                at = self._between(text, at)
        return at

    def _may_close(self, rest: str) -> bool:
        return len(rest) < len(self.closing) and self.closing.startswith(rest)

    def take(self) -> str:
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _between(self, text: str, at: int) -> int:
        """One character between keys and values."""
        char = text[at]
        if self._state == "brace" and char == "{":
            self._state = "first key"
        elif self._state in {"first key", "next key"} and char == '"':
            self._begin("key")
            return at
        elif self._state == "colon" and char == ":":
            self._state = "before value"
        elif self._state == "before value":
            self._begin("value")
            self._check_value(char)
            return at
        elif self._state == "after value" and char == ",":
            self._state = "next key"
        elif self._state == "after value" and char == "}":
            self._state = "closing"
            self._check(self._seen >= {"name", "arguments"})
        elif self._state == "closing" and text.startswith(self.closing, at):
            self.status = Status.CLOSED
            return at + len(self.closing)
        else:
            self.status = Status.BROKEN
        return at if self.status is Status.BROKEN else at + 1

    def _begin(self, state: str) -> None:
        self._state = state
        self._scanner = JsonScanner()
        self._value = []

    def _check_value(self, char: str) -> None:
        allowed = {"name": '"', "arguments": '{"'}.get(self._key)
        self._check(allowed is None or char in allowed)
        self._streams = self._key == "arguments" and char == "{"

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        piece = text[at:end]
        if self._state == "value" and self._streams:
            self._arguments.append(piece)
        else:
            self._value.append(piece)
        if self._scanner.failed:
            self.status = Status.BROKEN
        elif self._scanner.done:
            self._ended()
        return end

    def _ended(self) -> None:
        text = "".join(self._value)
        if self._state == "key":
            self._key = json.loads(text)
            self._check(self._key not in self._seen)
            self._seen.add(self._key)
            self._state = "colon"
            return
        self._state = "after value"
        if self._key == "name":
            name = json.loads(text)
            self._check(bool(name) and _is_text(name))
            self.name = name if self.status is Status.OPEN else None
        elif self._key == "arguments" and not self._streams:
            arguments = json.loads(text)
            self._check(_is_text(arguments))
            if self.status is Status.OPEN:
                self._arguments.append(arguments)

    def _check(self, right: bool) -> None:
        if not right:
            self.status = Status.BROKEN


def _is_text(value: str) -> bool:
    """Escapes can spell half a surrogate pair, which no client could be sent."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(name="hermes", opening="<tool_call>", closing=HermesCall.closing, reader=HermesCall),
)
