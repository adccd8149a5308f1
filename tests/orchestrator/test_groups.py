"""Groups: over-provisioning, stragglers, baselines; and both run of a run around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afield.advantages import compute_advantages
from afield.interfaces import StepReport
from afield.orchestrator.groups import (
    DynamicSampling,
    GroupRunner,
    GroupScheduler,
    Mode,
    Schedule,
    StalenessWindow,
    Validation,
    greedy,
)
from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import (
    LoopConfig,
    StepMetrics,
    TrainingLoop,
    rewind_published_step,
)
from afield.sdk.agent import Context
from afield.types import FailureKind, Policy, Reason, RolloutResult, Sampling, Split, Task
from support.in_process_collection import Collection, ask_model, collection, good

pytestmark = pytest.mark.anyio


async def test_one_broken_rollout_is_masked_and_its_group_stays(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        if rollout.rollout_id.endswith("r1"):
            raise OSError("no space left")
        return await good(task, rollout)

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(rollouts=4)
    assert [f.outcome.reward for f in group.finished] == [1.0, None, 1.0, 1.0]
    assert group.unusable_because(2) is None
    assert set(compute_advantages([group])) == {f"exp-e0-t0-r{k}" for k in (0, 2, 3)}


async def test_what_runs_beyond_enough_is_cut_and_carries_no_reward(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        if rollout.rollout_id.endswith("r0"):
            await asyncio.sleep(3600)
        return await good(task, rollout)

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(rollouts=2, extra=1)
    failures = [f.outcome.failure for f in group.finished]
    assert failures[0] and (failures[0].kind, failures[0].reason) == (
        FailureKind.INFRASTRUCTURE,
        Reason.CANCELLED,
    )
    assert [f.outcome.reward for f in group.finished] == [None, 1.0, 1.0]
    assert group.finished[0].attempts == 1


async def test_stragglers_are_cut_some_time_after_a_quorum(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        if rollout.rollout_id.endswith("r3"):
            await asyncio.sleep(3600)
        return await good(task, rollout)

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(rollouts=4, straggler_after=2, straggler_s=0.5)
    assert [f.outcome.reward for f in group.finished] == [1.0, 1.0, 1.0, None]


async def test_a_baseline_is_sampled_greedily_and_joined_by_its_group(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        await ask_model(rollout)
        return 0.25 if rollout.rollout_id.endswith("baseline") else 1.0

    async with collection(tmp_path, agent) as b:
        first, second = await b.collect(tasks=2, rollouts=2, baseline=True)
    for group in (first, second):
        assert group.baseline and group.baseline.rollout.group_id == group.id
        assert {turn.sampling.temperature for turn in group.baseline.turns} == {0.0}
        assert {turn.sampling.temperature for f in group.finished for turn in f.turns} == {1.0}
        assert set(compute_advantages([group], "remax").values()) == {0.75}
        assert group.baseline.rollout.id not in compute_advantages([group], "remax")


# --- both run ---------------------------------------------------------------------------------


class RecordingTrainer:
    """A trainer that writes down what it is given."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def step(self, groups: Any) -> StepReport:
        self.steps.append([group.id for group in groups])
        return StepReport(rollouts=sum(len(group.finished) for group in groups), tokens=0)

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True)

    def save(self, directory: Path) -> None:
        (directory / "trainer").write_text("\n".join(",".join(step) for step in self.steps))

    def begin_save(self, directory: Path) -> Callable[[], None]:
        said = "\n".join(",".join(step) for step in self.steps)
        return lambda: (directory / "trainer").write_text(said) and None

    def restore(self, directory: Path) -> None:
        said = (directory / "trainer").read_text().split("\n")
        self.steps = [step.split(",") for step in said]


class Run:
    def __init__(self, b: Collection, place: Path, mode: Mode, *, groups: int = 6, batch: int = 2) -> None:
        bound = {"sync": 0, "one-step-off": 1, "async": 2}[mode]
        self.window = StalenessWindow(mode=mode, groups=groups, batch=batch, staleness=bound)
        tasks = [Task(f"t{i}", {"n": i % 3}) for i in range(4)]
        self.schedule = Schedule(tasks, "exp")
        self.bench = b
        place.mkdir()
        self.run_dir = RunDirectory(place)
        self.trainer = RecordingTrainer()
        self.lines: list[StepMetrics] = []
        self.config = LoopConfig(policy="policy")
        self.dynamic: DynamicSampling | None = None
        self.taken: list[RolloutResult] = []

    def training_loop(self) -> TrainingLoop:
        return TrainingLoop(
            self.window,
            self.config,
            epoch_of=self.schedule.epoch,
            trainer=self.trainer,
            gateway=self.bench.up.client,
            run_state=self.bench.run_state,
            rollout_store=self.bench.rollout_store,
            run=self.run_dir,
            on_step=self.lines.append,
        )

    async def collect(self, validation: Validation | None = None, **plan: Any) -> None:
        async with self.bench.runner(**plan) as (values, runner):
            collector = GroupRunner(values, runner, self.bench.rollout_store)
            parts = {
                "group_runner": collector,
                "run_state": self.bench.run_state,
                "rollout_store": self.bench.rollout_store,
            }
            parts |= {"validation": validation, "dynamic_sampling": self.dynamic}
            await GroupScheduler(self.window, self.schedule, **parts).run()

    async def both(self, validation: Validation | None = None, **plan: Any) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.training_loop().run())
            tasks.create_task(self.collect(validation, **plan))


@pytest.mark.parametrize("mode", ["sync", "one-step-off", "async"])
async def test_every_group_is_trained_once_within_the_bound(tmp_path: Path, mode: Mode) -> None:
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", mode, groups=7)
        await run.both(rollouts=2, concurrency=4)
        wanted = sorted(run.schedule.group_spec(position).id for position in range(7))
        assert sorted(group for step in run.trainer.steps for group in step) == wanted
        assert [len(step) for step in run.trainer.steps] == [2, 2, 2, 1]
        assert max(line.staleness for line in run.lines) <= run.window.staleness
        assert len(b.rollout_store) == 0
        assert b.run_state.published_step == 4
        assert len(b.run_state.trained_rollouts()) == 14
        if mode == "sync":
            assert [line.staleness for line in run.lines] == [0, 0, 0, 0]


async def test_tokens_sampled_under_old_weights_are_dropped_with_a_reason(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", "sync", groups=2)
        await run.collect(rollouts=2)
        training_loop = run.training_loop()
        training_loop._version = 5  # as if the engine had gone back to old weights
        batch = training_loop._read(b.run_state.pending_groups())
    assert set(batch.dropped.values()) == {"sampled 5 versions ago; the bound is 0"}
    assert batch.usable == [] and batch.wasted > 0


async def test_a_gateway_that_served_another_run_counts_on(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        await b.up.client.publish(Policy("policy", 7), "somewhere")
        run = Run(b, tmp_path / "run", "async", groups=6)
        await run.both(rollouts=2)
        assert [line.version for line in run.lines] == [9, 10, 11]
        assert await b.up.client.version() == 11
        assert max(line.staleness for line in run.lines) <= 2


async def test_collector_and_trainer_may_run_and_crash_separately(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", "async", groups=8)
        learning = asyncio.create_task(run.training_loop().run())
        gathering = asyncio.create_task(run.collect(rollouts=2, concurrency=2))
        for number in range(4):
            await asyncio.sleep(0.25)
            doomed = learning if number % 2 else gathering
            doomed.cancel()
            await asyncio.gather(doomed, return_exceptions=True)
            if doomed is learning:
                learning = asyncio.create_task(run.training_loop().run())
            else:
                gathering = asyncio.create_task(run.collect(rollouts=2, concurrency=2))
        async with asyncio.timeout(60):
            await asyncio.gather(learning, gathering)
        taken = [f.rollout.id for step in run.run_dir.steps() for f in run.run_dir.read_rollouts(step)]
        assert len(taken) == len(set(taken)) == 16
        assert set(b.run_state.trained_rollouts()) == set(taken)


async def test_validation_is_greedy_reported_by_step_and_never_trained(tmp_path: Path) -> None:
    seen: list[tuple[int, list[RolloutResult]]] = []
    tasks = [Task("v0", {"n": 0}), Task("v1", {"n": 1})]
    validation = Validation(
        tasks=tasks, every=2, sampling=greedy(Sampling()), report=lambda step, f: seen.append((step, f))
    )
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", "sync", groups=6)
        await run.both(validation, rollouts=2)
        assert not [i for i in b.run_state.trained_rollouts() if "val" in i]
        assert len(b.rollout_store) == 0
    assert [step for step, _ in seen][-1] == 3 and seen[0][0] == 0
    for _, finished in seen:
        assert [f.rollout.task.id for f in finished] == ["v0", "v1"]
        assert {turn.sampling.temperature for f in finished for turn in f.turns} == {0.0}
        assert [f.outcome.reward for f in finished] == [1.0, 0.5]
        assert {f.rollout.split for f in finished} == {Split.VAL}


# --- dynamic sampling and checkpoints -----------------------------------------------------------


async def varied(task: dict[str, Any], rollout: Context) -> float:
    """Tasks of n == 0 always get the same reward; the others do not."""
    await ask_model(rollout)
    return 1.0 if task["n"] == 0 else float(rollout.rollout_id.endswith("r0"))


async def refilled_run(tmp_path: Path, mode: Mode, max_refills: int, agent: Any = varied) -> Run:
    async with collection(tmp_path, agent) as b:
        run = Run(b, tmp_path / "run", mode)
        run.dynamic = DynamicSampling(max_refills=max_refills)
        await run.both(rollouts=2, concurrency=8)
        assert len(b.rollout_store) == 0
        assert len(b.run_state.trained_rollouts()) == 12
        run.taken = [f for step in run.run_dir.steps() for f in run.run_dir.read_rollouts(step)]
        return run


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_groups_with_equal_rewards_are_replaced_by_other_tasks(tmp_path: Path, mode: Mode) -> None:
    run = await refilled_run(tmp_path, mode, 4)
    spread = {f.rollout.group_id: set() for f in run.taken}
    for f in run.taken:
        spread[f.rollout.group_id].add(f.outcome.reward)
    assert all(rewards == {0.0, 1.0} for rewards in spread.values())
    first = [run.schedule.group_spec(position) for position in range(6)]
    equal = sum(spec.task.input["n"] == 0 for spec in first)
    assert equal > 0
    assert sum(line.refilled_groups for line in run.lines) >= equal
    wasted = [line.wasted_tokens for line in run.lines]
    assert all(
        (waste > 0) == (line.refilled_groups > 0) for waste, line in zip(wasted, run.lines, strict=True)
    )


async def test_replacements_are_bounded_and_the_last_group_stays(tmp_path: Path) -> None:
    run = await refilled_run(tmp_path, "sync", 2, good)  # every group of `good` has equal rewards
    assert [line.refilled_groups for line in run.lines] == [4, 4, 4]
    assert all(f.rollout.group_id.endswith("n2") for f in run.taken)


async def test_a_collector_that_dies_continues_with_the_replacement(tmp_path: Path) -> None:
    async with collection(tmp_path, varied) as b:
        run = Run(b, tmp_path / "run", "sync", groups=2)
        position = next(p for p in range(2) if run.schedule.group_spec(p).task.input["n"] == 0)
        old, new = run.schedule.group_spec(position), run.schedule.refill(position, 1)
        for p in range(2):
            b.run_state.begin_group(run.schedule.group_spec(p).id, p, 0)
        b.run_state.refill_group(old.id, new.id, 0, 7)  # and killed here
        run.dynamic = DynamicSampling(max_refills=1)
        await run.both(rollouts=2)
        assert new.id in run.trainer.steps[0]
        assert old.id not in run.trainer.steps[0]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_steps_after_the_last_checkpoint_are_trained_again_on_the_same_groups(
    tmp_path: Path, asynchronous: bool
) -> None:
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", "sync", groups=10)
        # An agent that outlives its collector may go on with the weights of the checkpoint, and be stale.
        run.config = LoopConfig(
            policy="policy", checkpoint_every=3, async_checkpoints=asynchronous, stale="correct"
        )
        gathering = asyncio.create_task(run.collect(rollouts=2))
        learning = asyncio.create_task(run.training_loop().run())
        while len(run.lines) < 4:
            await asyncio.sleep(0.01)
        learning.cancel()  # one step after a checkpoint
        gathering.cancel()
        await asyncio.gather(learning, gathering, return_exceptions=True)
        before = list(run.trainer.steps)
        assert b.run_state.published_step >= 4
        checkpoints = [path.name for path in sorted((run.run_dir.path / "checkpoints").glob("step-????"))]
        assert checkpoints == ["step-0003"]
        run.trainer = RecordingTrainer()
        async with asyncio.timeout(60):
            rewind_published_step(run.run_dir, b.run_state)
            await run.both(rollouts=2)
        assert run.trainer.steps[: len(before)] == before
        assert run.trainer.steps == [
            [run.schedule.group_spec(2 * step + k).id for k in range(2)] for step in range(5)
        ]
        last = {line.step: line for line in run.lines}
        assert [last[step].dropped_groups for step in range(1, 6)] == [{}] * 5
        assert run.run_dir.last_state().step == 5
