"""Sample conversations for measuring chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from afield.chat.template import Tool
from afield.types import Message, ToolCall

PATTERNS = (
    "tool",
    "tools",
    "tool+user",
    "tools+user",
    "tool+system",
    "user",
    "users",
    "system",
    "system+user",
    "user+system",
    "developer",
    "developer+user",
)
MARK = "zebra"
QUESTION = Message(role="user", content="Will it rain in Bern?")
# A value of each JSON type, to detect formats that cannot distinguish them.
ARGUMENTS = {
    "city": "Zürich ☂ 北京",
    "days": [1, 2.5, {"deep": {"er": None}}],
    "quote": 'a "b" }\n42',
    "code": "007",
    "sure": True,
    "limit": 12,
}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "quote": {"type": "string"},
        "code": {"type": "string"},
        "sure": {"type": "boolean"},
        "limit": {"type": "integer"},
    },
}
TOOL = Tool(
    name="forecast",
    description="The weather of the next days.",
    parameters=_PARAMETERS,
    raw={
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "The weather of the next days.",
            "parameters": _PARAMETERS,
        },
    },
)


def call(id: str, arguments: dict[str, Any]) -> ToolCall:
    """Call of the sample tool."""
    return ToolCall(id, TOOL.name, json.dumps(arguments, ensure_ascii=False))


def conversations(pattern: str, *, named: bool = False) -> Iterator[tuple[list[Message], list[Message]]]:
    """Histories whose last turn contains `MARK`, each with new messages of the pattern.

    With `named`, tool results have the name of their tool.
    """
    for result in ("12 degrees.", ""):
        new = _new(pattern, result, TOOL.name if named else "")
        calls = tuple(call(m.tool_call_id, {"city": f"{MARK} {n}"}) for n, m in enumerate(_results(new)))
        for reasoning in ("", "The user wants the weather."):
            last = Message(
                role="assistant",
                content="" if calls else f"A {MARK}.",
                reasoning=reasoning,
                tool_calls=calls,
            )
            for history in _histories(reasoning):
                yield [*history, last], new
        if not calls:
            return


def _histories(reasoning: str) -> Iterator[list[Message]]:
    system = Message(role="system", content="Be brief.")
    answer = Message(role="assistant", content="It will.", reasoning=reasoning)
    yield [QUESTION]
    yield [system, QUESTION, answer, Message(role="user", content="And in Basel?")]
    yield [
        system,
        QUESTION,
        Message(role="assistant", reasoning=reasoning, tool_calls=(call("call00001", {"city": "Bern"}),)),
        Message(role="tool", content="Rain.", tool_call_id="call00001"),
        answer,
        Message(role="user", content="And in Basel?"),
    ]


def _new(pattern: str, result: str, name: str) -> list[Message]:
    messages: list[Message] = []
    for part in pattern.split("+"):
        role = part.removesuffix("s")
        for _ in range(2 if part == f"{role}s" else 1):
            messages.append(_one(role, len(messages), result, name))
    return messages


def _one(role: str, n: int, result: str, name: str) -> Message:
    if role == "tool":
        content = result and f"{result} {n}"
        return Message(role="tool", content=content, tool_call_id=f"call1000{n}", name=name)
    content = f"Remark {n}: thank you."
    return msgspec.convert({"role": role, "content": content}, Message)


def _results(new: Sequence[Message]) -> list[Message]:
    return [message for message in new if message.role == "tool"]
