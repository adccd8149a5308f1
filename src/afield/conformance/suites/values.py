"""JSON values for schemas, and texts for regular expressions.

The rule-based model uses them as tool arguments and structured replies. Values are made in the order of the
schema's properties; each number and quoted word of the text is used once.
"""

from __future__ import annotations

import re
import re._parser as parser
from collections.abc import Mapping
from typing import Any

PLACE = re.compile(
    r"\b(?:in|for|at|of|to|from)\s+((?:[A-Z][\w.'-]*)(?:(?:,?\s+)(?:[A-Z][\w.'-]*))*)"
    r"((?:,\s+(?:and\s+)?[A-Z][\w.'-]*)*(?:\s+and\s+(?:[A-Z][\w.'-]*)(?:\s+[A-Z][\w.'-]*)*)*)"
)
PLACES = ("location", "city", "place", "town", "country", "capital", "destination", "region", "area")
QUOTED = re.compile(r"\"([^\"]+)\"|'([^']+)'|“([^”]+)”|`([^`]+)`")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
TEXTS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "5f0c7a2e-8f1d-4c3b-9a6e-2d4b8c1e7f90",
    "ipv4": "192.0.2.1",
}
DAYS = re.compile(r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b")
PEOPLE = ("participant", "people", "person", "attendee", "names")
EVENT = re.compile(r"\b(?:to|at|of) an? ([a-z][a-z ]*?)(?= on\b| at\b| in\b|[.,!?]|$)")
SUM = re.compile(r"(-?\d+)\s*([+*x-])\s*(-?\d+)")
RESULTS = ("result", "answer", "sum", "total")
DEEP = 12  # depth from which optional properties are omitted, for recursive schemas


def computed(text: str) -> int | None:
    """Value of the first sum, difference or product of two integers in a text; None without one."""
    if not (match := SUM.search(text)):
        return None
    a, sign, b = int(match[1]), match[2], int(match[3])
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def places(text: str) -> list[str]:
    """Place names in a text, in order: "in Paris and Rome" has two, "in Oslo, Norway" one."""
    names: list[str] = []
    for match in PLACE.finditer(text):
        names.append(match[1].rstrip(".,?!'"))
        names += [name.rstrip(".,?!'") for name in re.split(r",\s+(?:and\s+)?|\s+and\s+", match[2]) if name]
    return names


class Values:
    """Source of values for one request, from the user's text.

    `place` is the value of every place property; by default the first place in the text.
    """

    def __init__(self, text: str, place: str = "") -> None:
        self._text = text
        self._numbers = [float(n) if "." in n else int(n) for n in NUMBER.findall(text)]
        self.quoted = ["".join(groups) for groups in QUOTED.findall(text)]
        self._place = place or next(iter(places(text)), "")

    def of(self, schema: Mapping[str, Any], name: str = "", root: Mapping[str, Any] | None = None) -> Any:
        """Value for a schema; `name` is the property's name, `root` the schema that `$ref`s refer to."""
        root = schema if root is None else root
        return self._value(schema, name, root, 0)

    def _value(self, schema: Any, name: str, root: Mapping[str, Any], depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return f"some {name or 'text'}"
        if "$ref" in schema:
            return self._value(_resolved(schema["$ref"], root), name, root, depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self._value(self._variant(schema[key], name), name, root, depth + 1)
        if schema.get("allOf"):
            merged: dict[str, Any] = {}
            for part in schema["allOf"]:
                merged |= dict(_resolved(part["$ref"], root) if "$ref" in part else part)
            return self._value(merged, name, root, depth + 1)
        return self._typed(schema, name, root, depth)

    def _typed(self, schema: Mapping[str, Any], name: str, root: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((name for name in kind if name != "null"), "null")
        kind = str(kind or ("object" if "properties" in schema else "string")).lower()
        if kind == "object":
            return self._object(schema, root, depth)
        people = re.findall(r"\b[A-Z][a-z]+\b", DAYS.sub("", self._text))
        if kind == "array" and people and any(word in name.lower() for word in PEOPLE):
            return people
        if kind == "array":
            items = schema.get("items", {})
            first = schema.get("prefixItems", [])
            least = max(int(schema.get("minItems", 0)), min(2, int(schema.get("maxItems", 2))))
            count = max(least, len(first))
            return [
                self._value(first[n] if n < len(first) else items, name, root, depth + 1)
                for n in range(count)
            ]
        if kind in ("integer", "number"):
            if name.lower() in RESULTS and (value := computed(self._text)) is not None:
                return value
            return self._number(schema, kind == "integer")
        if kind == "boolean":
            return True
        if kind == "null":
            return None
        return self._string(schema, name)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", [])
        properties = schema.get("properties", {})
        wanted = [name for name in properties if name in required or depth < DEEP]
        return {name: self._value(properties[name], name, root, depth + 1) for name in wanted}

    def _choice(self, values: list[Any]) -> Any:
        message = self._text.lower()
        return next((value for value in values if str(value).lower() in message), values[0])

    def _variant(self, variants: list[Any], name: str) -> Any:
        """First variant that is not null; null if the text excludes the property ("no punchline")."""
        spelled = name.replace("_", " ").lower()
        if any(f"{word} {spelled}" in self._text.lower() for word in ("no", "without")):
            for variant in variants:
                if variant.get("type") == "null":
                    return variant
        return next((variant for variant in variants if variant.get("type") != "null"), variants[0])

    def _number(self, schema: Mapping[str, Any], whole: bool) -> int | float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -(10**9)))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 10**9))
        if isinstance(low, bool):
            low = -(10**9)
        for n, value in enumerate(self._numbers):
            if low <= value <= high and (not whole or value == int(value)):
                del self._numbers[n]
                return int(value) if whole else value
        least = low + ("exclusiveMinimum" in schema)
        default = 1 if low <= 1 <= high else least
        return int(default) if whole else default

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        if "pattern" in schema:
            return example(str(schema["pattern"]))
        if schema.get("format") in TEXTS:
            return TEXTS[str(schema["format"])]
        lower = name.lower()
        if self._place and any(place in lower for place in PLACES):
            return self._place
        if ("date" in lower or "day" in lower) and (day := DAYS.search(self._text)):
            return day[0]
        if "event" in lower and (event := EVENT.search(self._text)):
            return event[1]
        if self.quoted:
            return self.quoted.pop(0)
        text = f"{name.replace('_', ' ') or 'text'} of {_topic(self._text)}".strip()
        text += " " * max(0, int(schema.get("minLength", 0)) - len(text))
        return text[: int(schema.get("maxLength", len(text)))]


def _topic(text: str) -> str:
    words = re.findall(r"\w+", text)
    return " ".join(words[-2:]) or "it"


def _resolved(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Any = root
    for part in reference.removeprefix("#/").split("/"):
        if part != "#":
            schema = schema[part.replace("~1", "/").replace("~0", "~")]
    return schema


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
