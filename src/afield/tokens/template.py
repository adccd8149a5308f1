"""A model's own chat template: messages to text.

Runs the Jinja source in a sandbox with what transformers offers templates: the special tokens by
name, `tojson` that leaves the text alone, `raise_exception`, `strftime_now` (the time is frozen when
the template is loaded), loop controls and the `generation` tag. Every string of a message or a tool
is escaped on its way in. Refuses with `UsageError` the messages the template refuses.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser as JinjaParser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from afield.errors import UsageError
from afield.tokens.escape import BREAK, Spelled, policy
from afield.tokens.jsonscan import JsonScanner
from afield.types import Message, ToolCall

# What templates, which are foreign code, raise when they meet messages they were not written for.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


TOOLSETS = 64  # of the latest requests, kept as templates take them


class Tool(Struct, frozen=True):
    """A function the model may call. `raw` is the tool object as the client gave it: what is rendered."""

    name: str
    description: str
    parameters: dict[str, Any]
    raw: dict[str, Any]


class TemplateRefusal(UsageError, ValueError):
    """These messages or tools cannot be rendered."""


class ChatTemplate:
    """`sources` holds the template under "default" and, where the model has one, another under "tool_use"."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, Any],
        now: datetime,
        literals: Iterable[str],
    ) -> None:
        environment = _environment(now)
        try:
            self._fixed = [text for source in sources.values() for text in _fixed(environment, source)]
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"the chat template does not compile (line {error.lineno}): {error}") from error
        self._literals = tuple(literals)
        self._escape = policy("escape", self._literals, self._fixed)
        self.source = "\n".join(sources[name] for name in sorted(sources))
        self.hash = hashlib.sha256(json.dumps(dict(sources), sort_keys=True).encode()).hexdigest()
        self._variables = dict(variables)
        self._text_arguments = False
        self._known_tools: dict[int, tuple[Sequence[Tool], list[dict[str, Any]]]] = {}
        self._knows_developer = "developer" in self.source

    def under(self, escape: str) -> ChatTemplate:
        """The same template under another policy for control tokens in content."""
        other = copy(self)
        other._escape = policy(escape, self._literals, self._fixed)
        other._known_tools = {}
        return other

    def with_text_arguments(self) -> ChatTemplate:
        """For a template that takes the arguments of a call only as text, as its model wrote them."""
        other = copy(self)
        other._text_arguments = True
        return other

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> str:
        """Escaped text; with `generation` it ends where the model goes on."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        said = self.messages(messages)
        try:
            return self._templates[name].render(
                {
                    **self._variables,
                    "messages": said,
                    "tools": self.tools(tools),
                    "documents": None,
                    "add_generation_prompt": generation,
                }
            )
        except RecursionError as error:
            raise TemplateRefusal("the tools are nested too deeply to be rendered") from error
        except _REFUSALS as error:
            roles = ", ".join(message.role for message in messages) or "none"
            raise TemplateRefusal(
                f"the model's chat template refuses these messages (roles: {roles}): {error}"
            ) from error

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """As templates take them, escaped."""
        return [self._checked(self._message, m, f"message {n} ({m.role})") for n, m in enumerate(messages)]

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        if not tools:
            return None
        key = id(tools)  # held below, so that the id is not used again while it is known
        if (known := self._known_tools.get(key)) is None:
            said = [self._checked(self._escaped, tool.raw, f"tool {tool.name}") for tool in tools]
            known = self._known_tools[key] = (tools, said)
            while len(self._known_tools) > TOOLSETS:
                with suppress(KeyError, RuntimeError):  # another thread was faster
                    del self._known_tools[next(iter(self._known_tools))]
        return known[1]

    def _checked(self, convert: Callable[[Any], Any], value: Any, what: str) -> Any:
        try:
            return convert(value)
        except Spelled as spelled:
            raise TemplateRefusal(
                f"{what} spells the control token {spelled.literal!r}, which this session refuses;"
                " remove it, or open the session with the policy 'escape'"
            ) from spelled

    def _message(self, message: Message) -> dict[str, Any]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        content = self._parts(message) if message.images else self._escape(message.content)
        out: dict[str, Any] = {"role": role, "content": content}
        if message.reasoning:
            out["reasoning_content"] = out["thinking"] = self._escape(message.reasoning)
        if message.tool_calls:
            out["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id:
            out["tool_call_id"] = self._escape(message.tool_call_id)
        if message.name:
            out["name"] = self._escape(message.name)
        return out

    def _parts(self, message: Message) -> list[dict[str, str]]:
        """Text and images in their order, for templates that know what to do with them."""
        if not self.takes_images:
            raise TemplateRefusal("the model's chat template has no place for images; send text")
        parts: list[dict[str, str]] = []
        done = 0
        for image in message.images:
            parts += self._text_part(message.content[done : image.at])
            parts.append({"type": "image"})
            done = image.at
        return parts + self._text_part(message.content[done:])

    def _text_part(self, text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": self._escape(text)}] if text else []

    @cached_property
    def takes_images(self) -> bool:
        """Whether an image changes what is rendered, and not by being spelled out."""
        text = {"type": "text", "text": "Look."}
        try:
            plain, pictured = (
                self._templates["default"].render(
                    {
                        **self._variables,
                        "messages": [{"role": "user", "content": content}],
                        "tools": None,
                        "documents": None,
                        "add_generation_prompt": True,
                    }
                )
                for content in ([text], [{"type": "image"}, text])
            )
        except _REFUSALS:
            return False
        return plain != pictured and "'type'" not in pictured and '"type"' not in pictured

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._text_arguments else _object_or_text(call.arguments)
        out: dict[str, Any] = {
            "type": "function",
            "function": {"name": self._escape(call.name), "arguments": self._escaped(arguments)},
        }
        if call.id:
            out["id"] = self._escape(call.id)
        return out

    def _escaped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._escape(value)
        if isinstance(value, list):
            return [self._escaped(item) for item in value]
        if isinstance(value, dict):
            return {self._escape(str(key)): self._escaped(item) for key, item in value.items()}
        return value


def _object_or_text(arguments: str) -> Any:
    """The JSON object, or the text as it is where it is none."""
    scanner = JsonScanner()
    end = scanner.feed(arguments, 0)
    if not arguments.lstrip().startswith("{") or not scanner.done or arguments[end:].strip():
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _fixed(environment: ImmutableSandboxedEnvironment, source: str) -> Iterator[str]:
    """The texts a template is made of."""
    tree = environment.parse(source)
    yield from (node.data for node in tree.find_all(nodes.TemplateData))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: JinjaParser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub(rf"[^\x00-\x7f{BREAK}]", lambda char: json.dumps(char.group())[1:-1], text)
    return text
