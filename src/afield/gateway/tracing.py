"""Traces of model calls by OpenTelemetry's GenAI conventions.

A gateway without traces uses `GatewayApp` and `Calls` themselves: a call does no extra work.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from afield.gateway.api_error import ApiError
from afield.gateway.app import GatewayApp
from afield.gateway.calls import Calls
from afield.gateway.dialects import RouteMatch
from afield.gateway.http import Receive, Scope, Send, header
from afield.gateway.model_request import CallFinished, Item, ModelRequest
from afield.gateway.sessions import Session
from afield.gateway.turn_ids import response_id
from afield.types import Message, Turn
from afield.utils.telemetry import SpanExporter, SpanLink, parse_traceparent

OPERATIONS = {"completions": "text_completion", "gemini": "generate_content"}
"""Operation names of the conventions by dialect; the others are chats."""
RESPONSE_IDS = {"chat": "chatcmpl-", "completions": "cmpl-"}
_INCOMING: ContextVar[str] = ContextVar("traceparent", default="")


class TracedGatewayApp(GatewayApp):
    """Gateway application that honours the header `traceparent` of model calls."""

    async def _model_call(
        self, session: Session, match: RouteMatch, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        _INCOMING.set(header(scope, b"traceparent"))
        await super()._model_call(session, match, path, scope, receive, send)


class TracedCalls(Calls):
    """Model calls, each with a span."""

    def __init__(self, spans: SpanExporter, **parts: Any) -> None:
        super().__init__(**parts)
        self._spans = spans

    async def run(self, session: Session, request: ModelRequest) -> AsyncGenerator[Item]:
        began = time.time()
        finished: CallFinished | None = None
        error, kind = "the client left before the answer was complete", "cancelled"
        try:
            async with aclosing(super().run(session, request)) as items:
                async for item in items:
                    if isinstance(item, CallFinished):
                        finished = item
                    yield item
        except ApiError as refused:
            error, kind = refused.message, refused.code
            raise
        finally:
            failure = ("", "") if finished is not None else (error, kind)
            self._emit(session, request, began, finished, *failure)

    def _emit(
        self,
        session: Session,
        request: ModelRequest,
        began: float,
        finished: CallFinished | None,
        error: str,
        error_type: str,
    ) -> None:
        incoming = parse_traceparent(_INCOMING.get())
        attempt = parse_traceparent(str(session.row.spec.metadata.get("traceparent", "")))
        parent, links = incoming or attempt, []
        if incoming and attempt and incoming.trace_id != attempt.trace_id:
            links.append(SpanLink(attempt, "attempt"))
        operation = OPERATIONS.get(request.dialect, "chat")
        model = request.model or self._tokenizer.name
        attributes = {
            **request_attributes(session, request, operation, model),
            **({"error.type": error_type} if error_type else {}),
        }
        if finished is not None:
            attributes |= response_attributes(session, finished, self._tokenizer.name)
        if self._spans.content:
            attributes |= content_attributes(request, finished)
        self._spans.emit(
            f"{operation} {model}",
            self._spans.child_of(parent),
            parent,
            start=began,
            end=time.time(),
            attributes=attributes,
            kind="client",
            error=error,
            links=links,
        )


def request_attributes(session: Session, request: ModelRequest, operation: str, model: str) -> dict[str, Any]:
    spec = session.row.spec
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "afield",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.stop_sequences": list(request.stop) or None,
        "gen_ai.conversation.id": session.id,
        "afield.session.id": session.id,
        "afield.rollout.id": spec.rollout_id,
        "afield.attempt": spec.attempt,
        "afield.group.id": spec.group_id,
        "afield.task.id": spec.input_id,
        "afield.split": str(spec.split),
        "afield.dialect": request.dialect,
        "afield.stream": request.stream,
    }


def response_attributes(session: Session, finished: CallFinished, model: str) -> dict[str, Any]:
    turn, sampling = finished.turn, finished.turn.sampling
    versions = [span.low for span in turn.versions] + [span.high for span in turn.versions]
    return {
        "gen_ai.response.id": _response_id(session.id, turn),
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [_finish_reason(finished)],
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": len(turn.token_ids),
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
        "gen_ai.request.seed": sampling.seed,
        "afield.turn.id": turn.id,
        "afield.tier": turn.tier,
        "afield.policy.version": max(versions, default=None),
        "afield.policy.oldest_version": min(versions, default=None),
        "afield.first_token_s": turn.first_token - turn.started if turn.first_token else None,
    }


def _response_id(session_id: str, turn: Turn) -> str:
    if prefix := RESPONSE_IDS.get(turn.dialect):
        return f"{prefix}{session_id}-{turn.id}"
    return response_id(session_id, turn.id)


def _finish_reason(finished: CallFinished) -> str:
    return "tool_calls" if finished.reply.tool_calls else str(finished.turn.finish_reason)


def content_attributes(request: ModelRequest, finished: CallFinished | None) -> dict[str, Any]:
    """Messages of the request and the reply, which are sent only if the user asks for it."""
    values = {"gen_ai.input.messages": json.dumps([_message(message) for message in request.messages])}
    if finished is not None:
        reply = {**_message(finished.reply), "finish_reason": _finish_reason(finished)}
        values["gen_ai.output.messages"] = json.dumps([reply])
    return values


def _message(message: Message) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.role == "tool":
        parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.content})
    elif message.content:
        parts.append({"type": "text", "content": message.content})
    parts += [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    return {"role": message.role, "parts": parts}
