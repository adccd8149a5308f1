"""Message rules: rewrite conversations that a chat template cannot render.

1. Templates raise on, or omit, messages they were not written for: a later system message, two user messages
   in a row, tool results. A rule rewrites such messages without losing content.
2. `template_probes.with_rules` finds the rules that a template needs; only those are applied.
3. A rule looks only at messages up to the next assistant turn, so new messages never change what was rendered
   before a turn.
4. Text that a rule adds is escaped like any other content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct, structs

from afield.types import ImageRef, Message, ToolCall

FILLER = "Continue."
"""Content of an added user message."""
SYSTEM = "You are a helpful assistant."
"""Content of an added system message."""

RULES: dict[str, str] = {
    "developer-as-system": "a developer message becomes a system message",
    "fold-tools": "tools are announced in the system message; calls and results are text (Hermes format)",
    "fold-results": "the result of a call that no turn made becomes a user message, in <tool_response> tags",
    "merge-system": "several system messages at the beginning become one",
    "fold-system": "a later system message becomes a user message in its place, in <system> tags",
    "fold-first-system": "the system message at the beginning becomes a user message, in <system> tags",
    "add-system": "a system message is added where there are tools and none",
    "wrap-arguments": 'arguments of a call that are no JSON object become {"input": ...}',
    "call-ids": "ids of calls become nine letters and digits",
    "reasoning-in-text": "the reasoning of a turn with text and calls stands before its text",
    "split-calls": "a turn with several calls becomes several turns, each followed by its result",
    "user-in-result": "a user message beside a tool's result becomes part of it, in <user> tags",
    "merge-users": "neighbouring user messages become one",
    "add-first-user": f'a user message, "{FILLER}", is added where none stands before the first turn',
    "add-user-between": f'a user message, "{FILLER}", is added between two turns',
}
"""Description of each rule, in the order of application."""

SAME_ROLE = "developer-as-system"
"""Rule that strict sessions apply too: both roles mean the same."""

LAST_RESORT = frozenset(RULES) - {"fold-tools", "add-system"}
"""Rules for a conversation that the template refuses after its own rules."""

_NINE = re.compile(r"[A-Za-z0-9]{9}")


class Announced(Protocol):
    """Tool with the object that the client sent."""

    @property
    def raw(self) -> dict[str, Any]:
        """Tool object as the client sent it."""
        ...


class Folded(Struct, frozen=True):
    """Conversation after the message rules."""

    messages: Sequence[Message]
    """Messages for the template."""
    tools: Sequence[Announced]
    """Tools for the template; empty if a message lists them."""
    applied: tuple[str, ...] = ()
    """Names of the rules that changed something."""


def fold(
    messages: Sequence[Message],
    tools: Sequence[Announced],
    rules: frozenset[str],
    *,
    begins: bool = True,
    generation: bool = False,
) -> Folded:
    """Apply `rules` to a conversation.

    Args:
        messages: messages to rewrite.
        tools: tools of the conversation.
        rules: names of the rules.
        begins: whether the conversation starts with these messages; False if they follow a turn.
        generation: whether an assistant turn follows the last message.
    """
    applied: list[str] = []
    current: list[Message] = list(messages)
    context = _Context(tools, begins, generation)
    for name in RULES:
        if name in rules:
            changed = _STEPS[name](current, context)
            if changed != current:
                applied.append(name)
                current = changed
    return Folded(current, () if "fold-tools" in rules else tools, tuple(applied))


class _Context(Struct, frozen=True):
    tools: Sequence[Announced]
    begins: bool
    generation: bool


# --- system messages -----------------------------------------------------------------------------


def _developer_as_system(messages: list[Message], context: _Context) -> list[Message]:
    return [structs.replace(m, role="system") if m.role == "developer" else m for m in messages]


def _leading(messages: Sequence[Message], context: _Context) -> int:
    """Number of system messages at the beginning of the conversation."""
    if not context.begins:
        return 0
    return next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))


def _merge_system(messages: list[Message], context: _Context) -> list[Message]:
    count = _leading(messages, context)
    return [_joined(messages[:count]), *messages[count:]] if count > 1 else messages


def _fold_system(messages: list[Message], context: _Context) -> list[Message]:
    count = _leading(messages, context)
    return messages[:count] + [_as_user(m) if m.role == "system" else m for m in messages[count:]]


def _fold_first_system(messages: list[Message], context: _Context) -> list[Message]:
    count = _leading(messages, context)
    return [_as_user(m) for m in messages[:count]] + messages[count:]


def _add_system(messages: list[Message], context: _Context) -> list[Message]:
    if not context.begins or not context.tools or _leading(messages, context):
        return messages
    return [Message(role="system", content=SYSTEM), *messages]


def _as_user(message: Message) -> Message:
    return _tagged(structs.replace(message, role="user", name=""), "system")


# --- tools ---------------------------------------------------------------------------------------


def _fold_tools(messages: list[Message], context: _Context) -> list[Message]:
    texts = [_call_as_text(_result_as_user(message)) for message in messages]
    if not context.tools or not context.begins:
        return texts
    announced = Message(role="system", content=announcement(context.tools))
    if texts and texts[0].role == "system":
        return [_joined([texts[0], announced]), *texts[1:]]
    return [announced, *texts]


def announcement(tools: Iterable[Announced]) -> str:
    """Text that lists the tools and the call format (Hermes) for the model."""
    listed = "\n".join(json.dumps(tool.raw, ensure_ascii=False) for tool in tools)
    return (
        f"Functions that you can call, one JSON object a line:\n{listed}\n\n"
        "A call is a JSON object with the function's name and arguments, between tags:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>\n'
        "What a function returned is shown to you between <tool_response> tags."
    )


def _call_as_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
        "\n</tool_call>"
        for call in message.tool_calls
    ]
    text = "\n".join([message.content] * bool(message.content) + calls)
    return structs.replace(message, content=text, tool_calls=())


def _result_as_user(message: Message) -> Message:
    if message.role != "tool":
        return message
    return _tagged(structs.replace(message, role="user", tool_call_id="", name=""), "tool_response")


def _fold_results(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    called = not context.begins
    for message in messages:
        if message.role == "assistant":
            called = bool(message.tool_calls)
        out.append(message if called else _result_as_user(message))
    return out


def _wrap_arguments(messages: list[Message], context: _Context) -> list[Message]:
    def wrapped(call: ToolCall) -> ToolCall:
        try:
            fine = isinstance(json.loads(call.arguments), dict)
        except (ValueError, RecursionError):
            fine = False
        if fine:
            return call
        return ToolCall(call.id, call.name, json.dumps({"input": call.arguments} if call.arguments else {}))

    return [_with_calls(m, [wrapped(c) for c in m.tool_calls]) for m in messages]


def _call_ids(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    waiting: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            calls = [
                ToolCall(_nine(c.id or f"{at}/{n}"), c.name, c.arguments)
                for n, c in enumerate(message.tool_calls)
            ]
            waiting = [call.id for call in calls]
            out.append(_with_calls(message, calls))
        elif message.role == "tool":
            short_id = _nine(message.tool_call_id) if message.tool_call_id else ""
            answered = short_id or (waiting[0] if waiting else _nine(str(at)))
            waiting = [other for other in waiting if other != answered]
            out.append(structs.replace(message, tool_call_id=answered))
        else:
            out.append(message)
    return out


def _nine(id: str) -> str:
    return id if _NINE.fullmatch(id) else hashlib.blake2b(id.encode(), digest_size=16).hexdigest()[:9]


def _reasoning_in_text(messages: list[Message], context: _Context) -> list[Message]:
    return [
        structs.replace(m, content=f"{m.reasoning}\n\n{m.content}", reasoning="")
        if m.tool_calls and m.content and m.reasoning
        else m
        for m in messages
    ]


def _split_calls(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    at = 0
    while at < len(messages):
        turn = messages[at]
        at += 1
        if len(turn.tool_calls) < 2:
            out.append(turn)
            continue
        end = next((n for n in range(at, len(messages)) if messages[n].role == "assistant"), len(messages))
        rest = messages[at:end]
        results = [message for message in rest if message.role == "tool"]
        for n, call in enumerate(turn.tool_calls):
            out.append(_with_calls(turn, [call]) if n == 0 else Message(role="assistant", tool_calls=(call,)))
            mine = next((r for r in results if r.tool_call_id == call.id), None)
            if mine is not None:
                results.remove(mine)
                rest.remove(mine)
                out.append(mine)
        out += rest
        at = end
    return out


def _with_calls(message: Message, calls: Sequence[ToolCall]) -> Message:
    return structs.replace(message, tool_calls=tuple(calls)) if message.tool_calls else message


# --- user messages -------------------------------------------------------------------------------


def _user_in_result(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    for run in _runs(messages):
        if not any(message.role == "tool" for message in run):
            out += run
            continue
        early: list[Message] = []
        result: int | None = None
        for message in run:
            if message.role == "user":
                tagged = _tagged(message, "user")
                if result is None:
                    early.append(tagged)
                else:
                    out[result] = _joined([out[result], tagged])
                continue
            if message.role == "tool":
                message = structs.replace(_joined([*early, message]), **_result_fields(message))
                early, result = [], len(out)
            out.append(message)
    return out


def _result_fields(message: Message) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message.tool_call_id, "name": message.name}


def _merge_users(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if message.role == "user" and out and out[-1].role == "user":
            out[-1] = _joined([out[-1], message])
        else:
            out.append(message)
    return out


def _add_first_user(messages: list[Message], context: _Context) -> list[Message]:
    if not context.begins:
        return messages
    first = next((n for n, m in enumerate(messages) if m.role == "assistant"), len(messages))
    if any(message.role == "user" for message in messages[:first]):
        return messages
    at = _leading(messages, context)
    return [*messages[:at], Message(role="user", content=FILLER), *messages[at:]]


def _add_user_between(messages: list[Message], context: _Context) -> list[Message]:
    out: list[Message] = []
    turn = not context.begins
    for message in messages:
        if turn and message.role == "assistant":
            out.append(Message(role="user", content=FILLER))
        out.append(message)
        turn = message.role == "assistant"
    if turn and messages and context.generation:
        out.append(Message(role="user", content=FILLER))
    return out


def _runs(messages: Sequence[Message]) -> Iterable[list[Message]]:
    """Split messages into assistant turns and the runs of other messages between them."""
    run: list[Message] = []
    for message in messages:
        if run and "assistant" in (message.role, run[0].role):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


# --- text ----------------------------------------------------------------------------------------


def _tagged(message: Message, tag: str) -> Message:
    head = f"<{tag}>\n"
    return structs.replace(
        message,
        content=f"{head}{message.content}\n</{tag}>",
        images=_moved(message.images, len(head)),
    )


def _joined(messages: Sequence[Message]) -> Message:
    """First message with the joined texts and images of all."""
    text = ""
    images: list[ImageRef] = []
    for message in messages:
        text += "\n\n" if text and message.content else ""
        images += _moved(message.images, len(text))
        text += message.content
    return structs.replace(messages[0], content=text, images=tuple(images))


def _moved(images: Iterable[ImageRef], by: int) -> tuple[ImageRef, ...]:
    return tuple(ImageRef(image.digest, image.offset + by) for image in images)


_STEPS: dict[str, Callable[[list[Message], _Context], list[Message]]] = {
    "developer-as-system": _developer_as_system,
    "fold-tools": _fold_tools,
    "fold-results": _fold_results,
    "merge-system": _merge_system,
    "fold-system": _fold_system,
    "fold-first-system": _fold_first_system,
    "add-system": _add_system,
    "wrap-arguments": _wrap_arguments,
    "call-ids": _call_ids,
    "reasoning-in-text": _reasoning_in_text,
    "split-calls": _split_calls,
    "user-in-result": _user_in_result,
    "merge-users": _merge_users,
    "add-first-user": _add_first_user,
    "add-user-between": _add_user_between,
}
