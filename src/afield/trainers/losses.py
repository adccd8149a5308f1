"""Policy losses: PPO, CISPO, GSPO, Dr. GRPO; importance weights, KL, entropy.

Pure functions of vectors with one entry per sampled token, row after row.

1. Three policies: the sampler, the proximal policy that the step began with, and the policy in training.
2. Losses clip the ratio of the policy in training to the proximal one; the ratio of the proximal policy to
   the sampler is a constant importance weight.
3. A sequence is a row: for losses and corrections over sequences, a rollout of several rows has several.

To add a loss: write a function of `LossInputs` and `Objective`, and add a line to `LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from afield.errors import UsageError
from afield.settings.trainer import Aggregate, Importance, KLEstimator, LossName

DUAL_CLIP = 3.0
"""Bound on the ratio of a token with a negative advantage (dual clip), for "ppo" and "dr_grpo"."""
MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""Bounds of the k3 estimator: on the log-ratio before it is exponentiated, and on the estimate itself."""


class LossInputs(NamedTuple):
    """Inputs of a loss, one entry per sampled token. Log-probabilities are at the sampling temperature."""

    logp: Tensor
    """Log-probability under the policy in training, with its gradient."""
    proximal: Tensor
    """Log-probability under the policy that the step began with."""
    sampler: Tensor
    """Log-probability that the sampler recorded."""
    advantage: Tensor
    """Advantage of the token's turn."""
    weight: Tensor
    """Weight of the token in the sum; see `token_weights`."""
    row: Tensor
    """Index of the token's row, from 0."""
    reference: Tensor | None = None
    """Log-probability under the policy that the run began with; None without a KL penalty."""


class Objective(NamedTuple):
    """A loss and its settings."""

    loss: LossName = "ppo"
    """Name in `LOSSES`."""
    clip: tuple[float, float] | None = None
    """Bounds (low, high) of the ratio: 1 - low and 1 + high; None is the loss's default."""
    dual_clip: float = DUAL_CLIP
    """Bound on the ratio of tokens with a negative advantage; see `DUAL_CLIP`."""
    importance: Importance = "token"
    """Importance correction; see `importance_weights`."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    kl: float = 0.0
    """Coefficient of the KL penalty; 0 is off."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL penalty; see `kl_estimate`."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus; 0 is off."""

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip or LOSSES[self.loss].clip


class LossOutputs(NamedTuple):
    """The loss to differentiate, and per-token diagnostics without gradient."""

    total: Tensor
    """Sum over the tokens, each by its weight."""
    ratio: Tensor
    """Ratio to the proximal policy."""
    clipped: Tensor
    """Whether the clip removed the token's gradient, or bounded its weight."""
    importance: Tensor
    """Importance weight that corrects for staleness."""
    truncated: Tensor
    """Whether that weight was truncated or masked."""
    penalty: Tensor | None
    """KL estimate; None without a KL penalty."""


class TokenLoss(NamedTuple):
    """Policy loss per token, before importance weights."""

    loss: Tensor
    """Loss, with its gradient."""
    ratio: Tensor
    """Ratio to the proximal policy, of the token or its sequence."""
    clipped: Tensor
    """Whether the clip removed the gradient or bounded its weight."""


def check_choice(value: str, choices: Any, name: str) -> None:
    if value not in get_args(choices):
        raise UsageError(f"unknown {name} {value!r}; choose one of: {', '.join(get_args(choices))}")


def compute_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """Policy loss times importance weight, minus the entropy bonus, plus the KL penalty."""
    check_choice(objective.loss, LossName, "loss")
    policy = LOSSES[objective.loss].function(inputs, objective)
    importance, truncated = importance_weights(
        inputs.proximal.detach() - inputs.sampler, inputs.row, objective.importance, objective.importance_cap
    )
    loss = policy.loss * importance
    if objective.entropy:
        loss = loss - objective.entropy * importance * entropy_bonus(inputs)
    penalty = None
    if inputs.reference is not None:
        penalty = kl_estimate(inputs.logp, inputs.reference, objective.kl_estimator)
        loss = loss + objective.kl * penalty
    return LossOutputs(
        total=(loss * inputs.weight).sum(),
        ratio=policy.ratio.detach(),
        clipped=policy.clipped,
        importance=importance,
        truncated=truncated,
        penalty=None if penalty is None else penalty.detach(),
    )


# --- policy losses -------------------------------------------------------------------------------


def ppo(inputs: LossInputs, objective: Objective) -> TokenLoss:
    """PPO's clipped loss, with dual clip for negative advantages."""
    ratio = torch.exp(inputs.logp - inputs.proximal)
    clipped = _clipped(ratio, inputs.advantage, objective.bounds)
    bound = -objective.dual_clip * inputs.advantage
    dual = (inputs.advantage < 0) & (clipped.loss > bound)
    return TokenLoss(torch.where(dual, bound, clipped.loss), ratio, clipped.clipped | dual)


def gspo(inputs: LossInputs, objective: Objective) -> TokenLoss:
    """PPO's clip on the ratio of a sequence, the geometric mean over its tokens, which share the gradient."""
    log_ratio = row_mean((inputs.logp - inputs.proximal).detach(), inputs.row)[inputs.row]
    ratio = torch.exp(inputs.logp - inputs.logp.detach() + log_ratio)
    return _clipped(ratio, inputs.advantage, objective.bounds)


def cispo(inputs: LossInputs, objective: Objective) -> TokenLoss:
    """REINFORCE weighted by the clamped ratio: every token keeps its gradient."""
    low, high = objective.bounds
    ratio = torch.exp(inputs.logp - inputs.proximal).detach()
    clamped = ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-clamped * inputs.advantage * inputs.logp, ratio, clamped != ratio)


def _clipped(ratio: Tensor, advantage: Tensor, bounds: tuple[float, float]) -> TokenLoss:
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - bounds[0], 1 + bounds[1]) * advantage
    return TokenLoss(-torch.minimum(unclipped, clipped), ratio, clipped < unclipped)


class PolicyLoss(NamedTuple):
    """A registered loss with its default clip and aggregation."""

    function: Callable[[LossInputs, Objective], TokenLoss]
    """Function that computes the loss of each token."""
    clip: tuple[float, float]
    """Default bounds (low, high) of the ratio: 1 - low and 1 + high."""
    aggregate: Aggregate = "rollout"
    """Default aggregation; see `token_weights`."""


LOSSES: dict[LossName, PolicyLoss] = {
    "ppo": PolicyLoss(ppo, clip=(0.2, 0.28)),
    # PPO's loss with another aggregation; advantages are not divided by their standard deviation.
    "dr_grpo": PolicyLoss(ppo, clip=(0.2, 0.28), aggregate="constant"),
    # Bounded from above only: a ratio is never below 0.
    "cispo": PolicyLoss(cispo, clip=(1.0, 4.0)),
    # A sequence's ratio is a mean over tokens, so it is much closer to 1.
    "gspo": PolicyLoss(gspo, clip=(3e-4, 4e-4)),
}


# --- importance weights, KL, entropy -------------------------------------------------------------


def importance_weights(
    log_ratio: Tensor, row: Tensor, importance: Importance, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weights that correct for the sampler's policy, and whether each was truncated.

    `log_ratio` is proximal minus sampler. "token" truncates each token's ratio at `cap`, "sequence" the
    product over a row, "masked" drops tokens whose ratio is above `cap` or below its inverse.
    """
    if importance == "off":
        return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    check_choice(importance, Importance, "importance")
    ratio = torch.exp(row_sum(log_ratio, row)[row] if importance == "sequence" else log_ratio)
    if importance == "masked":
        outside = (ratio > cap) | (ratio < 1 / cap)
        return torch.where(outside, torch.zeros_like(ratio), ratio), outside
    return ratio.clamp(max=cap), ratio > cap


def kl_estimate(logp: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of the KL divergence from the reference policy.

    k1 is unbiased and may be negative; k2 is its square, halved; k3 is unbiased and never negative, up to
    its bounds (a token that the reference finds e^20 times likelier would count 5e8). The gradient of k1 has
    mean 0 and has no effect, so k1 is differentiated as k2.
    """
    check_choice(estimator, KLEstimator, "KL estimator")
    log_ratio = logp - reference
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k1":
        k2 = 0.5 * log_ratio.square()
        return log_ratio.detach() + k2 - k2.detach()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-log_ratio) + log_ratio).clamp(max=MAX_K3)


def entropy_bonus(inputs: LossInputs) -> Tensor:
    """A token's part of the policy's entropy: -log p, with the gradient of the entropy in expectation."""
    ratio = torch.exp(inputs.logp - inputs.proximal.detach())
    return -ratio * inputs.logp.detach()


# --- aggregation ---------------------------------------------------------------------------------


def token_weights(
    weight: Tensor, aggregate: Aggregate, *, rollouts: int, tokens: int, length: int
) -> tuple[Tensor, float]:
    """Weight of each token, and the divisor of their sum, in an update of `rollouts` with `tokens`.

    "rollout": mean over rollouts, whose tokens (by `weight`) add up to 1. "token": mean over tokens, so that
    a long rollout counts more. "constant": sum over a rollout's tokens divided by `length`, then the mean
    over rollouts.
    """
    check_choice(aggregate, Aggregate, "aggregate")
    if aggregate == "rollout":
        return weight, float(rollouts)
    if aggregate == "token":
        return torch.ones_like(weight), float(tokens)
    return torch.ones_like(weight), float(rollouts) * length


def row_sum(values: Tensor, row: Tensor) -> Tensor:
    rows = int(row.max()) + 1 if row.numel() else 0
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)


def row_mean(values: Tensor, row: Tensor) -> Tensor:
    return row_sum(values, row) / row_sum(torch.ones_like(values), row).clamp(min=1)


def effective_sample_size(weight: Tensor) -> float:
    """Kish's effective sample size: the number of equally weighted tokens that these are worth."""
    total, squares = float(weight.sum()), float(weight.square().sum())
    return total * total / squares if squares > 0 and math.isfinite(squares) else 0.0
