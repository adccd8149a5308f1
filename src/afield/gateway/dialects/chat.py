"""OpenAI Chat Completions.

Unknown fields are tolerated. What would silently change the meaning is refused instead: several
choices, images, forced tool choice, structured output. Temperature and the like belong to the trainer
and are ignored here; `max_tokens` may only lower what the session allows. A client that asks for
`logprobs` or `return_token_ids` gets exactly what is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from afield.gateway.calls import Done, ModelRequest, Piece, Started
from afield.gateway.lineage import call_id
from afield.gateway.refusal import Refusal, bad_request
from afield.tokens import ChatTokens, Event, ReasoningDelta, TextDelta, Tool, ToolArguments, ToolStart
from afield.types import FinishReason, Message, ToolCall

NAME = "chat"
ROLES = {"developer": "system", "function": "tool"}


class Wish(Struct, frozen=True, kw_only=True):
    """What the client wants of the answer, besides the answer."""

    model: str
    usage: bool
    logprobs: bool
    token_ids: bool


# --- requests ------------------------------------------------------------------------------------


class ContentPart(Struct):
    type: str = "text"
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class WireCall(Struct):
    function: FunctionCall
    id: str = ""


class WireMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class WireFunction(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class WireTool(Struct):
    function: WireFunction
    type: str = "function"


class StreamOptions(Struct):
    include_usage: bool | None = False


class Body(Struct):
    messages: list[WireMessage]
    model: str = ""
    tools: list[WireTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    logprobs: bool | None = False
    return_token_ids: bool | None = False
    response_format: dict[str, Any] | None = None


DECODER = msgspec.json.Decoder(Body)
RAW_TOOLS = msgspec.json.Decoder(dict[str, Any])


def decode(body: bytes) -> tuple[ModelRequest, Wish]:
    try:
        wire = DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request is not a chat completion request: {error}") from error
    _refuse_what_would_be_ignored(wire)
    tools = _tools(wire, body) if wire.tool_choice != "none" else ()
    limit = wire.max_completion_tokens or wire.max_tokens
    stop = (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())
    request = ModelRequest(
        dialect=NAME,
        messages=tuple(_message(message, i) for i, message in enumerate(wire.messages)),
        tools=tools,
        max_tokens=limit,
        stop=stop,
        stream=bool(wire.stream),
    )
    options = wire.stream_options
    usage = not wire.stream or bool(options and options.include_usage)
    wish = Wish(
        model=wire.model, usage=usage, logprobs=bool(wire.logprobs), token_ids=bool(wire.return_token_ids)
    )
    return request, wish


def _refuse_what_would_be_ignored(wire: Body) -> None:
    if not wire.messages:
        raise bad_request("messages is empty", "send at least one message")
    if (wire.n or 1) != 1:
        raise bad_request(f"n={wire.n} is not served", "ask once per choice; each call is its own turn")
    if wire.response_format and wire.response_format.get("type", "text") != "text":
        raise bad_request(f"response_format {wire.response_format.get('type')!r} is not served", "remove it")
    if wire.tool_choice not in (None, "auto", "none"):
        raise bad_request(f"tool_choice {wire.tool_choice!r} is not served", "use 'auto' or 'none'")
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(wire, name)
        if value is not None and value < 1:
            raise bad_request(f"{name}={value} must be at least 1")


def _message(wire: WireMessage, index: int) -> Message:
    role = ROLES.get(wire.role, wire.role)
    try:
        return msgspec.convert(
            {
                "role": role,
                "content": _text(wire.content, index),
                "reasoning": wire.reasoning_content or wire.reasoning or "",
                "tool_calls": tuple(_call(call) for call in wire.tool_calls or ()),
                "tool_call_id": wire.tool_call_id or "",
                "name": wire.name or "",
            },
            Message,
        )
    except msgspec.ValidationError as error:
        raise bad_request(f"messages[{index}]: role {wire.role!r}: {error}") from error


def _text(content: str | list[ContentPart] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal", "input_text") or part.text is None:
            raise bad_request(f"messages[{index}] has a part of type {part.type!r}", "send text")
    return "".join(part.text or "" for part in content)


def _call(wire: WireCall) -> ToolCall:
    arguments = wire.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return ToolCall(wire.id, wire.function.name, text)


def _tools(wire: Body, body: bytes) -> tuple[Tool, ...]:
    """The template renders the tool objects as the client wrote them, unknown keys included."""
    if not wire.tools:
        return ()
    if odd := [tool.type for tool in wire.tools if tool.type != "function"]:
        raise bad_request(f"tools of type {odd[0]!r} are not served", "use type 'function'")
    raw = RAW_TOOLS.decode(body)["tools"]
    return tuple(
        Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {}, given)
        for tool, given in zip(wire.tools, raw, strict=True)
    )


# --- answers -------------------------------------------------------------------------------------


def encode_error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.text, "type": kind, "param": None, "code": refusal.code}}


def finish_reason(done: Done) -> str:
    if done.turn.finish_reason is FinishReason.STOP and done.reply.tool_calls:
        return "tool_calls"
    return str(done.turn.finish_reason)


def usage(done: Done) -> dict[str, int]:
    sampled = len(done.turn.token_ids)
    total = done.prompt_tokens + sampled
    return {"prompt_tokens": done.prompt_tokens, "completion_tokens": sampled, "total_tokens": total}


def fold(session_id: str, started: Started, done: Done, wish: Wish, tokens: ChatTokens) -> dict[str, Any]:
    """The whole answer at once."""
    reply = done.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason(done)}
    choice["logprobs"] = _logprobs(done.turn.token_ids, done.turn.logprobs, tokens) if wish.logprobs else None
    answer = _envelope("chat.completion", session_id, started, done.turn.started, wish, choice)
    answer["usage"] = usage(done)
    if wish.token_ids:
        choice["token_ids"] = list(done.turn.token_ids)
        answer["prompt_token_ids"] = list(started.prompt_ids)
    return answer


class Stream:
    """The answer in chunks."""

    def __init__(self, session_id: str, started: Started, created: float, wish: Wish, tokens: ChatTokens):
        self._session_id = session_id
        self._started = started
        self._created = created
        self._wish = wish
        self._tokens = tokens

    def opening(self) -> list[dict[str, Any]]:
        chunk = self._chunk({"role": "assistant", "content": ""}, None)
        if self._wish.token_ids:
            chunk["prompt_token_ids"] = list(self._started.prompt_ids)
        return [chunk]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        deltas = [delta for event in piece.events if (delta := self._delta(event))]
        wanted = self._wish.logprobs or self._wish.token_ids
        chunks = [self._chunk(delta, None) for delta in deltas or ([{}] if wanted else [])]
        if wanted and piece.token_ids:
            choice = chunks[0]["choices"][0]
            if self._wish.logprobs:
                choice["logprobs"] = _logprobs(piece.token_ids, piece.logprobs, self._tokens)
            if self._wish.token_ids:
                choice["token_ids"] = list(piece.token_ids)
        return chunks

    def closing(self, done: Done) -> list[dict[str, Any]]:
        chunks = [self._chunk({}, finish_reason(done))]
        if self._wish.usage:
            last = self._chunk({}, None)
            last["choices"] = []
            last["usage"] = usage(done)
            chunks.append(last)
        return chunks

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, TextDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return {"reasoning_content": event.text}
        if isinstance(event, ToolStart):
            named = {"name": event.name, "arguments": ""}
            start = {"index": event.index, "id": call_id(self._started.turn_id, event.index)}
            return {"tool_calls": [{**start, "type": "function", "function": named}]}
        if isinstance(event, ToolArguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None

    def _chunk(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        kind = "chat.completion.chunk"
        return _envelope(kind, self._session_id, self._started, self._created, self._wish, choice)


def _envelope(
    kind: str, session_id: str, started: Started, created: float, wish: Wish, choice: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{session_id}-{started.turn_id}",
        "object": kind,
        "created": int(created),
        "model": wish.model,
        "choices": [choice],
    }


def _logprobs(ids: Sequence[int], logprobs: Sequence[float], tokens: ChatTokens) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        text = tokens.decode([token_id])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**entry, "top_logprobs": []})
    return {"content": content, "refusal": None}
