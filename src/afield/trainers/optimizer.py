"""AdamW over a policy: scores rows, accumulates gradients over micro-batches, steps.

Rows have advantages; the caller provides the loss. Gradients add up over micro-batches of
`max_tokens_per_pass` until `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from afield.batches.rows import Row
from afield.errors import UsageError
from afield.settings.trainer import LayoutName
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import LossInputs, LossOutputs
from afield.trainers.micro_batches import MicroBatch, TokenScores, split_micro_batches, token_scores
from afield.trainers.model import PolicyModel
from afield.trainers.sharded_checkpoint import flat_state, load_shards

SMALL_MODEL = 5_000_000
"""Parameters below which a model runs on one CPU thread."""
CONTROL_TOKENS = 2048
"""Sampled tokens over which the control difference is measured."""
FIRST_SCALE = 2.0**16
GROWTH_UPDATES = 200
LossFunction = Callable[[LossInputs], LossOutputs]
WeightFunction = Callable[[Tensor], tuple[Tensor, float]]
"""Token weights, and the divisor of their sum; see `losses.token_weights`."""
Scores = dict[tuple[str, int], Tensor]
"""Log-probabilities of the tokens that a row owns, by `Row.key`."""


def rows_for_control(rows: Sequence[Row]) -> list[Row]:
    """Enough rows to measure a mean over their sampled tokens."""
    chosen: list[Row] = []
    for row in rows:
        if sum(row.owned for row in chosen) >= CONTROL_TOKENS:
            break
        chosen.append(row)
    return chosen


class LossScale:
    """Factor of the loss that keeps small float16 gradients from becoming 0.

    It is halved when the gradient overflows, and doubled after `GROWTH_UPDATES` updates without an overflow.
    """

    def __init__(self) -> None:
        self.factor = FIRST_SCALE
        self.updates = 0
        """Updates since the factor changed."""

    def overflowed(self) -> None:
        self.factor, self.updates = self.factor / 2, 0

    def updated(self) -> None:
        self.updates += 1
        if self.updates >= GROWTH_UPDATES:
            self.factor, self.updates = self.factor * 2, 0


class Optimizer:
    """AdamW and the forward and backward passes of a policy.

    For small models, an `eps` near the size of the gradients keeps noise from moving weights of little
    effect.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        max_tokens_per_pass: int = 16384,
    ) -> None:
        if not 0 <= lr < math.inf:
            raise UsageError(f"lr = {lr} must be 0 or positive")
        self.policy = policy
        self.hyperparameters = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        self.optimizer = torch.optim.AdamW(policy.trainable, lr=lr, eps=eps, weight_decay=weight_decay)
        self.grad_clip = grad_clip
        self.max_tokens_per_pass = max_tokens_per_pass
        self.loss_scale = LossScale() if policy.dtype == "float16" else None
        """Scale of the loss in float16; None in other dtypes."""

    @property
    def layout(self) -> LayoutName:
        return self.policy.layout

    def micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        if self.policy.device.type == "cpu" and self.policy.model.num_parameters() < SMALL_MODEL:
            torch.set_num_threads(1)  # for a small model, threads cost more than they save
        policy = self.policy
        return split_micro_batches(
            rows,
            self.max_tokens_per_pass,
            policy.device,
            self.layout,
            policy.tree_context,
            policy.images,
            policy.masks,
        )

    @torch.no_grad()
    def score(self, rows: Sequence[Row], diagnostics: BatchDiagnostics) -> Scores:
        """Log-probabilities of each row's sampled tokens under the policy as it is now."""
        scores: Scores = {}
        with self.policy.rounded():
            for batch in self.micro_batches(rows):
                logp, entropy = self.scores(
                    self.policy.model, batch, entropy=diagnostics.recorder is not None
                )
                diagnostics.compare_logprobs(batch, logp, entropy)
                lengths = [row.owned for row in batch.rows]
                scores.update(zip((row.key for row in batch.rows), logp.split(lengths), strict=True))
        return scores

    @torch.no_grad()
    def control_logprob_diff(self, rows: Sequence[Row], dtype: torch.dtype) -> float | None:
        """Mean difference in log-probabilities between `dtype` and float32: a sampler in `dtype` cannot be
        closer to the trainer. None for a sharded model whose weights are held in less than float32.
        """
        policy = self.policy
        if dtype == torch.float32:
            return 0.0
        parameters = list(policy.model.parameters())
        if any(isinstance(p, DTensor) and p.dtype != torch.float32 for p in parameters):
            return None
        diffs: list[Tensor] = []
        with policy.rounded():
            for batch in self.micro_batches(rows_for_control(rows)):
                with policy.computing(torch.float32):
                    exact = self.logprobs(policy.model, batch)
                with policy.computing(dtype):
                    diffs.append((self.logprobs(policy.model, batch) - exact).abs())
        return float(torch.cat(diffs).mean()) if diffs else None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(
        self,
        rows: Sequence[Row],
        loss: LossFunction,
        weights: WeightFunction,
        diagnostics: BatchDiagnostics,
        *,
        proximal: Scores | None = None,
        reference: bool = False,
    ) -> float:
        """Accumulate the gradient of the loss over `rows`; returns the loss. Without `proximal` scores the
        current policy is the proximal one."""
        with self.policy.rounded():
            return self._backward(rows, loss, weights, diagnostics, proximal, reference=reference)

    def _backward(
        self,
        rows: Sequence[Row],
        loss: LossFunction,
        weights: WeightFunction,
        diagnostics: BatchDiagnostics,
        proximal: Scores | None,
        *,
        reference: bool,
    ) -> float:
        total, scale = 0.0, self.loss_scale.factor if self.loss_scale else 1.0
        for batch in self.micro_batches(rows):
            # With proximal scores, the values of the policy before the step have been recorded.
            recorded = diagnostics.recorder is not None and proximal is None
            logp, entropy = self.scores(self.policy.model, batch, entropy=recorded)
            if proximal is None:
                diagnostics.compare_logprobs(batch, logp, entropy)
                before = logp.detach()
            else:
                before = torch.cat([proximal[row.key] for row in batch.rows])
            weight, divisor = weights(batch.weight)
            inputs = LossInputs(
                logp=logp,
                proximal=before,
                sampler=batch.sampler,
                advantage=batch.advantage,
                weight=weight,
                row=batch.row,
                reference=self.reference_logprobs(batch) if reference else None,
            )
            outputs = loss(inputs)
            (outputs.total * (scale / divisor)).backward()
            diagnostics.add_loss(batch, outputs)
            total += float(outputs.total.detach()) / divisor
        return total

    def clip_gradient(self) -> float:
        """Clip the gradient; returns its norm before."""
        if self.loss_scale:
            for parameter in self.policy.trainable:
                if parameter.grad is not None:
                    parameter.grad.div_(self.loss_scale.factor)
        return self._clip()

    def _clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.policy.trainable, self.grad_clip))

    def lower_loss_scale(self) -> bool:
        """After a gradient that is not finite: halve the scale of the loss. False if there is none to halve,
        so that computing the gradient again would give the same."""
        if self.loss_scale is None or self.loss_scale.factor <= 1:
            return False
        self.loss_scale.overflowed()
        return True

    def clip_and_step(self, lr: float | None = None) -> float:
        """Clip the gradient and step; returns the norm before clipping. `lr` holds for this step only."""
        norm = self.clip_gradient()
        if not math.isfinite(norm):
            remedy = "lower the learning rate"
            if self.lower_loss_scale():
                remedy = "the loss is scaled less now: compute the gradient again"
            raise UsageError(f"the gradient's norm is {norm}; {remedy}")
        self.step(lr)
        return norm

    def step(self, lr: float | None = None) -> None:
        """Make an AdamW step; the gradient must be finite and clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.hyperparameters["lr"] if lr is None else lr
        self.policy.changed()  # before, to have the memory of the rounded weights
        self.optimizer.step()
        if self.loss_scale:
            self.loss_scale.updated()

    def logprobs(self, model: Any, batch: MicroBatch) -> Tensor:
        return self.scores(model, batch).logprob

    def scores(self, model: Any, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        self.policy.set_attention(model, batch.layout)
        with self.policy.autocast():
            return token_scores(model, batch, entropy=entropy)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.reference() as model:
            return self.logprobs(model, batch)

    def state(self) -> dict[str, Any]:
        return {"model": self.policy.state(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load weights and moments; hyperparameters stay those of this optimizer."""
        self.policy.load_state(state["model"])
        self.load_optimizer(state["optimizer"])

    def shards(self) -> dict[str, Tensor]:
        """Trained tensors and optimizer state of this process, for a sharded checkpoint."""
        return flat_state(self.policy.trained(), self.optimizer)

    def load_shards(self, directory: Path) -> None:
        """Load weights and moments from a sharded checkpoint, by any number of processes."""
        policy = self.policy
        moments = load_shards(directory, policy.trained(), policy.trainable, policy.checkpoint_group)
        policy.changed()
        self.load_optimizer({**self.optimizer.state_dict(), "state": moments})

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group.update(self.hyperparameters)
