"""Rows that the engine could sample and the trainer cannot run are data: named, counted, left out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from msgspec import structs

from afield.engines.scripted import ScriptedEngine
from afield.jobs.training import warn_context_mismatch
from afield.orchestrator import training_loop
from afield.settings.train import TrainConfig
from afield.trainers.frozen import Frozen
from afield.trainers.grpo import GRPO
from afield.trajectories import linear
from afield.types import Group, Trajectory, TurnRange, VersionSpan
from support.gateways import running
from support.tiny_model import build_tiny_model
from support.training_groups import finished, forest, group

CONTEXT = 128


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("long") / "model", hidden=32, max_positions=CONTEXT)


def row(length: int, *, weight: float = 1.0) -> Trajectory:
    """Two turns, of ten tokens and of one; the second one ends the row."""
    mask = [0] * length
    mask[20:30], mask[-1] = [1] * 10, 1
    return Trajectory(
        token_ids=tuple(7 + n % 50 for n in range(length)),
        loss_mask=tuple(mask),
        logprobs=tuple(-2.0 * m for m in mask),
        versions=(VersionSpan(20, 30, 0, 0), VersionSpan(length - 1, length, 0, 0)),
        turns=(TurnRange(f"t{length}", 20, 30, 1.0), TurnRange(f"u{length}", length - 1, length, 1.0)),
        weight=weight,
    )


def of(*rows_of_second: Trajectory) -> Group:
    """Three rollouts with different rewards, the second of which has these rows."""
    short = [linear(forest(n, turns=2)).trajectories for n in range(2)]
    return group(
        finished("0", 1.0, short[0]), finished("1", 0.25, rows_of_second), finished("2", 0.0, short[1])
    )


def gradient(model_path: Path, trained: Group, **how) -> dict[str, torch.Tensor]:
    trainer = GRPO(model_path, lr=1e-3, grad_clip=1e9, device="cpu", **how)
    trainer.step([trained])
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", ["grpo", "rloo", "reinforce_plus_plus"])
def test_the_others_learn_as_if_the_long_one_were_there(model_path, how):
    """Its reward is part of the baseline, and its rollout of what losses are divided by."""
    with_long = gradient(model_path, of(row(CONTEXT + 1)), advantage=how)
    without_rows = gradient(model_path, of(), advantage=how)
    assert all(torch.equal(with_long[name], without_rows[name]) for name in without_rows)
    without_rollout = group(of().finished[0], of().finished[2])
    assert any(not torch.equal(with_long[n], g) for n, g in gradient(model_path, without_rollout).items())


def test_the_rows_beside_a_long_one_weigh_what_they_weighed(model_path):
    kept = row(60, weight=0.5)
    with_long = gradient(model_path, of(kept, row(CONTEXT + 40, weight=0.5)))
    alone = gradient(model_path, of(kept))
    assert all(torch.equal(with_long[name], alone[name]) for name in alone)


def test_a_row_as_long_as_the_context_is_trained(model_path):
    report = GRPO(model_path, lr=1e-3, device="cpu").step([of(row(CONTEXT))])
    assert (report.too_long, report.metrics["delivered_share"]) == (0, 1.0)


@pytest.mark.parametrize("kind", [GRPO, Frozen])
def test_it_is_named_and_counted(model_path, kind, caplog):
    trainer = GRPO(model_path, lr=1e-3, device="cpu") if kind is GRPO else Frozen(model_path)
    trained = of(row(60, weight=0.5), row(200, weight=0.5))
    with caplog.at_level(logging.WARNING, "afield.trainers"):
        report = trainer.step([trained])
    assert "rollout g-1, turn u200: 200 tokens exceed the model's context of 128" in caplog.text
    assert "max_context = 128" in caplog.text
    assert report.too_long == 1
    assert report.metrics["excluded_tokens.too_long"] == 11
    owned = sum(t.owned for f in trained.finished for t in f.trajectories)
    assert report.metrics["delivered_share"] == pytest.approx((owned - 11) / owned)
    assert report.tokens == owned - 11
    batch = training_loop.StepBatch([trained], {}, version=0, wasted=0)
    line = training_loop.step_metrics(step=1, version=1, batch=batch, report=report, seconds=(0.0, 0.0))
    assert line.too_long == 1


def test_a_step_of_long_rows_alone_leaves_the_weights_as_they_are(model_path, caplog):
    trainer = GRPO(model_path, lr=1e-3, device="cpu")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    parts = [finished(str(n), float(n), (row(150 + n),)) for n in range(12)]
    report = trainer.step([group(*parts)])
    assert (report.too_long, report.tokens, trainer.steps) == (12, 0, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert "rows not trained: 4 more" in caplog.text


# --- before the first rollout --------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_gateway_tells_how_long_rows_may_get(tmp_path):
    async with running(ScriptedEngine([], max_context=777), tmp_path) as gateway:
        assert await gateway.client.context() == 777


@pytest.mark.parametrize(
    ("engine", "bound", "trainer", "told"),
    [
        (4096, None, 128, "the engine takes rows of 4096 tokens, the trainer 128"),
        (4096, 256, 128, "the engine takes rows of 256 tokens, the trainer 128"),
        (4096, 128, 128, ""),
        (128, None, 128, ""),
        (None, None, 128, ""),
        (4096, None, None, ""),
    ],
)
def test_an_engine_that_takes_more_than_the_trainer_is_reported_before_anything_is_sampled(
    engine, bound, trainer, told, caplog
):
    config = TrainConfig(model="any", max_context=bound)
    warn_context_mismatch(config, engine, trainer)
    assert told in caplog.text
    assert bool(told) == bool(caplog.records)
    caplog.clear()
    warn_context_mismatch(structs.replace(config, freeze_weights=True), engine, trainer)
    assert not caplog.records
