"""Tools of OpenAI Responses: every kind the client itself runs becomes a function the model may call.

Functions come flat and are rendered in Chat's shape, so that both dialects share their roots. A `custom`
tool takes free text: the model sees a function with one string, `input`. Tools in a `namespace` keep
their own names where these are unique. What only a provider could run is dropped with a tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from afield.chat import Tool
from afield.gateway.api_error import bad_request
from afield.gateway.dialects.base import STRICT, TOOLS_TAG, read


class WireTool(Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[WireTool] | None = None


class Named(Struct, frozen=True):
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Toolbox(Struct, frozen=True):
    """The tools as the model sees them, and what each of those names is to the client."""

    tools: tuple[Tool, ...] = ()
    named: Mapping[str, Named] = {}
    tags: tuple[str, ...] = ()
    shown: Raw = Raw(b"[]")
    """The tools as answers list them: as they came, on one line, with every field that functions have."""

    def to_client(self, name: str) -> Named:
        return self.named.get(name) or Named(name)

    def to_model(self, name: str, namespace: str | None) -> str:
        """A history may hold calls of tools that are no longer listed: they keep their names."""
        for known, named in self.named.items():
            if (named.name, named.namespace) == (name, namespace):
                return known
        return name


class _Input(Struct, forbid_unknown_fields=True):
    input: str


TOOLS = msgspec.json.Decoder(list[WireTool] | None)
INPUT = msgspec.json.Decoder(_Input)


def read_tools(raw: Raw) -> Toolbox:
    """Clients send the same tools again with every request, so they are read once."""
    return _read_tools(bytes(raw))


@lru_cache(maxsize=64)
def _read_tools(raw: bytes) -> Toolbox:
    wire = read(TOOLS, raw, "a Responses request: tools") or []
    tools: list[Tool] = []
    named: dict[str, Named] = {}
    tags: list[str] = []
    for tool, namespace in _flat(wire, None):
        if tool.type not in ("function", "custom"):
            tags.append(f"{TOOLS_TAG}.{tool.type}")
            continue
        if not tool.name:
            raise bad_request(f"a tool of type {tool.type!r} has no name")
        name = tool.name if tool.name not in named else f"{namespace or tool.type}__{tool.name}"
        named[name] = Named(tool.name, namespace, tool.type == "custom")
        tools.append(_tool(name, tool))
        if tool.type == "custom" and (tool.format or {}).get("type") == "grammar":
            tags.append(f"{TOOLS_TAG}.{tool.name}.format")
        if tool.strict:
            tags.append(STRICT)
    listed = [_whole(tool) for tool in msgspec.json.decode(raw) or []]
    shown = Raw(msgspec.json.encode(listed))
    return Toolbox(tuple(tools), named, tuple(dict.fromkeys(tags)), shown)


def _whole(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "namespace":
        return tool | {"tools": [_whole(inner) for inner in tool.get("tools") or []]}
    if tool.get("type", "function") != "function":
        return tool
    # A schema that is not asked to be strict is none that calls are held to.
    usual = {"type": "function", "description": None, "parameters": None}
    return {**usual, **tool, "strict": bool(tool.get("strict"))}


def _flat(tools: list[WireTool], namespace: str | None) -> Iterator[tuple[WireTool, str | None]]:
    for tool in tools:
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or [], tool.name)
        else:
            yield tool, namespace


def _tool(name: str, tool: WireTool) -> Tool:
    parameters = tool.parameters if tool.type == "function" else _free_text(tool.format or {})
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if parameters is not None:
        function["parameters"] = parameters
    if tool.strict:
        function["strict"] = True
    raw = {"type": "function", "function": function}
    return Tool(name, tool.description or "", parameters or {}, raw)


def _free_text(form: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string"}
    if form.get("type") == "grammar":
        text["description"] = f"Follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


# --- calls of custom tools ------------------------------------------------------------------------


def free_text(arguments: str) -> str | None:
    """The input of a custom tool's call; None when the model wrote its arguments some other way."""
    try:
        return INPUT.decode(arguments).input
    except msgspec.MsgspecError:
        return None


def as_arguments(text: str) -> str:
    return msgspec.json.encode(_Input(text)).decode()
