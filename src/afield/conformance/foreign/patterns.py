"""The shortest text that a regular expression matches: `example`."""

from __future__ import annotations

import re._parser as parser
from typing import Any

CATEGORIES = {"CATEGORY_DIGIT": "1", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " "}


def example(pattern: str) -> str:
    return _all(parser.parse(pattern))


def _all(parsed: Any) -> str:
    return "".join(_one(str(kind), value) for kind, value in parsed)


def _one(kind: str, value: Any) -> str:
    if kind == "LITERAL":
        return chr(value)
    if kind == "IN":
        return _of_class([(str(member), of) for member, of in value])
    if kind == "CATEGORY":
        return CATEGORIES.get(str(value), "a")
    if kind == "BRANCH":
        return _all(value[1][0])
    if kind == "SUBPATTERN":
        return _all(value[-1])
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, body = value
        return _all(body) * max(least, min(1, most))
    if kind == "NOT_LITERAL":
        return "b" if value == ord("a") else "a"
    if kind in ("AT", "ANY"):
        return "" if kind == "AT" else "a"
    raise ValueError(f"no example for {kind} in a regular expression")


def _of_class(members: list[tuple[str, Any]]) -> str:
    kind, value = members[0]
    if kind == "NEGATE":
        excluded = {of for member, of in members if member == "LITERAL"}
        return next(char for char in "ab1 _" if ord(char) not in excluded)
    return chr(value[0]) if kind == "RANGE" else _one(kind, value)
