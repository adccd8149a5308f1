"""Turn facts: countable properties of a rollout's turns, for `afield why`.

The index of a run has these counts for every rollout, so that a diagnosis of a run reads no turns.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from afield.types import Exclusion, FinishReason, Message, ToolCall, Turn, TurnStatus

EMPTY_SCHEMA = "empty-schema:"
"""Prefix of the tag for a tool that arrived without parameters, followed by its name."""
ENGINE_FAILED = "engine-failed"
"""Tag of a turn whose engine failed."""
MALFORMED = "malformed-call"
"""Tag of a turn with a tool call that cannot be parsed and stays text."""
FACTS = {
    "tool_turns": "complete turns whose request has tools",
    "bad_arguments": "tool calls whose arguments are no JSON object",
    "untyped_calls": "tool calls with arguments, of a tool whose schema arrived empty",
    "continued_calls": "tool calls of turns that another turn continues or repeats",
    "lost_results": "such calls whose result is in no later prompt",
    "main_turns": "turns of the longest conversation",
    "main_excluded": "such turns that are excluded from training, without those whose engine failed",
    "continuations": "turns whose messages begin with those of an earlier turn and its reply",
    "unstable_turns": "such turns whose prompt does not begin with the tokens of the earlier turn",
    "edited_turns": "turns whose messages have an edited reply of an earlier turn",
    "cut_turns": "complete turns whose reply reached `max_tokens` or the context",
    "cut_end": "1 if the last reply was cut off in this way",
    "engine_failed_end": "1 if the engine failed in the last turn",
    "replies": "number that is equal for equal sampled tokens, 53 bits of their digest",
}
"""Counts of a rollout with their meanings; counts of 0 are left out."""


def turn_tags(turns: Sequence[Turn]) -> dict[str, int]:
    """Number of turns with each tag."""
    return dict(Counter(tag for turn in turns for tag in dict.fromkeys(turn.tags)))


def turn_facts(turns: Sequence[Turn], excluded: Sequence[Exclusion] = ()) -> dict[str, int]:
    """Facts of a rollout's turns, by the names of `FACTS`."""
    if not turns:
        return {}
    complete = [turn for turn in turns if turn.status is TurnStatus.COMMITTED]
    by_id = {turn.id: turn for turn in turns}
    main = _main_path(turns, by_id)
    left_out = {exclusion.turn for exclusion in excluded}
    last = max(turns, key=lambda turn: turn.ended or turn.started)
    continued, lost = _lost_results(complete)
    unstable = [turn for turn in complete if _is_unstable(turn, by_id)]
    counts = {
        "tool_turns": sum(bool(turn.tools_digest) for turn in complete),
        "bad_arguments": sum(not _is_object(call.arguments) for turn in complete for call in _calls(turn)),
        "untyped_calls": sum(_untyped(turn) for turn in complete),
        "continued_calls": continued,
        "lost_results": lost,
        "main_turns": len(main),
        "main_excluded": sum(turn.id in left_out and ENGINE_FAILED not in turn.tags for turn in main),
        "continuations": sum(turn.parent is not None for turn in complete) + len(unstable),
        "unstable_turns": len(unstable),
        "edited_turns": sum(any(link.type == "edit" for link in turn.links) for turn in complete),
        "cut_turns": sum(turn.finish_reason is FinishReason.LENGTH for turn in complete),
        "cut_end": int(last.finish_reason is FinishReason.LENGTH),
        "engine_failed_end": int(ENGINE_FAILED in last.tags),
        "replies": _digest(turns),
    }
    return {name: count for name, count in counts.items() if count}


def tool_names(tags: Mapping[str, Any]) -> list[str]:
    """Names of the tools that arrived without parameters, from the tags of turns."""
    return [tag.removeprefix(EMPTY_SCHEMA) for tag in tags if tag.startswith(EMPTY_SCHEMA)]


def has_empty_schema(parameters: Mapping[str, Any]) -> bool:
    """Whether a tool's JSON schema allows no argument: without properties and without another rule."""
    ignored = {"type", "properties", "required", "additionalProperties", "$schema", "description", "title"}
    return not parameters.get("properties") and set(parameters) <= ignored


def _calls(turn: Turn) -> tuple[ToolCall, ...]:
    reply = turn.messages[-1] if turn.messages else None
    return reply.tool_calls if reply is not None and reply.role == "assistant" else ()


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _is_object(arguments: str) -> bool:
    return not arguments.strip() or isinstance(_parsed(arguments), dict)


def _untyped(turn: Turn) -> int:
    empty = tool_names(dict.fromkeys(turn.tags))
    return sum(call.name in empty and bool(_parsed(call.arguments)) for call in _calls(turn))


def _main_path(turns: Sequence[Turn], by_id: Mapping[str, Turn]) -> list[Turn]:
    """Turns of the longest conversation in tokens."""
    lengths: dict[str, int] = {}
    for turn in turns:
        own = len(turn.delta_ids) + len(turn.token_ids)
        lengths[turn.id] = own + (lengths.get(turn.parent, 0) if turn.parent else 0)
    return list(_path(by_id[max(lengths, key=lambda turn_id: lengths[turn_id])], by_id))


def _path(turn: Turn | None, by_id: Mapping[str, Turn]) -> Iterator[Turn]:
    """This turn, its parent, and so on."""
    while turn is not None:
        yield turn
        turn = by_id.get(turn.parent) if turn.parent else None


def _lost_results(turns: Sequence[Turn]) -> tuple[int, int]:
    """Number of tool calls that the conversation left behind, and of those whose result never came.

    A call is left behind if a later prompt has it, or if the same request was sent again after it and no
    prompt continues any of the replies.
    """
    answered: set[str] = set()
    spoken: dict[str, int] = {}
    for turn in turns:
        for message in _prompt_messages(turn):
            if message.role == "tool":
                answered.add(message.tool_call_id)
            for call in message.tool_calls:
                spoken[call.id] = spoken.get(call.id, 0) + 1
    parents = {turn.parent for turn in turns if turn.parent}
    repeated: dict[str, list[Turn]] = {}
    for turn in turns:
        if turn.request_digest:
            repeated.setdefault(turn.request_digest, []).append(turn)
    continued = lost = 0
    for turn in turns:
        calls = [call for call in _calls(turn) if call.id]
        alike = repeated.get(turn.request_digest, [turn])
        later = any(repeat.started >= (turn.ended or turn.started) for repeat in alike if repeat is not turn)
        asked_again = later and not any(repeat.id in parents for repeat in alike)
        for call in calls:
            if turn.id in parents or call.id in spoken or asked_again:
                continued += 1
                lost += call.id not in answered
    return continued, lost


def _prompt_messages(turn: Turn) -> tuple[Message, ...]:
    """New messages of the request, without the reply."""
    return turn.messages[:-1] if turn.messages and turn.messages[-1].role == "assistant" else turn.messages


def _is_unstable(turn: Turn, by_id: Mapping[str, Turn]) -> bool:
    """Whether a turn continues the messages of another one, but not its tokens."""
    if turn.parent is not None or turn.tier != "full":
        return False
    for link in turn.links:
        linked = by_id.get(link.to)
        if linked is None or linked.root != turn.root or link.type != "fork":
            continue
        before = [m for step in reversed(list(_path(linked, by_id))) for m in step.messages]
        if len(before) < len(turn.messages) and _texts(turn.messages[: len(before)]) == _texts(before):
            return True
    return False


def _texts(messages: Sequence[Message]) -> list[tuple[str, str, int]]:
    return [(message.role, message.content.strip(), len(message.tool_calls)) for message in messages]


def _digest(turns: Sequence[Turn]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for turn in turns:
        digest.update(array("q", (len(turn.token_ids), *turn.token_ids)).tobytes())
    return int.from_bytes(digest.digest()) >> 11
