"""What a sampled token costs: PPO's clip, CISPO, GSPO; corrections for staleness; KL; entropy; adding up.

Pure functions of vectors with one entry per sampled token, row after row; nothing here knows how a model
was run. Three policies meet: the one that sampled, the one the step began with (proximal), and the one
that is being trained. The ratio of the last two is what losses clip; the ratio of the first two is a
constant weight that corrects for staleness. A sequence is a row: where losses or corrections work on
sequences, a rollout of several rows has several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from afield.errors import UsageError

LossName = Literal["ppo", "cispo", "gspo", "dr_grpo"]
Aggregate = Literal["rollout", "token", "constant"]
Importance = Literal["token", "sequence", "masked", "off"]
Estimator = Literal["k1", "k2", "k3"]

DEFAULT_CLIP: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.28),
    "cispo": (1.0, 4.0),  # only from above: a ratio is never below 0
    "gspo": (3e-4, 4e-4),  # a sequence's ratio is a mean, and so much nearer to 1
}
USUAL_AGGREGATE: dict[str, Aggregate] = {
    "ppo": "rollout",
    "cispo": "rollout",
    "gspo": "rollout",
    "dr_grpo": "constant",
}


DUAL_CLIP = 3.0
"""Bound on the ratio of a token with a negative advantage (dual clip); for "ppo" and "dr_grpo"."""
MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""Bounds of the k3 estimator: on the log-ratio before it is exponentiated, and on the estimate itself."""


class LossInputs(NamedTuple):
    """What a loss sees of each sampled token. All log-probabilities are of the tempered distribution."""

    logp: Tensor  # of the policy in training, with its gradient
    proximal: Tensor  # of the policy the step began with
    sampler: Tensor  # when it was sampled
    advantage: Tensor
    weight: Tensor  # what it counts
    row: Tensor  # which sequence it belongs to, from 0
    reference: Tensor | None = None  # of the policy the run began with


class Objective(NamedTuple):
    """Which loss, with its settings."""

    loss: LossName = "ppo"
    clip: tuple[float, float] = DEFAULT_CLIP["ppo"]
    dual_clip: float = DUAL_CLIP
    importance: Importance = "token"
    importance_cap: float = 2.0
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0


class LossOutputs(NamedTuple):
    """`total` is summed over the tokens, each by its weight; the others are per token, without gradient."""

    total: Tensor
    ratio: Tensor  # to the proximal policy
    clipped: Tensor  # the clip took its gradient, or bounded its weight
    importance: Tensor  # the weight that corrects for staleness
    truncated: Tensor  # that weight is not what it would have been
    penalty: Tensor | None  # KL, where it is on


class TokenLoss(NamedTuple):
    cost: Tensor
    ratio: Tensor
    clipped: Tensor


def check_choice(word: str, words: Any, what: str) -> None:
    if word not in get_args(words):
        raise UsageError(f"unknown {what} {word!r}; choose one of: {', '.join(get_args(words))}")


def compute_loss(tokens: LossInputs, objective: Objective) -> LossOutputs:
    check_choice(objective.loss, LossName, "loss")
    surrogate = SURROGATES[objective.loss](tokens, objective)
    importance, truncated = importance_weights(
        tokens.proximal.detach() - tokens.sampler, tokens.row, objective.importance, objective.importance_cap
    )
    cost = surrogate.cost * importance
    if objective.entropy:
        cost = cost - objective.entropy * importance * entropy_bonus(tokens)
    penalty = None
    if tokens.reference is not None:
        penalty = kl_estimate(tokens.logp, tokens.reference, objective.kl_estimator)
        cost = cost + objective.kl * penalty
    return LossOutputs(
        total=(cost * tokens.weight).sum(),
        ratio=surrogate.ratio.detach(),
        clipped=surrogate.clipped,
        importance=importance,
        truncated=truncated,
        penalty=None if penalty is None else penalty.detach(),
    )


# --- losses --------------------------------------------------------------------------------------


def ppo(tokens: LossInputs, objective: Objective) -> TokenLoss:
    """The lesser gain of the ratio as it is and as it is bounded; dual clip bounds what a bad token costs."""
    ratio = torch.exp(tokens.logp - tokens.proximal)
    surrogate = _clipped(ratio, tokens.advantage, objective.clip)
    bound = -objective.dual_clip * tokens.advantage
    dual = (tokens.advantage < 0) & (surrogate.cost > bound)
    return TokenLoss(torch.where(dual, bound, surrogate.cost), ratio, surrogate.clipped | dual)


def gspo(tokens: LossInputs, objective: Objective) -> TokenLoss:
    """PPO's clip on the ratio of a whole sequence, its geometric mean; the gradient is spread over tokens."""
    apart = row_mean((tokens.logp - tokens.proximal).detach(), tokens.row)[tokens.row]
    ratio = torch.exp(tokens.logp - tokens.logp.detach() + apart)
    return _clipped(ratio, tokens.advantage, objective.clip)


def cispo(tokens: LossInputs, objective: Objective) -> TokenLoss:
    """REINFORCE weighed by the bounded ratio: every token keeps a gradient, whatever its ratio."""
    ratio = torch.exp(tokens.logp - tokens.proximal).detach()
    bounded = ratio.clamp(1 - objective.clip[0], 1 + objective.clip[1])
    return TokenLoss(-bounded * tokens.advantage * tokens.logp, ratio, bounded != ratio)


def _clipped(ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> TokenLoss:
    free = ratio * advantage
    held = ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage
    return TokenLoss(-torch.minimum(free, held), ratio, held < free)


# Dr. GRPO's surrogate is PPO's: what differs is how it adds up, and advantages that are not scaled.
SURROGATES: dict[str, Callable[[LossInputs, Objective], TokenLoss]] = {
    "ppo": ppo,
    "dr_grpo": ppo,
    "cispo": cispo,
    "gspo": gspo,
}


# --- what is added to them -----------------------------------------------------------------------


def importance_weights(apart: Tensor, row: Tensor, kind: Importance, cap: float) -> tuple[Tensor, Tensor]:
    """The weight that makes tokens of an older policy count as the proximal one's do, and where it was cut.

    `apart` is proximal minus sampler. "token" truncates each token's ratio at `cap`, "sequence" the product
    of a row's, "masked" drops tokens whose ratio is above `cap` or below its inverse.
    """
    if kind == "off":
        return torch.ones_like(apart), torch.zeros_like(apart, dtype=torch.bool)
    check_choice(kind, Importance, "importance")
    raw = torch.exp(row_sum(apart, row)[row] if kind == "sequence" else apart)
    if kind == "masked":
        outside = (raw > cap) | (raw < 1 / cap)
        return torch.where(outside, torch.zeros_like(raw), raw), outside
    return raw.clamp(max=cap), raw > cap


def kl_estimate(logp: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimates, from a token the policy sampled, of how far it has moved from the reference (KL).

    k1 is unbiased and may be negative; k2 is its square, halved; k3 is unbiased and never negative, up to
    its bounds (a token that the reference finds e^20 times likelier would count 5e8). k1's gradient teaches
    nothing as a loss (its mean is 0): it is differentiated as k2.
    """
    check_choice(estimator, Estimator, "KL estimator")
    away = logp - reference
    if estimator == "k2":
        return 0.5 * away.square()
    if estimator == "k1":
        halved = 0.5 * away.square()
        return away.detach() + halved - halved.detach()
    away = away.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-away) + away).clamp(max=MAX_K3)


def entropy_bonus(tokens: LossInputs) -> Tensor:
    """A token's part of the policy's entropy: -log p, with the gradient of the entropy in expectation."""
    ratio = torch.exp(tokens.logp - tokens.proximal.detach())
    return -ratio * tokens.logp.detach()


# --- how it adds up ------------------------------------------------------------------------------


def token_weights(
    weight: Tensor, aggregate: Aggregate, *, rollouts: int, tokens: int, length: int
) -> tuple[Tensor, float]:
    """What each token counts, and what their sum is divided by, in an update of `rollouts` with `tokens`.

    "rollout": the mean over rollouts, whose tokens (by `weight`) count 1 together. "token": the mean over
    tokens, so that a long rollout counts more. "constant": the sum of a rollout's tokens by `length`,
    which is the same for all, and the mean over rollouts.
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
    """How many equally weighed tokens these would be worth (Kish): far fewer than there are is a warning."""
    total, squares = float(weight.sum()), float(weight.square().sum())
    return total * total / squares if squares > 0 and math.isfinite(squares) else 0.0
