"""Replies of any shape, and the items a call would yield for them, cut anywhere."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from afield.chat import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted
from afield.types import FinishReason, Message, Sampling, ToolCall, Turn, TurnStatus, VersionSpan

STARTED = CallStarted("r.1", "t7", (1, 2, 3), 0.0)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXTS | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
# A model may also sample arguments that are no JSON object.
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps) | st.sampled_from(
    ["{}", "red mug", "[1, 2]", '{"a": "\\ud800"}', '{"a": 1e4}', '{"__unparsedToolInput": {"x": 1}}']
)
REPLIES = st.builds(
    lambda content, reasoning, calls: Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(f"call_t7_{n}", name, arguments) for n, (name, arguments) in enumerate(calls)
        ),
    ),
    TEXTS,
    TEXTS,
    st.lists(st.tuples(st.sampled_from(["get_price", "bash"]), ARGUMENTS), max_size=3),
)


def done(
    reply: Message, finish: FinishReason = FinishReason.STOP, stop: str | None = None, ids: int = 4
) -> CallFinished:
    turn = Turn(
        id="t7",
        root="x",
        delta_ids=(1, 2, 3),
        token_ids=tuple(range(ids)),
        logprobs=(-0.5,) * ids,
        versions=(VersionSpan(0, ids, 0, 0),),
        finish_reason=finish,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
    )
    return CallFinished(turn, reply, 3, stop)


def pieces(reply: Message, sizes: list[int]) -> list[CallDelta]:
    """The reply as events, its texts cut into pieces of these sizes, the last one repeated."""
    events: list[Event] = [ReasoningDelta(text) for text in cut(reply.reasoning, sizes)]
    words = cut(reply.content, sizes)
    # Text may come between calls, and after them.
    events += [TextDelta(text) for text in words[: len(words) // 2]]
    for n, call in enumerate(reply.tool_calls):
        events.append(ToolStart(n, call.name, call.id))
        events += [ToolArguments(n, text) for text in cut(call.arguments, sizes)]
        events.append(ToolEnd(n))
    events += [TextDelta(text) for text in words[len(words) // 2 :]]
    return [CallDelta((), (), events[at : at + 3]) for at in range(0, len(events), 3)]


def cut(text: str, sizes: list[int]) -> list[str]:
    out: list[str] = []
    while text:
        size = sizes[min(len(out), len(sizes) - 1)]
        out.append(text[:size])
        text = text[size:]
    return out
