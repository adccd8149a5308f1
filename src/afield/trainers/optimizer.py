"""A policy with its optimiser: score rows, add up gradients, make an update; and go on after a break.

Nothing here knows what is learned: rows come with their advantages, and a loss says what a token costs.
Gradients add up over as many passes as the memory wants (`max_tokens_per_pass`) until `apply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from afield.errors import UsageError
from afield.trainers.batch import Row
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.losses import LossInputs, LossOutputs
from afield.trainers.micro_batches import LayoutName, MicroBatch, split_micro_batches, token_logprobs
from afield.trainers.model import PolicyModel

SMALL = 5_000_000
CONTROL_TOKENS = 2048
LossFunction = Callable[[LossInputs], LossOutputs]
WeightFunction = Callable[
    [Tensor], tuple[Tensor, float]
]  # what tokens count, and what their sum is divided by
Scores = dict[int, Tensor]  # by the number of the row: a log-probability for each token it owns


def rows_for_control(rows: Sequence[Row]) -> list[Row]:
    """Enough rows to measure a mean over their sampled tokens."""
    chosen: list[Row] = []
    for row in rows:
        if sum(one.trajectory.owned for one in chosen) >= CONTROL_TOKENS:
            break
        chosen.append(row)
    return chosen


class Optimizer:
    """`eps` is AdamW's; near the size of a small model's gradients it keeps weights that hardly matter from
    being moved by noise.
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

    @property
    def layout(self) -> LayoutName:
        return self.policy.layout

    def micro_batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        if self.policy.device.type == "cpu" and self.policy.model.num_parameters() < SMALL:
            torch.set_num_threads(1)  # a small model's work is less than what sharing it out costs
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
    def score(self, rows: Sequence[Row], audit: BatchDiagnostics) -> Scores:
        """Log-probabilities of each row's sampled tokens under the policy as it is now."""
        scores: Scores = {}
        for batch in self.micro_batches(rows):
            logp = self.logprobs(self.policy.model, batch)
            audit.compare_logprobs(batch, logp)
            lengths = [row.trajectory.owned for row in batch.rows]
            scores.update(zip((row.number for row in batch.rows), logp.split(lengths), strict=True))
        return scores

    @torch.no_grad()
    def control_logprob_diff(self, rows: Sequence[Row], dtype: torch.dtype) -> float | None:
        """How far the model's own arithmetic in `dtype` is from float32 about the tokens of `rows`: the mean
        difference of log-probabilities, which a sampler in `dtype` cannot fall below.

        None where that cannot be measured: a sharded model whose weights are held in less than float32.
        """
        policy = self.policy
        if dtype == torch.float32:
            return 0.0
        parameters = list(policy.model.parameters())
        if any(isinstance(p, DTensor) and p.dtype != torch.float32 for p in parameters):
            return None
        apart: list[Tensor] = []
        for batch in self.micro_batches(rows_for_control(rows)):
            with policy.computing(torch.float32):
                exact = self.logprobs(policy.model, batch)
            with policy.computing(dtype):
                apart.append((self.logprobs(policy.model, batch) - exact).abs())
        return float(torch.cat(apart).mean()) if apart else None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(
        self,
        rows: Sequence[Row],
        loss: LossFunction,
        weigh: WeightFunction,
        audit: BatchDiagnostics,
        *,
        proximal: Scores | None = None,
        reference: bool = False,
    ) -> float:
        """Add the gradient of the loss over `rows`, whose value it returns. Without `proximal` scores the
        policy as it is now takes their place."""
        total = 0.0
        for batch in self.micro_batches(rows):
            logp = self.logprobs(self.policy.model, batch)
            if proximal is None:
                audit.compare_logprobs(batch, logp)
                before = logp.detach()
            else:
                before = torch.cat([proximal[row.number] for row in batch.rows])
            weight, divisor = weigh(batch.weight)
            seen = LossInputs(
                logp=logp,
                proximal=before,
                sampler=batch.sampler,
                advantage=batch.advantage,
                weight=weight,
                row=batch.row,
                reference=self.reference_logprobs(batch) if reference else None,
            )
            found = loss(seen)
            (found.total / divisor).backward()
            audit.add_loss(batch, found)
            total += float(found.total.detach()) / divisor
        return total

    def clip_gradient(self) -> float:
        """Cut the gradient to the bound; its norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.policy.trainable, self.grad_clip))

    def clip_and_step(self, lr: float | None = None) -> float:
        """Move the weights by the gradients that have added up, which stay; their norm, before it is cut.
        An `lr` given here is for this once."""
        norm = self.clip_gradient()
        if not math.isfinite(norm):
            raise UsageError(f"the gradient's norm is {norm}; lower the learning rate")
        self.step(lr)
        return norm

    def step(self, lr: float | None = None) -> None:
        """One optimiser step along the gradients, which are finite and clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.hyperparameters["lr"] if lr is None else lr
        self.optimizer.step()

    def logprobs(self, model: Any, batch: MicroBatch) -> Tensor:
        self.policy.set_attention(model, batch.layout)
        with self.policy.autocast():
            return token_logprobs(model, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        with self.policy.reference() as model:
            return self.logprobs(model, batch)

    def state(self) -> dict[str, Any]:
        return {"model": self.policy.state(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Weights and moments are those saved; how large a step is, and its kind, stays as given here."""
        self.policy.load_state(state["model"])
        self.load_optimizer(state["optimizer"])

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group.update(self.hyperparameters)
