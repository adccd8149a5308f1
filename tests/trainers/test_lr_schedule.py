"""Learning-rate schedules against those of transformers, and in a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from afield.errors import UsageError
from afield.trainers.grpo import GRPO
from afield.trainers.lr_schedule import LRSchedule
from support.tiny_model import build_tiny_model
from support.training_groups import group_of


def theirs(name: str, warmup: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(
    ("name", "known_as"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")]
)
def test_rates_after_the_warmup_are_those_of_transformers(name: str, known_as: str, warmup: int) -> None:
    schedule = LRSchedule(name, warmup, 11)
    expected = theirs(known_as, warmup, 11)
    ours = [schedule.factor(step) for step in range(11)]
    assert ours[warmup:] == pytest.approx(expected[warmup:])
    # transformers begins at 0, which trains nothing in the first step; here each rate comes one step sooner.
    assert ours[: max(warmup - 1, 0)] == pytest.approx(expected[1:warmup])
    assert all(factor > 0 for factor in ours)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_learning_rate_decay_ends_at_the_minimum_ratio_and_stays_there(name: str) -> None:
    schedule = LRSchedule(name, 2, 10, 0.1)
    assert schedule.factor(2) == 1.0
    assert schedule.factor(10) == schedule.factor(25) == pytest.approx(0.1)


def test_a_decay_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the number of steps"):
        LRSchedule("cosine").check()


def test_a_trainer_steps_with_the_rate_of_its_step_and_continues_with_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = build_tiny_model(tmp_path / "model", hidden=32)
    settings = {"lr": 1e-3, "lr_schedule": "linear", "warmup_steps": 2, "total_steps": 6, "device": "cpu"}
    trainer = GRPO(model, **settings)
    rates = []
    for step in range(3):
        report = trainer.step([group_of([0.0, 1.0, 2.0], seed=10 * step, name=f"g{step}")])
        rates.append(report.metrics["lr"])
        assert trainer.optimizer.optimizer.param_groups[0]["lr"] == report.metrics["lr"]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3])
    trainer.save(tmp_path / "saved")
    again = GRPO(model, **settings)
    again.restore(tmp_path / "saved")
    last = [group_of([0.0, 1.0], seed=99)]
    one, other = trainer.step(last), again.step(last)
    assert one == other
    assert one.metrics["lr"] == pytest.approx(0.75e-3)
