import json
import math
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from msgspec import structs

from afield import factory
from afield.errors import UsageError
from afield.settings.train import build
from afield.settings.trainer import LoraOptions, LossName
from afield.trainers.frozen import Frozen
from afield.trainers.grpo import GRPO
from afield.trainers.losses import LOSSES
from afield.trainers.optimizer import GROWTH_UPDATES
from afield.trajectories import linear, per_turn
from afield.types import Group, Sampling, Trajectory, TurnRange, VersionSpan
from support.paths import ROOT
from support.tiny_model import build_tiny_model
from support.training_groups import finished, forest, group, group_of

ANYTHING = 1e9  # a gradient clip that clips nothing


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("grpo") / "model", hidden=32, max_positions=128)


def gradient(model_path: Path, groups: list[Group], **settings) -> dict[str, torch.Tensor]:
    trainer = GRPO(model_path, lr=1e-3, grad_clip=ANYTHING, device="cpu", **settings)
    trainer.step(groups)
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def weights(trainer: GRPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    apart = math.sqrt(sum(float((one[n] - other[n]).square().sum()) for n in one))
    return apart / math.sqrt(sum(float(g.square().sum()) for g in other.values()))


def plain_gradient(model_path: Path, trained: Group, kl: float = 0.0) -> dict[str, torch.Tensor]:
    """The loss written out token by token, one row at a time, without padding or micro-batches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").eval()
    rewards = [f.outcome.reward or 0.0 for f in trained.finished]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    loss = torch.zeros(())
    for part, reward in zip(trained.finished, rewards, strict=True):
        earned = (reward - mean) / (deviation + 1e-4)
        owned = sum(t.owned for t in part.trajectories)
        for row in part.trajectories:
            logits = model(torch.tensor([row.token_ids])).logits[0]
            for turn in row.turns:
                for place in range(turn.start, turn.end):
                    distribution = torch.log_softmax(logits[place - 1] / turn.temperature, dim=-1)
                    logp = distribution[row.token_ids[place]]
                    weight = min(2.0, math.exp(float(logp.detach()) - row.logprobs[place]))
                    ratio = torch.exp(logp - logp.detach())
                    k3 = torch.exp(logp.detach() - logp) - (logp.detach() - logp) - 1
                    loss = loss + (kl * k3 - ratio * earned * weight) / owned / len(rewards)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_loss_written_out_token_by_token(model_path, temperature):
    trained = group_of([1.0, 0.0, 0.5, 0.0], sampling=Sampling(temperature=temperature))
    assert relative_error(gradient(model_path, [trained]), plain_gradient(model_path, trained)) < 1e-5


def test_at_the_start_the_penalty_has_no_gradient(model_path):
    trained = group_of([1.0, 0.0, 0.5, 0.0])
    with_kl = gradient(model_path, [trained], kl=0.5)
    assert relative_error(with_kl, plain_gradient(model_path, trained, kl=0.5)) < 1e-5


def test_the_penalty_pulls_a_policy_that_has_moved_back_to_the_start(model_path):
    trainer = GRPO(model_path, lr=1e-2, kl=0.1, device="cpu")
    flat = group_of([1.0, 1.0], name="flat", seed=50)
    trainer.step([group_of([1.0, 0.0])])
    moved = trainer.step([flat]).metrics["kl"]
    for _ in range(5):
        trainer.step([flat])
    assert trainer.step([flat]).metrics["kl"] < moved


def test_micro_batches_do_not_change_the_gradient(model_path):
    groups = [group_of([1.0, 0.0, 0.0, 1.0], turns=3)]
    small = gradient(model_path, groups, max_tokens_per_pass=1)
    assert relative_error(small, gradient(model_path, groups)) < 1e-5


def test_a_rollout_weighs_the_same_as_one_row_and_as_a_row_for_each_turn(model_path):
    conversations = [forest(n, turns=3) for n in range(4)]
    rewards = [1.0, 0.0, 0.0, 0.5]
    pairs = list(zip(rewards, conversations, strict=True))
    merged = [finished(str(n), r, linear(c).trajectories) for n, (r, c) in enumerate(pairs)]
    split = [finished(str(n), r, per_turn(c).trajectories) for n, (r, c) in enumerate(pairs)]
    assert [len(f.trajectories) for f in split] == [3, 3, 3, 3]
    ours = gradient(model_path, [group(*split)])
    assert relative_error(ours, gradient(model_path, [group(*merged)])) < 1e-5


def test_an_update_without_a_finite_gradient_is_skipped_and_the_third_in_a_row_refused(model_path):
    trainer = GRPO(model_path, lr=1e-3, scale=False, device="cpu")
    before = weights(trainer)
    huge, good = group_of([3e38, 0.0, -3e38]), group_of([1.0, 0.0])
    for _ in range(2):
        metrics = trainer.step([huge]).metrics
        assert metrics["skipped_updates"] == 1
        assert all(map(math.isfinite, metrics.values()))
        assert same(weights(trainer), before)
    assert trainer.step([good]).metrics.get("skipped_updates", 0) == 0
    assert not same(weights(trainer), before)
    for _ in range(2):
        trainer.step([huge])
    with pytest.raises(UsageError, match="in 3 updates in a row"):
        trainer.step([huge])


def test_tokens_that_were_not_sampled_get_no_gradient(model_path):
    """The output embedding's gradient is that of the sampled positions alone, whatever stands after them."""
    ids = (5, 6, 7, 8, 9, 10)
    lonely = Trajectory(
        token_ids=ids,
        loss_mask=(0, 0, 1, 0, 0, 0),
        logprobs=(0.0, 0.0, -6.0, 0.0, 0.0, 0.0),
        versions=(VersionSpan(2, 3, 0, 0),),
        turns=(TurnRange("t0", 2, 3, 1.0),),
        weight=1.0,
    )
    cut = Trajectory(
        token_ids=ids[:3],
        loss_mask=(0, 0, 1),
        logprobs=(0.0, 0.0, -6.0),
        versions=lonely.versions,
        turns=lonely.turns,
        weight=1.0,
    )
    other = linear(forest(9)).trajectories
    groups = [group(finished("a", 1.0, (row,)), finished("b", 0.0, other)) for row in (lonely, cut)]
    whole, shorter = (gradient(model_path, [g]) for g in groups)
    assert relative_error(whole, shorter) < 1e-5


def test_a_rollout_lost_to_infrastructure_changes_nothing(model_path):
    healthy = group_of([1.0, 0.0, 0.5])
    lost = finished("lost", None, linear(forest(77)).trajectories)
    ours = gradient(model_path, [group(*healthy.finished, lost)])
    assert same(ours, gradient(model_path, [healthy]))


def test_a_group_of_equal_rewards_changes_nothing_but_the_denominators(model_path):
    teaching = group_of([1.0, 0.0, 0.0])
    flat = group_of([1.0, 1.0, 1.0], name="flat", seed=20)
    diluted = gradient(model_path, [teaching, flat])
    doubled = {name: 2 * tensor for name, tensor in diluted.items()}
    assert relative_error(doubled, gradient(model_path, [teaching])) < 1e-5


def test_a_batch_that_teaches_nothing_leaves_the_weights_as_they_are(model_path):
    trainer = GRPO(model_path, lr=1e-2, device="cpu")
    trainer.step([group_of([1.0, 0.0])])
    before = weights(trainer)
    report = trainer.step([group_of([0.5, 0.5], name="flat")])
    assert same(before, weights(trainer))
    assert report.rollouts == 2


def test_an_update_makes_the_better_rollout_likelier(model_path):
    trained = group_of([1.0, 0.0])
    trainer = GRPO(model_path, lr=1e-3, minibatches=2, epochs=2, device="cpu")
    better = trained.finished[0].trajectories[0]
    before = rescored(trainer.model, better)
    trainer.step([trained])
    assert rescored(trainer.model, better) > before


@torch.no_grad()
def rescored(model, row: Trajectory) -> float:
    logits = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
    owned = [place for turn in row.turns for place in range(turn.start, turn.end)]
    return sum(float(logits[place - 1, row.token_ids[place]]) for place in owned)


def test_the_report_has_the_sampler_trainer_difference_before_the_update(model_path):
    trained = group_of([1.0, 0.0], version=3)
    row = trained.finished[0].trajectories[0]
    for settings in ({}, {"minibatches": 2, "epochs": 3}):
        trainer = GRPO(model_path, lr=1e-3, device="cpu", **settings)
        metrics = trainer.step([trained]).metrics
        assert 0 < metrics["sampler_trainer_logprob_diff_mean"] <= metrics["sampler_trainer_logprob_diff_max"]
        assert metrics["tokens"] == row.owned + trained.finished[1].trajectories[0].owned
        assert metrics["grad_norm"] > 0
        assert metrics["entropy"] > 0
        assert 0 <= metrics["clip_share"] <= 1
        assert metrics["ratio_min"] <= metrics["ratio_mean"] <= metrics["ratio_max"]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0)],
    ids=["top_p", "top_k", "greedy"],
)
@pytest.mark.parametrize("kind", [GRPO, Frozen])
def test_sampling_that_cannot_be_reproduced_is_refused(model_path, sampling, kind):
    trainer = GRPO(model_path, lr=1e-3, device="cpu") if kind is GRPO else Frozen(model_path)
    with pytest.raises(UsageError, match=r"rollout g-0, turn t0: .*top_p=1"):
        trainer.step([group_of([1.0, 0.0], sampling=sampling)])


def test_a_batch_that_does_not_line_up_is_refused_before_any_weight_changes(model_path):
    trainer = GRPO(model_path, lr=1e-3, device="cpu")
    before = weights(trainer)
    good = group_of([1.0, 0.0])

    def with_ids(*ids: int) -> Group:
        bad = Trajectory(
            token_ids=ids,
            loss_mask=(0,) * (len(ids) - 1) + (1,),
            logprobs=(0.0,) * (len(ids) - 1) + (-1.0,),
            versions=(VersionSpan(len(ids) - 1, len(ids), 0, 0),),
            turns=(TurnRange("t7", len(ids) - 1, len(ids), 1.0),),
            weight=1.0,
        )
        return group(good.finished[0], finished("1", 0.0, (bad,)))

    with pytest.raises(UsageError, match=r"rollout g-1, turn t7: token id 99999 is outside"):
        trainer.step([with_ids(1, 99999, 2)])
    with pytest.raises(UsageError, match="more than once"):
        trainer.step([good, good])
    assert same(before, weights(trainer))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_policy_with_broken_weights_is_refused(model_path, minibatches):
    trainer = GRPO(model_path, lr=1e-3, minibatches=minibatches, device="cpu")
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(UsageError, match=r"rollout g-\d, turn t\d: the policy gives token \d+ .* nan"):
        trainer.step([group_of([1.0, 0.0])])


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_restored_trainer_continues_bit_for_bit(model_path, tmp_path, minibatches):
    def trainer(seed: int) -> GRPO:
        return GRPO(model_path, lr=1e-3, minibatches=minibatches, seed=seed, device="cpu")

    batches = [[group_of([1.0, 0.0, 0.0, 1.0, 0.5], name=f"g{n}", seed=10 * n)] for n in range(4)]
    unbroken, first, second = trainer(1), trainer(1), trainer(2)
    for batch in batches[:2]:
        unbroken.step(batch)
        first.step(batch)
    first.save(tmp_path / "checkpoint")
    second.restore(tmp_path / "checkpoint")
    reports = [(unbroken.step(batch), second.step(batch)) for batch in batches[2:]]
    assert all(one == other for one, other in reports)
    assert same(weights(unbroken), weights(second))


@pytest.mark.parametrize("tied", [False, True])
def test_exported_weights_load_as_the_model_in_memory(tmp_path, tied):
    trainer = GRPO(build_tiny_model(tmp_path / "model", hidden=32, tied=tied), lr=1e-2, device="cpu")
    for _ in range(2):
        trainer.step([group_of([1.0, 0.0])])
        trainer.export(tmp_path / "out" / "v1")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "v1", dtype="float32")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
    assert json.loads((tmp_path / "out" / "v1" / "config.json").read_text())["tie_word_embeddings"] is False
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "v1").encode("red mug")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v1"]


def test_a_path_that_holds_no_model_is_named(tmp_path):
    for make in (lambda: GRPO(tmp_path / "nowhere", lr=1e-3), lambda: Frozen(tmp_path / "nowhere")):
        with pytest.raises(UsageError, match=r"nowhere is not a model directory"):
            make()


def test_a_directory_without_a_checkpoint_is_named(model_path, tmp_path):
    for trainer in (GRPO(model_path, lr=1e-3, device="cpu"), Frozen(model_path)):
        with pytest.raises(UsageError, match=r"restore from a directory that save\(\) wrote"):
            trainer.restore(tmp_path)


def test_a_frozen_trainer_exports_what_it_was_given(model_path, tmp_path):
    trainer = Frozen(model_path)
    report = trainer.step([group_of([1.0, 0.0])])
    assert (report.rollouts, report.metrics["tokens"]) == (2, report.tokens)
    trainer.export(tmp_path / "v1")
    given = (model_path / "model.safetensors").read_bytes()
    assert (tmp_path / "v1" / "model.safetensors").read_bytes() == given
    trainer.save(tmp_path / "checkpoint")
    again = Frozen(model_path)
    again.restore(tmp_path / "checkpoint")
    assert again.steps == 1


# --- what can be chosen --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "dr_grpo"])
def test_every_loss_has_the_same_gradient_over_a_tree_and_over_padded_rows(model_path, loss):
    rewards = enumerate([1.0, 0.0, 0.5])
    trained = group(*(finished(str(n), r, per_turn(forest(n, turns=3)).trajectories) for n, r in rewards))
    settings = {"loss": loss, "length": 20, "kl": 0.1, "entropy": 0.01}
    tree = gradient(model_path, [trained], layout="tree", **settings)
    padded = gradient(model_path, [trained], layout="padded", max_tokens_per_pass=30, **settings)
    assert relative_error(tree, padded) < 1e-5


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "dr_grpo"])
def test_every_loss_makes_the_better_rollout_likelier(model_path, loss):
    trained = group_of([1.0, 0.0])
    trainer = GRPO(model_path, lr=1e-3, loss=loss, length=16, minibatches=2, epochs=2, device="cpu")
    better, worse = (f.trajectories[0] for f in trained.finished)
    before = rescored(trainer.model, better) - rescored(trainer.model, worse)
    trainer.step([trained])
    assert rescored(trainer.model, better) - rescored(trainer.model, worse) > before


def test_on_its_first_update_a_step_has_the_same_gradient_whatever_the_loss(model_path):
    groups = [group_of([1.0, 0.0, 0.5])]
    ppo = gradient(model_path, groups)
    for loss in ("cispo", "gspo"):
        assert relative_error(gradient(model_path, groups, loss=loss), ppo) < 1e-5


def test_how_rollouts_of_unlike_length_add_up(model_path):
    """By rollout each counts the same; by token, or by a constant, the longer one counts more."""
    rows = [linear(forest(n, turns=turns)).trajectories for n, turns in enumerate((1, 4))]
    owned = [sum(row.owned for row in part) for part in rows]
    trained = [group(*(finished(str(n), 1.0 - n, part) for n, part in enumerate(rows)))]
    alone = [
        gradient(model_path, [group(finished("0", 1.0, rows[0]), finished("1", 0.0, ()))], scale=False),
        gradient(model_path, [group(finished("0", 1.0, ()), finished("1", 0.0, rows[1]))], scale=False),
    ]
    shares = {
        "rollout": [1.0, 1.0],
        "token": [2 * n / sum(owned) for n in owned],
        "constant": [n / 10 for n in owned],
    }
    for how, (one, other) in shares.items():
        expected = {name: one * alone[0][name] + other * alone[1][name] for name in alone[0]}
        ours = gradient(model_path, trained, scale=False, aggregate=how, length=10)
        assert relative_error(ours, expected) < 1e-5, how


def test_dr_grpo_divides_by_no_deviation_and_by_a_length_that_is_the_same_for_all(model_path):
    trained = [group_of([1.0, 0.0, 0.0])]
    ours = gradient(model_path, trained, loss="dr_grpo", length=12)
    plain = gradient(model_path, trained, scale=False, aggregate="constant", length=12)
    assert same(ours, plain)
    with pytest.raises(UsageError, match="'constant' needs a length"):
        GRPO(model_path, lr=1e-3, loss="dr_grpo", device="cpu")


def test_named_rewards_train_by_their_weights(model_path):
    plain = group_of([0.9, 0.1])
    parts = [{"answer": 1.0, "style": 0.5}, {"answer": 0.0, "style": 0.5}]
    named = [
        structs.replace(f, outcome=structs.replace(f.outcome, reward=7.0, rewards=rewards))
        for f, rewards in zip(plain.finished, parts, strict=True)
    ]
    ours = gradient(model_path, [group(*named)], scale=False, rewards={"answer": 0.8, "style": 0.2})
    assert relative_error(ours, gradient(model_path, [plain], scale=False)) < 1e-6
    with pytest.raises(UsageError, match="rollout g-0 has no reward named 'stile'"):
        gradient(model_path, [group(*named)], rewards={"answer": 0.8, "stile": 0.2})


def test_each_turn_may_earn_what_came_after_it(model_path):
    """The first of two turns got 1 and the second nothing; the other rollout got nothing at all."""
    good, bad = group_of([0.0, 0.0]).finished
    paid = structs.replace(good, outcome=structs.replace(good.outcome, turn_rewards={"t0": 1.0}))
    report = GRPO(model_path, lr=1e-3, credit="turns", scale=False, device="cpu")
    rows = report.batch([group(paid, bad)]).rows
    # A rollout stands for the mean of its turns, 0.5 and 0: they are compared with 0.25.
    assert [row.advantages for row in rows] == [(0.75, -0.25), (-0.25, -0.25)]
    late = structs.replace(good, outcome=structs.replace(good.outcome, turn_rewards={"t1": 1.0}))
    later = GRPO(model_path, lr=1e-3, credit="turns", discount=0.5, scale=False, device="cpu")
    assert later.batch([group(late, bad)]).rows[0].advantages == (0.125, 0.625)
    assert later.step([group(late, bad)]).metrics["grad_norm"] > 0


def test_checkpointing_changes_no_gradient(model_path):
    groups = [group_of([1.0, 0.0, 0.5])]
    ours = gradient(model_path, groups, checkpointing=True)
    assert relative_error(ours, gradient(model_path, groups)) < 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_weights_stay_float32_and_the_gradient_points_the_same_way(model_path, dtype):
    groups = [group_of([1.0, 0.0, 0.5])]
    half, full = gradient(model_path, groups, dtype=dtype), gradient(model_path, groups)
    assert {tensor.dtype for tensor in half.values()} == {torch.float32}
    dot = sum(float((half[n] * full[n]).sum()) for n in full)
    norms = [math.sqrt(sum(float(g.square().sum()) for g in side.values())) for side in (half, full)]
    assert dot / norms[0] / norms[1] > 0.99
    assert math.isclose(norms[0], norms[1], rel_tol=0.05)


def test_a_gradient_that_overflows_in_float16_is_computed_again_with_a_smaller_scale(model_path):
    def trained(factor: float) -> tuple[GRPO, float]:
        trainer = GRPO(model_path, lr=1e-3, dtype="float16", device="cpu")
        assert trainer.optimizer.loss_scale is not None
        trainer.optimizer.loss_scale.factor = factor
        report = trainer.step([group_of([1.0, 0.0, 0.5])])
        assert "skipped_updates" not in report.metrics
        return trainer, report.metrics["grad_norm"]

    (plain, norm), (rescaled, same_norm) = trained(2.0**16), trained(2.0**40)
    assert math.isclose(norm, same_norm, rel_tol=1e-2)
    assert plain.optimizer.loss_scale is not None
    assert plain.optimizer.loss_scale.factor == 2.0**16
    assert rescaled.optimizer.loss_scale is not None
    assert 2.0**16 <= rescaled.optimizer.loss_scale.factor < 2.0**40


def test_the_scale_of_the_loss_grows_after_updates_without_an_overflow(model_path):
    trainer = GRPO(model_path, lr=0.0, dtype="float16", device="cpu")
    scale = trainer.optimizer.loss_scale
    assert scale is not None
    scale.updates = GROWTH_UPDATES - 1
    trainer.step([group_of([1.0, 0.0])])
    assert (scale.factor, scale.updates) == (2.0**17, 0)


def test_by_default_a_cpu_computes_in_float32(model_path):
    assert GRPO(model_path, lr=1e-3, device="cpu").policy.dtype == "float32"


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": LoraOptions(rank=4), "kl": 0.1},
        {"dtype": "bfloat16", "checkpointing": True},
        {"dtype": "float16"},
        {"loss": "cispo", "layout": "padded", "epochs": 2, "minibatches": 2},
        {"loss": "gspo", "minibatches": 3, "advantage": "rloo"},
    ],
    ids=["lora", "bfloat16", "float16", "cispo", "gspo"],
)
def test_whatever_was_chosen_a_restored_trainer_continues_bit_for_bit(model_path, tmp_path, settings):
    def trainer(seed: int) -> GRPO:
        return GRPO(model_path, lr=1e-2, seed=seed, device="cpu", **settings)

    batches = [[group_of([1.0, 0.0, 0.0, 0.5], name=f"g{n}", seed=10 * n)] for n in range(3)]
    unbroken, second = trainer(1), trainer(2)
    for batch in batches[:2]:
        unbroken.step(batch)
    unbroken.save(tmp_path / "checkpoint")
    second.restore(tmp_path / "checkpoint")
    assert unbroken.step(batches[2]) == second.step(batches[2])
    assert same(weights(unbroken), weights(second))


def test_checkpoint_keeps_the_tokenizer_and_refuses_another_thinking_policy(model_path, tmp_path):
    trainer = GRPO(model_path, lr=1e-3, device="cpu", thinking="per_turn")
    trainer.step([group_of([1.0, 0.0])])
    trainer.save(tmp_path / "saved")
    kept = tmp_path / "saved" / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (kept / name).read_bytes() == (model_path / name).read_bytes()
    assert not list(kept.glob("*.safetensors"))
    with pytest.raises(UsageError, match="was trained with thinking 'per_turn', not 'preserve'"):
        GRPO(model_path, lr=1e-3, device="cpu").restore(tmp_path / "saved")


def test_a_checkpoint_of_another_template_is_refused(tmp_path):
    model = build_tiny_model(tmp_path / "model", hidden=32)
    trainer = GRPO(model, lr=1e-3, device="cpu")
    trainer.save(tmp_path / "saved")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UsageError, match=r"was saved with another chat_template\.jinja than"):
        trainer.restore(tmp_path / "saved")


def test_what_the_configuration_says_is_what_is_trained(model_path):
    config = {"model": str(model_path), "learn": {"loss": "cispo", "clip": [0.5, 2.0], "device": "cpu"}}
    trainer = factory.trainer(build(config, "here"))
    assert isinstance(trainer, GRPO)
    assert trainer.objective.loss == "cispo"
    assert trainer.objective.clip == (0.5, 2.0)
    dr = {"loss": "dr_grpo", "device": "cpu", "lora": {"rank": 2, "targets": ["q_proj"]}}
    trainer = factory.trainer(build({**config, "max_tokens": 30, "max_calls": 3, "learn": dr}, "here"))
    assert isinstance(trainer, GRPO)
    assert (trainer.aggregate, trainer.length, trainer.estimator) == ("constant", 90, "dr_grpo")
    assert all("q_proj" in name for name in trainer.policy.state())


@pytest.mark.parametrize(
    ("learn", "told"),
    [
        ({"loss": "dpo"}, "learn.loss = 'dpo' must be one of: ppo, cispo, gspo, dr_grpo"),
        ({"clip": [0.2]}, "must be two numbers: the distances below and above 1"),
        ({"importance_cap": 0.5}, "importance_cap = 0.5 must be at least 1"),
        ({"epochs": 0}, "epochs = 0 must be at least 1"),
        ({"discount": 1.5}, "discount = 1.5 must be from 0 to 1"),
        ({"entropy": -1.0}, "entropy = -1"),
        ({"max_logprob_diff": 0.0}, "max_logprob_diff = 0"),
        ({"lora": {"rank": -1}}, "rank = -1 must be 0"),
        ({"lora": {"targets": []}}, "targets is empty"),
        ({"lora": {"alpha": 0.0}}, "alpha = 0"),
        ({"lose": "ppo"}, "unknown key 'learn.lose' in here; did you mean 'learn.loss'"),
    ],
)
def test_unknown_learn_choice_is_refused_with_the_known_ones(learn, told):
    with pytest.raises(UsageError) as refused:
        build({"model": "m", "learn": learn}, "here")
    assert told in str(refused.value)


# --- the page about it ---------------------------------------------------------------------------

PAGE = ROOT / "docs" / "reference" / "run-directory.md"


def test_every_metric_of_a_step_is_documented(model_path):
    listed = set(re.findall(r"`([a-z_]+)", PAGE.read_text()))
    report = GRPO(model_path, lr=1e-3, kl=0.1, device="cpu").step([group_of([1.0, 0.0], tier="append")])
    assert {name.partition(".")[0] for name in report.metrics} <= listed


def test_every_loss_is_registered():
    assert set(LOSSES) == set(get_args(LossName))
