"""Reader of XML-style tool calls, with tags for each argument.

1. Values have no quotes, so the tool's schema decides between string and JSON; a value that does not have the
   schema's type is a string.
2. Arguments are held until the call is closed.
3. A value ends at the first closing tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from afield.chat.parsers.base import CallState, matches, partial
from afield.chat.parsers.json_scanner import JsonScanner, skip_blank
from afield.chat.template import Tool

_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r'[^<>"\n]+')
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Tags(Struct, frozen=True):
    """Literals of a format: `head` NAME `head_end`, then `key` KEY `key_end` `value` VALUE `value_end` per
    argument, then `ends`."""

    head: str
    """Literal before the name; empty for none."""
    head_end: str
    """Literal after the name; empty for none."""
    key: str
    """Literal before an argument's name."""
    key_end: str
    """Literal after an argument's name."""
    value: str
    """Literal before an argument's value; empty for none."""
    value_end: str
    """Literal after an argument's value."""
    ends: tuple[str, ...]
    """Literals that close the call, in order."""
    lines: bool = False
    """Whether a value is on its own lines; the newlines around it are dropped."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All literals that are not empty."""
        tags = (self.head, self.head_end, self.key, self.key_end, self.value, self.value_end, *self.ends)
        return tuple(tag for tag in tags if tag)


class TaggedCall:
    """Reader of one tagged call; `tools` give the types of its arguments."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]) -> None:
        self.status = CallState.OPEN
        self.name: str | None = None
        self.id = ""
        self._tags = tags
        self._tools = tools
        self._state = "head"
        self._word = ""
        self._key = ""
        self._value: list[str] = []
        self._arguments: dict[str, str] = {}
        self._ends = list(tags.ends)
        self._steps = {
            "head": self._read_head,
            "name": self._read_name,
            "next": self._read_next,
            "key": self._read_key,
            "open": self._read_open,
            "value": self._read_value,
            "close": self._read_close,
        }

    def feed(self, text: str) -> int:
        at = 0
        while self.status is CallState.OPEN:
            before, state = at, self._state
            at = self._steps[self._state](text, at)
            if at == before and self._state == state:
                break
        return at

    @property
    def arguments(self) -> str:
        return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in self._arguments.items()) + "}"

    def _read_head(self, text: str, at: int) -> int:
        at = skip_blank(text, at)
        return at if at == len(text) else self._pass(text, at, self._tags.head, "name")

    def _read_name(self, text: str, at: int) -> int:
        if run := _NAME.match(text, at):
            self._word += run.group()
            return run.end()
        if at == len(text):
            return at
        if not self._word:
            self.status = CallState.BROKEN
            return at
        end = self._pass(text, at, self._tags.head_end, "next")
        if self._state == "next":
            self.name, self._word = self._word, ""
        return end

    def _read_next(self, text: str, at: int) -> int:
        at = skip_blank(text, at)
        matched = matches(text, at, self._tags.key)
        if matched:
            self._state = "key"
            return at + len(self._tags.key)
        closes = matches(text, at, self._ends[0])
        if closes:
            return self._read_close(text, at)
        if matched is False and closes is False:
            self.status = CallState.BROKEN
        return at

    def _read_key(self, text: str, at: int) -> int:
        if run := _KEY.match(text, at):
            self._word += run.group()
            return run.end()
        if at == len(text):
            return at
        if not self._word or self._word in self._arguments:
            self.status = CallState.BROKEN
            return at
        end = self._pass(text, at, self._tags.key_end, "open")
        if self._state == "open":
            self._key, self._word = self._word, ""
        return end

    def _read_open(self, text: str, at: int) -> int:
        if not self._tags.value:
            self._state = "value"
            return at
        return self._pass(text, skip_blank(text, at), self._tags.value, "value")

    def _read_value(self, text: str, at: int) -> int:
        end = text.find(self._tags.value_end, at)
        if end < 0:
            end = len(text) - partial(text[at:], self._tags.value_end)
            self._value.append(text[at:end])
            return end
        self._value.append(text[at:end])
        value = "".join(self._value)
        if self._tags.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        self._value = []
        self._arguments[self._key] = as_json(value, self._schema())
        self._state = "next"
        return end + len(self._tags.value_end)

    def _read_close(self, text: str, at: int) -> int:
        at = skip_blank(text, at)
        end = self._pass(text, at, self._ends[0], "close")
        if end > at:
            self._ends.pop(0)
            if not self._ends:
                self.status = CallState.CLOSED
        return end

    def _pass(self, text: str, at: int, literal: str, state: str) -> int:
        matched = matches(text, at, literal)
        if matched is False:
            self.status = CallState.BROKEN
        if not matched:
            return at
        self._state = state
        return at + len(literal)

    def _schema(self) -> Any:
        tool = next((tool for tool in self._tools if tool.name == self.name), None)
        properties = tool.parameters.get("properties") if tool else None
        return properties.get(self._key) if isinstance(properties, dict) else None


def as_json(value: str, schema: Any) -> str:
    """JSON of a value that was written without quotes."""
    types = _types(schema)
    text = value.strip()
    if types and types & {"boolean", "null"}:
        text = _PYTHON.get(text, text)
    kind = _kind(text)
    if kind and (not types or kind in types or (kind == "integer" and "number" in types)):
        return text
    return _quoted(value)


def _types(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_kind(json.dumps(value)) or "string" for value in values)
    options = schema.get("anyOf") or schema.get("oneOf")
    return _union(map(_types, options)) if isinstance(options, list) else frozenset()


def _union(options: Iterable[frozenset[str]]) -> frozenset[str]:
    sets = list(options)
    return frozenset().union(*sets) if all(sets) else frozenset()


def _kind(text: str) -> str | None:
    """JSON type of a value that is not a string; None for other text."""
    scanner = JsonScanner()
    # The newline ends a number for the scanner.
    if not text or text[0] == '"' or scanner.feed(f"{text}\n", 0) < len(text) or not scanner.done:
        return None
    if text in {"true", "false"}:
        return "boolean"
    if text == "null":
        return "null"
    if text[0] in "{[":
        return "object" if text[0] == "{" else "array"
    return "integer" if text.lstrip("-").isdigit() else "number"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
