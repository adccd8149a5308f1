import json
import math
import random
from pathlib import Path

import pytest
import torch
import transformers

from afield.assembly import linear, per_turn
from afield.errors import UsageError
from afield.forest import Forest
from afield.trainers.frozen import Frozen
from afield.trainers.grpo import GRPO
from afield.types import (
    Failure,
    FailureKind,
    Finished,
    FinishReason,
    Group,
    Outcome,
    Reason,
    Rollout,
    Sampling,
    Split,
    Task,
    Trajectory,
    Turn,
    TurnRange,
    TurnStatus,
    VersionSpan,
)
from tiny_model import build_tiny_model

ANYTHING = 1e9  # a gradient clip that clips nothing
BROKEN = Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "the machine went away")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("grpo") / "model", hidden=32, max_positions=128)


def forest(seed: int, *, turns: int = 2, sampling: Sampling | None = None, version: int = 0) -> Forest:
    """A conversation of random ids, sampled by something near the policy."""
    rng = random.Random(seed)
    made = Forest()
    for n in range(turns):
        sampled = tuple(rng.randrange(300) for _ in range(rng.randint(2, 5)))
        made.add(
            Turn(
                id=f"t{n}",
                root="root",
                parent=f"t{n - 1}" if n else None,
                delta_ids=tuple(rng.randrange(300) for _ in range(rng.randint(2, 6))),
                token_ids=sampled,
                logprobs=tuple(-rng.uniform(5.0, 7.0) for _ in sampled),
                versions=(VersionSpan(0, len(sampled), version, version),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=sampling or Sampling(),
                digest=f"d{n}",
            )
        )
    return made


def finished(
    name: str, reward: float | None, trajectories: tuple[Trajectory, ...], group: str = "g"
) -> Finished:
    rollout = Rollout(id=f"{group}-{name}", exp_id="exp", group_id=group, task=Task("task", {}))
    failure = BROKEN if reward is None else None
    outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=reward, failure=failure)
    return Finished(rollout=rollout, outcome=outcome, trajectories=trajectories)


def group(*rollouts: Finished, name: str = "g") -> Group:
    return Group(id=name, task_id="task", epoch=0, split=Split.TRAIN, finished=rollouts)


def group_of(rewards: list[float], *, name: str = "g", seed: int = 0, **how) -> Group:
    rows = [linear(forest(seed + n, **how)).trajectories for n in range(len(rewards))]
    parts = zip(rewards, rows, strict=True)
    return group(*(finished(str(n), r, t, name) for n, (r, t) in enumerate(parts)), name=name)


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


def test_the_report_says_how_far_sampler_and_trainer_are_apart_before_the_update(model_path):
    trained = group_of([1.0, 0.0], version=3)
    row = trained.finished[0].trajectories[0]
    for settings in ({}, {"minibatches": 2, "epochs": 3}):
        trainer = GRPO(model_path, lr=1e-3, device="cpu", **settings)
        trainer.steps = 5
        metrics = trainer.step([trained]).metrics
        assert 0 < metrics["sampler_trainer_logprob_diff_mean"] <= metrics["sampler_trainer_logprob_diff_max"]
        assert metrics["staleness"] == 2.0
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
    with pytest.raises(
        UsageError, match=r"rollout g-1, turn t7: 200 tokens exceed the model's context of 128"
    ):
        trainer.step([with_ids(*range(200))])
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
def test_a_restored_trainer_goes_on_bit_for_bit(model_path, tmp_path, minibatches):
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
