"""Turns and replies made by hand, for tests that drive a dialect without a gateway."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from afield.chat import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.gateway.dialects import RawRequest
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted
from afield.types import FinishReason, Message, Sampling, Turn, TurnStatus, VersionSpan

STARTED = CallStarted("r.1", "t3", (1, 2), 1000.0)


def asked(body: Any, headers: dict[str, str] | None = None) -> RawRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return RawRequest("", raw, {}, {}, headers or {})


def done(reply: Message, finish: FinishReason = FinishReason.STOP) -> CallFinished:
    turn = Turn(
        id="t3",
        root="r",
        delta_ids=(1, 2),
        token_ids=(5, 6, 7),
        logprobs=(-0.5, -1.0, -1.5),
        versions=(VersionSpan(0, 3, 0, 0),),
        finish_reason=finish,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        messages=(reply,),
        ended=1002.0,
    )
    return CallFinished(turn, reply, 2)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    parts: list[str] = []
    for size in sizes:
        if text:
            parts.append(text[:size])
            text = text[size:]
    return [*parts, text] if text else parts


def pieces(reply: Message, sizes: Sequence[int] = (1, 3)) -> list[CallDelta]:
    """The reply as a parser would tell it, cut into pieces."""
    events: list[Event] = [ReasoningDelta(text) for text in cut(reply.reasoning, sizes)]
    events += [TextDelta(text) for text in cut(reply.content, sizes)]
    for n, call in enumerate(reply.tool_calls):
        events.append(ToolStart(n, call.name, call.id))
        events += [ToolArguments(n, text) for text in cut(call.arguments, sizes)]
        events.append(ToolEnd(n))
    return [CallDelta((), (), [event]) for event in events]


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """The data of server-sent events; one line each, whatever was put into them."""
    events = []
    for block in stream.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line]
        assert all(line.startswith(("event: ", "data: ", ": ")) for line in lines), block
        events += [
            json.loads(line[6:]) for line in lines if line.startswith("data: ") and "[DONE]" not in line
        ]
    return events
