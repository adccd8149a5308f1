"""Incremental JSON scanner (RFC 8259): finds the end of a value.

Scanning is linear in the length of the value, whatever the size of the pieces. Nesting deeper than
`MAX_DEPTH` fails. The scanner builds no objects: callers use the text itself.
"""

from __future__ import annotations

import re

MAX_DEPTH = 100
BLANK = " \t\r\n"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"}": "{", "]": "["}


def skip_blank(text: str, at: int) -> int:
    """Position of the first character from `at` on that is not JSON whitespace."""
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


class JsonScanner:
    """Scanner of one value; stops at its end (`done`) or at the first invalid character (`failed`)."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._state = "value"
        self._stack: list[str] = []
        self._string_is_key = False
        self._hex_left = 0
        self._scalar = ""

    def feed(self, text: str, at: int) -> int:
        """Scan text from `at`; returns the position after the part that belongs to the value."""
        while at < len(text) and not (self.done or self.failed):
            if self._state in {"string", "escape", "hex"}:
                at = self._in_string(text, at)
            elif self._state == "scalar":
                at = self._in_scalar(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        char = text[at]
        if self._state == "hex":
            self.failed = char not in _HEX
            self._hex_left -= 1
            if not self._hex_left:
                self._state = "string"
        elif self._state == "escape":
            self.failed = char not in '"\\/bfnrtu'
            self._state, self._hex_left = ("hex", 4) if char == "u" else ("string", 0)
        elif run := _PLAIN.match(text, at):
            return run.end()
        elif char == "\\":
            self._state = "escape"
        elif char == '"':
            self._string_ended()
        else:
            self.failed = True
        return at if self.failed else at + 1

    def _string_ended(self) -> None:
        if self._string_is_key:
            self._state = "colon"
        else:
            self._value_ended()

    def _in_scalar(self, text: str, at: int) -> int:
        if run := _SCALAR_RUN.match(text, at):
            self._scalar += run.group()
            return run.end()
        if _SCALAR.fullmatch(self._scalar):
            self._scalar = ""
            self._value_ended()
        else:
            self.failed = True
        return at

    def _structure(self, text: str, at: int) -> int:
        if (start := skip_blank(text, at)) > at:
            return start
        char = text[at]
        if char in _CLOSES:
            self._close(char)
        elif self._state in {"value", "first"}:
            return self._open_value(char, at)
        elif self._state in {"key", "first key"} and char == '"':
            self._state, self._string_is_key = "string", True
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "next" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        else:
            self.failed = True
        return at if self.failed else at + 1

    def _open_value(self, char: str, at: int) -> int:
        if char in "{[":
            self._stack.append(char)
            self._state = "first key" if char == "{" else "first"
            self.failed = len(self._stack) > MAX_DEPTH
            return at + 1
        if char == '"':
            self._state, self._string_is_key = "string", False
            return at + 1
        self._state = "scalar"
        self.failed = not _SCALAR_RUN.match(char)
        return at

    def _close(self, char: str) -> None:
        empty = {"}": "first key", "]": "first"}[char]
        if self._state in {"next", empty} and self._stack and self._stack[-1] == _CLOSES[char]:
            self._stack.pop()
            self._value_ended()
        else:
            self.failed = True

    def _value_ended(self) -> None:
        self._state = "next"
        self.done = not self._stack
