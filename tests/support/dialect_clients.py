"""A small client of every dialect, as loose with its history as real ones are, and a door without sockets.

`write` makes a request of canonical messages, `read` a reply of an answer, whole or streamed. With a `rng`
what carries no meaning varies: strings or parts, how arguments are spelled, whether reasoning is kept.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from afield.types import Message, ToolCall

DIALECTS = ("chat", "anthropic", "responses", "gemini")
LAST = -1  # the event that ends an answer
Row = dict[str, Any]


class Answer(Struct, frozen=True):
    """What came back. `whole` says that the client got the end of it."""

    status: int
    body: bytes
    whole: bool


class Heard(Struct, frozen=True):
    turn_id: str
    reply: Message


class Ask(Struct, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    tools: tuple[Row, ...] = ()
    max_tokens: int = 200
    stream: bool = False
    model: str = "m"
    after: str | None = None


# --- a door without sockets -----------------------------------------------------------------------


async def knock(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    key: str = "",
    *,
    headers: dict[str, str] | None = None,
    leaves_at: int | None = None,
) -> Answer:
    """One request to the app. The client is gone before the event of this number reaches it; 0: at once."""
    path, _, query = path.partition("?")
    named = {"authorization": f"Bearer {key}", **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }
    gone, never = asyncio.Event(), asyncio.Event()
    if leaves_at == 0:
        gone.set()
    asked, status, parts, whole = False, 0, [], False

    async def receive() -> Row:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Row) -> None:
        nonlocal status, whole
        if message["type"] == "http.response.start":
            status = message["status"]
            return
        last = not message.get("more_body", False)
        if last if leaves_at == LAST else leaves_at is not None and len(parts) + 1 >= leaves_at:
            task = asyncio.current_task()
            if task and task.cancelling():  # a server drops what is sent to a client that has gone
                return
            gone.set()
            await never.wait()
        parts.append(message.get("body", b""))
        whole = last

    await asyncio.create_task(app(scope, receive, send))
    task = asyncio.current_task()
    if task and task.cancelling():  # the app takes a cancellation for a client that leaves
        raise asyncio.CancelledError
    return Answer(status, b"".join(parts), whole)


# --- requests -------------------------------------------------------------------------------------


def write(dialect: str, ask: Ask, rng: random.Random | None = None) -> tuple[str, bytes]:
    """The path and the body."""
    rng = rng or _Steady()
    path, body = {"chat": _chat, "anthropic": _anthropic, "responses": _responses, "gemini": _gemini}[
        dialect
    ](ask, rng)
    return path, json.dumps(body).encode()


class _Steady(random.Random):
    def random(self) -> float:
        return 0.99


def _arguments(call: ToolCall, rng: random.Random) -> Any:
    """The object, its keys in another order and its numbers spelled in another way, or the text."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return call.arguments
    if not isinstance(value, dict):
        return call.arguments
    items = list(value.items())
    if rng.random() < 0.5:
        items.reverse()
    return {key: float(v) if type(v) is int and rng.random() < 0.3 else v for key, v in items}


def _text_arguments(call: ToolCall, rng: random.Random) -> str:
    value = _arguments(call, rng)
    if not isinstance(value, dict) or rng.random() > 0.8:
        return call.arguments
    return json.dumps(
        value, ensure_ascii=rng.random() < 0.5, separators=(",", ":") if rng.random() < 0.5 else None
    )


def _split(text: str, rng: random.Random) -> list[str]:
    at = rng.randrange(len(text) + 1) if text and rng.random() < 0.4 else 0
    return [part for part in (text[:at], text[at:]) if part]


def _chat(ask: Ask, rng: random.Random) -> tuple[str, Row]:
    return "/v1/chat/completions", {
        "model": ask.model,
        "messages": [_chat_message(m, rng) for m in ask.messages],
        "max_tokens": ask.max_tokens,
        "stream": ask.stream,
        **({"tools": list(ask.tools)} if ask.tools else {}),
    }


def _chat_message(message: Message, rng: random.Random) -> Row:
    out: Row = {"role": message.role, "content": message.content or rng.choice([None, ""])}
    if message.content and rng.random() < 0.3:
        out["content"] = [{"type": "text", "text": part} for part in _split(message.content, rng)]
    if message.role == "assistant" and message.content and rng.random() < 0.2:
        out["content"] = message.content.strip()
    if message.reasoning and rng.random() < 0.5:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": _text_arguments(c, rng)},
            }
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out


def _anthropic(ask: Ask, rng: random.Random) -> tuple[str, Row]:
    messages = list(ask.messages)
    system = messages.pop(0).content if messages[0].role == "system" else None
    entries: list[Row] = []
    for message in messages:
        if message.role == "tool" and entries and entries[-1].get("results"):
            entries[-1]["content"].append(_tool_result(message, rng))
        elif message.role == "tool":
            entries.append({"role": "user", "content": [_tool_result(message, rng)], "results": True})
        elif message.role == "assistant":
            entries.append({"role": "assistant", "content": _anthropic_blocks(message, rng)})
        else:
            entries.append({"role": message.role, "content": _text_blocks(message.content, rng)})
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in ask.tools
    ]
    body = {"model": ask.model, "messages": entries, "max_tokens": ask.max_tokens, "stream": ask.stream}
    return "/v1/messages", body | ({"system": system} if system else {}) | ({"tools": tools} if tools else {})


def _text_blocks(text: str, rng: random.Random) -> Any:
    if rng.random() > 0.5:
        return text
    mark = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.5 else {}
    return [{"type": "text", "text": part, **mark} for part in _split(text, rng)]


def _tool_result(message: Message, rng: random.Random) -> Row:
    return {
        "type": "tool_result",
        "tool_use_id": message.tool_call_id,
        "content": _text_blocks(message.content, rng),
    }


def _anthropic_blocks(message: Message, rng: random.Random) -> list[Row]:
    blocks: list[Row] = [{"type": "text", "text": part} for part in _split(message.content, rng)]
    if message.reasoning and rng.random() < 0.5:
        blocks.insert(0, {"type": "thinking", "thinking": message.reasoning, "signature": "from elsewhere"})
    for call in message.tool_calls:
        value = _arguments(call, rng)
        given = value if isinstance(value, dict) else {"__unparsedToolInput": value}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _responses(ask: Ask, rng: random.Random) -> tuple[str, Row]:
    items: list[Row] = []
    for m in ask.messages:
        if m.role == "tool":
            items.append({"type": "function_call_output", "call_id": m.tool_call_id, "output": m.content})
            continue
        if m.content or not m.tool_calls:
            kind = "output_text" if m.role == "assistant" else "input_text"
            parts = [{"type": kind, "text": part} for part in _split(m.content, rng) or [""]]
            items.append({"type": "message", "role": m.role, "content": parts})
        items += [
            {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": _text_arguments(c, rng)}
            for c in m.tool_calls
        ]
    tools = [{"type": "function", **tool["function"]} for tool in ask.tools]
    body = {"model": ask.model, "input": items, "max_output_tokens": ask.max_tokens, "stream": ask.stream}
    after = {"previous_response_id": ask.after} if ask.after else {}
    return "/v1/responses", body | ({"tools": tools} if tools else {}) | after


def _gemini(ask: Ask, rng: random.Random) -> tuple[str, Row]:
    messages = list(ask.messages)
    system = messages.pop(0).content if messages[0].role == "system" else None
    names = {call.id: call.name for m in messages for call in m.tool_calls}
    contents: list[Row] = []
    for m in messages:
        if m.role == "tool":
            answer = {"id": m.tool_call_id, "name": names[m.tool_call_id], "response": {"result": m.content}}
            part = {"functionResponse": answer}
            if contents[-1].get("results"):
                contents[-1]["parts"].append(part)
            else:
                contents.append({"role": "user", "parts": [part], "results": True})
        elif m.role == "assistant":
            parts: list[Row] = [{"text": part} for part in _split(m.content, rng)]
            parts += [
                {"functionCall": {"id": call.id, "name": call.name, "args": _arguments(call, rng)}}
                for call in m.tool_calls
            ]
            contents.append({"role": "model", "parts": parts or [{"text": ""}]})
        else:
            contents.append({"role": m.role, "parts": [{"text": part} for part in _split(m.content, rng)]})
    body: Row = {"contents": contents, "generationConfig": {"maxOutputTokens": ask.max_tokens}}
    if system:
        body["systemInstruction"] = {"parts": [{"text": system}]}
    if ask.tools:
        body["tools"] = [{"functionDeclarations": [tool["function"] for tool in ask.tools]}]
    verb = "streamGenerateContent?alt=sse" if ask.stream else "generateContent"
    return f"/v1beta/models/{ask.model}:{verb}", body


# --- answers --------------------------------------------------------------------------------------


def read(dialect: str, stream: bool, body: bytes) -> Heard:
    if stream:
        lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        return {
            "chat": _chat_stream,
            "anthropic": _anthropic_stream,
            "responses": _responses_stream,
            "gemini": _gemini_answers,
        }[dialect](events)
    answer = json.loads(body)
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        return _heard(
            answer["id"].rpartition("-")[2],
            message["content"],
            [
                (c["id"], c["function"]["name"], c["function"]["arguments"])
                for c in message.get("tool_calls") or ()
            ],
            message.get("reasoning_content", ""),
        )
    if dialect == "anthropic":
        return _anthropic_heard(answer["id"], answer["content"])
    return _responses_heard(answer) if dialect == "responses" else _gemini_answers([answer])


def _heard(
    turn_id: str, text: str | None, calls: Sequence[tuple[str, str, str]], reasoning: str = ""
) -> Heard:
    made = tuple(ToolCall(*call) for call in calls)
    return Heard(turn_id, Message(role="assistant", content=text or "", tool_calls=made, reasoning=reasoning))


def _chat_stream(events: list[Row]) -> Heard:
    text, thought, calls = "", "", {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls") or ():
                known = calls.setdefault(piece["index"], [piece.get("id"), piece["function"].get("name"), ""])
                known[2] += piece["function"].get("arguments") or ""
    return _heard(events[0]["id"].rpartition("-")[2], text, [tuple(c) for c in calls.values()], thought)


def _anthropic_stream(events: list[Row]) -> Heard:
    blocks: list[Row] = []
    inputs: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            inputs.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            inputs[-1] += delta.get("partial_json", "")
            for key in ("text", "thinking"):
                blocks[-1][key] = blocks[-1].get(key, "") + delta.get(key, "")
    for block, given in zip(blocks, inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(given or "{}")
    return _anthropic_heard(events[0]["message"]["id"], blocks)


def _anthropic_heard(id: str, blocks: list[Row]) -> Heard:
    text = "".join(b["text"] for b in blocks if b["type"] == "text")
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    calls = [(b["id"], b["name"], _unparsed(b["input"])) for b in blocks if b["type"] == "tool_use"]
    return _heard(id.removeprefix("msg_"), text, calls, thought)


def _unparsed(given: Row) -> str:
    odd = given.get("__unparsedToolInput")
    return odd if isinstance(odd, str) else json.dumps(given, ensure_ascii=False)


def _responses_stream(events: list[Row]) -> Heard:
    return _responses_heard(events[-1]["response"])


def _responses_heard(answer: Row) -> Heard:
    text, calls = "", []
    for item in answer["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            calls.append((item["call_id"], item["name"], item["arguments"]))
    return _heard(answer["id"].rpartition("_")[2], text, calls)


def _gemini_answers(events: list[Row]) -> Heard:
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    text = "".join(p["text"] for p in parts if "text" in p and not p.get("thought"))
    made = [p["functionCall"] for p in parts if "functionCall" in p]
    calls = [(c["id"], c["name"], _unparsed(c["args"])) for c in made]
    return _heard(events[0]["responseId"].removeprefix("resp_"), text, calls)
