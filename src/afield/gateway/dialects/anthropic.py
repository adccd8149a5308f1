"""Anthropic Messages, the answering half; `anthropic_request` reads what is asked.

Reasoning is a thinking block whose signature names the turn, for clients that ask for thinking. Blocks come
in the order they were sampled. A call whose arguments are no JSON object has them as text under one key of
its input. An overlong prompt is refused in the words that make clients compact. A client that asks for
`logprobs` or `return_token_ids` gets exactly what is recorded, beside the message.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from afield.chat import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects import anthropic_request
from afield.gateway.dialects.base import EVENTS, RawRequest, ResponseOptions, event
from afield.gateway.dialects.json_arguments import as_object
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, ModelRequest
from afield.gateway.turn_ids import item_id, seal
from afield.types import FinishReason, ToolCall

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
PING = event("ping", {"type": "ping"})


class Anthropic:
    name = "anthropic"

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        try:
            return anthropic_request.decode(asked)
        except RecursionError as error:
            raise bad_request("the request is nested too deeply to be read") from error

    def error(self, refusal: ApiError) -> dict[str, Any]:
        return error(refusal)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
        reply = done.reply
        content: list[dict[str, Any]] = []
        if reply.reasoning and wish.reasoning:
            text = "" if wish.echo.get("omitted") else reply.reasoning
            content.append(thinking(text, seal(started.turn_id)))
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call) for call in reply.tool_calls]
        message = envelope(started, wish) | {"content": content, "usage": usage(done)} | stopped(done)
        return message | sampled(done, wish)

    def view(self, started: CallStarted, wish: ResponseOptions) -> AnthropicStream:
        return AnthropicStream(started, wish)


def error(refusal: ApiError) -> dict[str, Any]:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    text = refusal.text
    if refusal.sizes:
        text = f"prompt is too long: {refusal.sizes[0]} tokens > {refusal.sizes[1]} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


def stopped(done: CallFinished) -> dict[str, Any]:
    if done.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop}
    if done.turn.finish_reason is not FinishReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if done.reply.tool_calls else "end_turn", "stop_sequence": None}


def usage(done: CallFinished) -> dict[str, Any]:
    told = _usage(done.prompt_tokens, len(done.turn.token_ids))
    return told | {"output_tokens_details": {"thinking_tokens": done.thought}}


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": sampled}


def envelope(started: CallStarted, wish: ResponseOptions) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": item_id("msg", started.turn_id),
        "type": "message",
        "role": "assistant",
        "model": wish.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(len(started.prompt_ids), 0),
    }
    return shown | {"prompt_token_ids": started.prompt_ids} if wish.token_ids else shown


def sampled(done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
    ids = {"token_ids": done.turn.token_ids} if wish.token_ids else {}
    return ids | ({"logprobs": done.turn.logprobs} if wish.logprobs else {})


def thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": Raw(as_object(call.arguments).encode()),
    }


class AnthropicStream:
    """The answer in events: one block is open at a time."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, wish: ResponseOptions) -> None:
        self._started = started
        self._wish = wish
        self._open = ""
        self._index = -1
        self._arguments: list[str] = []

    def opening(self) -> bytes:
        return event(
            "message_start", {"type": "message_start", "message": envelope(self._started, self._wish)}
        )

    def piece(self, piece: CallDelta) -> bytes:
        return b"".join([self._show(event) for event in piece.events])

    def closing(self, done: CallFinished) -> bytes:
        last = {"type": "message_delta", "delta": stopped(done), "usage": usage(done)}
        end = event("message_delta", last | sampled(done, self._wish))
        return self._close() + end + event("message_stop", {"type": "message_stop"})

    def failing(self, refusal: ApiError) -> bytes:
        return event("error", error(refusal))

    def keepalive(self) -> bytes:
        return PING

    def _show(self, shown: Event) -> bytes:
        if isinstance(shown, TextDelta):
            begun = self._begin("text", {"type": "text", "text": ""})
            return begun + self._delta({"type": "text_delta", "text": shown.text})
        if isinstance(shown, ReasoningDelta):
            if not self._wish.reasoning:
                return b""
            begun = self._begin("thinking", thinking("", ""))
            if self._wish.echo.get("omitted"):
                return begun
            return begun + self._delta({"type": "thinking_delta", "thinking": shown.text})
        if isinstance(shown, ToolStart):
            block = {"type": "tool_use", "id": shown.id, "name": shown.name, "input": {}}
            return self._begin(f"tool {shown.index}", block)
        if isinstance(shown, ToolArguments):
            self._arguments.append(shown.text)
            return b""
        assert isinstance(shown, ToolEnd)
        return self._close()

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event(
            "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}
        )

    def _close(self) -> bytes:
        if not self._open:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta({"type": "signature_delta", "signature": seal(self._started.turn_id)})
        elif self._open != "text":
            text = as_object("".join(self._arguments))
            last = self._delta({"type": "input_json_delta", "partial_json": text})
            self._arguments.clear()
        self._open = ""
        return last + event("content_block_stop", {"type": "content_block_stop", "index": self._index})
