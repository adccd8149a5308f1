"""Diagnostics of a training step: sampler-trainer differences, ratios, clipping, KL.

1. Before any weight changes, refuses a policy whose log-probabilities are not finite or differ from the
   sampler's by more than an optional bound.
2. Collects per-token and per-update numbers and summarises them as metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from afield.batches.rows import Row
from afield.errors import UsageError
from afield.runs.token_account import metric_name
from afield.trainers.losses import LossOutputs, effective_sample_size
from afield.trainers.micro_batches import MicroBatch
from afield.trainers.token_recorder import TokenRecorder


class LogprobDifference(NamedTuple):
    """Largest difference between sampler and trainer log-probabilities."""

    diff: float
    """Absolute difference of the two log-probabilities."""
    where: str
    """Rollout and turn of the token, for messages."""
    place: int
    """Index of the token in its row."""


class BatchDiagnostics:
    """Collects the numbers of one step.

    `bound` is the largest allowed difference of a token's log-probabilities; None allows any.
    Tokens sampled by policy `version` differ from the trainer by arithmetic only. `recorder` gets the values
    of every token.
    """

    def __init__(
        self,
        bound: float | None = None,
        version: int | None = None,
        recorder: TokenRecorder | None = None,
    ) -> None:
        self.bound = bound
        self.version = version
        self.recorder = recorder
        self.worst = LogprobDifference(0.0, "", 0)
        self.tokens: dict[str, list[Tensor]] = {}
        self.updates: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self.tiers: dict[str, list[Tensor]] = {}

    def compare_logprobs(self, batch: MicroBatch, logp: Tensor, entropy: Tensor | None = None) -> None:
        """Compare policy and sampler before any update; refuses log-probabilities that are not finite."""
        logp = logp.detach()
        if self.recorder is not None:
            self.recorder.add(batch, logprob=logp, **({} if entropy is None else {"entropy": entropy}))
        if (wrong := torch.nonzero(~torch.isfinite(logp)).flatten()).numel():
            where, place = locate_token(batch, int(wrong[0]))
            raise UsageError(
                f"{where}: the policy gives token {place} a log-probability of"
                f" {float(logp[wrong[0]])}; its weights are broken or it is not the model that sampled"
            )
        diff = (logp - batch.sampler).abs()
        self._collect(diff=diff, entropy=-logp)
        if self.version is not None:
            current = sampled_by(batch.rows, self.version).to(diff.device)
            self._collect(current=diff[current])
        for tier, part in by_tier(batch.rows, diff).items():
            self.tiers.setdefault(tier, []).append(part)
        largest = int(diff.argmax())
        if float(diff[largest]) > self.worst.diff:
            self.worst = LogprobDifference(float(diff[largest]), *locate_token(batch, largest))

    def check_bound(self) -> None:
        """Refuse a step whose sampler and trainer differ by more than the bound."""
        if self.bound is not None and self.worst.diff > self.bound:
            raise UsageError(
                f"{self.worst.where}: sampler and trainer differ by {self.worst.diff:.3g} in the"
                f" log-probability of token {self.worst.place}, more than max_logprob_diff = {self.bound:g};"
                " do both have the same weights, and is the sampler stale or less precise?"
            )

    def add_loss(self, batch: MicroBatch, loss: LossOutputs) -> None:
        self._collect(
            ratio=loss.ratio,
            clipped=loss.clipped.float(),
            importance=loss.importance,
            truncated=loss.truncated.float(),
        )
        if self.recorder is not None:
            self.recorder.add(
                batch, ratio=loss.ratio, importance=loss.importance, clipped=loss.clipped.float()
            )
        if loss.penalty is not None:
            self._collect(kl=loss.penalty)
        self.counts["computed_tokens"] += batch.computed
        self.counts["row_tokens"] += sum(len(row.trajectory.token_ids) for row in batch.rows)
        self.counts["passes"] += 1

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.updates.setdefault(name, []).append(value)

    def _collect(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.tokens.setdefault(name, []).append(value.detach())

    def summary(self) -> dict[str, float]:
        tokens = {name: torch.cat(values) for name, values in self.tokens.items()}
        if not self.updates:
            compared = self._compared(tokens["entropy"], tokens["diff"]) if "diff" in tokens else {}
            return {**compared, **{name: float(count) for name, count in self.counts.items()}}
        return {
            **{name: sum(values) / len(values) for name, values in self.updates.items()},
            "ratio_mean": float(tokens["ratio"].mean()),
            "ratio_min": float(tokens["ratio"].min()),
            "ratio_max": float(tokens["ratio"].max()),
            "clip_share": float(tokens["clipped"].mean()),
            "importance_mean": float(tokens["importance"].mean()),
            "importance_truncated_share": float(tokens["truncated"].mean()),
            "importance_effective_share": effective_sample_size(tokens["importance"])
            / tokens["importance"].numel(),
            **({"kl": float(tokens["kl"].mean())} if "kl" in tokens else {}),
            **(self._compared(tokens["entropy"], tokens["diff"]) if "diff" in tokens else {}),
            **{name: float(count) for name, count in self.counts.items()},
        }

    def _compared(self, entropy: Tensor, diff: Tensor) -> dict[str, float]:
        metrics = {
            "entropy": float(entropy.mean()),
            "sampler_trainer_logprob_diff_mean": float(diff.mean()),
            "sampler_trainer_logprob_diff_max": float(diff.max()),
        }
        current = torch.cat(self.tokens["current"]) if "current" in self.tokens else diff
        if current.numel():
            metrics["logprob_diff"] = float(current.mean())
        for tier, parts in sorted(self.tiers.items()):
            diffs = torch.cat(parts)
            metrics[f"sampler_trainer_logprob_diff_mean.{tier}"] = float(diffs.mean())
            metrics[f"sampler_trainer_logprob_diff_max.{tier}"] = float(diffs.max())
        return metrics


def locate_token(batch: MicroBatch, token: int) -> tuple[str, int]:
    """Rollout and turn of a sampled token, and its index in the row."""
    row, place = batch.rows[int(batch.row[token])], int(batch.place[token])
    turn = next(turn.id for turn in row.trajectory.turns if turn.start <= place < turn.end)
    return f"rollout {row.rollout_id}, turn {turn}", place


def sampled_by(rows: Sequence[Row], version: int) -> Tensor:
    """Mask of the sampled tokens that exactly this policy version sampled."""
    masks: list[Tensor] = []
    for row in rows:
        mask = torch.zeros(len(row.trajectory.token_ids), dtype=torch.bool)
        for span in row.trajectory.versions:
            mask[span.start : span.end] = span.low == span.high == version
        masks += [mask[turn.start : turn.end] for turn in row.trajectory.turns]
    return torch.cat(masks)


def by_tier(rows: Sequence[Row], values: Tensor) -> dict[str, Tensor]:
    """Values of sampled tokens by the rendering tier of their prompts, where it was recorded."""
    ranges = [turn for row in rows for turn in row.trajectory.turns]
    parts = values.split([turn.end - turn.start for turn in ranges])
    tiers: dict[str, list[Tensor]] = {}
    for turn, part in zip(ranges, parts, strict=True):
        if turn.tier and part.numel():
            tiers.setdefault(metric_name(turn.tier), []).append(part)
    return {tier: torch.cat(parts) for tier, parts in tiers.items()}
