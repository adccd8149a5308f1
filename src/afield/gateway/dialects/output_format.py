"""Structured output in any dialect: the form that a request wants its reply to have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from afield.gateway.api_error import bad_request
from afield.gateway.dialects.base import encode
from afield.gateway.model_request import OutputFormat

JSON_OBJECT = OutputFormat("json_object")
VLLM = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def response_format(given: Any, name: str, *, flat: bool = False) -> OutputFormat | None:
    """`response_format` of Chat Completions; `flat` where the schema is not in an object of its own."""
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise bad_request(f"{name} is not an object", "send an object with a type")
    if (kind := given.get("type")) is None:
        raise bad_request(f"{name} has no type", "say which of text, json_object, json_schema it is")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind == "json_schema":
        held = given if flat else given.get("json_schema")
        return json_schema(held.get("schema") if isinstance(held, Mapping) else None, f"{name}.schema")
    if kind == "regex":
        return _text("regex", given.get("pattern"), f"{name}.pattern")
    if kind == "grammar":
        return _text("grammar", given.get("grammar"), f"{name}.grammar")
    raise bad_request(
        f"{name}: type {kind!r} is not one of text, json_object, json_schema", "use a JSON schema, or text"
    )


def json_schema(schema: Any, name: str) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise bad_request(f"{name} is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise bad_request(f"{name} has no JSON schema", "send the schema as an object")
    return OutputFormat("json_schema", encode(schema).decode())


def guided(given: Mapping[str, Any]) -> tuple[OutputFormat, str] | None:
    """vLLM's parameters, in their present and their earlier spelling, and the name of the one used."""
    found = [
        (_guided(name.removeprefix("guided_"), value, name), name)
        for name in VLLM[:4]
        if (value := given.get(name)) is not None
    ]
    held = given.get("structured_outputs") or {}
    for kind in _KINDS:
        if (value := held.get(kind)) is not None and (kind != "json_object" or value is not False):
            name = f"structured_outputs.{kind}"
            found.append((_guided(kind, value, name), name))
    if len(found) > 1:
        raise bad_request(f"{found[0][1]} and {found[1][1]} both constrain the reply", "send one of them")
    return found[0] if found else None


def one(
    first: OutputFormat | None, name: str, second: tuple[OutputFormat, str] | None
) -> tuple[OutputFormat | None, str]:
    """The one form that is asked for, and the parameter that asks."""
    if first is not None and second is not None:
        raise bad_request(f"{name} and {second[1]} both constrain the reply", "send one of them")
    return (first, name) if first is not None else second or (None, "")


def choice(values: Any, name: str) -> OutputFormat:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise bad_request(f"{name} is not a list of strings", "send the strings to choose from")
    return OutputFormat("choice", encode(values).decode())


def _guided(kind: str, value: Any, name: str) -> OutputFormat:
    if kind == "json_object":
        if value is not True:
            raise bad_request(f"{name} is neither true nor false", "send true, or leave it out")
        return JSON_OBJECT
    if kind == "json":
        return json_schema(value, name)
    if kind == "choice":
        return choice(value, name)
    return _text(kind, value, name)


def _text(kind: str, value: Any, name: str) -> OutputFormat:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{name} is not text", "send it as a string")
    return OutputFormat("regex" if kind == "regex" else "grammar", value)
