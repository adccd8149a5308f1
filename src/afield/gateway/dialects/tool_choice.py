"""Tool choice in any dialect: whether a reply may, must or must not call, and which tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from afield.chat import Tool
from afield.gateway.api_error import bad_request


class ToolChoice(Struct, frozen=True, kw_only=True):
    """As `ModelRequest` has it; `callable_tools` are names, all tools if empty."""

    may_call: bool = True
    must_call: bool = False
    callable_tools: tuple[str, ...] = ()


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
    """The same, once its tools are known to be there. `name` is that of the parameter."""
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
    given: str | dict[str, Any] | None,
    *,
    nested: bool,
    to_model: Callable[[str, str | None], str] = lambda name, _: name,
) -> ToolChoice:
    """`tool_choice` of Chat Completions (`nested`: names stand in an object of their own) and Responses."""
    if given is None:
        return AUTO
    if isinstance(given, str):
        if given not in MODES:
            raise bad_request(
                f"tool_choice {given!r} is not one of {', '.join(sorted(MODES))}",
                "or send an object that names a tool",
            )
        return MODES[given]
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given.get("allowed_tools") if nested else given, nested, to_model)
    if kind not in ("function", "custom"):
        raise bad_request(
            f"tool_choice forces {kind!r}, which only a provider could run",
            "name a function of the request's tools",
        )
    return forced(to_model(*_named(given, nested, "tool_choice")))


def _named(given: Any, nested: bool, where: str) -> tuple[str, str | None]:
    kind = given.get("type", "function") if isinstance(given, dict) else ""
    kind = kind if isinstance(kind, str) else ""
    inner = given.get(kind) if nested and isinstance(given, dict) else given
    name = inner.get("name") if kind and isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where} names no tool", "send the name of one of the request's tools")
    space = inner.get("namespace") if isinstance(inner, dict) else None
    return name, space if isinstance(space, str) else None


def _allowed(given: Any, nested: bool, to_model: Callable[[str, str | None], str]) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or not isinstance(given.get("tools"), list) or not given["tools"]:
        raise bad_request(f"{where} has no list of tools", "send the tools that may be called")
    mode = given.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise bad_request(f"{where}: mode {mode!r} is not one of auto, required")
    names = [to_model(*_named(tool, nested, where)) for tool in given["tools"]]
    return ToolChoice(must_call=mode == "required", callable_tools=tuple(dict.fromkeys(names)))
