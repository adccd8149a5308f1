"""What every step is checked for and has to tell.

Before any weight changes rows are compared with the recorded turns (`check_against_turns`),
and the policy has to give sampled tokens a finite log-probability, if wanted no further from the sampler's
than a bound. What is not so is refused by rollout and turn.
Every step tells how far sampler and trainer are apart, how much of what was sampled is trained and why
the rest is not, and what the loss cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afield.batches.verification import check_against_turns
from afield.errors import UsageError
from afield.token_account import metric_name
from afield.trainers.batch import Row
from afield.trainers.delivery import delivery
from afield.trainers.losses import LossOutputs, effective_sample_size
from afield.trainers.micro_batches import MicroBatch

__all__ = ["BatchDiagnostics", "LogprobDifference", "check_against_turns", "delivery"]

# --- what a step tells ---------------------------------------------------------------------------


class LogprobDifference(NamedTuple):
    """The token about which sampler and trainer disagree most."""

    by: float
    where: str
    place: int


class BatchDiagnostics:
    """What a step saw, token by token and update by update. `bound` is how far apart sampler and trainer
    may be about one token; None is as far as they like. Tokens of policy `version` have the weights that the
    trainer has; those of others differ by more than arithmetic.
    """

    def __init__(self, bound: float | None = None, version: int | None = None) -> None:
        self.bound = bound
        self.version = version
        self.worst = LogprobDifference(0.0, "", 0)
        self.tokens: dict[str, list[Tensor]] = {}
        self.updates: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self.tiers: dict[str, list[Tensor]] = {}

    def compare_logprobs(self, batch: MicroBatch, logp: Tensor) -> None:
        """Policy against sampler, before any update; refuses what is not a number."""
        logp = logp.detach()
        if (wrong := torch.nonzero(~torch.isfinite(logp)).flatten()).numel():
            where, place = locate_token(batch, int(wrong[0]))
            raise UsageError(
                f"{where}: the policy gives token {place} a log-probability of"
                f" {float(logp[wrong[0]])}; its weights are broken or it is not the model that sampled"
            )
        apart = (logp - batch.sampler).abs()
        self._see(diff=apart, entropy=-logp)
        if self.version is not None:
            self._see(current=apart[of_version(batch.rows, self.version).to(apart.device)])
        for tier, part in by_tier(batch.rows, apart).items():
            self.tiers.setdefault(tier, []).append(part)
        most = int(apart.argmax())
        if float(apart[most]) > self.worst.by:
            self.worst = LogprobDifference(float(apart[most]), *locate_token(batch, most))

    def check_bound(self) -> None:
        """Refuse a step whose sampler and trainer are too far apart. To be called before weights change."""
        if self.bound is not None and self.worst.by > self.bound:
            raise UsageError(
                f"{self.worst.where}: sampler and trainer are {self.worst.by:.3g} apart about the"
                f" log-probability of token {self.worst.place}, more than max_logprob_diff = {self.bound:g};"
                " do both have the same weights, and is the sampler stale or less precise?"
            )

    def add_loss(self, batch: MicroBatch, loss: LossOutputs) -> None:
        self._see(
            ratio=loss.ratio,
            clipped=loss.clipped.float(),
            importance=loss.importance,
            truncated=loss.truncated.float(),
        )
        if loss.penalty is not None:
            self._see(kl=loss.penalty)
        self.counts["computed_tokens"] += batch.computed
        self.counts["row_tokens"] += sum(len(row.trajectory.token_ids) for row in batch.rows)
        self.counts["passes"] += 1

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.updates.setdefault(name, []).append(value)

    def _see(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.tokens.setdefault(name, []).append(value.detach())

    def summary(self) -> dict[str, float]:
        seen = {name: torch.cat(values) for name, values in self.tokens.items()}
        if not self.updates:
            compared = self._compared(seen["entropy"], seen["diff"]) if "diff" in seen else {}
            return {**compared, **{name: float(count) for name, count in self.counts.items()}}
        return {
            **{name: sum(values) / len(values) for name, values in self.updates.items()},
            "ratio_mean": float(seen["ratio"].mean()),
            "ratio_min": float(seen["ratio"].min()),
            "ratio_max": float(seen["ratio"].max()),
            "clip_share": float(seen["clipped"].mean()),
            "importance_mean": float(seen["importance"].mean()),
            "importance_truncated_share": float(seen["truncated"].mean()),
            "importance_effective_share": effective_sample_size(seen["importance"])
            / seen["importance"].numel(),
            **({"kl": float(seen["kl"].mean())} if "kl" in seen else {}),
            **(self._compared(seen["entropy"], seen["diff"]) if "diff" in seen else {}),
            **{name: float(count) for name, count in self.counts.items()},
        }

    def _compared(self, entropy: Tensor, diff: Tensor) -> dict[str, float]:
        told = {
            "entropy": float(entropy.mean()),
            "sampler_trainer_logprob_diff_mean": float(diff.mean()),
            "sampler_trainer_logprob_diff_max": float(diff.max()),
        }
        current = torch.cat(self.tokens["current"]) if "current" in self.tokens else diff
        if current.numel():
            told["logprob_diff"] = float(current.mean())
        for tier, parts in sorted(self.tiers.items()):
            apart = torch.cat(parts)
            told[f"sampler_trainer_logprob_diff_mean.{tier}"] = float(apart.mean())
            told[f"sampler_trainer_logprob_diff_max.{tier}"] = float(apart.max())
        return told


def locate_token(batch: MicroBatch, token: int) -> tuple[str, int]:
    """Rollout and turn of a sampled token, and where it is in its row."""
    row, place = batch.rows[int(batch.row[token])], int(batch.place[token])
    turn = next(turn.id for turn in row.trajectory.turns if turn.start <= place < turn.end)
    return f"rollout {row.rollout_id}, turn {turn}", place


def of_version(rows: Sequence[Row], version: int) -> Tensor:
    """Which sampled tokens were drawn by exactly this version of the policy."""
    found: list[Tensor] = []
    for row in rows:
        drawn = torch.zeros(len(row.trajectory.token_ids), dtype=torch.bool)
        for span in row.trajectory.versions:
            drawn[span.start : span.end] = span.low == span.high == version
        found += [drawn[turn.start : turn.end] for turn in row.trajectory.turns]
    return torch.cat(found)


def by_tier(rows: Sequence[Row], values: Tensor) -> dict[str, Tensor]:
    """The values of sampled tokens, by how exactly their prompts were made; where that was recorded."""
    ranges = [turn for row in rows for turn in row.trajectory.turns]
    parts = values.split([turn.end - turn.start for turn in ranges])
    found: dict[str, list[Tensor]] = {}
    for turn, part in zip(ranges, parts, strict=True):
        if turn.tier and part.numel():
            found.setdefault(metric_name(turn.tier), []).append(part)
    return {tier: torch.cat(parts) for tier, parts in found.items()}
