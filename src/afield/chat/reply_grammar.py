"""Grammars of replies in a model's own format, as structural tags of xgrammar.

A reply is reasoning (free, or bounded by a number of tokens), then text, JSON or calls. The readers in
`formats` read exactly what is allowed here. A grammar is told as JSON, so that every engine compiles the same
text. Markers are texts, which a vocabulary may have as single tokens: xgrammar (0.2.8), where it keeps
what it compiled, as servers do, confuses grammars that name tokens by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from afield.chat.parsers.formats import ReasoningFormat, ToolFormat

Element = dict[str, Any]
ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
DEFINITIONS = ("$defs", "definitions")
_OTHER_ROOT = re.compile(r'"\$ref": "#(?!/(?:\$defs|definitions)/)')


class CallSpec(Struct, frozen=True):
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    schema: Mapping[str, Any]


class ReplyForm(Struct, frozen=True, kw_only=True):
    """How a model spells its replies."""

    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    """Whether the prompt has opened a block of reasoning."""
    harmony: bool = False


def grammar(
    form: ReplyForm,
    *,
    output: Element | None = None,
    calls: Sequence[CallSpec] = (),
    forced: bool = False,
    several: bool = True,
    thinks: bool = True,
    budget: int | None = None,
) -> str:
    """The text of a grammar. With `calls` the reply makes at least one (`forced`), or one or what `output`
    says, or else text and calls of these; `several` or one at most. Without any of it the reply is free. It
    may think before, for as many tokens as `budget` says, unless `thinks` is False."""
    if form.harmony:
        body = _harmony(output, calls, forced=forced, thinks=thinks, budget=budget)
    else:
        rest = _body(form, output, calls, forced=forced, several=several)
        body = sequence(*_thoughts(form, thinks=thinks, budget=budget), rest)
    return json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False, separators=(",", ":"))


# --- elements ------------------------------------------------------------------------------------


def sequence(*elements: Element | None) -> Element:
    present = [element for element in elements if element is not None]
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}


def either(elements: Sequence[Element]) -> Element:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def maybe(element: Element) -> Element:
    return {"type": "optional", "content": element}


def repeated(element: Element) -> Element:
    """Any number of times."""
    return {"type": "star", "content": element}


def text(*without: str, limit: int | None = None) -> Element:
    """Any text in which none of these stands."""
    element: Element = {"type": "any_text", "excludes": list(without)}
    return element if limit is None else element | {"max_tokens": limit}


def json_value(schema: Mapping[str, Any] | bool, *without: str) -> Element:
    """A value in JSON; its strings have none of the texts `without`."""
    element: Element = {"type": "json_schema", "json_schema": schema}
    return element | {"excludes": list(without)} if without else element


def _without(element: Element, *markers: str) -> Element:
    """JSON in which no marker stands that a reader would take for one."""
    return element | {"excludes": list(markers)} if element["type"] == "json_schema" else element


def regex(pattern: str) -> Element:
    return {"type": "regex", "pattern": pattern}


def ebnf(source: str) -> Element:
    return {"type": "grammar", "grammar": source}


def choice(values: Sequence[str]) -> Element:
    return either([{"type": "const_string", "value": value} for value in values])


def spelled(*parts: str | Element) -> Element:
    """Texts and elements, one after the other."""
    elements: list[Element] = []
    for part in parts:
        if not isinstance(part, str):
            elements.append(part)
        elif part:
            elements.append({"type": "const_string", "value": part})
    return sequence(*elements)


# --- reasoning -----------------------------------------------------------------------------------


def _thoughts(form: ReplyForm, *, thinks: bool, budget: int | None) -> list[Element]:
    """What may stand, or has to, before the reply."""
    tags = form.reasoning
    if tags is None:
        return []
    rest = [text(tags.closing, limit=budget), spelled(tags.closing), regex(r"\n{0,2}")]
    if form.opened:
        return rest
    return [maybe(sequence(spelled(tags.opening), *rest))] if thinks and budget != 0 else []


# --- what follows --------------------------------------------------------------------------------


def _body(
    form: ReplyForm, output: Element | None, calls: Sequence[CallSpec], *, forced: bool, several: bool
) -> Element:
    if not calls:
        return output or {"type": "any_tokens"}
    if form.tool_format is None:
        raise ValueError("this model has no format for calls")
    section = _section(form.tool_format, calls, several=several)
    if forced:
        return section
    if output is not None:
        return either([section, _without(output, form.tool_format.opening)])
    opening = form.tool_format.opening
    if form.tool_format.bare:
        # A reply that begins with a brace is a call; one that does not has none.
        return either([section, maybe(sequence(regex(r"[^{\s]"), text(opening)))])
    return sequence(text(opening), maybe(section))


def _section(tool_format: ToolFormat, calls: Sequence[CallSpec], *, several: bool) -> Element:
    """One call, or as many as there may be."""
    spelling = SPELLINGS[tool_format.name]
    one = either([spelling.call(call) for call in calls])
    more = repeated(sequence(*_of(spelling.between), one)) if several else None
    return sequence(*_of(spelling.begin), one, more, *_of(spelling.end))


def _of(literal: str) -> list[Element]:
    return [spelled(literal)] if literal else []


class _Spelling(Struct, frozen=True, kw_only=True):
    """How a format writes calls: what begins a section, stands between two of them and ends it."""

    call: Callable[[CallSpec], Element]
    begin: str = ""
    between: str = ""
    end: str = ""


def _object(
    before: str = "", after: str = "", name: str = "name", arguments: str = "arguments", head: str = ""
) -> Callable[[CallSpec], Element]:
    def call(spec: CallSpec) -> Element:
        start = f'{before}{{{head}"{name}": {_quoted(spec.name)}, "{arguments}": '
        return spelled(start, json_value(spec.schema), f"}}{after}")

    return call


def _headed(before: str, separator: str, after: str) -> Callable[[CallSpec], Element]:
    def call(spec: CallSpec) -> Element:
        return spelled(f"{before}{spec.name}{separator}", json_value(spec.schema), after)

    return call


def _kimi(spec: CallSpec) -> Element:
    """The id of a call counts the calls of a conversation."""
    return spelled(
        f"<|tool_call_begin|>functions.{spec.name}:",
        regex("0|[1-9][0-9]{0,3}"),
        "<|tool_call_argument_begin|>",
        json_value(spec.schema),
        "<|tool_call_end|>",
    )


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


class _Parameter(Struct, frozen=True):
    """How one argument is written: what stands before its name, after it, and after its value."""

    before: str
    named: str
    after: str
    end: str
    """What ends a value wherever it stands."""


def _tagged(before: str, named: str, parameter: _Parameter, after: str):
    def arguments(schema: Mapping[str, Any]) -> Iterator[Element]:
        required = set(schema.get("required", ()))
        for name, property_schema in schema.get("properties", {}).items():
            value = _plain(_with_definitions(property_schema, schema), parameter)
            one = spelled(f"{parameter.before}{name}{parameter.named}", value, parameter.after)
            yield one if name in required else maybe(one)

    def call(spec: CallSpec) -> Element:
        schemas = [schema for schema in object_schemas(spec.schema) if "enum" not in schema]
        if not schemas:
            raise ValueError(
                f"the arguments of {spec.name!r} cannot be written in this model's format of calls"
            )
        head = f"{before}{spec.name}{named}"
        return either([spelled(head, *arguments(schema), after) for schema in schemas])

    return call


def object_schemas(schema: Any) -> list[dict[str, Any]]:
    """The objects among what a schema allows, each with its definitions."""
    objects: list[dict[str, Any]] = []
    for kind in _alternatives(_with_definitions(schema, schema)):
        if not kind.keys() - set(DEFINITIONS):
            objects.append({**kind, **ANY_OBJECT})
        elif kind.get("type") == "object":
            objects.append(kind)
        elif values := [value for value in kind.get("enum", ()) if isinstance(value, dict)]:
            objects.append({"enum": values})
    return objects


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    while "$ref" in schema:
        target: Any = definitions
        for step in schema["$ref"].removeprefix("#/").split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or step not in target:
                raise ValueError(f"$ref {schema['$ref']!r} cannot be written in this model's format of calls")
            target = target[step]
        schema = target
    return {**schema, **definitions}


def _plain(schema: Any, parameter: _Parameter) -> Element:
    """A value as it is written without quotes where it is a string."""
    kinds = _alternatives(schema)
    if any(
        kind.keys() <= {"type", *DEFINITIONS} and kind.get("type", "string") == "string" for kind in kinds
    ):
        return text(parameter.end)  # whatever is written is some value
    if not kinds:
        raise ValueError("a schema of alternatives has none but itself")
    if _OTHER_ROOT.search(json.dumps(schema)):
        raise ValueError("a $ref to the whole schema cannot be written in this model's format of calls")
    return either([_without(_plain_one(kind), parameter.end) for kind in kinds])


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _alternatives(schema: Any, seen: set[str] | None = None) -> list[dict[str, Any]]:
    """Schemas of one type each; what has no keyword allows everything. Each `$ref` is followed once."""
    if not isinstance(schema, dict):
        return [{}]
    if "anyOf" not in schema:
        return [schema]
    seen = set() if seen is None else seen
    alternatives: list[dict[str, Any]] = []
    for option in schema["anyOf"]:
        if (name := option.get("$ref")) is not None:
            if name in seen:
                continue
            seen.add(name)
        alternatives += _alternatives(_with_definitions(option, schema), seen)
    return alternatives


def _plain_one(schema: Mapping[str, Any]) -> Element:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        words = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
        return choice(words)
    if not _is_text(schema):
        return json_value(schema)
    if "pattern" in schema:
        return regex(schema["pattern"].removeprefix("^").removesuffix("$"))
    # A format: what JSON writes between quotes is the text itself, since it has nothing to escape.
    raise ValueError("a string with a format cannot be written in this model's format of calls")


_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SECTION = {"begin": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>"}
_QWEN = _Parameter("<parameter=", ">\n", "\n</parameter>\n", "</parameter>")
_GLM = _Parameter("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_value>")
_MINIMAX = _Parameter('<parameter name="', '">', "</parameter>\n", "</parameter>")

SPELLINGS: dict[str, _Spelling] = {
    "hermes": _Spelling(call=_object("<tool_call>\n", "\n</tool_call>"), between="\n"),
    "qwen_xml": _Spelling(
        call=_tagged("<tool_call>\n<function=", ">\n", _QWEN, "</function>\n</tool_call>"), between="\n"
    ),
    "glm": _Spelling(call=_tagged("<tool_call>", "\n", _GLM, "</tool_call>"), between="\n"),
    "minimax": _Spelling(
        call=_tagged('<invoke name="', '">\n', _MINIMAX, "</invoke>\n"),
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
    "llama_json": _Spelling(call=_object(arguments="parameters"), between="; "),
    "mistral_list": _Spelling(call=_object(), begin="[TOOL_CALLS][", between=", ", end="]"),
    "mistral_args": _Spelling(call=_headed("[TOOL_CALLS]", "[ARGS]", "")),
    "deepseek_v3": _Spelling(
        call=_headed(f"{_DEEPSEEK[0]}function{_DEEPSEEK[1]}", "\n```json\n", f"\n```{_DEEPSEEK[2]}"),
        between="\n",
        **_DEEPSEEK_SECTION,
    ),
    "deepseek_v31": _Spelling(call=_headed(*_DEEPSEEK), **_DEEPSEEK_SECTION),
    "kimi": _Spelling(call=_kimi, begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>"),
    "json_list": _Spelling(call=_object(), begin="<|tool_call|>[", between=", ", end="]"),
    "cohere": _Spelling(
        call=_object(name="tool_name", arguments="parameters", head='"tool_call_id": "0", '),
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]",
    ),
}
"""By the name of the format."""


# --- harmony -------------------------------------------------------------------------------------

HARMONY_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>")


def _harmony(
    output: Element | None,
    calls: Sequence[CallSpec],
    *,
    forced: bool,
    thinks: bool,
    budget: int | None,
) -> Element:
    """A message of reasoning, then one that answers or calls. A call ends the turn."""
    thoughts = spelled(
        "<|channel|>analysis<|message|>",
        text(*HARMONY_ENDS, limit=budget),
        "<|end|><|start|>assistant",
    )
    asked: list[Element] = [
        spelled(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>",
            json_value(call.schema, *HARMONY_ENDS),
        )
        for call in calls
    ]
    if not forced:
        final = _without(output, *HARMONY_ENDS) if output else text(*HARMONY_ENDS)
        asked.append(spelled("<|channel|>final<|message|>", final))
    return sequence(maybe(thoughts) if thinks and budget != 0 else None, either(asked))
