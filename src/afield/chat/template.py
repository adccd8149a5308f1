"""Chat template of a model: renders messages and tools to text.

1. Runs the Jinja source in a sandbox with the globals that transformers provides: special tokens by name,
   `tojson` without HTML escaping, `raise_exception`, `strftime_now` (frozen when the template is loaded),
   loop controls and the `generation` tag.
2. Escapes every string of a message or tool, so that content cannot become a control token.
3. Applies the message rules that the template needs; see `message_rules`.
4. Raises `TemplateRefusal` for messages that the template refuses after that; under the policy `strict`
   also for messages that a rule would change.
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

# Exceptions of template code that meets messages it was not written for.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


TOOLSETS = 64  # tool lists whose escaped form is cached


class Tool(Struct, frozen=True):
    """Function that the model may call."""

    name: str
    """Name of the function."""
    description: str
    """Description for the model."""
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    raw: dict[str, Any]
    """Tool object as the client sent it; this is rendered."""


class TemplateRefusal(UsageError, ValueError):
    """The chat template cannot render the messages or tools."""


class _Raised(TemplateRefusal):
    """The template raised an exception."""


class ChatTemplate:
    """Compiled chat template; `with_...` methods return changed copies.

    Args:
        sources: Jinja sources by name: "default" and, if the model has one, "tool_use".
        variables: variables of the template besides the conversation.
        now: date and time that `strftime_now` prints.
        literals: texts of the control tokens, for escaping.
    """

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
            self._globals = dict(environment.globals)
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
        """Copy with another escape policy, and with or without `strict` rules."""
        changed = copy(self)
        changed._escape = policy(escape, self._literals, self._fixed)
        changed._known_tools = {}
        changed._strict = strict
        return changed

    def with_rules(self, rules: Iterable[str], *, last_resort: bool = False) -> ChatTemplate:
        """Copy that applies these message rules.

        With `last_resort`, `render_any` tries the other rules on a conversation that is still refused.
        """
        changed = copy(self)
        changed.rules = frozenset(rules)
        changed._last_resort = LAST_RESORT if last_resort else frozenset()
        return changed

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Copy with additional template variables."""
        changed = copy(self)
        changed._variables = {**self._variables, **variables}
        return changed

    def without_variables(self, names: Collection[str]) -> ChatTemplate:
        """Copy without these template variables."""
        changed = copy(self)
        changed._variables = {name: value for name, value in self._variables.items() if name not in names}
        return changed

    def with_text_arguments(self) -> ChatTemplate:
        """Copy for a template that accepts call arguments only as text, not as an object."""
        changed = copy(self)
        changed._text_arguments = True
        return changed

    def with_content_parts(self) -> ChatTemplate:
        """Copy for a template that accepts message content only as a list of parts."""
        changed = copy(self)
        changed._content_parts = True
        return changed

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation: bool) -> str:
        """Render to escaped text; with `generation` it ends with the generation prompt."""
        folded = self._folded(messages, tools, self.rules, generation=generation)
        return self._render(folded, tools, generation)

    def render_any(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
        """Render a prompt; returns it with the names of the rules that changed the conversation.

        Falls back to the last-resort rules if the template refuses its own.
        """
        folded = self._folded(messages, tools, self.rules, generation=True)
        try:
            return self._render(folded, tools, generation=True), folded.applied
        except _Raised:
            last = fold(messages, tools, self.rules | self._last_resort, generation=True)
            if self._strict or last.messages == folded.messages:
                raise
            return self._render(last, tools, generation=True), last.applied

    def applied(self, new: Sequence[Message]) -> tuple[str, ...]:
        """Rules that change new messages after a turn."""
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
                f"the model's chat template takes these messages (roles: {_roles(messages)}) only after the"
                f" changes {', '.join(changes)}, which render = 'strict' forbids; use render = 'fold'"
            )
        return folded

    def _render(self, folded: Folded, tools: Sequence[Tool], generation: bool) -> str:
        tools = tools if folded.tools else ()
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        escaped = self._escaped_messages(folded.messages)
        template = self._templates[name]
        try:
            variables = {
                **self._globals,
                **self._variables,
                "messages": escaped,
                "tools": self.tools(tools),
                "documents": None,
                "add_generation_prompt": generation,
            }
            # `Template.render` would copy the globals, one by one.
            return "".join(template.root_render_func(template.new_context(variables, shared=True)))
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
        """Escaped messages and tools as template variables, after the message rules.

        With `begins` false, the messages follow a turn that is not part of them.
        """
        folded = self._folded(messages, tools, self.rules, begins=begins, generation=True)
        return self._escaped_messages(folded.messages), self.tools(tools if folded.tools else ())

    def _escaped_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._checked(self._message, m, f"message {n} ({m.role})") for n, m in enumerate(messages)]

    def tools(self, tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
        """Escaped tools as a template variable; None without tools."""
        if not tools:
            return None
        key = id(tools)  # the cache entry keeps a reference, so that the id stays unique
        if (entry := self._known_tools.get(key)) is None:
            escaped = [self._checked(self._escaped, tool.raw, f"tool {tool.name}") for tool in tools]
            entry = self._known_tools[key] = (tools, escaped)
            while len(self._known_tools) > TOOLSETS:
                with suppress(KeyError, RuntimeError):  # another thread changed the cache
                    del self._known_tools[next(iter(self._known_tools))]
        return entry[1]

    def _checked(self, convert: Callable[[Any], Any], value: Any, what: str) -> Any:
        try:
            return convert(value)
        except Spelled as spelled:
            raise TemplateRefusal(
                f"{what} contains the control token {spelled.literal!r}, which escape = 'reject' refuses;"
                " remove it, or open the session with escape = 'escape'"
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
        """Content as a list of text and image parts, in order."""
        if message.images and not self.takes_images:
            raise TemplateRefusal("the model's chat template has no place for images; send text")
        parts: list[dict[str, str]] = []
        position = 0
        for image in message.images:
            parts += self._text_part(message.content[position : image.offset])
            parts.append({"type": "image"})
            position = image.offset
        parts += self._text_part(message.content[position:])
        return parts or [{"type": "text", "text": ""}]

    def _text_part(self, text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": self._escape(text)}] if text else []

    @cached_property
    def takes_images(self) -> bool:
        """Whether the template renders an image part, other than as its Python or JSON text."""
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
    """Parse arguments as a JSON object; other text is returned unchanged."""
    scanner = JsonScanner()
    end = scanner.feed(arguments, 0)
    if not arguments.lstrip().startswith("{") or not scanner.done or arguments[end:].strip():
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


_DICT = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox that finds `message.role` in a dict without an AttributeError first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _fixed(environment: ImmutableSandboxedEnvironment, source: str) -> Iterator[str]:
    """Literal texts and string constants of a template."""
    tree = environment.parse(source)
    yield from (node.data for node in tree.find_all(nodes.TemplateData))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


class _GenerationTag(Extension):
    """Jinja tag `{% generation %}`, which marks assistant text; renders as its body."""

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
