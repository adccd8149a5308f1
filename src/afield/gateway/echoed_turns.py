"""Recognises sampled replies in the messages that clients send back (pure).

A tool-call id names its turn. Where a message equals that turn's reply in content, the sampled reply
replaces it. That covers unparsable arguments, text that was dropped or moved behind the calls, one turn
split into several messages, and reordered results. Without ids, `match_replies` matches a reply by its
conversation. Messages with real edits stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from afield.turn_tree import TurnTree, arguments_value, extend_digest
from afield.types import Message, ToolCall, Turn, TurnStatus


def recognise_replies(tree: TurnTree, messages: Sequence[Message]) -> tuple[Message, ...]:
    if not any(message.tool_calls for message in messages):
        return tuple(messages)
    out: list[Message] = []
    start = 0
    while start < len(messages):
        turn = turn_of(tree, messages[start]) or _begun(tree, messages, start)
        if turn is None:
            out.append(messages[start])
            start += 1
            continue
        end = _end_of_turn(tree, turn, messages, start)
        out.extend(_as_sampled(turn, messages[start:end]))
        start = end
    return tuple(out)


def turn_of(tree: TurnTree, message: Message) -> Turn | None:
    """Returns the turn to which all calls of an assistant message belong."""
    if message.role != "assistant" or not message.tool_calls:
        return None
    turns = [tree.caller(call.id) for call in message.tool_calls]
    return turns[0] if all(turn is not None and turn is turns[0] for turn in turns) else None


def _begun(tree: TurnTree, messages: Sequence[Message], start: int) -> Turn | None:
    """Returns the turn whose text is in a separate message before its calls."""
    text, rest = messages[start], messages[start + 1 : start + 2]
    if text.role != "assistant" or text.tool_calls or not rest:
        return None
    turn = turn_of(tree, rest[0])
    spoken = text.content.strip()
    return turn if turn and spoken and spoken == turn.messages[-1].content.strip() else None


def _end_of_turn(tree: TurnTree, turn: Turn, messages: Sequence[Message], start: int) -> int:
    """Returns the index after the messages of a turn and its results."""
    call_ids = {call.id for call in turn.messages[-1].tool_calls}
    text = messages[start].content.strip()
    end = start + 1
    while end < len(messages):
        message = messages[end]
        if not _carries(tree, turn, call_ids, message) and (text or not moved(tree, turn, message)):
            break
        text = text or (message.content.strip() if message.role == "assistant" else "")
        end += 1
    return end


def moved(tree: TurnTree, turn: Turn, message: Message) -> bool:
    """Returns whether a message repeats the text of a turn behind its calls, and is not a later turn."""
    text = message.content.strip()
    if message.role != "assistant" or message.tool_calls or not text:
        return False
    if text != turn.messages[-1].content.strip():
        return False
    children = (child for child in tree.turns if child.parent == turn.id and child.messages)
    return all(child.messages[-1].content.strip() != text for child in children)


def _carries(tree: TurnTree, turn: Turn, call_ids: set[str], message: Message) -> bool:
    if message.role == "tool":
        return message.tool_call_id in call_ids
    return message.role == "assistant" and turn_of(tree, message) is turn


def _as_sampled(turn: Turn, messages: Sequence[Message]) -> list[Message]:
    reply = turn.messages[-1]
    replies = [message for message in messages if message.role == "assistant"]
    results = [message for message in messages if message.role == "tool"]
    if len(replies) > 1 or not _word_for_word(reply, replies[0]):
        calls = [call for message in replies for call in message.tool_calls]
        if not _same(reply, "".join(message.content for message in replies), calls):
            return list(messages)
    if len(results) > 1:
        order = {call.id: n for n, call in enumerate(reply.tool_calls)}
        results.sort(key=lambda result: order[result.tool_call_id])
    return [reply, *results]


def _word_for_word(reply: Message, echoed: Message) -> bool:
    return echoed.content == reply.content and echoed.tool_calls == reply.tool_calls


def _same(reply: Message, content: str, calls: Sequence[ToolCall]) -> bool:
    by_id = {call.id: call for call in calls}
    if len(by_id) != len(calls) or set(by_id) != {call.id for call in reply.tool_calls}:
        return False
    if content.strip() not in ("", reply.content.strip()) and "".join(content.split()) != _aloud(reply):
        return False
    return all(_same_call(call, by_id[call.id]) for call in reply.tool_calls)


def _same_call(sampled: ToolCall, echoed: ToolCall) -> bool:
    if sampled.name != echoed.name:
        return False
    sampled_value, echoed_value = arguments_value(sampled.arguments), arguments_value(echoed.arguments)
    # Clients change arguments that are not a JSON object.
    return sampled_value == echoed_value or not sampled.arguments.lstrip().startswith("{")


def match_replies(
    tree: TurnTree, start: str, messages: Sequence[Message]
) -> tuple[tuple[Message, ...], list[str]]:
    """Replaces messages that contain reasoning as text by their replies, and returns the digests."""
    out: list[Message] = []
    digests: list[str] = []
    for message in messages:
        digest = extend_digest(start, message)
        if message.role == "assistant" and not tree.knows(digest):
            reply = _thinking_aloud(tree, start, message)
            if reply is not None:
                message, digest = reply, extend_digest(start, reply)
        out.append(message)
        digests.append(digest)
        start = digest
    return tuple(out), digests


def _thinking_aloud(tree: TurnTree, request_digest: str, message: Message) -> Message | None:
    for turn in reversed(tree.turns_of_request(request_digest)):
        reply = turn.messages[-1] if turn.status is TurnStatus.COMMITTED and turn.messages else None
        if reply is None or not reply.reasoning.strip():
            continue
        calls = [(call.name, arguments_value(call.arguments)) for call in reply.tool_calls]
        echoed_calls = [(call.name, arguments_value(call.arguments)) for call in message.tool_calls]
        if calls == echoed_calls and _aloud(reply) == "".join(message.content.split()):
            return reply
    return None


def _aloud(reply: Message) -> str:
    """Returns reasoning and text without whitespace."""
    return "".join(f"{reply.reasoning} {reply.content}".split())
