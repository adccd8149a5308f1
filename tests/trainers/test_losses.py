"""Losses against the same thing written out token by token, in plain Python over one tensor element."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from afield.errors import UsageError
from afield.trainers import losses
from afield.trainers.losses import LossInputs, LossOutputs, Objective, compute_loss

LENGTHS = (5, 1, 8, 3)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(seed: int = 0, *, spread: float = 0.5, reference: bool = False) -> LossInputs:
    rng = random.Random(seed)
    count = sum(LENGTHS)

    def near(values: list[float]) -> list[float]:
        return [min(value + rng.gauss(0, spread), -1e-3) for value in values]

    sampler = [-rng.uniform(0.1, 4) for _ in range(count)]
    proximal = near(sampler)
    row = [n for n, length in enumerate(LENGTHS) for _ in range(length)]
    earned = [rng.uniform(-2, 2) for _ in LENGTHS]

    def tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return LossInputs(
        logp=tensor(near(proximal)).requires_grad_(),
        proximal=tensor(proximal),
        sampler=tensor(sampler),
        advantage=tensor([earned[r] for r in row]),
        weight=tensor([1 / LENGTHS[r] for r in row]),
        row=torch.tensor(row),
        reference=tensor(near(proximal)) if reference else None,
    )


def value(of: Tensor) -> float:
    return float(of.detach())


def mean_ratio(seen: LossInputs, n: int) -> float:
    mine = [i for i, r in enumerate(seen.row.tolist()) if r == seen.row[n]]
    return math.exp(sum(value(seen.logp[i] - seen.proximal[i]) for i in mine) / len(mine))


def plain_ppo(seen: LossInputs, n: int, low: float, high: float) -> Tensor:
    ratio, gain = torch.exp(seen.logp[n] - seen.proximal[n]), float(seen.advantage[n])
    over = gain > 0 and value(ratio) > 1 + high
    under = gain < 0 and value(ratio) < 1 - low
    if gain < 0 and value(ratio) > 3:
        return torch.tensor(-3 * gain, dtype=torch.float64)
    bound = 1 + high if over else 1 - low
    return torch.tensor(-bound * gain, dtype=torch.float64) if over or under else -ratio * gain


def plain_cispo(seen: LossInputs, n: int, low: float, high: float) -> Tensor:
    ratio = math.exp(value(seen.logp[n] - seen.proximal[n]))
    return -min(max(ratio, 1 - low), 1 + high) * float(seen.advantage[n]) * seen.logp[n]


def plain_gspo(seen: LossInputs, n: int, low: float, high: float) -> Tensor:
    ratio, gain = mean_ratio(seen, n), float(seen.advantage[n])
    if (gain > 0 and ratio > 1 + high) or (gain < 0 and ratio < 1 - low):
        return torch.tensor(-(1 + high if gain > 0 else 1 - low) * gain, dtype=torch.float64)
    # Its value is the sequence's ratio times the advantage, its gradient that times the token's own.
    return -ratio * gain * (1 + seen.logp[n] - seen.logp[n].detach())


PLAIN: dict[str, Callable[[LossInputs, int, float, float], Tensor]] = {
    "ppo": plain_ppo,
    "dr_grpo": plain_ppo,
    "cispo": plain_cispo,
    "gspo": plain_gspo,
}


def gradient(total: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(total, of, retain_graph=True)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_loss_is_what_it_says_written_out_token_by_token(name, seed):
    seen, clip = tokens(seed), (0.15, 0.3)
    ours = compute_loss(seen, Objective(loss=name, clip=clip, importance="off"))
    plain = sum(PLAIN[name](seen, n, *clip) * float(seen.weight[n]) for n in range(len(seen.row)))
    assert isinstance(plain, Tensor)
    assert value(ours.total) == pytest.approx(value(plain), abs=1e-12)
    assert torch.allclose(gradient(ours.total, seen.logp), gradient(plain, seen.logp), atol=1e-12)


def test_clipping_is_counted_where_it_takes_the_gradient_away():
    seen = tokens(3)
    for name in ("ppo", "gspo"):
        loss = compute_loss(seen, Objective(loss=name, clip=(0.01, 0.02), importance="off"))
        assert torch.equal(gradient(loss.total, seen.logp) == 0, loss.clipped)
        assert 0 < int(loss.clipped.sum()) < len(seen.row), name
    loss = compute_loss(seen, Objective(loss="cispo", clip=(0.1, 0.2), importance="off"))
    assert loss.clipped.any()
    assert (gradient(loss.total, seen.logp) != 0).all()


def test_the_clip_may_be_wider_above_than_below():
    ratio = torch.tensor([0.75, 0.85, 1.25, 1.35], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    seen = LossInputs(ratio.log(), zero, zero, torch.tensor([-1.0, -1, 1, 1]), torch.ones(4), torch.arange(4))
    assert compute_loss(seen, Objective(clip=(0.2, 0.3))).clipped.tolist() == [True, False, False, True]


def test_the_dual_clip_bounds_what_a_token_with_a_negative_advantage_costs():
    ratio = torch.tensor([2.9, 3.1, 50.0, 50.0], dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    logp = ratio.log().requires_grad_()
    seen = LossInputs(logp, zero, zero, torch.tensor([-1.0, -1, -1, 1]), torch.ones(4), torch.arange(4))
    loss = compute_loss(seen, Objective(importance="off"))
    assert loss.clipped.tolist() == [False, True, True, True]
    assert value(loss.total) == pytest.approx(2.9 + 3.0 + 3.0 - 1.28)
    assert gradient(loss.total, logp).tolist() == pytest.approx([2.9, 0.0, 0.0, 0.0])
    free = compute_loss(seen, Objective(importance="off", dual_clip=math.inf))
    assert value(free.total) == pytest.approx(2.9 + 3.1 + 50 - 1.28)


def test_the_k3_estimate_is_bounded_where_policy_and_reference_are_far_apart():
    reference = torch.tensor([29.0, 3.0, 0.0, -29.0], dtype=torch.float64)
    logp = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    estimate = losses.kl_estimate(logp, reference, "k3")
    assert estimate.tolist() == pytest.approx([10.0, 10.0, 0.0, 10.0], abs=1e-9)
    assert torch.isfinite(gradient(estimate.sum(), logp)).all()


def test_at_its_start_a_step_has_the_gradient_of_reinforce_whatever_the_loss():
    seen = tokens(2)
    fresh = seen._replace(proximal=seen.logp.detach(), sampler=seen.logp.detach())
    for name in PLAIN:
        loss = compute_loss(fresh, Objective(loss=name))
        assert torch.allclose(gradient(loss.total, seen.logp), -seen.advantage * seen.weight)
        assert not loss.clipped.any()
        assert not loss.truncated.any()


def test_stale_tokens_are_corrected_for_up_to_a_bound():
    seen = tokens(3, spread=1.0)
    ratios = [math.exp(float(p - s)) for p, s in zip(seen.proximal, seen.sampler, strict=True)]
    for kind, expected in {
        "token": [min(r, 2.0) for r in ratios],
        "masked": [r if 0.5 <= r <= 2 else 0.0 for r in ratios],
        "sequence": [min(product(ratios, n), 2.0) for n in seen.row.tolist()],
        "off": [1.0] * len(ratios),
    }.items():
        loss = compute_loss(seen, Objective(importance=kind, importance_cap=2.0))
        assert loss.importance.tolist() == pytest.approx(expected)
        plain = compute_loss(seen, Objective(importance="off"))
        weighed = gradient(plain.total, seen.logp) * torch.tensor(expected, dtype=torch.float64)
        assert torch.allclose(gradient(loss.total, seen.logp), weighed)
        assert bool(loss.truncated.any()) == (kind != "off")


def product(ratios: list[float], row: int) -> float:
    start = sum(LENGTHS[:row])
    return math.prod(ratios[start : start + LENGTHS[row]])


def test_a_wildly_stale_sequence_is_bounded_not_infinite():
    far = torch.full((4,), 400.0)
    weight, cut = losses.importance_weights(far, torch.zeros(4, dtype=torch.long), "sequence", 2.0)
    assert weight.tolist() == [2.0] * 4
    assert cut.all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_is_right_on_average(estimator):
    """Over all tokens of a small vocabulary, each by its probability, the estimates give the KL itself."""
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    logits = (other + 0.01 * logits).requires_grad_()
    logp, reference = logits.log_softmax(0), other.log_softmax(0)
    estimate = losses.kl_estimate(logp, reference, estimator)
    chance = logp.exp().detach()
    exact = (logp.exp() * (logp - reference)).sum()
    near = 1e-5 if estimator == "k2" else 1e-12  # k2 is biased in the third order
    assert value((chance * estimate).sum()) == pytest.approx(value(exact), abs=near)
    if estimator == "k3":
        assert (estimate >= 0).all()
    if estimator != "k3":  # whose gradient is that of the other direction
        ours = gradient((chance * estimate).sum(), logits)
        assert torch.allclose(ours, gradient(exact, logits), atol=1e-10)


def test_the_penalty_counts_by_its_weight_and_is_reported():
    seen = tokens(4, reference=True)
    without = compute_loss(seen._replace(reference=None), Objective())
    with_kl = compute_loss(seen, Objective(kl=0.3))
    assert without.penalty is None
    assert with_kl.penalty is not None
    added = 0.3 * (with_kl.penalty * seen.weight).sum()
    assert value(with_kl.total) == pytest.approx(value(without.total + added))


def test_the_bonus_has_the_gradient_of_the_entropy():
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logp = logits.log_softmax(0)
    frozen = logp.detach()
    none = torch.zeros(7, dtype=torch.float64)
    seen = LossInputs(logp, frozen, frozen, none, frozen.exp(), torch.zeros(7, dtype=torch.long))
    ours = gradient(compute_loss(seen, Objective(entropy=0.5)).total, logits)
    entropy = -(logp.exp() * logp).sum()
    assert torch.allclose(ours, -0.5 * gradient(entropy, logits), atol=1e-12)


def test_token_weights_of_each_loss_aggregation():
    seen = tokens(6)
    much = {"rollouts": 4, "tokens": sum(LENGTHS), "length": 10}
    shares = {}
    for how in ("rollout", "token", "constant"):
        weight, by = losses.token_weights(seen.weight, how, **much)
        shares[how] = losses.row_sum(weight, seen.row) / by
    assert shares["rollout"].tolist() == pytest.approx([0.25] * 4)
    assert shares["token"].tolist() == pytest.approx([n / sum(LENGTHS) for n in LENGTHS])
    assert shares["constant"].tolist() == pytest.approx([n / 10 / 4 for n in LENGTHS])


def test_weights_that_differ_are_worth_fewer_tokens():
    assert losses.effective_sample_size(torch.ones(8)) == pytest.approx(8)
    assert losses.effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(1)
    assert losses.effective_sample_size(torch.zeros(3)) == 0


def test_a_loss_of_nothing_is_nothing():
    none = torch.zeros(0)
    seen = LossInputs(none, none, none, none, none, torch.zeros(0, dtype=torch.long))
    for name in PLAIN:
        loss = compute_loss(seen, Objective(loss=name, importance="sequence"))
        assert isinstance(loss, LossOutputs)
        assert float(loss.total) == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss": "dpo"}, "unknown loss 'dpo'; choose one of: ppo, cispo, gspo, dr_grpo"),
        ({"importance": "is"}, "unknown importance 'is'; choose one of: token, sequence, masked, off"),
        ({"kl": 0.1, "kl_estimator": "k4"}, "unknown KL estimator 'k4'; choose one of: k1, k2, k3"),
    ],
)
def test_unknown_loss_options_are_refused_with_the_known_ones(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        compute_loss(tokens(reference=True), Objective(**given))
    with pytest.raises(UsageError, match="unknown aggregate 'mean'; choose one of: rollout, token, constant"):
        losses.token_weights(torch.ones(3), "mean", rollouts=1, tokens=3, length=3)  # pyright: ignore[reportArgumentType]
