"""Grammar constraints for structured output, tool choice and parallel calls.

1. `wanted` names the fields of a request that need a constraint; usually none.
2. `constraint` builds the grammar in the model's own format. Schemas that cannot be enforced are refused with
   their keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from afield.chat import ChatTokenizer, Tool, reply_grammar
from afield.chat.reply_grammar import ANY_OBJECT, CallSpec, Element
from afield.gateway.model_request import ModelRequest, OutputFormat
from afield.gateway.schemas import check_pattern, enforceable
from afield.runs.exclusions import ExclusionReason
from afield.types import Constraint, Turn, TurnStatus

MAX_TEXT = 1 << 17
"""Maximum length of a schema, pattern or grammar, in characters."""


def wanted(request: ModelRequest) -> list[str]:
    """Returns the fields of a request that constrain the reply; usually none."""
    fields: list[str] = []
    if request.output is not None:
        fields.append("output")
    if request.must_call or (request.callable_tools and _may_call(request)):
        fields.append("must_call")
    if not request.parallel_calls and not request.must_call and _may_call(request):
        fields.append("parallel_calls")
    return fields


def without(request: ModelRequest, tags: Sequence[str]) -> ModelRequest:
    """Returns the request without its constraints."""
    return msgspec.structs.replace(
        request,
        output=None,
        must_call=False,
        callable_tools=(),
        parallel_calls=True,
        tags=(*request.tags, *tags),
    )


def with_budget(request: ModelRequest) -> ModelRequest:
    """Drops the tag of an overridden reasoning budget: the constraint enforces it."""
    tag = f"overridden:{request.names.get('budget')}"
    if request.reasoning.budget is None or tag not in request.tags:
        return request
    return msgspec.structs.replace(request, tags=tuple(other for other in request.tags if other != tag))


def size(request: ModelRequest) -> int:
    """Returns the approximate number of characters to compile."""
    return (len(request.output.text) if request.output else 0) + len(_tools_key(request.tools))


def excluded(turns: Iterable[Turn]) -> dict[str, str]:
    """Returns the turns sampled with a constraint, and the exclusion reason."""
    return {
        turn.id: ExclusionReason.CONSTRAINED
        for turn in turns
        if turn.constraint is not None and turn.status is TurnStatus.COMMITTED
    }


def _may_call(request: ModelRequest) -> bool:
    return request.may_call and bool(request.tools)


def constraint(tokenizer: ChatTokenizer, request: ModelRequest) -> Constraint:
    """Builds the constraint of a request. Raises ValueError with the reason if it cannot be enforced."""
    grammar = _kept(
        tokenizer,
        request.output,
        _tools_key(_callable(request)),
        request.must_call,
        request.parallel_calls,
        request.prompt is not None,
        request.reasoning.enabled is not False,
        request.reasoning.budget,
    )
    return Constraint(grammar=grammar, stop_ids=tokenizer.stop_ids)


def _callable(request: ModelRequest) -> tuple[Tool, ...]:
    if not _may_call(request):
        if request.must_call:
            raise ValueError("tool_choice asks for a call, and the request has no tools")
        return ()
    names = request.callable_tools
    if unknown := sorted(set(names) - {tool.name for tool in request.tools}):
        raise ValueError(f"tool_choice names {unknown[0]!r}, which is not among the tools")
    return tuple(tool for tool in request.tools if not names or tool.name in names)


def _tools_key(tools: Sequence[Tool]) -> bytes:
    try:
        return msgspec.json.encode([(tool.name, tool.parameters) for tool in tools]) if tools else b""
    except RecursionError as error:
        raise ValueError("the schema of a tool is nested too deeply") from error


@lru_cache(maxsize=256)
def _kept(
    tokenizer: ChatTokenizer,
    output: OutputFormat | None,
    tools: bytes,
    forced: bool,
    parallel: bool,
    plain: bool,
    thinks: bool,
    budget: int | None,
) -> str:
    form = tokenizer.reply_form()
    if plain:  # a raw prompt
        form = msgspec.structs.replace(form, reasoning=None, opened=False, harmony=False)
    specs: list[tuple[str, Any]] = msgspec.json.decode(tools) if tools else []
    if forced and not all(name for name, _ in specs):
        raise ValueError("a tool without a name cannot be called")
    calls = [call_spec(name, schema, forced=forced) for name, schema in specs if name]
    return reply_grammar.grammar(
        form,
        output=None if output is None else _output(output),
        calls=calls,
        forced=forced,
        several=parallel,
        thinks=thinks,
        budget=budget,
    )


def call_spec(name: str, schema: Any, *, forced: bool) -> CallSpec:
    """Builds a call's grammar. The arguments of optional calls follow the schema as far as it can be
    enforced.
    """
    try:
        return CallSpec(name, _arguments(enforceable(schema or ANY_OBJECT, name="the schema")))
    except ValueError as error:
        if forced:
            raise ValueError(f"tool {name!r}: {error}") from error
        properties = schema.get("properties") if isinstance(schema, dict) else None
        names = properties if isinstance(properties, dict) else ()
        return CallSpec(name, {**ANY_OBJECT, "properties": {key: {} for key in names}})


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Restricts an arguments schema to objects."""
    if schema.get("type") == "object":
        return schema
    object_schemas = reply_grammar.object_schemas(schema)
    if not object_schemas:
        raise ValueError("the schema of its arguments allows no object")
    definitions = {name: schema[name] for name in reply_grammar.DEFINITIONS if name in schema}
    bare = [{key: value for key, value in one.items() if key not in definitions} for one in object_schemas]
    return bare[0] | definitions if len(bare) == 1 else {"anyOf": bare, **definitions}


def _output(output: OutputFormat) -> Element:
    if len(output.text) > MAX_TEXT:
        raise ValueError(f"{output.kind} has more than {MAX_TEXT} characters")
    if output.kind == "json_object":
        return reply_grammar.json_value(ANY_OBJECT)
    if output.kind == "json_schema":
        return reply_grammar.json_value(enforceable(_json(output)))
    if output.kind == "regex":
        return reply_grammar.regex(check_pattern(output.text, "regex"))
    if output.kind == "choice":
        values = _json(output)
        if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
            raise ValueError("choice must be a list of at least one string")
        return reply_grammar.choice(values)
    if not output.text.strip():
        raise ValueError("grammar is empty; write one in EBNF, with a rule `root ::= ...`")
    return reply_grammar.ebnf(output.text)


def _json(output: OutputFormat) -> Any:
    try:
        return json.loads(output.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{output.kind} is no JSON: {error}") from error
