"""Independent decoders of model requests, one per dialect, for the oracle.

The decoders share no code with the gateway. Each converts a raw body to messages and tools by the rules in
`docs/how-to/conformance.md`, and raises `UnknownShape` for anything else, so that no content is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from afield.conformance.proxy import CapturedRequest

BILLING = "x-anthropic-billing-header:"
JSON_TYPES = ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")


class UnknownShape(ValueError):
    """A request contains something that the decoders do not support."""


class ClientCall(Struct, frozen=True):
    """Tool call in an assistant message."""

    id: str
    """Call id as the client sent it."""
    name: str
    """Function name."""
    arguments: Any
    """Parsed JSON arguments, or the text if it is not JSON."""


class ClientMessage(Struct, frozen=True, kw_only=True):
    """Message as the client sent it."""

    role: str
    """Author: system, user, assistant or tool."""
    content: str = ""
    """Text with all parts joined."""
    reasoning: str = ""
    """Reasoning of an assistant message; empty if there is none."""
    calls: tuple[ClientCall, ...] = ()
    """Tool calls of an assistant message."""
    call_id: str = ""
    """Id of the call that a tool message answers; empty for other roles."""


class ClientRequest(Struct, frozen=True, kw_only=True):
    """Decoded model request."""

    messages: tuple[ClientMessage, ...]
    """Conversation in order."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools in Chat Completions format."""


def decode(request: CapturedRequest) -> ClientRequest | None:
    """Decode a request; None if it is not a model request."""
    if request.method != "POST":
        return None
    for suffix, read in DIALECTS.items():
        if request.path.endswith(suffix):
            decoded = read(json.loads(request.content))
            messages = [message for message in decoded.messages if _says_anything(message)]
            return ClientRequest(messages=_in_call_order(messages), tools=decoded.tools)
    return None


def _says_anything(message: ClientMessage) -> bool:
    """False for an empty assistant message, which some clients keep for an interrupted reply."""
    return message.role != "assistant" or bool(message.content or message.reasoning or message.calls)


def _in_call_order(messages: Iterable[ClientMessage]) -> tuple[ClientMessage, ...]:
    """Sort the results of parallel calls in the order of the calls."""
    ordered: list[ClientMessage] = []
    calls: dict[str, int] = {}
    results: list[ClientMessage] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        ordered += _sorted(results, calls)
        results = []
        if message.role == "assistant":
            calls = {call.id: n for n, call in enumerate(message.calls)}
        ordered.append(message)
    return (*ordered, *_sorted(results, calls))


def _sorted(results: list[ClientMessage], calls: Mapping[str, int]) -> list[ClientMessage]:
    if not all(result.call_id in calls for result in results):
        return results
    return sorted(results, key=lambda result: calls[result.call_id])


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        return json.loads(value)
    except ValueError:
        return value


# --- Chat Completions ----------------------------------------------------------------------------


def _chat(body: dict[str, Any]) -> ClientRequest:
    tools = [tool for tool in body.get("tools") or [] if tool.get("type", "function") == "function"]
    return ClientRequest(
        messages=tuple(_chat_message(message) for message in body["messages"]), tools=tuple(tools)
    )


def _chat_message(message: dict[str, Any]) -> ClientMessage:
    role = str({"developer": "system", "function": "tool"}.get(message["role"], message["role"]))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = [
        ClientCall(call.get("id") or "", call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return ClientMessage(
        role=role,
        content=_text(message.get("content"), ("text", "refusal"), ("thinking", "reasoning")),
        reasoning=reasoning if isinstance(reasoning, str) else "",
        calls=tuple(calls),
        call_id=message.get("tool_call_id") or "",
    )


def _text(content: Any, kinds: Sequence[str], ignored: Sequence[str] = ()) -> str:
    """Text of a string or of content parts; raises `UnknownShape` for other types of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in content:
        kind = part.get("type", "text")
        if kind in kinds:
            parts.append(part.get("refusal") or part.get("text") or "")
        elif kind not in ignored:
            raise UnknownShape(f"unsupported content part of type {kind!r}")
    return "".join(parts)


# --- Anthropic Messages --------------------------------------------------------------------------


def _anthropic(body: dict[str, Any]) -> ClientRequest:
    """Decode Anthropic Messages; a `tool_reference` adds the definition of a tool with `defer_loading`."""
    wires = [tool for tool in body.get("tools") or [] if tool.get("type") in (None, "custom")]
    definitions = {tool["name"]: _anthropic_tool(tool) for tool in wires}
    messages: list[ClientMessage] = []
    if system := _anthropic_system(body.get("system")):
        messages.append(ClientMessage(role="system", content=system))
    turn: list[dict[str, Any]] = []
    for entry in [*body["messages"], {"role": "end"}]:
        if entry["role"] == "assistant":
            turn += _blocks(entry["content"])
            continue
        if turn:
            messages.append(_anthropic_assistant(turn))
            turn = []
        if entry["role"] != "end":
            messages += _anthropic_entry(entry, definitions)
    if any((tool.get("type") or "").startswith("tool_search_tool") for tool in body.get("tools") or []):
        raise UnknownShape("unsupported tool search by the provider")
    tools = tuple(definitions[tool["name"]] for tool in wires if not tool.get("defer_loading"))
    return ClientRequest(messages=tuple(messages), tools=tools)


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    described = {} if tool.get("description") is None else {"description": tool["description"]}
    function = {"name": tool["name"], **described, "parameters": tool.get("input_schema") or {}}
    return {"type": "function", "function": function}


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _anthropic_system(system: Any) -> str:
    """System text without billing headers, which differ between threads."""
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(BILLING) else system
    return _text([b for b in system or [] if not (b.get("text") or "").startswith(BILLING)], ("text",))


def _anthropic_entry(entry: dict[str, Any], definitions: Mapping[str, Any]) -> list[ClientMessage]:
    """Tool results first, then the other content of the entry."""
    blocks = _blocks(entry["content"])
    results = [block for block in blocks if block["type"] == "tool_result"]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    messages = [
        ClientMessage(
            role="tool",
            content=_text([_loaded(b, definitions) for b in _blocks(block.get("content"))], ("text",)),
            call_id=block["tool_use_id"],
        )
        for block in results
    ]
    if rest or not blocks:
        messages.append(ClientMessage(role=entry["role"], content=_text(rest, ("text",))))
    return messages


def _loaded(block: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_reference":
        return block
    tool = definitions.get(block["tool_name"], block["tool_name"])
    text = tool if isinstance(tool, str) else json.dumps(tool, ensure_ascii=False, separators=(",", ":"))
    return {"type": "text", "text": text}


def _anthropic_assistant(blocks: Sequence[dict[str, Any]]) -> ClientMessage:
    calls = [
        ClientCall(block["id"], block["name"], block.get("input") or {})
        for block in blocks
        if block["type"] == "tool_use"
    ]
    thoughts = [block.get("thinking") or "" for block in blocks if "thinking" in block["type"]]
    others = ("tool_use", "thinking", "redacted_thinking")
    return ClientMessage(
        role="assistant",
        content=_text(blocks, ("text",), others),
        reasoning="".join(thoughts),
        calls=tuple(calls),
    )


# --- Responses -----------------------------------------------------------------------------------

SAID = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def _responses(body: dict[str, Any]) -> ClientRequest:
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise UnknownShape(f"{name}: the request does not contain the history that it names")
    history = body.get("input")
    items = [{"role": "user", "content": history}] if isinstance(history, str) else history or []
    messages: list[ClientMessage] = []
    if instructions := body.get("instructions"):
        messages.append(ClientMessage(role="system", content=instructions))
    turn: list[dict[str, Any]] = []
    for item in [*items, {"type": "end"}]:
        if _is_model_item(item):
            if turn and item.get("type") == "reasoning":
                messages.append(_responses_assistant(turn))
                turn = []
            turn.append(item)
            continue
        if turn:
            messages.append(_responses_assistant(turn))
            turn = []
        if item.get("type") != "end":
            messages += _responses_item(item)
    tools = [tool for tool in _flat(body.get("tools") or []) if tool.get("type") in ("function", "custom")]
    names: set[str] = set()
    return ClientRequest(messages=tuple(messages), tools=tuple(_responses_tool(t, names) for t in tools))


def _is_model_item(item: dict[str, Any]) -> bool:
    kind = item.get("type") or "message"
    model_items = ("reasoning", "function_call", "custom_tool_call")
    return kind in model_items or (kind == "message" and item.get("role") == "assistant")


def _responses_item(item: dict[str, Any]) -> list[ClientMessage]:
    kind = item.get("type") or "message"
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = json.dumps(output, ensure_ascii=False) if isinstance(output, dict) else _text(output, SAID)
        return [ClientMessage(role="tool", content=text, call_id=item["call_id"])]
    if kind != "message":
        raise UnknownShape(f"unsupported input item of type {kind!r}")
    role = "system" if item["role"] == "developer" else item["role"]
    return [ClientMessage(role=role, content=_text(item["content"], SAID))]


def _responses_assistant(items: Sequence[dict[str, Any]]) -> ClientMessage:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ClientCall] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thoughts.append("\n\n".join(part["text"] for part in parts))
        elif kind == "message":
            text.append(_text(item["content"], SAID))
        elif kind == "function_call":
            calls.append(ClientCall(item["call_id"], item["name"], _arguments(item["arguments"])))
        else:
            calls.append(ClientCall(item["call_id"], item["name"], {"input": item["input"]}))
    return ClientMessage(
        role="assistant", content="".join(text), reasoning="".join(thoughts), calls=tuple(calls)
    )


def _flat(tools: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from (inner | {"namespace": tool["name"]} for inner in tool["tools"])
        else:
            yield tool


def _responses_tool(tool: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Convert a tool: a custom tool becomes a function of one string; a duplicate name gets its namespace."""
    name = tool["name"]
    if name in names:
        name = f"{tool.get('namespace') or tool['type']}__{name}"
    names.add(name)
    function: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    parameters = tool.get("parameters")
    if tool["type"] == "custom":
        text: dict[str, Any] = {"type": "string"}
        form = tool.get("format") or {}
        if form.get("type") == "grammar":
            text["description"] = f"Follows this {form['syntax']} grammar:\n{form['definition']}"
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    if parameters is not None:
        function["parameters"] = parameters
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


# --- Gemini --------------------------------------------------------------------------------------


def _gemini(body: dict[str, Any]) -> ClientRequest:
    messages: list[ClientMessage] = []
    instruction = _either(body, "systemInstruction", "system_instruction")
    if instruction and (system := _gemini_text(_gemini_parts(instruction))):
        messages.append(ClientMessage(role="system", content=system))
    turn: list[dict[str, Any]] = []
    calls: list[ClientCall] = []
    contents = body["contents"] if isinstance(body["contents"], list) else [body["contents"]]
    for content in [*contents, {"role": "end"}]:
        if content.get("role") == "model":
            turn += _gemini_parts(content)
            continue
        if turn:
            messages.append(_gemini_model(turn))
            calls = list(messages[-1].calls)
            turn = []
        if content.get("role") != "end":
            messages += _gemini_content(content, calls)
    declared = [
        declaration
        for tool in body.get("tools") or []
        for declaration in _either(tool, "functionDeclarations", "function_declarations") or []
    ]
    return ClientRequest(messages=tuple(messages), tools=tuple(_gemini_tool(d) for d in declared))


def _either(value: Mapping[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _gemini_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content}]
    parts = content.get("parts") or []
    return [parts] if isinstance(parts, dict) else parts


def _gemini_text(parts: Iterable[dict[str, Any]]) -> str:
    text: list[str] = []
    for part in parts:
        if part.get("text") is None:
            raise UnknownShape(f"unsupported part with the keys {sorted(part)}")
        text.append(part["text"])
    return "".join(text)


def _gemini_content(content: dict[str, Any], calls: list[ClientCall]) -> list[ClientMessage]:
    parts = _gemini_parts(content)
    answers = [_either(part, "functionResponse", "function_response") for part in parts]
    messages = [
        ClientMessage(
            role="tool", content=_returned(answer.get("response")), call_id=_answered(answer, calls)
        )
        for answer in answers
        if answer
    ]
    rest = [part for part, answer in zip(parts, answers, strict=True) if not answer]
    if rest or not parts:
        messages.append(ClientMessage(role="user", content=_gemini_text(rest)))
    return messages


def _answered(answer: dict[str, Any], calls: list[ClientCall]) -> str:
    """Id of the call that a response answers: by its id or, without one, the first of its function."""
    for call in calls:
        if call.id == answer["id"] if answer.get("id") else call.name == answer["name"]:
            calls.remove(call)
            return call.id
    return answer.get("id") or ""


def _returned(response: Any) -> str:
    """Text of a response, also inside {"result": ...} or {"output": ...}; other values as compact JSON."""
    if isinstance(response, dict) and list(response) in (["result"], ["output"]):
        [response] = response.values()
    if response is None:
        return ""
    if isinstance(response, str):
        return response
    return json.dumps(response, ensure_ascii=False, separators=(",", ":"))


def _gemini_model(parts: Sequence[dict[str, Any]]) -> ClientMessage:
    calls: list[ClientCall] = []
    text: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        call = _either(part, "functionCall", "function_call")
        if call:
            calls.append(ClientCall(call.get("id") or "", call["name"], call.get("args") or {}))
        elif part.get("thought"):
            thoughts.append(part.get("text") or "")
        elif part.get("text") is not None:
            text.append(part["text"])
        elif not _either(part, "thoughtSignature", "thought_signature"):
            raise UnknownShape(f"unsupported model part with the keys {sorted(part)}")
    return ClientMessage(
        role="assistant", content="".join(text), reasoning="".join(thoughts), calls=tuple(calls)
    )


def _gemini_tool(declaration: dict[str, Any]) -> dict[str, Any]:
    parameters = _either(declaration, "parametersJsonSchema", "parameters_json_schema")
    if parameters is None:
        parameters = _json_schema(declaration.get("parameters") or {})
    described = {} if declaration.get("description") is None else {"description": declaration["description"]}
    return {
        "type": "function",
        "function": {"name": declaration["name"], **described, "parameters": parameters},
    }


def _json_schema(schema: Any) -> Any:
    """Convert Google's schema to JSON schema: `type` in lower case and first, `any_of` as `anyOf`."""
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    converted: dict[str, Any] = {} if kind is None else {"type": kind.lower() if kind in JSON_TYPES else kind}
    for key, value in schema.items():
        if key == "type":
            continue
        if key == "properties" and isinstance(value, dict):
            converted[key] = {name: _json_schema(inner) for name, inner in value.items()}
        elif key in ("anyOf", "any_of"):
            converted["anyOf"] = [_json_schema(inner) for inner in value]
        else:
            converted[key] = _json_schema(value) if key == "items" else value
    return converted


DIALECTS: dict[str, Callable[[dict[str, Any]], ClientRequest]] = {
    "/chat/completions": _chat,
    "/messages": _anthropic,
    "/responses": _responses,
    ":generateContent": _gemini,
    ":streamGenerateContent": _gemini,
}
