"""Memory does not grow with the rollouts: what is finished lies on disk, what was trained is gone."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from afield.interfaces import SessionRecord
from afield.orchestrator.groups import Mode
from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import StepMetrics
from afield.orchestrator.watcher import RunningAttempt
from afield.transports.stores.files import FilesTransport
from afield.types import Group, Outcome, Rollout, RolloutResult, Task, Trajectory
from bench.collect.simulation.agent_schedule import Habits
from bench.collect.simulation.checks import latest, problems
from bench.collect.simulation.components import Session, SimulatedTrainer
from bench.collect.simulation.run import Setting, simulate

RESULTS = (RolloutResult, Trajectory, Group, Outcome, Rollout, SessionRecord)
HELD = [kind.__name__ for kind in (*RESULTS, RunningAttempt, Session, Task)]
QUICK = Habits(turns=(1, 3), tokens=(4, 12), failing=0.1)


def test_memory_and_disk_use_do_not_grow_with_the_number_of_rollouts() -> None:
    alive: list[Counter[str]] = []
    on_disk: list[int] = []

    def count(line: StepMetrics, record: RunDirectory, trainer: SimulatedTrainer) -> None:
        gc.collect()
        names = Counter(type(thing).__name__ for thing in gc.get_objects())
        alive.append(Counter({name: names[name] for name in HELD}))
        on_disk.append(sum(1 for _ in record.rollout_store.iterdir()))

    def files(directory: Path) -> FilesTransport:
        return FilesTransport(directory / "outcomes")

    setting = Setting(mode="async", staleness=2, groups=60, batch=5, total=2_000.0, habits=QUICK, step_s=0.5)
    gc.freeze()  # leaves out everything that was imported before
    try:
        result = simulate(setting, transport=files, on_step=count)
    finally:
        gc.unfreeze()

    trained = sum(len(step.rollouts) for step in result.steps)
    assert trained + result.cut == 480
    quarter = len(alive) // 4
    early, late = (sum(alive[k : k + quarter], Counter()) for k in (quarter, len(alive) - quarter))
    for name in HELD:
        assert late[name] <= 1.1 * early[name] + 10 * quarter, (name, early[name], late[name])
    # At most what the window lets begin: three steps' groups, one of them being trained.
    assert max(on_disk) <= 3 * setting.batch * setting.rollouts


MODES: list[tuple[Mode, int]] = [("sync", 0), ("one-step-off", 1), ("async", 1), ("async", 2)]


@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_every_mode_trains_each_group_once_within_its_bound(mode: Mode, staleness: int) -> None:
    setting = Setting(
        mode=mode,
        staleness=staleness,
        groups=21,
        rollouts=4,
        batch=4,
        total=1_000.0,
        step_s=2.0,
        straggler_after=3,
        straggler_s=None,
        habits=Habits(failing=0.2),
    )
    result = simulate(setting)
    assert problems(result) == []
    assert latest(result) <= staleness
    assert result.died > 0
    assert result.waste == pytest.approx(result.floor)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def told(seed: int) -> list[tuple[float, tuple[str, ...], tuple[int, ...]]]:
        setting = Setting(
            mode="async", staleness=2, seed=seed, groups=20, rollouts=4, straggler_after=3, batch=4, total=1e3
        )
        return [(step.at, step.groups, step.lengths) for step in simulate(setting).steps]

    assert told(1) == told(1) != told(2)
