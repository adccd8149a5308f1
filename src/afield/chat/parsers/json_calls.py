"""Readers of JSON tool calls: one object, or name and arguments.

A call is broken unless it has exactly the format: JSON by RFC 8259, no duplicate key, a valid name, no lone
surrogate.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from afield.chat.parsers.base import CallState, matches
from afield.chat.parsers.json_scanner import MAX_DEPTH, JsonScanner, skip_blank

_NAME = re.compile(r"[\w.:/-]+")
_LONGEST_NAME = 256
_BLANK = r"[ \t\n\r]*"
_PLAIN = re.compile(
    _BLANK.join(
        [
            "",
            r"\{",
            r'"(?P<name_key>\w+)"',
            ":",
            r'"(?P<name>[^"\\\x00-\x1f]+)"',
            ",",
            r'"(?P<arguments_key>\w+)"',
            ":",
            r"(?P<arguments>\{.*\})",
            r"\}",
            "",
        ]
    ),
    re.DOTALL,
)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


class ObjectCall:
    """Reader of `{"name": ..., "arguments": {...}}` and a closing literal.

    Keys may have any order; unknown keys are ignored. `name`, `arguments` and `id` are the names of the keys.
    """

    def __init__(
        self, closing: str = "", *, name: str = "name", arguments: str = "arguments", id: str = "id"
    ) -> None:
        self.status = CallState.OPEN
        self.name: str | None = None
        self.id = ""
        self._closing = closing
        self._keys = (name, arguments, id)
        self._state = "brace"
        self._key = ""
        self._seen: set[str] = set()
        self._scanner = JsonScanner()
        self._value: list[str] = []
        self._streams = False
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        end = text.find(self._closing) if self._state == "brace" and self._closing else -1
        if end >= 0 and self._plain(text[:end]):
            return end + len(self._closing)
        at = 0
        while at < len(text) and self.status is CallState.OPEN:
            if self._state in {"key", "value"}:
                at = self._scan(text, at)
                continue
            at = skip_blank(text, at)
            if self._state == "closing" and matches(text, at, self._closing) is None:
                break
            if at < len(text):
                at = self._between(text, at)
        return at

    def _plain(self, text: str) -> bool:
        """Fast path: read a complete call with its keys in the usual order."""
        name, arguments, _ = self._keys
        match = _PLAIN.fullmatch(text)
        if match is None or (match["name_key"], match["arguments_key"]) != (name, arguments):
            return False
        if text.count("{") + text.count("[") > MAX_DEPTH:
            return False  # may be nested too deeply; the scanner decides
        try:
            _OBJECT.decode(match["arguments"])
        except (msgspec.MsgspecError, RecursionError):
            return False  # the scanner decides whether it is JSON
        self.name, self.status = match["name"], CallState.CLOSED
        self._arguments.append(match["arguments"])
        return True

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def _between(self, text: str, at: int) -> int:
        """Read one character between keys and values."""
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
            self._object_ended()
        elif self._state == "closing" and text.startswith(self._closing, at):
            self.status = CallState.CLOSED
            return at + len(self._closing)
        else:
            self.status = CallState.BROKEN
        return at if self.status is CallState.BROKEN else at + 1

    def _object_ended(self) -> None:
        self._state = "closing"
        self._check(self._seen >= set(self._keys[:2]))
        if not self._closing and self.status is CallState.OPEN:
            self.status = CallState.CLOSED

    def _begin(self, state: str) -> None:
        self._state = state
        self._scanner = JsonScanner()
        self._value = []

    def _check_value(self, char: str) -> None:
        name, arguments, _ = self._keys
        allowed = {name: '"', arguments: '{"'}.get(self._key)
        self._check(allowed is None or char in allowed)
        self._streams = self._key == arguments and char == "{"

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        piece = text[at:end]
        if self._state == "value" and self._streams:
            self._arguments.append(piece)
        else:
            self._value.append(piece)
        if self._scanner.failed:
            self.status = CallState.BROKEN
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
        if self._key in self._keys and not self._streams:
            self._check_parsed(json.loads(text))

    def _check_parsed(self, value: object) -> None:
        name, arguments, _ = self._keys
        text = value if isinstance(value, str) else ""
        self._check(_is_text(text) and (bool(text) or self._key != name))
        if self.status is not CallState.OPEN:
            return
        if self._key == name:
            self.name = text
        elif self._key == arguments:
            self._arguments.append(text)
        else:
            self.id = text

    def _check(self, right: bool) -> None:
        if not right:
            self.status = CallState.BROKEN


class HeadedCall:
    """Reader of a name, a separator, a JSON object of arguments and a closing literal.

    Args:
        separator: literal between name and arguments.
        closing: literal after the arguments; empty for none.
        prefix: literal before the name; empty for none.
        id_mark: literal between the name and an optional call id; empty for none.
        id_is_name: whether the head is an id that contains the name, as in `functions.NAME:0`.
    """

    def __init__(
        self,
        separator: str,
        closing: str = "",
        *,
        prefix: str = "",
        id_mark: str = "",
        id_is_name: bool = False,
    ) -> None:
        self.status = CallState.OPEN
        self.name: str | None = None
        self.id = ""
        self._literals = {"prefix": prefix, "separator": separator, "closing": closing}
        self._id_mark = id_mark
        self._id_is_name = id_is_name
        self._state = "prefix" if prefix else "head"
        self._head = ["", ""]
        self._part = 0
        self._scanner = JsonScanner()
        self._arguments: list[str] = []

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and self.status is CallState.OPEN:
            before, state = at, self._state
            at = self._step(text, at)
            if at == before and self._state == state:
                break
        return at

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def _step(self, text: str, at: int) -> int:
        if self._state == "head":
            return self._read_head(text, at)
        if self._state == "arguments":
            return self._read_arguments(text, at)
        if self._state == "brace":
            at = skip_blank(text, at)
            if at < len(text):
                self._state = "arguments"
                self.status = CallState.OPEN if text[at] == "{" else CallState.BROKEN
            return at
        if self._state == "closing":
            at = skip_blank(text, at)
        return self._literal(text, at)

    def _literal(self, text: str, at: int) -> int:
        literal = self._literals[self._state]
        matched = matches(text, at, literal)
        if matched is False:
            self.status = CallState.BROKEN
        if not matched:
            return at
        if self._state == "closing":
            self.status = CallState.CLOSED
        else:
            self._state = {"prefix": "head", "separator": "brace"}[self._state]
        return at + len(literal)

    def _read_head(self, text: str, at: int) -> int:
        if run := _NAME.match(text, at):
            end = min(run.end(), at + _LONGEST_NAME - len(self._head[self._part]))
            self._head[self._part] += text[at:end]
            if end < run.end():
                self.status = CallState.BROKEN
            return end
        if self._id_mark and not self._part and (matched := matches(text, at, self._id_mark)) is not False:
            if matched:
                self._part = 1
                return at + len(self._id_mark)
            return at
        separated = matches(text, at, self._literals["separator"])
        if separated is False or (separated and not self._named()):
            self.status = CallState.BROKEN
        elif separated:
            self._state = "separator"
        return at

    def _named(self) -> bool:
        name, self.id = self._head
        if self._id_is_name:
            self.id = name
            name = name.removeprefix("functions.").rpartition(":")[0]
        self.name = name or None
        return bool(name)

    def _read_arguments(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._arguments.append(text[at:end])
        if self._scanner.failed:
            self.status = CallState.BROKEN
        elif self._scanner.done:
            self._state = "closing"
            if not self._literals["closing"]:
                self.status = CallState.CLOSED
        return end


def _is_text(value: str) -> bool:
    """Whether the text has no lone surrogate, which JSON escapes can produce and UTF-8 cannot encode."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
