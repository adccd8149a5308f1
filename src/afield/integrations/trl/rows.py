"""Groups as TRL's asynchronous GRPO takes them: one `RolloutSample` for every row of every rollout.

Advantages are the rollout's: TRL averages its loss over tokens, so by default a rollout's advantage is
divided by its own number of sampled tokens and multiplied by the recent mean of it, and each rollout
weighs the same, whatever its length and branches. Rollouts without a reward have no rows and are in no
baseline. A rollout's rows are all as old as its oldest token, so that it is refused as a whole or not at
all. What TRL would rescore differently from how it was sampled is refused, naming rollout and turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from afield.advantages import compute_advantages
from afield.errors import UsageError
from afield.types import Group, Message, RolloutResult, Trajectory

RowWeighting = Literal["rollout", "token"]
TrlEstimator = Literal["grpo", "dr_grpo", "rloo", "remax"]
RECENT = 64  # groups over which the mean length is taken


class RowConfig(Struct, frozen=True, kw_only=True):
    """How rows are made. `temperature` is the trainer's: it has one for all turns."""

    temperature: float = 1.0
    advantage: TrlEstimator = "grpo"
    weigh: RowWeighting = "rollout"


class MeanLength:
    """The mean number of sampled tokens of a rollout, of late."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    def add(self, tokens: int, rollouts: int) -> float:
        if rollouts:
            self._recent.append((tokens, rollouts))
        return sum(t for t, _ in self._recent) / max(sum(n for _, n in self._recent), 1)


def rows(group: Group, recipe: RowConfig, *, number: int, base: int, lengths: MeanLength) -> list[Any]:
    """`number` is what TRL calls the group; version 0 of its own counting is the gateway's `base`."""
    earned = compute_advantages([group], recipe.advantage)
    trained = [f for f in group.finished if f.rollout.id in earned and owned(f)]
    mean = lengths.add(sum(map(owned, trained)), len(trained))
    made: list[Any] = []
    for finished in trained:
        share = mean / owned(finished) if recipe.weigh == "rollout" else 1.0
        earned_by_it = earned[finished.rollout.id]
        assert isinstance(earned_by_it, float)
        worth = earned_by_it * share
        for trajectory in finished.trajectories:
            if trajectory.owned:
                check(finished, trajectory, recipe.temperature)
                made.append(_sample(finished, trajectory, worth, number, oldest(finished) - base))
    return made


def owned(finished: RolloutResult) -> int:
    return sum(t.owned for t in finished.trajectories)


def oldest(finished: RolloutResult) -> int:
    """The version that sampled its oldest token."""
    return min(span.low for t in finished.trajectories for span in t.versions)


def check(finished: RolloutResult, trajectory: Trajectory, temperature: float) -> None:
    shown = [turn.id for turn in finished.turns if any(message.images for message in turn.messages)]
    if trajectory.images or shown:
        raise UsageError(
            f"rollout {finished.rollout.id}, turn {shown[0] if shown else trajectory.turns[0].id}: it has"
            " images, and TRL's asynchronous GRPO has no place for pixels in its samples; train with afield's"
            " own trainer or with veRL, or take the images out of the task"
        )
    for turn in trajectory.turns:
        where = f"rollout {finished.rollout.id}, turn {turn.id}"
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


def _sample(finished: RolloutResult, trajectory: Trajectory, worth: float, number: int, version: int) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import (  # pyright: ignore[reportMissingImports]
        RolloutSample,
    )

    outcome = finished.outcome
    reward = outcome.reward_or_floor(0.0)
    prompt, completion = messages(finished, trajectory)
    return RolloutSample(
        prompt=prompt,
        completion=completion,
        input_ids=np.array(trajectory.token_ids, dtype=np.int64),
        completion_mask=np.array(trajectory.loss_mask, dtype=np.int64),
        old_log_probs=np.array(trajectory.logprobs, dtype=np.float32),
        advantage=worth,
        model_version=version,
        group_id=number,
        metrics={"reward": reward or 0.0, **{f"rewards/{k}": v for k, v in outcome.rewards.items()}},
        enqueued_at=time.time(),
    )


def messages(
    finished: RolloutResult, trajectory: Trajectory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For people who read traces: what the row's first turn was asked, and what came after."""
    mine = {turn.id for turn in trajectory.turns}
    told = [turn.messages for turn in finished.turns if turn.id in mine and turn.messages]
    if not told:
        return [], []
    first, *rest = told
    after: Sequence[Message] = [first[-1], *(message for turn in rest for message in turn)]
    return [_plain(m) for m in first[:-1]], [_plain(m) for m in after]


def _plain(message: Message) -> dict[str, Any]:
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls]
    return {
        "role": message.role,
        "content": message.content,
        **({"tool_calls": calls} if calls else {}),
    }
