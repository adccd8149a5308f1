"""A model's own chat template: messages to text.

Runs the Jinja source in a sandbox with what transformers offers templates: the special tokens by
name, `tojson` that leaves the text alone, `raise_exception`, `strftime_now` (the time is frozen when
the template is loaded), loop controls and the `generation` tag. Every string of a message or a tool
is escaped on its way in. A conversation goes through the rules that the template needs (`rules`) first.
Refuses with `UsageError` the messages the template refuses in spite of them; under the policy `strict`
also those that a rule would have to change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from afield.chat.escape import BREAK, Spelled, policy
from afield.chat.message_rules import LAST_RESORT, SAME_ROLE, Folded, fold
from afield.chat.parsers.json_scanner import JsonScanner
from afield.errors import UsageError
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


class _Raised(TemplateRefusal):
    """The template itself raised."""


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
        self._content_parts = False
        self._known_tools: dict[int, tuple[Sequence[Tool], list[dict[str, Any]]]] = {}
        self.rules: frozenset[str] = frozenset()
        self._last_resort: frozenset[str] = frozenset()
        self._strict = False

    def under(self, escape: str, *, strict: bool = False) -> ChatTemplate:
        """The same template under other policies, for control tokens in content and for rules."""
        other = copy(self)
        other._escape = policy(escape, self._literals, self._fixed)
        other._known_tools = {}
        other._strict = strict
        return other

    def with_rules(self, rules: Iterable[str], *, last_resort: bool = False) -> ChatTemplate:
        """The same template, which gets conversations as these rules leave them.

        With `last_resort`, the other rules are tried on what it refuses all the same.
        """
        other = copy(self)
        other.rules = frozenset(rules)
        other._last_resort = LAST_RESORT if last_resort else frozenset()
        return other

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template, told these variables too."""
        other = copy(self)
        other._variables = {**self._variables, **variables}
        return other

    def without_variables(self, names: Collection[str]) -> ChatTemplate:
        other = copy(self)
        other._variables = {name: value for name, value in self._variables.items() if name not in names}
        return other

    def with_text_arguments(self) -> ChatTemplate:
        """For a template that takes the arguments of a call only as text, as its model wrote them."""
        other = copy(self)
        other._text_arguments = True
        return other

    def with_content_parts(self) -> ChatTemplate:
        """For a template that takes the content of a message only as a list of parts."""
        other = copy(self)
        other._content_parts = True
        return other

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> str:
        """Escaped text; with `generation` it ends where the model goes on."""
        folded = self._folded(messages, tools, self.rules, generation=generation)
        return self._render(folded, tools, generation)

    def render_any(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
        """A prompt, and the rules that were applied: those of the template, or else all there are."""
        folded = self._folded(messages, tools, self.rules, generation=True)
        try:
            return self._render(folded, tools, generation=True), folded.applied
        except _Raised:
            last = fold(messages, tools, self.rules | self._last_resort, generation=True)
            if self._strict or last.messages == folded.messages:
                raise
            return self._render(last, tools, generation=True), last.applied

    def applied(self, new: Sequence[Message]) -> tuple[str, ...]:
        """The rules that change messages which follow a turn."""
        return fold(new, (), self.rules, begins=False, generation=True).applied if self.rules else ()

    def _folded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        rules: frozenset[str],
        *,
        generation: bool = False,
        begins: bool = True,
    ) -> Folded:
        if not rules:
            return Folded(messages, tools)
        folded = fold(messages, tools, rules, begins=begins, generation=generation)
        if self._strict and (changes := [rule for rule in folded.applied if rule != SAME_ROLE]):
            raise TemplateRefusal(
                f"the model's chat template takes these messages (roles: {_roles(messages)}) only by the"
                f" rules {', '.join(changes)}, and this session is strict; open it with render 'fold'"
            )
        return folded

    def _render(self, folded: Folded, tools: Sequence[Tool], generation: bool) -> str:
        tools = tools if folded.tools else ()
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        escaped = self._escaped_messages(folded.messages)
        try:
            return self._templates[name].render(
                {
                    **self._variables,
                    "messages": escaped,
                    "tools": self.tools(tools),
                    "documents": None,
                    "add_generation_prompt": generation,
                }
            )
        except RecursionError as error:
            raise TemplateRefusal("the tools are nested too deeply to be rendered") from error
        except _REFUSALS as error:
            roles = _roles(folded.messages)
            raise _Raised(
                f"the model's chat template refuses these messages (roles: {roles}): {error}"
            ) from error

    def inputs(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, begins: bool = True
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as templates take them before a turn of the model's, escaped.

        With `begins` false, the messages follow a turn that is not among them.
        """
        folded = self._folded(messages, tools, self.rules, begins=begins, generation=True)
        return self._escaped_messages(folded.messages), self.tools(tools if folded.tools else ())

    def _escaped_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._checked(self._message, m, f"message {n} ({m.role})") for n, m in enumerate(messages)]

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        if not tools:
            return None
        key = id(tools)  # held below, so that the id is not used again while it is known
        if (entry := self._known_tools.get(key)) is None:
            escaped = [self._checked(self._escaped, tool.raw, f"tool {tool.name}") for tool in tools]
            entry = self._known_tools[key] = (tools, escaped)
            while len(self._known_tools) > TOOLSETS:
                with suppress(KeyError, RuntimeError):  # another thread was faster
                    del self._known_tools[next(iter(self._known_tools))]
        return entry[1]

    def _checked(self, convert: Callable[[Any], Any], value: Any, what: str) -> Any:
        try:
            return convert(value)
        except Spelled as spelled:
            raise TemplateRefusal(
                f"{what} spells the control token {spelled.literal!r}, which this session refuses;"
                " remove it, or open the session with the policy 'escape'"
            ) from spelled

    def _message(self, message: Message) -> dict[str, Any]:
        as_parts = message.images or self._content_parts
        content = self._parts(message) if as_parts else self._escape(message.content)
        out: dict[str, Any] = {"role": message.role, "content": content}
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
        if message.images and not self.takes_images:
            raise TemplateRefusal("the model's chat template has no place for images; send text")
        parts: list[dict[str, str]] = []
        done = 0
        for image in message.images:
            parts += self._text_part(message.content[done : image.offset])
            parts.append({"type": "image"})
            done = image.offset
        parts += self._text_part(message.content[done:])
        return parts or [{"type": "text", "text": ""}]

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


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(message.role for message in messages) or "none"


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
