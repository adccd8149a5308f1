"""Reply grammars in a model's own format, as xgrammar structural tags.

1. A reply is reasoning (unlimited, or limited to a number of tokens), then text, JSON or tool calls. The
   readers of `parsers.formats` accept everything that a grammar allows.
2. A grammar is JSON text, so that every engine compiles the same one.
3. Markers are texts, not token ids: xgrammar 0.2.8 with a compile cache, as servers use it, confuses grammars
   that differ only in token ids.
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
    """Function that a reply may call."""

    name: str
    """Name of the function."""
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""


class ReplyForm(Struct, frozen=True, kw_only=True):
    """Reply format of a model."""

    tool_format: ToolFormat | None = None
    """Tool-call format; None if the model has none."""
    reasoning: ReasoningFormat | None = None
    """Reasoning format; None if the model has none."""
    opened: bool = False
    """Whether the prompt opens a block of reasoning."""
    harmony: bool = False
    """Whether replies are in the harmony format (gpt-oss)."""


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
    """Text of a grammar; without `output` and `calls` the reply is unconstrained after the reasoning.

    Args:
        form: reply format of the model.
        output: element that the text must match; None for any text.
        calls: functions that the reply may call, instead of `output` or after free text.
        forced: whether the reply must make a call.
        several: whether the reply may make more than one call.
        thinks: whether the reply may begin with reasoning.
        budget: maximum number of reasoning tokens; None for no limit.
    """
    if form.harmony:
        body = _harmony(output, calls, forced=forced, thinks=thinks, budget=budget)
    else:
        reply = _body(form, output, calls, forced=forced, several=several)
        body = sequence(*_thoughts(form, thinks=thinks, budget=budget), reply)
    return json.dumps({"type": "structural_tag", "format": body}, ensure_ascii=False, separators=(",", ":"))


# --- elements ------------------------------------------------------------------------------------


def sequence(*elements: Element | None) -> Element:
    """Elements in order; None is skipped."""
    present = [element for element in elements if element is not None]
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}


def either(elements: Sequence[Element]) -> Element:
    """Alternation of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def maybe(element: Element) -> Element:
    """Element or nothing."""
    return {"type": "optional", "content": element}


def repeated(element: Element) -> Element:
    """Zero or more repetitions."""
    return {"type": "star", "content": element}


def text(*without: str, limit: int | None = None) -> Element:
    """Any text that contains none of `without`, of at most `limit` tokens."""
    element: Element = {"type": "any_text", "excludes": list(without)}
    return element if limit is None else element | {"max_tokens": limit}


def json_value(schema: Mapping[str, Any] | bool, *without: str) -> Element:
    """JSON value whose strings contain none of `without`."""
    element: Element = {"type": "json_schema", "json_schema": schema}
    return element | {"excludes": list(without)} if without else element


def _without(element: Element, *markers: str) -> Element:
    """Exclude markers from the strings of a JSON element; other elements are unchanged."""
    return element | {"excludes": list(markers)} if element["type"] == "json_schema" else element


def regex(pattern: str) -> Element:
    """Text that matches a regular expression."""
    return {"type": "regex", "pattern": pattern}


def ebnf(source: str) -> Element:
    """Text that matches an EBNF grammar."""
    return {"type": "grammar", "grammar": source}


def choice(values: Sequence[str]) -> Element:
    """Alternation of the literal texts."""
    return either([{"type": "const_string", "value": value} for value in values])


def spelled(*parts: str | Element) -> Element:
    """Sequence of literal texts and elements."""
    elements: list[Element] = []
    for part in parts:
        if not isinstance(part, str):
            elements.append(part)
        elif part:
            elements.append({"type": "const_string", "value": part})
    return sequence(*elements)


# --- reasoning -----------------------------------------------------------------------------------


def _thoughts(form: ReplyForm, *, thinks: bool, budget: int | None) -> list[Element]:
    """Reasoning before the reply: required if the prompt opens it, else optional."""
    tags = form.reasoning
    if tags is None:
        return []
    closed_thought = [text(tags.closing, limit=budget), spelled(tags.closing), regex(r"\n{0,2}")]
    if form.opened:
        return closed_thought
    return [maybe(sequence(spelled(tags.opening), *closed_thought))] if thinks and budget != 0 else []


# --- text and calls ------------------------------------------------------------------------------


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
        # A reply that begins with a brace is a call; any other reply has no call.
        return either([section, maybe(sequence(regex(r"[^{\s]"), text(opening)))])
    return sequence(text(opening), maybe(section))


def _section(tool_format: ToolFormat, calls: Sequence[CallSpec], *, several: bool) -> Element:
    """Section of one call, or of one or more if `several`."""
    spelling = SPELLINGS[tool_format.name]
    first_call = either([spelling.call(call) for call in calls])
    more = repeated(sequence(*_of(spelling.between), first_call)) if several else None
    return sequence(*_of(spelling.begin), first_call, more, *_of(spelling.end))


def _of(literal: str) -> list[Element]:
    return [spelled(literal)] if literal else []


class _Spelling(Struct, frozen=True, kw_only=True):
    """Grammar of a tool-call format."""

    call: Callable[[CallSpec], Element]
    """Element of one call."""
    begin: str = ""
    """Literal before the first call."""
    between: str = ""
    """Literal between two calls."""
    end: str = ""
    """Literal after the last call."""


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
    """Call in Kimi's format; its id contains the number of the call in the conversation."""
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
    """Literals around one argument of a tagged call."""

    before: str
    """Literal before the name."""
    named: str
    """Literal between name and value."""
    after: str
    """Literal after the value."""
    end: str
    """Literal that ends a value; values cannot contain it."""


def _tagged(before: str, named: str, parameter: _Parameter, after: str):
    def arguments(schema: Mapping[str, Any]) -> Iterator[Element]:
        required = set(schema.get("required", ()))
        for name, property_schema in schema.get("properties", {}).items():
            value = _plain(_with_definitions(property_schema, schema), parameter)
            parameter_text = spelled(f"{parameter.before}{name}{parameter.named}", value, parameter.after)
            yield parameter_text if name in required else maybe(parameter_text)

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
    """Object schemas among the alternatives of a schema, each with its definitions."""
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
    """Value of a tagged argument; strings are written without quotes."""
    kinds = _alternatives(schema)
    if any(
        kind.keys() <= {"type", *DEFINITIONS} and kind.get("type", "string") == "string" for kind in kinds
    ):
        return text(parameter.end)  # any text is a valid string
    if not kinds:
        raise ValueError("the anyOf of a schema refers only to the schema itself")
    if _OTHER_ROOT.search(json.dumps(schema)):
        raise ValueError("a $ref to the whole schema cannot be written in this model's format of calls")
    return either([_without(_plain_one(kind), parameter.end) for kind in kinds])


def _is_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _alternatives(schema: Any, seen: set[str] | None = None) -> list[dict[str, Any]]:
    """Flatten `anyOf` into its alternatives; follows each `$ref` once. An empty schema allows everything."""
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
    # Only a string with a `format` is left.
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
"""Grammars of the tool-call formats, by format name."""


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
    """Optional reasoning message, then a final message or a call. A call ends the turn."""
    thoughts = spelled(
        "<|channel|>analysis<|message|>",
        text(*HARMONY_ENDS, limit=budget),
        "<|end|><|start|>assistant",
    )
    endings: list[Element] = [
        spelled(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>",
            json_value(call.schema, *HARMONY_ENDS),
        )
        for call in calls
    ]
    if not forced:
        final = _without(output, *HARMONY_ENDS) if output else text(*HARMONY_ENDS)
        endings.append(spelled("<|channel|>final<|message|>", final))
    return sequence(maybe(thoughts) if thinks and budget != 0 else None, either(endings))
