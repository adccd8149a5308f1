"""The training loop: collect, learn, publish; step by step, and on again after a crash.

A step is done when its checkpoint has its name on disk. Whatever was in flight when the process died is
found again: finished rollouts in the journal, committed outcomes in the transport, turns in the
gateway. So no rollout is trained twice and none is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from afield.collect import Collector, GroupWish
from afield.errors import Fruitless
from afield.journal import Journal
from afield.rundir import STATE, RunDir, StepState
from afield.seams import Gateway, StepReport, Trainer
from afield.types import ID_PATTERN, Finished, Group, Policy, Task

PATIENCE = 3  # steps without a single reward before a run is given up


class Recipe(Struct, frozen=True, kw_only=True):
    steps: int
    tasks_per_step: int
    quorum: int = 2
    seed: int = 0
    shuffle: bool = True
    keep_checkpoints: int = 2
    keep_weights: int | None = 2
    frozen: bool = False


class StepLine(Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl."""

    step: int
    version: int
    reward: float | None
    rollouts: int
    trained: int
    failed: int
    failures: dict[str, int]
    retried: int
    dropped_groups: dict[str, str]
    turns_per_rollout: float
    tool_calls_per_rollout: float
    sampled_tokens: int
    collect_s: float
    train_s: float
    trainer: dict[str, float]


class Loop:
    def __init__(
        self,
        recipe: Recipe,
        *,
        tasks: Sequence[Task],
        collector: Collector,
        trainer: Trainer,
        gateway: Gateway,
        journal: Journal,
        run: RunDir,
        exp_id: str,
        policy: str,
        on_step: Callable[[StepLine], None],
    ) -> None:
        self._recipe = recipe
        self._tasks = tasks
        self._collector = collector
        self._trainer = trainer
        self._gateway = gateway
        self._journal = journal
        self._run = run
        self._exp_id = exp_id
        self._policy = policy
        self._on_step = on_step

    async def run(self) -> None:
        """From wherever the run directory says we are, to the last step."""
        state = await asyncio.to_thread(self._restore)
        await self._publish(state.version)
        barren = 0
        for step in range(state.step + 1, self._recipe.steps + 1):
            groups = await self._step(step)
            finished = [f for group in groups for f in group.finished]
            rewarded = any(f.outcome.reward_or_floor(0.0) is not None for f in finished)
            barren = 0 if rewarded else barren + 1
            if barren == PATIENCE:
                raise Fruitless(
                    f"{PATIENCE} steps without a single reward; most often: {usual_failure(finished)}"
                )

    def _restore(self) -> StepState:
        state = self._run.last_state()
        self._run.rewind(state)
        if state is None:
            return StepState(0, 0, (), {})
        self._trainer.restore(self._run.checkpoint(state.step))
        self._journal.rewind(state.step)
        self._journal.train(state.step, state.trained)
        return state

    async def _step(self, step: int) -> list[Group]:
        began = time.monotonic()
        wishes = schedule(self._tasks, step, self._recipe, self._exp_id)
        groups = await self._collector.collect(wishes)
        collected = time.monotonic()
        dropped = {g.id: why for g in groups if (why := g.unusable_because(self._recipe.quorum))}
        usable = [group for group in groups if group.id not in dropped]
        report = StepReport(rollouts=0, tokens=0)
        if usable:
            report = await asyncio.to_thread(self._trainer.step, usable)
        finished = [f for group in groups for f in group.finished]
        await asyncio.to_thread(self._run.write_rollouts, step, finished)
        line = describe(
            step=step,
            version=step if not self._recipe.frozen else 0,
            groups=groups,
            dropped=dropped,
            report=report,
            seconds=(collected - began, time.monotonic() - collected),
        )
        await asyncio.to_thread(self._checkpoint, line, usable)
        self._run.append_metrics(msgspec.to_builtins(line))
        await self._publish(line.version)
        self._on_step(line)
        return groups

    def _checkpoint(self, line: StepLine, groups: Sequence[Group]) -> None:
        """Write everything under another name first; the rename is what makes the step done."""
        step, version = line.step, line.version
        finished = [f for group in groups for f in group.finished]
        ids = tuple(f.rollout.id for f in finished if f.outcome.reward_or_floor(0.0) is not None)
        final = self._run.checkpoint(step)
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._trainer.save(partial)
        if version == step:
            shutil.rmtree(self._run.weights(version), ignore_errors=True)  # of a crashed try at this step
            self._trainer.export(self._run.weights(version))
        state = StepState(step, version, ids, msgspec.to_builtins(line))
        (partial / STATE).write_bytes(msgspec.json.encode(state))
        partial.rename(final)
        self._journal.train(step, ids)
        recipe = self._recipe
        self._run.prune(keep_checkpoints=recipe.keep_checkpoints, keep_weights=recipe.keep_weights)

    async def _publish(self, version: int) -> None:
        path = self._run.weights(version)
        if not path.exists():
            await asyncio.to_thread(self._trainer.export, path)
        await self._gateway.publish(Policy(self._policy, version), str(path))


def schedule(tasks: Sequence[Task], step: int, recipe: Recipe, exp_id: str) -> list[GroupWish]:
    """Which tasks a step attempts: all of them, epoch after epoch, each in an order of its own.

    A function of seed and step alone, so that a run goes on where it stopped.
    """
    wishes: list[GroupWish] = []
    orders: dict[int, list[int]] = {}
    first = (step - 1) * recipe.tasks_per_step
    for position in range(first, first + recipe.tasks_per_step):
        epoch, index = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            if recipe.shuffle:
                random.Random(f"{recipe.seed}/{epoch}").shuffle(orders[epoch])
        task = tasks[orders[epoch][index]]
        wishes.append(GroupWish(f"{exp_id}-e{epoch}-{slug(task.id)}", task, epoch))
    return wishes


def slug(task_id: str) -> str:
    """A task id as part of an id: itself where that is allowed, else a digest."""
    if ID_PATTERN.fullmatch(task_id) and len(task_id) <= 40:
        return task_id
    return "x" + hashlib.sha256(task_id.encode()).hexdigest()[:16]


def describe(
    *,
    step: int,
    version: int,
    groups: Sequence[Group],
    dropped: dict[str, str],
    report: StepReport,
    seconds: tuple[float, float],
) -> StepLine:
    finished = [f for group in groups for f in group.finished]
    rewards = [r for f in finished if (r := f.outcome.reward_or_floor(0.0)) is not None]
    kinds = Counter(str(f.outcome.failure.kind) for f in finished if f.outcome.failure)
    turns = sum(len(f.turns) for f in finished)
    return StepLine(
        step=step,
        version=version,
        reward=sum(rewards) / len(rewards) if rewards else None,
        rollouts=len(finished),
        trained=report.rollouts,
        failed=len(finished) - len(rewards),
        failures=dict(kinds),
        retried=sum(f.attempts - 1 for f in finished),
        dropped_groups=dropped,
        turns_per_rollout=turns / max(len(finished), 1),
        tool_calls_per_rollout=sum(map(_tool_calls, finished)) / max(len(finished), 1),
        sampled_tokens=sum(t.owned for f in finished for t in f.trajectories),
        collect_s=round(seconds[0], 3),
        train_s=round(seconds[1], 3),
        trainer=dict(report.metrics),
    )


def usual_failure(finished: Sequence[Finished]) -> str:
    failures = [f.outcome.failure for f in finished if f.outcome.failure]
    told = Counter(f"{f.kind}/{f.reason}: {f.message}" for f in failures)
    return told.most_common(1)[0][0] if told else "no failure at all"


def _tool_calls(finished: Finished) -> int:
    return sum(len(turn.messages[-1].tool_calls) for turn in finished.turns if turn.messages)
