"""Our losses and veRL's on the same numbers; prints how far values and gradients are apart, as JSON.

Run by `test_verl_losses.py` in an environment that has veRL.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import FSDPActorConfig

from afield.trainers.losses import (
    LossInputs,
    Objective,
    compute_loss,
    importance_weights,
    kl_estimate,
    token_weights,
)

ROWS, WIDTH = 6, 11
CLIP = (0.2, 0.28)
AGGREGATES = {"rollout": "seq-mean-token-mean", "token": "token-mean", "constant": "seq-mean-token-sum-norm"}


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    mask[:, 4:6] = 0
    mask[2, 8:] = 0
    sampler = -3 * torch.rand(ROWS, WIDTH, dtype=torch.float64)
    proximal = sampler + 0.5 * torch.randn_like(sampler)
    logp = (proximal + 0.9 * torch.randn_like(sampler)).requires_grad_()
    reference = torch.where(torch.rand_like(proximal) < 0.1, proximal + 29.0, proximal)
    advantage = torch.randn(ROWS, 1, dtype=torch.float64).expand(ROWS, WIDTH)
    found = {
        **losses(mask, proximal, logp, advantage),
        **corrections(mask, proximal, sampler),
        **penalties(logp, reference),
    }
    return {name: float(value) for name, value in found.items()}


def losses(mask: Tensor, proximal: Tensor, logp: Tensor, advantage: Tensor) -> dict[str, Any]:
    config = FSDPActorConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio=CLIP[0],
        clip_ratio_low=CLIP[0],
        clip_ratio_high=CLIP[1],
        optim=None,
    )
    found: dict[str, Any] = {}
    for ours, theirs in (("ppo", "vanilla"), ("cispo", "cispo"), ("gspo", "gspo")):
        for aggregate, mode in AGGREGATES.items():
            told, metrics = core_algos.get_policy_loss_fn(theirs)(
                old_log_prob=proximal,
                log_prob=logp,
                advantages=advantage,
                response_mask=mask,
                loss_agg_mode=mode,
                config=config,
            )
            loss, share = mine(ours, aggregate, mask, proximal, logp, advantage)
            gradients = [torch.autograd.grad(total, logp)[0] for total in (told, loss)]
            found[f"{ours} {aggregate} value"] = (told - loss).detach().abs()
            found[f"{ours} {aggregate} gradient"] = (gradients[0] - gradients[1]).abs().max()
            # Tokens with a negative advantage that only the dual clip bounds are counted apart there.
            theirs_share = metrics["actor/pg_clipfrac"] + metrics.get("actor/pg_clipfrac_lower", 0.0)
            found[f"{ours} {aggregate} clipped"] = abs(theirs_share - share)
    return found


def mine(
    name: Any, aggregate: Any, mask: Tensor, proximal: Tensor, logp: Tensor, advantage: Tensor
) -> tuple[Tensor, float]:
    kept = mask.bool()
    row = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[kept]
    weight, divisor = token_weights(
        (1 / mask.sum(1, keepdim=True)).expand(ROWS, WIDTH)[kept],
        aggregate,
        rollouts=ROWS,
        tokens=int(mask.sum()),
        length=WIDTH,
    )
    seen = LossInputs(logp[kept], proximal[kept], proximal[kept], advantage[kept], weight, row)
    loss = compute_loss(seen, Objective(loss=name, clip=CLIP, importance="off"))
    return loss.total / divisor, float(loss.clipped.double().mean())


def corrections(mask: Tensor, proximal: Tensor, sampler: Tensor) -> dict[str, Any]:
    kept = mask.bool()
    row = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH)[kept]
    found: dict[str, Any] = {}
    for kind in ("token", "sequence"):
        told, _ = rollout_corr_helper.compute_rollout_correction_weights(
            proximal - sampler, mask, rollout_is=kind, rollout_is_threshold=2.0
        )
        ours, cut = importance_weights((proximal - sampler)[kept], row, kind, 2.0)
        found[f"importance {kind}"] = (told[kept] - ours).abs().max()
        found[f"importance {kind} cuts nothing"] = float(not cut.any())
    return found


def penalties(logp: Tensor, reference: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in (("k1", "k1+"), ("k2", "k2"), ("k3", "k3")):
        pair = core_algos.kl_penalty(logp, reference, theirs), kl_estimate(logp, reference, ours)
        gradients = [torch.autograd.grad(penalty.sum(), logp)[0] for penalty in pair]
        found[f"kl {ours}"] = (pair[0] - pair[1]).detach().abs().max()
        found[f"kl {ours} gradient"] = (gradients[0] - gradients[1]).abs().max()
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
