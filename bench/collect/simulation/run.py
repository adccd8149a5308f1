"""A training run on a simulated clock: real collector and loop, simulated components."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.interfaces import Transport
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.groups import GroupRunner, GroupScheduler, Mode, Schedule, StalenessWindow
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunDirectory, RunState
from afield.orchestrator.training_loop import LoopConfig, StepMetrics, TrainingLoop
from afield.transports.stores.memory import MemoryTransport
from afield.types import FailureKind, Outcome, Rollout, RolloutResult, Task
from bench.collect.simulation.agent_schedule import Habits
from bench.collect.simulation.components import SimulatedGateway, SimulatedRuntime, SimulatedTrainer, Step
from bench.collect.simulation.engine import Engine
from support.virtual_time import VirtualLoop, run

OnStep = Callable[[StepMetrics, RunDirectory, SimulatedTrainer], None]
RUNNING_PER_CALL = 1.7  # a rollout is at its tools for 35 % of its life, at full speed


class Setting(Struct, frozen=True, kw_only=True):
    mode: Mode
    staleness: int
    seed: int = 0
    groups: int = 400
    rollouts: int = 8
    batch: int = 32
    step_s: float = 10.0
    total: float = 20_000.0
    each: float = 200.0
    concurrency: int | None = None
    straggler_after: int = 7
    straggler_s: float | None = 15.0
    habits: Habits = Habits()

    @property
    def places(self) -> int:
        """Rollouts at once: all of a step where a step is waited for, else just enough to fill the engine.

        More than enough makes every call slower and the run's end longer, and gains nothing.
        """
        if self.concurrency is not None:
            return self.concurrency
        if self.mode == "sync":
            return self.batch * self.rollouts
        return round(RUNNING_PER_CALL * self.total / self.each)


class Result(Struct, frozen=True, kw_only=True):
    """What came of a run. Waste and staleness are read off what the trainer was given.

    `busy` is from the first token to the last; `filled` only to the moment the last rollout began, before
    the run drains. `limit_s` is how long the engine needs for all that was sampled when it is never idle.
    """

    setting: Setting
    seconds: float
    busy: float
    filled: float
    limit_s: float
    sampled: int
    trained: int
    attempts: int
    died: int
    cut: int
    stalest: int
    steps: list[Step]
    lost: int
    served: list[float]

    @property
    def waste(self) -> float:
        return 1 - self.trained / self.sampled

    @property
    def floor(self) -> float:
        """Waste that nobody can avoid: what attempts had sampled when they died."""
        return self.lost / self.sampled

    @property
    def rate(self) -> float:
        """Groups trained per second, from the first launch to the end of the last step."""
        return sum(len(step.groups) for step in self.steps) / self.seconds


class Counting:
    """A watcher that counts the rollouts that came to nothing: here, those that were cut."""

    def __init__(self) -> None:
        self.cut = 0

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        failure = outcome.failure
        self.cut += failure is not None and not will_retry and failure.kind is FailureKind.INFRASTRUCTURE

    def rollout_finished(self, result: RolloutResult) -> None: ...


def simulate(
    setting: Setting,
    *,
    transport: Callable[[Path], Transport] = lambda _: MemoryTransport(),
    on_step: OnStep = lambda *_: None,
) -> Result:
    with tempfile.TemporaryDirectory(prefix="afield-") as directory:
        return run(_simulate(setting, RunDirectory(Path(directory)), transport(Path(directory)), on_step))


async def _simulate(setting: Setting, record: RunDirectory, transport: Transport, on_step: OnStep) -> Result:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    engine = Engine(setting.total, setting.each)
    gateway = SimulatedGateway(engine)
    runtime = SimulatedRuntime(setting.habits, setting.seed, gateway, transport)
    trainer = SimulatedTrainer(setting.step_s, engine, loop.spend)
    counting = Counting()
    config, schedule = config_of(setting), schedule_of(setting)
    window = StalenessWindow(
        mode=setting.mode, groups=setting.groups, batch=setting.batch, staleness=setting.staleness
    )
    with RunState(record.run_state) as run_state:
        stores: dict[str, Any] = {"run_state": run_state, "rollout_store": RolloutStore(record.rollout_store)}
        rollout_runner = RolloutRunner(
            config, gateway=gateway, runtime=runtime, transport=transport, observer=counting, **stores
        )
        training_loop = TrainingLoop(
            window,
            LoopConfig(policy="policy"),
            epoch_of=schedule.epoch,
            trainer=trainer,
            gateway=gateway,
            run=record,
            on_step=lambda line: on_step(line, record, trainer),
            **stores,
        )
        async with transport, runtime, rollout_runner:
            group_runner = GroupRunner(config, rollout_runner, stores["rollout_store"])
            scheduler = GroupScheduler(window, schedule, group_runner=group_runner, **stores)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(scheduler.run())
                tasks.create_task(training_loop.run())
            seconds = loop.time()
    return result_of(setting, seconds, runtime, trainer, counting.cut)


def schedule_of(setting: Setting) -> Schedule:
    return Schedule([Task(f"t{n}", {}) for n in range(setting.groups)], "sim", setting.seed)


def config_of(setting: Setting) -> RolloutConfig:
    return RolloutConfig(
        exp_id="sim",
        model_id="policy",
        rollouts=setting.rollouts,
        straggler_after=setting.straggler_after,
        straggler_s=setting.straggler_s,
        concurrency=setting.places,
    )


def result_of(
    setting: Setting, seconds: float, runtime: SimulatedRuntime, trainer: SimulatedTrainer, cut: int
) -> Result:
    engine = trainer.engine
    return Result(
        setting=setting,
        seconds=seconds,
        busy=engine.busy,
        filled=engine.busy_until(runtime.last_first),
        limit_s=engine.sampled / engine.total,
        sampled=engine.sampled,
        trained=trainer.tokens,
        attempts=runtime.launched,
        died=runtime.died,
        lost=runtime.lost,
        cut=cut,
        stalest=max((step.stalest for step in trainer.steps), default=0),
        steps=trainer.steps,
        served=engine.served,
    )
