"""Tool choice and output format, shared by the dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from afield.chat import Tool
from afield.gateway.api_error import bad_request
from afield.gateway.dialects.base import encode
from afield.gateway.model_request import OutputFormat


class ToolChoice(Struct, frozen=True, kw_only=True):
    """Tool choice of a request."""

    may_call: bool = True
    """Whether the reply may contain tool calls."""
    must_call: bool = False
    """Whether the reply must be a tool call."""
    callable_tools: tuple[str, ...] = ()
    """Names of the tools that the reply may call; empty for all."""


AUTO = ToolChoice()
NONE = ToolChoice(may_call=False)
MODES = {
    "auto": AUTO,
    "none": NONE,
    "required": ToolChoice(must_call=True),
    "any": ToolChoice(must_call=True),
}


def forced(name: str) -> ToolChoice:
    return ToolChoice(must_call=True, callable_tools=(name,))


def checked(choice: ToolChoice, tools: Sequence[Tool], name: str) -> ToolChoice:
    """Returns the choice after checking that its tools exist. `name` is the parameter."""
    if choice is AUTO or choice is NONE:
        return choice
    if not tools and choice.must_call:
        raise bad_request(
            f"{name} forces a tool call, and the request has no tools", "send tools, or leave it out"
        )
    names = {tool.name for tool in tools}
    if unknown := [tool for tool in choice.callable_tools if tool not in names]:
        raise bad_request(
            f"{name} names {', '.join(map(repr, unknown))}, which the request's tools do not have",
            f"its tools are: {', '.join(sorted(names)) or 'none'}",
        )
    return choice


def openai_choice(
    value: str | dict[str, Any] | None,
    *,
    nested: bool,
    to_model: Callable[[str, str | None], str] = lambda name, _: name,
) -> ToolChoice:
    """Parses `tool_choice` of Chat Completions (`nested`: names are in an inner object) and Responses."""
    if value is None:
        return AUTO
    if isinstance(value, str):
        if value not in MODES:
            raise bad_request(
                f"tool_choice {value!r} is not one of {', '.join(sorted(MODES))}",
                "or send an object that names a tool",
            )
        return MODES[value]
    kind = value.get("type")
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools") if nested else value, nested, to_model)
    if kind not in ("function", "custom"):
        raise bad_request(
            f"tool_choice forces {kind!r}, which only a provider could run",
            "name a function of the request's tools",
        )
    return forced(to_model(*_named(value, nested, "tool_choice")))


def _named(value: Any, nested: bool, where: str) -> tuple[str, str | None]:
    kind = value.get("type", "function") if isinstance(value, dict) else ""
    kind = kind if isinstance(kind, str) else ""
    inner = value.get(kind) if nested and isinstance(value, dict) else value
    name = inner.get("name") if kind and isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where} names no tool", "send the name of one of the request's tools")
    space = inner.get("namespace") if isinstance(inner, dict) else None
    return name, space if isinstance(space, str) else None


def _allowed(value: Any, nested: bool, to_model: Callable[[str, str | None], str]) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or not isinstance(value.get("tools"), list) or not value["tools"]:
        raise bad_request(f"{where} has no list of tools", "send the tools that may be called")
    mode = value.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise bad_request(f"{where}: mode {mode!r} is not one of auto, required")
    names = [to_model(*_named(tool, nested, where)) for tool in value["tools"]]
    return ToolChoice(must_call=mode == "required", callable_tools=tuple(dict.fromkeys(names)))


JSON_OBJECT = OutputFormat("json_object")
VLLM = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def response_format(value: Any, name: str, *, flat: bool = False) -> OutputFormat | None:
    """Parses `response_format`; `flat` if the schema is not in an inner object."""
    if value is None or value == {}:
        return None
    if not isinstance(value, Mapping):
        raise bad_request(f"{name} is not an object", "send an object with a type")
    if (kind := value.get("type")) is None:
        raise bad_request(f"{name} has no type", "say which of text, json_object, json_schema it is")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind == "json_schema":
        schema_object = value if flat else value.get("json_schema")
        return json_schema(
            schema_object.get("schema") if isinstance(schema_object, Mapping) else None, f"{name}.schema"
        )
    if kind == "regex":
        return _text("regex", value.get("pattern"), f"{name}.pattern")
    if kind == "grammar":
        return _text("grammar", value.get("grammar"), f"{name}.grammar")
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


def guided(values: Mapping[str, Any]) -> tuple[OutputFormat, str] | None:
    """Parses vLLM's guided and structured output parameters; returns the format and the parameter."""
    formats = [
        (_guided(name.removeprefix("guided_"), constraint, name), name)
        for name in VLLM[:4]
        if (constraint := values.get(name)) is not None
    ]
    structured = values.get("structured_outputs") or {}
    for kind in _KINDS:
        if (constraint := structured.get(kind)) is not None and (
            kind != "json_object" or constraint is not False
        ):
            name = f"structured_outputs.{kind}"
            formats.append((_guided(kind, constraint, name), name))
    if len(formats) > 1:
        raise bad_request(f"{formats[0][1]} and {formats[1][1]} both constrain the reply", "send one of them")
    return formats[0] if formats else None


def one(
    first: OutputFormat | None, name: str, second: tuple[OutputFormat, str] | None
) -> tuple[OutputFormat | None, str]:
    """Returns the only format and its parameter; raises 400 if there are two."""
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
