"""Training batch: rows of groups, their checks and token account.

Rows that cannot be rescored exactly are refused with rollout and turn: truncated or greedy sampling, ids
outside the vocabulary, numbers that are not finite. A row longer than the model's context is excluded and
logged; the reward of its rollout still counts in every baseline. This module needs no torch.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from afield.advantages import TurnAdvantages
from afield.batches.rows import Row, rows_of
from afield.errors import UsageError
from afield.runs.exclusions import ExclusionReason, UntrainedReason
from afield.runs.token_account import TokenAccount, failure_reason
from afield.types import Group

log = logging.getLogger(__name__)
MAX_LOGGED_ROWS = 8
"""Rows beyond the context that are logged individually."""


class TrainingBatch(NamedTuple):
    """Rollouts that have an advantage, and their rows."""

    rollout_ids: tuple[str, ...]
    """Rollouts with an advantage; one without rows still counts in the loss's denominator."""
    rows: tuple[Row, ...]
    """Rows to train on, with their advantages."""
    too_long: tuple[Row, ...] = ()
    """Rows that exceed the model's context and are not trained."""

    @property
    def tokens(self) -> int:
        return sum(row.owned for row in self.rows)

    @property
    def advantages(self) -> dict[str, float]:
        """Mean advantage of each rollout over its tokens."""
        sums: dict[str, list[float]] = {}
        for row in (*self.rows, *self.too_long):
            total = sums.setdefault(row.rollout_id, [0.0, 0.0])
            for turn, advantage in zip(row.trajectory.turns, row.advantages, strict=True):
                total[0] += advantage * (turn.end - turn.start)
                total[1] += turn.end - turn.start
        return {rollout_id: total / tokens for rollout_id, (total, tokens) in sums.items() if tokens}


def to_batch(
    groups: Iterable[Group], advantages: Mapping[str, TurnAdvantages], context: int | None = None
) -> TrainingBatch:
    """Build the rows of rollouts in `advantages`; rows of more than `context` tokens go to `too_long`."""
    ids: list[str] = []
    rows: list[Row] = []
    for result in (result for group in groups for result in group.finished):
        if result.rollout.id in advantages:
            ids.append(result.rollout.id)
            rows += rows_of(result, advantages[result.rollout.id])
    if repeated := [i for i, times in Counter(ids).items() if times > 1]:
        raise UsageError(f"rollouts {repeated} are in the batch more than once; train on each once")
    if context is None:
        return TrainingBatch(tuple(ids), tuple(rows))
    too_long = [row for row in rows if len(row.token_ids) > context]
    _log_too_long(too_long, context)
    return TrainingBatch(
        tuple(ids),
        tuple(row for row in rows if len(row.token_ids) <= context),
        tuple(structs.replace(row, excluded=ExclusionReason.TOO_LONG) for row in too_long),
    )


def _log_too_long(rows: Sequence[Row], context: int) -> None:
    for row in rows[:MAX_LOGGED_ROWS]:
        turn = next((turn.id for turn in row.trajectory.turns if turn.end > context), "(none)")
        log.warning(
            "rollout %s, turn %s: %d tokens exceed the model's context of %d; row not trained, reward counts;"
            " set max_context = %d",
            row.rollout_id,
            turn,
            len(row.token_ids),
            context,
            context,
        )
    if len(rows) > MAX_LOGGED_ROWS:
        log.warning("rows not trained: %d more exceed the model's context", len(rows) - MAX_LOGGED_ROWS)


def token_account(
    groups: Sequence[Group], batch: TrainingBatch, *, regularised: bool = False
) -> TokenAccount:
    """Trained, excluded and untrained tokens of a step.

    `regularised`: a KL or entropy term also trains rows whose advantages are zero.
    """
    excluded: Counter[str] = Counter()
    excluded[ExclusionReason.TOO_LONG] = sum(row.owned for row in batch.too_long)
    untrained: Counter[str] = Counter()
    trained = set(batch.rollout_ids)
    for result in (result for group in groups for result in group.finished):
        for exclusion in result.excluded:
            excluded[exclusion.reason] += exclusion.tokens
        if result.rollout.id not in trained:
            reason = failure_reason(result) or UntrainedReason.NO_ADVANTAGE
            untrained[reason] += sum(trajectory.owned for trajectory in result.trajectories)
    idle = 0 if regularised else sum(row.owned for row in batch.rows if not any(row.advantages))
    untrained[UntrainedReason.NO_ADVANTAGE] += idle
    return TokenAccount(trained=batch.tokens - idle, excluded=+excluded, untrained=+untrained)


def check_rows(
    rows: Iterable[Row],
    *,
    vocabulary: int,
    context: int | None,
    no_images: str = "it has no vision part",
    truncated: bool = False,
) -> None:
    """Refuse rows that cannot be rescored exactly.

    `no_images` is the reason why the model takes no images; empty if it does. `truncated` accepts turns that
    were sampled with top_p or top_k, for steps that rescore nothing.
    """
    for row in rows:
        ids, turns = row.token_ids, row.trajectory.turns
        if row.trajectory.images and no_images:
            raise UsageError(
                f"{row.where}: it has images, which this trainer cannot give to the model: {no_images}"
            )
        if context is not None and len(ids) > context:
            raise UsageError(
                f"{row.where}: {len(ids)} tokens exceed the model's context of {context}; lower the budget"
            )
        if stray := [i for i in ids if not 0 <= i < vocabulary]:
            raise UsageError(
                f"{row.where}: token id {stray[0]} is outside the vocabulary of {vocabulary};"
                " train the model that the engine serves"
            )
        if len(row.advantages) != len(turns):
            raise UsageError(
                f"{row.where}: {len(row.advantages)} advantages for {len(turns)} turns; give one per turn"
            )
        _check_turns(row, truncated)


def _check_turns(row: Row, truncated: bool) -> None:
    for turn, advantage in zip(row.trajectory.turns, row.advantages, strict=True):
        where = f"rollout {row.rollout_id}, turn {turn.id}"
        if not math.isfinite(advantage):
            raise UsageError(f"{where}: its advantage {advantage} is not a finite number")
        if (turn.truncated and not truncated) or turn.temperature <= 0:
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
