"""Example strings for regular expressions."""

from __future__ import annotations

import re._parser as parser
from typing import Any

CATEGORIES = {"CATEGORY_DIGIT": "1234567890", "CATEGORY_WORD": "abcdefgh", "CATEGORY_SPACE": " "}


def example(pattern: str, variant: int = 0) -> str:
    """Short text that matches the pattern; another `variant` chooses other branches and characters."""
    return _all(parser.parse(pattern), variant)


def _all(parsed: Any, variant: int) -> str:
    return "".join(_one(str(kind), value, variant) for kind, value in parsed)


def _one(kind: str, value: Any, variant: int) -> str:
    if kind == "LITERAL":
        return chr(value)
    if kind == "IN":
        return _of_class([(str(member), of) for member, of in value], variant)
    if kind == "CATEGORY":
        characters = CATEGORIES.get(str(value), "a")
        return characters[variant % len(characters)]
    if kind == "BRANCH":
        return _all(value[1][variant % len(value[1])], variant)
    if kind == "SUBPATTERN":
        return _all(value[-1], variant)
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, body = value
        return _all(body, variant) * max(least, min(1, most))
    if kind == "NOT_LITERAL":
        return "b" if value == ord("a") else "a"
    if kind in ("AT", "ANY"):
        return "" if kind == "AT" else "a"
    raise ValueError(f"no example for {kind} in a regular expression")


def _of_class(members: list[tuple[str, Any]], variant: int) -> str:
    kind, value = members[0]
    if kind == "NEGATE":
        excluded = {of for member, of in members if member == "LITERAL"}
        return next(char for char in "ab1 _" if ord(char) not in excluded)
    if kind == "RANGE":
        return chr(value[0] + variant % (value[1] - value[0] + 1))
    return _one(kind, value, variant)
