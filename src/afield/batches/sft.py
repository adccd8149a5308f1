"""Supervised fine-tuning pairs from the best rollouts of each group, as JSONL.

A line has `prompt` and `completion`, two lists of Chat Completions messages: what came before the first reply
of the model, and everything after it, on the path of the rollout's last committed turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from afield.types import Group, Message, RolloutResult, Turn, TurnStatus


def best_rollouts(groups: Iterable[Group], best: int, min_reward: float | None) -> list[RolloutResult]:
    """The `best` rollouts of each group with the highest rewards, of those that reach `min_reward`."""
    chosen: list[RolloutResult] = []
    for group in groups:
        rewarded = [f for f in group.finished if f.outcome.failure is None and f.outcome.reward is not None]
        able = [f for f in rewarded if min_reward is None or (f.outcome.reward or 0.0) >= min_reward]
        chosen += sorted(able, key=lambda f: -(f.outcome.reward or 0.0))[:best]
    return chosen


def pair(result: RolloutResult) -> dict[str, Any] | None:
    """A rollout as a pair; None if it has no committed turn."""
    turns = {turn.id: turn for turn in result.turns if turn.status is TurnStatus.COMMITTED}
    if not turns:
        return None
    path: list[Turn] = []
    turn: Turn | None = list(turns.values())[-1]
    while turn is not None:
        path.insert(0, turn)
        turn = turns.get(turn.parent) if turn.parent else None
    prompt = path[0].messages[:-1]
    completion = [path[0].messages[-1], *(message for turn in path[1:] for message in turn.messages)]
    return {
        "prompt": [chat_message(message) for message in prompt],
        "completion": [chat_message(message) for message in completion],
        "reward": result.outcome.reward,
        "rollout_id": result.rollout.id,
        "task_id": result.rollout.task.id,
    }


def chat_message(message: Message) -> dict[str, Any]:
    """A message as Chat Completions has it, with reasoning in `reasoning_content`."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    return fields


def write_sft(path: Path, results: Iterable[RolloutResult]) -> int:
    """Write the pairs of rollouts; returns their number."""
    pairs = [line for result in results if (line := pair(result)) is not None]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in pairs)
    path.write_text(text, encoding="utf-8")
    return len(pairs)
