"""Groups to the rows a step trains on, each with what its rollout earned; and what is refused.

A batch that does not line up is refused, naming rollout and turn: truncated or greedy sampling, ids
outside the vocabulary, numbers that are not finite. A row longer than the model's context cannot be
rescored and is never cut: it is left out and named, as data; the reward of its rollout was earned all the
same and counts in every baseline.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from afield.errors import UsageError
from afield.types import Group, Image, RolloutResult, Trajectory

log = logging.getLogger("afield.trainers")
NAMED = 8  # rows that are too long are named one by one up to here
Earned = Mapping[str, float | Mapping[str, float]]  # by rollout: one for all, or by turn


class Row(NamedTuple):
    """One sequence to train on. `number` is its place in the batch; `advantages` has one per turn it owns,
    `images` one per image that its trajectory has."""

    number: int
    rollout_id: str
    group_id: str
    trajectory: Trajectory
    advantages: tuple[float, ...]
    images: tuple[Image, ...] = ()


class TooLong(NamedTuple):
    """A row that was left out: `turn` is the first one of it that ends beyond the limit."""

    rollout_id: str
    turn: str
    tokens: int
    limit: int
    owned: int

    def __str__(self) -> str:
        return (
            f"rollout {self.rollout_id}, turn {self.turn}: {self.tokens} tokens exceed the model's context of"
            f" {self.limit}"
        )


class TrainingBatch(NamedTuple):
    """The rollouts that carry an advantage. One without rows still counts in the denominators."""

    rollout_ids: tuple[str, ...]
    rows: tuple[Row, ...]
    too_long: tuple[TooLong, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(row.trajectory.owned for row in self.rows)


def to_batch(groups: Iterable[Group], earned: Earned, context: int | None = None) -> TrainingBatch:
    """Rollouts that are not in `earned` stay out, and so do rows of more than `context` tokens."""
    ids: list[str] = []
    rows: list[Row] = []
    too_long: list[TooLong] = []
    for group in groups:
        for finished in group.finished:
            rollout_id = finished.rollout.id
            if rollout_id not in earned:
                continue
            ids.append(rollout_id)
            for trajectory in finished.trajectories:
                if context is not None and len(trajectory.token_ids) > context:
                    too_long.append(_too_long(rollout_id, trajectory, context))
                    continue
                advantages = _of_turns(earned[rollout_id], rollout_id, trajectory)
                images = images_of(finished, trajectory)
                rows.append(Row(len(rows), rollout_id, group.id, trajectory, advantages, images))
    if repeated := [i for i, times in Counter(ids).items() if times > 1]:
        raise UsageError(f"rollouts {repeated} are in the batch more than once; train on each once")
    _tell(too_long)
    return TrainingBatch(tuple(ids), tuple(rows), tuple(too_long))


def images_of(finished: RolloutResult, trajectory: Trajectory) -> tuple[Image, ...]:
    """Those of a row, in order; refused if they were not kept with the rollout."""
    kept = {image.digest: image for image in finished.images}
    if missing := [span.digest for span in trajectory.images if span.digest not in kept]:
        raise UsageError(
            f"rollout {finished.rollout.id}: its image {missing[0][:12]} was not kept with it, so it cannot"
            " be trained; collect it with this version of afield"
        )
    return tuple(kept[span.digest] for span in trajectory.images)


def _too_long(rollout_id: str, row: Trajectory, context: int) -> TooLong:
    turn = next((turn.id for turn in row.turns if turn.end > context), "(none)")
    return TooLong(rollout_id, turn, len(row.token_ids), context, row.owned)


def _tell(too_long: list[TooLong]) -> None:
    for one in too_long[:NAMED]:
        log.warning("%s; it is not trained, its reward counts; set max_context = %d", one, one.limit)
    if len(too_long) > NAMED:
        log.warning("and %d rows more that are too long", len(too_long) - NAMED)


def _of_turns(
    earned: float | Mapping[str, float], rollout_id: str, trajectory: Trajectory
) -> tuple[float, ...]:
    if isinstance(earned, int | float):
        return (float(earned),) * len(trajectory.turns)
    if missing := [turn.id for turn in trajectory.turns if turn.id not in earned]:
        raise UsageError(
            f"rollout {rollout_id}, turn {missing[0]}: it has no advantage; give one for each turn"
        )
    return tuple(earned[turn.id] for turn in trajectory.turns)


def check_rows(
    rows: Iterable[Row], *, vocabulary: int, context: int | None, no_images: str = "it has no vision part"
) -> None:
    """Refuse what cannot be rescored exactly. `no_images` is why the model takes none; empty if it does."""
    for row in rows:
        ids, turns = row.trajectory.token_ids, row.trajectory.turns
        where = f"rollout {row.rollout_id}, turn {turns[0].id if turns else '(none)'}"
        if row.trajectory.images and no_images:
            raise UsageError(
                f"{where}: it has images, which this trainer cannot give to the model: {no_images}"
            )
        if context is not None and len(ids) > context:
            raise UsageError(
                f"{where}: {len(ids)} tokens exceed the model's context of {context}; lower the budget"
            )
        if stray := [i for i in ids if not 0 <= i < vocabulary]:
            raise UsageError(
                f"{where}: token id {stray[0]} is outside the vocabulary of {vocabulary};"
                " train the model that the engine serves"
            )
        if (given := len(row.advantages)) != len(turns):
            raise UsageError(f"{where}: {given} advantages for {len(turns)} turns; one for each")
        _check_turns(row)


def _check_turns(row: Row) -> None:
    for turn, earned in zip(row.trajectory.turns, row.advantages, strict=True):
        where = f"rollout {row.rollout_id}, turn {turn.id}"
        if not math.isfinite(earned):
            raise UsageError(f"{where}: its advantage {earned} is not a finite number")
        if turn.truncated or turn.temperature <= 0:
            raise UsageError(
                f"{where}: sampled with temperature {turn.temperature:g}"
                f"{' and top_p or top_k' if turn.truncated else ''}, a distribution the trainer cannot"
                " reproduce; sample with temperature above 0, top_p=1 and top_k=0"
            )
        owned = row.trajectory.loss_mask[turn.start : turn.end]
        if turn.start < 1 or owned != (1,) * (turn.end - turn.start):
            raise UsageError(
                f"{where}: tokens {turn.start} to {turn.end} are not sampled ones after a prompt"
            )
        if bad := [p for p in row.trajectory.logprobs[turn.start : turn.end] if not math.isfinite(p)]:
            raise UsageError(f"{where}: recorded log-probability {bad[0]} is not a finite number")
