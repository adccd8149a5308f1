"""Published weights carry the update: rounded stochastically, the same bits for every engine."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from afield.cli.live_chart import precision
from afield.engines.torch.engine import TorchEngine
from afield.engines.torch.weights import read_weights
from afield.factory import published_dtype
from afield.gateway.engine_pool import common_dtype
from afield.interfaces.weight_probe import read_weight_probe
from afield.models.rounding import Rounding, measure_update, rounded
from afield.settings.train import TrainConfig
from afield.settings.trainer import LoraOptions, TrainerOptions
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.grpo import GRPO
from afield.trainers.model import PolicyModel, compute_weight_probe
from afield.trainers.publication import Checkpoint, Rounder
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import (
    FinishReason,
    Group,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.tiny_model import build_tiny_model

CPU = torch.device("cpu")
HOW = Rounding(dtype="bfloat16", seed=3, version=7)
LORA = LoraOptions(rank=4, alpha=8, publish="merged")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 with tied embeddings, as most published ones are."""
    path = build_tiny_model(tmp_path_factory.mktemp("publication") / "model", hidden=64, tied=True)
    stored = load_file(path / "model.safetensors")
    save_file(
        {n: t.bfloat16() for n, t in stored.items()}, path / "model.safetensors", metadata={"format": "pt"}
    )
    return path


def moved(path: Path, by: float, **how) -> PolicyModel:
    """A policy after an update of Adam's size: every trained weight moves by about as much."""
    policy = PolicyModel(path, device=CPU, **how)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return policy


def stored(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("by", [1e-6, 1e-5, 1e-4])
def test_an_update_below_the_spacing_of_bfloat16_is_published(
    model_path: Path, tmp_path: Path, by: float
) -> None:
    policy = moved(model_path, by)
    told = policy.export(tmp_path / "v7", HOW)
    start = stored(model_path)
    sent = stored(tmp_path / "v7")
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    masters = policy.model.state_dict()
    count = sum(parameter.numel() for parameter in policy.trainable)
    noise = told.noise**0.5 / told.update**0.5 / count**0.5
    assert told.kept == pytest.approx(1.0, abs=6 * noise)
    along = sum(measure_update(masters[n], sent[n], start[n]).along for n in start)
    update = sum(measure_update(masters[n], sent[n], start[n]).update for n in start)
    assert along / update == pytest.approx(told.kept, rel=1e-6)
    nearest = policy.export(tmp_path / "near", Rounding(dtype="bfloat16", version=7, nearest=True))
    assert by > 1e-5 or (nearest.kept or 0) < 0.5


def test_masters_come_back_bit_for_bit_and_train_on(model_path: Path, tmp_path: Path) -> None:
    for how in ({}, {"lora": LORA}):
        policy = moved(model_path, 1e-4, **how)
        before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
        policy.export(tmp_path / "v7", HOW)
        after = policy.model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_repeating_a_publication_gives_the_same_bits_and_another_version_others(
    model_path: Path, tmp_path: Path
) -> None:
    policy = moved(model_path, 1e-4)
    for name, how in (("a", HOW), ("b", HOW), ("c", Rounding(dtype="bfloat16", seed=3, version=8))):
        policy.export(tmp_path / name, how)
    a, b, c = (stored(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_tied_embeddings_are_rounded_alike(model_path: Path, tmp_path: Path) -> None:
    moved(model_path, 1e-3).export(tmp_path / "v7", HOW)
    sent = stored(tmp_path / "v7")
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "v7" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_probe_is_of_the_weights_that_were_published(model_path: Path, tmp_path: Path) -> None:
    for name, how in (("whole", {}), ("merged", {"lora": LORA})):
        moved(model_path, 0.05, **how).export(tmp_path / name, HOW)
        probe = read_weight_probe(tmp_path / name)
        again = compute_weight_probe(PolicyModel(tmp_path / name, device=CPU).model)
        assert probe is not None
        assert probe.logprobs == pytest.approx(again.logprobs, abs=1e-5)


def test_merging_happens_in_float32_and_then_rounds(model_path: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        policy = moved(model_path, 1e-3, lora=LORA, dtype=dtype)
        told = policy.export(tmp_path / dtype, HOW)
        exact = policy.weights()
        sent, start = stored(tmp_path / dtype), stored(model_path)
        for name in (name for name in sent if "_proj" in name):
            assert exact[name].dtype == torch.float32
            expected = rounded(exact[name], name, HOW, start=start[name])
            assert torch.equal(sent[name], expected)
        assert told.kept == pytest.approx(1.0, abs=0.2)


def test_an_engine_merges_adapters_in_float32_and_rounds_them_as_the_directory_says(
    model_path: Path, tmp_path: Path
) -> None:
    policy = moved(model_path, 1e-3, lora=LoraOptions(rank=4, alpha=8))
    told = policy.export_adapter(tmp_path / "v7", HOW)
    assert told.kept == pytest.approx(1.0, abs=0.02)
    assert {t.dtype for t in load_file(tmp_path / "v7" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }

    async def served(seed: int) -> list[torch.Tensor]:
        async with TorchEngine(model_path, dtype="bfloat16", device="cpu", seed=seed) as engine:
            tensors = await asyncio.to_thread(
                read_weights, tmp_path / "v7", engine._parameters, model_path, Rounding(seed=seed, version=7)
            )
            await engine.load(7, str(tmp_path / "v7"))
            held = [parameter.tensor for parameter in engine._parameters]
            assert all(torch.equal(a, b) for a, b in zip(tensors, held, strict=True))
            return [tensor.clone() for tensor in tensors]

    one, other = asyncio.run(served(0)), asyncio.run(served(99))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_engine_has_the_published_bits(model_path: Path, tmp_path: Path) -> None:
    moved(model_path, 1e-4).export(tmp_path / "v7", HOW)
    sent = stored(tmp_path / "v7")

    async def check(dtype: str) -> None:
        async with TorchEngine(model_path, dtype=dtype, device="cpu") as engine:
            await engine.load(7, str(tmp_path / "v7"))
            for parameter in engine._parameters:
                assert torch.equal(parameter.tensor, sent[parameter.names[0]].to(parameter.tensor.dtype))

    asyncio.run(check("bfloat16"))
    asyncio.run(check("float32"))


def test_version_0_is_what_an_engine_makes_of_the_checkpoint_itself(tmp_path: Path) -> None:
    """Also of one in float32, which loaders round to nearest."""
    path = build_tiny_model(tmp_path / "model", hidden=32)
    policy = PolicyModel(path, device=CPU)
    policy.export(tmp_path / "v0", Rounding(dtype="bfloat16"))
    start, sent = stored(path), stored(tmp_path / "v0")
    assert all(torch.equal(start[name].bfloat16(), sent[name]) for name in start)


def test_float32_engines_get_the_masters(model_path: Path, tmp_path: Path) -> None:
    trainer = GRPO(model_path, lr=1e-5, device="cpu")
    metrics = trainer.publish(tmp_path / "v1", version=1, dtype="float32")
    sent, masters = stored(tmp_path / "v1"), trainer.model.state_dict()
    assert all(torch.equal(sent[name], masters[name]) for name in sent)
    assert metrics["update_kept"] == 1.0


def test_an_update_that_is_lost_is_reported(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = GRPO(model_path, lr=1e-5, device="cpu", rounding="nearest")
    with torch.no_grad():
        for parameter in trainer.policy.trainable:
            parameter.add_(1e-6)
    with caplog.at_level(logging.WARNING, logger="afield.trainers"):
        metrics = trainer.publish(tmp_path / "v1", version=1, dtype="bfloat16")
    assert metrics["update_kept"] < 0.5
    assert "of the update reached the published weights" in caplog.text


def test_tensors_that_the_checkpoint_names_otherwise_are_held_in_memory(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", hidden=32)
    policy = PolicyModel(path, device=CPU)
    (tmp_path / "other").mkdir()
    held = Checkpoint(tmp_path / "other", policy.model)
    filed = Checkpoint(path, policy.model)
    for name, parameter in policy.model.named_parameters():
        count = parameter.numel()
        first = count // 3
        assert torch.equal(
            held.flat(name, first, count - first - 1).float(), filed.flat(name, first, count - first - 1)
        )


def test_tensors_of_another_trainer_are_rounded_one_at_a_time(model_path: Path) -> None:
    policy = moved(model_path, 1e-5)
    rounder = Rounder(model_path, HOW)
    sent = {name: rounder(name, tensor) for name, tensor in policy.model.state_dict().items()}
    assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])  # they are tied
    assert rounder.metrics()["update_kept"] == pytest.approx(1.0, abs=0.3)
    with policy.published(HOW) as told:
        own = {name: tensor.bfloat16() for name, tensor in policy.model.state_dict().items()}
    assert all(torch.equal(own[name], sent[name]) for name in own)
    assert rounder.arrived.update == pytest.approx(told.update)


def test_nothing_is_claimed_about_weights_that_come_in_16_bits(
    model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounder = Rounder(model_path, HOW)
    for name, tensor in stored(model_path).items():
        assert torch.equal(rounder(name, tensor), tensor)
    assert rounder.metrics() == {}
    assert "let it send float32" in caplog.text


# --- how far sampler and trainer are apart ---------------------------------------------------------


def sampled_by(path: Path, dtype: str, version: int) -> Group:
    """A group whose log-probabilities are those of the model in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    rng = random.Random(0)
    rows = []
    for _ in range(4):
        ids = torch.tensor([rng.randrange(model.config.vocab_size) for _ in range(24)])
        with torch.no_grad():
            scores = model(ids[None]).logits[0].float().log_softmax(-1)
        rows.append((tuple(ids.tolist()), scores[3:-1].gather(1, ids[4:, None])[:, 0].tolist()))
    finished = []
    for n, (ids, logprobs) in enumerate(rows):
        forest = TurnTree()
        forest.add(
            Turn(
                id="t",
                root="root",
                parent=None,
                delta_ids=ids[:4],
                token_ids=ids[4:],
                logprobs=tuple(logprobs),
                versions=(VersionSpan(0, 20, version, version),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(),
                digest="d",
            )
        )
        rollout = Rollout(id=f"r{n}", exp_id="exp", group_id="g", task=Task("t", {}))
        outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=float(n))
        rows_of = linear(forest).trajectories
        finished.append(RolloutResult(rollout=rollout, outcome=outcome, trajectories=rows_of))
    return Group(id="g", task_id="t", epoch=0, split=Split.TRAIN, finished=tuple(finished))


def test_a_sampler_in_bfloat16_is_as_far_from_the_trainer_as_the_control_says(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for how in ({}, {"lora": LORA, "dtype": "bfloat16"}):
        trainer = GRPO(model_path, lr=0.0, device="cpu", **how)
        trainer.publish(tmp_path / "v3", version=3, dtype="bfloat16")
        metrics = trainer.step([sampled_by(model_path, "bfloat16", 3)]).metrics
        assert metrics["logprob_diff_control"] > 5e-4
        assert metrics["logprob_diff_times_control"] < 1.6
    assert "times what the engine's" not in caplog.text


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_trainer_in_bfloat16_computes_with_the_published_update(
    model_path: Path, tmp_path: Path, minibatches: int
) -> None:
    """Casting the masters to the nearest bfloat16 would compute with the weights from before the update."""
    trainer = GRPO(model_path, lr=2e-5, device="cpu", dtype="bfloat16", minibatches=minibatches)
    group = sampled_by(model_path, "bfloat16", 0)
    trainer.publish(tmp_path / "v0", version=0, dtype="bfloat16")
    trainer.step([group])
    with torch.no_grad():  # an update in one direction, far below the spacing of bfloat16
        for parameter in trainer.policy.trainable:
            parameter.add_(1e-4)
    trainer.publish(tmp_path / "v1", version=1, dtype="bfloat16")
    masters = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    batch = trainer.batch([sampled_by(tmp_path / "v1", "bfloat16", 1)])
    diagnostics = BatchDiagnostics(version=1)
    trainer.optimizer.score(batch.rows, diagnostics)
    control = trainer.optimizer.control_logprob_diff(batch.rows, torch.bfloat16)
    assert control is not None
    diff = diagnostics.summary()["logprob_diff"]
    assert diff < 1.6 * control
    assert all(torch.equal(masters[name], tensor) for name, tensor in trainer.model.state_dict().items())
    sent = stored(tmp_path / "v1")
    with trainer.policy.rounded():
        own = trainer.model.state_dict()
        assert all(torch.equal(own[name].bfloat16(), sent[name]) for name in sent)
        assert all(torch.equal(own[name], own[name].bfloat16().float()) for name in sent)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_kept_weights_are_those_that_are_rounded_again(
    model_path: Path, tmp_path: Path, lora: LoraOptions | None
) -> None:
    trainer = GRPO(model_path, lr=1e-4, device="cpu", dtype="bfloat16", lora=lora)
    with torch.no_grad():
        for parameter in trainer.policy.trainable:
            parameter.add_(1e-4 * torch.randn(parameter.shape))
    trainer.publish(tmp_path / "v1", version=1, dtype="bfloat16")

    def computed() -> list[torch.Tensor]:
        with trainer.policy.rounded():
            return [parameter.detach().clone() for parameter in trainer.policy.trainable]

    kept = computed()
    trainer.policy.changed()
    again = computed()
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert all(torch.equal(a, a.bfloat16().float()) for a in kept)
    assert not all(torch.equal(a, b) for a, b in zip(kept, trainer.policy.trainable, strict=True))


def test_the_control_follows_a_policy_that_becomes_certain(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = GRPO(model_path, lr=0.0, device="cpu")
    trainer.publish(tmp_path / "v3", version=3, dtype="bfloat16")
    first = trainer.step([sampled_by(model_path, "bfloat16", 3)]).metrics
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(0.01)
    flat = tmp_path / "v4"
    trainer.publish(flat, version=4, dtype="bfloat16")
    second = trainer.step([sampled_by(flat, "bfloat16", 4)]).metrics
    assert second["logprob_diff_control"] < 0.3 * first["logprob_diff_control"]
    assert second["logprob_diff_times_control"] < 2


def test_a_sampler_with_other_weights_is_reported(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = moved(model_path, 0.02)
    other.export(tmp_path / "other")
    trainer = GRPO(model_path, lr=0.0, device="cpu")
    trainer.publish(tmp_path / "v3", version=3, dtype="bfloat16")
    stale = trainer.step([sampled_by(tmp_path / "other", "float32", 2)]).metrics
    assert "logprob_diff" not in stale  # no token of the trainer's own version
    assert "times what the engine's" not in caplog.text
    metrics = trainer.step([sampled_by(tmp_path / "other", "float32", 3)]).metrics
    assert metrics["logprob_diff_times_control"] > 3
    assert "times what the engine's bfloat16 explains" in caplog.text


def test_in_float32_sampler_and_trainer_are_equal(model_path: Path, tmp_path: Path) -> None:
    trainer = GRPO(model_path, lr=0.0, device="cpu")
    trainer.publish(tmp_path / "v3", version=3, dtype="float32")
    metrics = trainer.step([sampled_by(model_path, "float32", 3)]).metrics
    assert metrics["sampler_trainer_logprob_diff_max"] < 1e-4
    assert metrics["logprob_diff_control"] == 1e-4


def test_a_checkpoint_remembers_what_was_published(model_path: Path, tmp_path: Path) -> None:
    trainer = GRPO(model_path, lr=0.0, device="cpu")
    trainer.publish(tmp_path / "v3", version=3, dtype="bfloat16")
    trainer.save(tmp_path / "saved")
    again = GRPO(model_path, lr=0.0, device="cpu")
    again.restore(tmp_path / "saved")
    assert (again.version, again.engine_dtype) == (3, "bfloat16")


# --- settings --------------------------------------------------------------------------------------


def test_adapters_have_a_learning_rate_of_their_own_unless_one_is_given() -> None:
    whole = TrainConfig(model="m")
    lora = TrainConfig(model="m", learn=TrainerOptions(lora=LoraOptions(rank=8)))
    assert (whole.learning_rate, lora.learning_rate) == (1e-6, 1e-5)
    assert TrainConfig(model="m", lr=3e-4, learn=lora.learn).learning_rate == 3e-4
    assert lora.learn.lora.publish == "adapter"


def test_weights_are_published_in_the_dtype_that_is_set_told_or_the_model_s_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert published_dtype("float16", "bfloat16", tmp_path) == "float16"
    assert published_dtype("auto", "float32", tmp_path) == "float32"
    assert not caplog.text
    assert published_dtype("auto", "", tmp_path) == "bfloat16"
    assert "set engine_dtype" in caplog.text


def test_engines_of_several_dtypes_get_what_all_can_hold() -> None:
    assert common_dtype(["float32", "float32"]) == "float32"
    assert common_dtype(["float32", "bfloat16"]) == "bfloat16"
    assert common_dtype(["float16", "bfloat16"]) == "bfloat16"
    assert common_dtype(["float16", "float32"]) == "float16"
    assert common_dtype(["float16", ""]) == ""


def test_a_steps_line_shows_the_sampler_trainer_difference() -> None:
    told = precision({"logprob_diff": 0.03, "logprob_diff_times_control": 1.04, "update_kept": 0.998})
    assert told == "  logprob diff 3.0e-02 (1x expected)  update kept 100%"
    assert precision({}) == ""
    assert precision({"logprob_diff": 0.02}) == "  logprob diff 2.0e-02"
    assert precision({"logprob_diff": float("nan")}) == "  logprob diff nan"


def test_a_step_s_line_says_nothing_of_sampler_and_trainer_that_are_equal() -> None:
    in_float32 = {"logprob_diff": 5e-7, "logprob_diff_times_control": 0.005, "update_kept": 1.0}
    assert precision(in_float32) == ""
    # Equal dtypes, and other weights.
    apart = in_float32 | {"logprob_diff": 0.05, "logprob_diff_times_control": 500.0}
    assert precision(apart) == "  logprob diff 5.0e-02 (5e+02x expected)"
