"""Token account of a training step: how much of what was sampled is trained, and why the rest is not.

It needs no torch: a run that only collects says the same of itself, and starts without loading it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from afield.exclusions import ExclusionReason, UntrainedReason
from afield.token_account import TokenAccount, failure_reason
from afield.trainers.batch import TrainingBatch
from afield.types import Group


def delivery(groups: Sequence[Group], batch: TrainingBatch, *, pulled: bool = False) -> TokenAccount:
    """The account of a batch. `pulled`: the loss has a term that also moves rows without an advantage."""
    excluded: Counter[str] = Counter()
    excluded[ExclusionReason.TOO_LONG] = sum(row.owned for row in batch.too_long)
    untrained: Counter[str] = Counter()
    trained = set(batch.rollout_ids)
    for finished in (f for group in groups for f in group.finished):
        for one in finished.excluded:
            excluded[one.reason] += one.tokens
        if finished.rollout.id not in trained:
            reason = failure_reason(finished) or UntrainedReason.NO_ADVANTAGE
            untrained[reason] += sum(row.owned for row in finished.trajectories)
    idle = 0 if pulled else sum(row.trajectory.owned for row in batch.rows if not any(row.advantages))
    untrained[UntrainedReason.NO_ADVANTAGE] += idle
    return TokenAccount(trained=batch.tokens - idle, excluded=+excluded, untrained=+untrained)
