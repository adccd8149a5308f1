"""Rows of groups as samples of TRL's asynchronous GRPO trainer.

TRL averages its loss over tokens, so by default an advantage is divided by its rollout's sampled tokens and
multiplied by their recent mean: each rollout has the same weight, regardless of length and branches. Rollouts
without a reward have no rows and are in no baseline. All rows of a rollout carry the version of its oldest
token, so that TRL refuses it as a whole or not at all. Rows that TRL would rescore differently from how they
were sampled are refused with rollout and turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from afield.advantages import compute_advantages
from afield.batches.rows import Row, rows_of
from afield.errors import UsageError
from afield.types import Group, Message, RolloutResult

RowWeighting = Literal["rollout", "token"]
TrlEstimator = Literal["grpo", "dr_grpo", "rloo", "remax"]
RECENT_GROUPS = 64
"""Groups over which the mean number of sampled tokens is taken."""


class RowConfig(Struct, frozen=True, kw_only=True):
    """Settings for building samples from groups."""

    temperature: float = 1.0
    """The trainer's sampling temperature, one for all turns."""
    advantage: TrlEstimator = "grpo"
    """Advantage estimator."""
    weigh: RowWeighting = "rollout"
    """`rollout` gives each rollout the same weight, `token` each token, as TRL does."""


class MeanLength:
    """Mean number of sampled tokens per rollout, over recent groups."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_GROUPS)

    def add(self, tokens: int, rollouts: int) -> float:
        """Add a group; returns the mean over recent groups."""
        if rollouts:
            self._recent.append((tokens, rollouts))
        return sum(t for t, _ in self._recent) / max(sum(n for _, n in self._recent), 1)


def samples(group: Group, config: RowConfig, *, number: int, base: int, lengths: MeanLength) -> list[Any]:
    """TRL samples of a group. `number` is TRL's group id; `base` the gateway version that TRL counts as 0."""
    advantages = compute_advantages([group], config.advantage)
    trained = [f for f in group.finished if f.rollout.id in advantages and owned_tokens(f)]
    mean = lengths.add(sum(map(owned_tokens, trained)), len(trained))
    built: list[Any] = []
    for finished in trained:
        advantage = advantages[finished.rollout.id]
        assert isinstance(advantage, float)
        weighted = advantage * (mean / owned_tokens(finished) if config.weigh == "rollout" else 1.0)
        version = min(span.low for row in finished.trajectories for span in row.versions) - base
        for row in rows_of(finished, weighted):
            if row.owned:
                check(finished, row, config.temperature)
                built.append(_sample(finished, row, number, version))
    return built


def owned_tokens(finished: RolloutResult) -> int:
    return sum(trajectory.owned for trajectory in finished.trajectories)


def check(finished: RolloutResult, row: Row, temperature: float) -> None:
    """Refuse a row that TRL would rescore under another distribution than it was sampled from."""
    with_images = [turn.id for turn in finished.turns if any(message.images for message in turn.messages)]
    turns = row.trajectory.turns
    if row.trajectory.images or with_images:
        raise UsageError(
            f"rollout {row.rollout_id}, turn {with_images[0] if with_images else turns[0].id}: it has"
            " images, and TRL's asynchronous GRPO has no place for pixels in its samples; train with afield's"
            " own trainer or with veRL, or take the images out of the task"
        )
    for turn in turns:
        where = f"rollout {row.rollout_id}, turn {turn.id}"
        if turn.truncated:
            raise UsageError(
                f"{where}: sampled with top_p, top_k or greedily, a distribution that TRL's loss does not"
                " reproduce; sample with temperature above 0, top_p=1 and top_k=0"
            )
        if turn.constraint is not None:
            raise UsageError(
                f"{where}: sampled under a constraint, which TRL's loss does not reproduce; collect with"
                " constrained_turns = 'exclude' or 'ignore'"
            )
        if turn.temperature != temperature:
            raise UsageError(
                f"{where}: sampled at temperature {turn.temperature:g}, but the trainer rescores everything"
                f" at {temperature:g}; give both the same"
            )
        if turn.start == 0:
            raise UsageError(f"{where}: its first token has no prompt before it, so it cannot be rescored")


def _sample(finished: RolloutResult, row: Row, number: int, version: int) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import (  # pyright: ignore[reportMissingImports]
        RolloutSample,
    )

    outcome = finished.outcome
    reward = outcome.reward_or_floor(0.0)
    prompt, completion = messages(finished, row)
    return RolloutSample(
        prompt=prompt,
        completion=completion,
        input_ids=np.array(row.token_ids, dtype=np.int64),
        completion_mask=np.array(row.trajectory.loss_mask, dtype=np.int64),
        old_log_probs=np.array(row.trajectory.logprobs, dtype=np.float32),
        advantage=row.advantages[0],
        model_version=version,
        group_id=number,
        metrics={"reward": reward or 0.0, **{f"rewards/{k}": v for k, v in outcome.rewards.items()}},
        enqueued_at=time.time(),
    )


def messages(finished: RolloutResult, row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages for TRL's logs: the prompt of the row's first turn, and all that followed."""
    owned = {turn.id for turn in row.trajectory.turns}
    turns = [turn.messages for turn in finished.turns if turn.id in owned and turn.messages]
    if not turns:
        return [], []
    first, *rest = turns
    after: Sequence[Message] = [first[-1], *(message for turn in rest for message in turn)]
    return [_plain(m) for m in first[:-1]], [_plain(m) for m in after]


def _plain(message: Message) -> dict[str, Any]:
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {
        "role": message.role,
        "content": message.content,
        **({"tool_calls": calls} if calls else {}),
    }
