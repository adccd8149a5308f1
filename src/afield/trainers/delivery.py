"""How much of what was sampled is trained, and why the rest is not.

It needs no torch: a run that only collects says the same of itself, and starts without loading it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from afield.trainers.rows import Batch
from afield.types import Group

LONG = "too long"


def delivery(groups: Sequence[Group], batch: Batch) -> dict[str, float]:
    """The share of sampled tokens that reach training, and how many others there are, by reason."""
    lost: Counter[str] = Counter({LONG: sum(row.owned for row in batch.too_long)})
    trained = set(batch.rollout_ids)
    for finished in (f for group in groups for f in group.finished):
        for excluded in finished.excluded:
            lost[excluded.reason] += excluded.tokens
        if finished.rollout.id not in trained:
            kind = finished.outcome.failure.kind if finished.outcome.failure else "no advantage"
            lost[f"{kind} failure" if finished.outcome.failure else kind] += sum(
                row.owned for row in finished.trajectories
            )
    sampled = batch.tokens + lost.total()
    return {
        "delivered_share": batch.tokens / sampled if sampled else 1.0,
        **{f"undelivered_tokens.{word(reason)}": float(n) for reason, n in lost.items() if n},
    }


def word(text: str) -> str:
    """As part of a metric's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unknown"
