"""The collecting half of a training run: which group begins when, and validation in between.

Groups are begun in the order of the data set, as the window allows and as soon as there is room for
another rollout: no step is waited for. What was begun before a crash comes first. Everything it finds
out is in the ledger and the spool; the learning half may live in another process.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from msgspec import Struct

from afield.errors import UsageError, root_cause
from afield.interfaces import Gateway
from afield.orchestrator.groups import GroupRunner, GroupSpec
from afield.orchestrator.rollout_store import RolloutStore
from afield.orchestrator.run_state import PendingGroup, RunState
from afield.orchestrator.staleness import StalenessWindow
from afield.types import ID_PATTERN, RolloutResult, Sampling, Split, Task

log = logging.getLogger("afield.loop")
POLL_S = 0.05
LONGEST = 64  # of an experiment's name; the rest of a rollout's id is epoch, task and number


class Schedule(Struct, frozen=True):
    """All tasks, epoch after epoch, each in an order of its own: a function of seed and position alone."""

    tasks: Sequence[Task]
    exp_id: str
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if len(self.exp_id) > LONGEST:
            told = (
                f"the name {self.exp_id!r} has {len(self.exp_id)} characters, too many for its rollouts' ids"
            )
            raise UsageError(f"{told}; give exp_id, or the run, a name of at most {LONGEST}")

    def epoch(self, position: int) -> int:
        return position // len(self.tasks)

    def group_spec(self, position: int) -> GroupSpec:
        epoch, index = divmod(position, len(self.tasks))
        seed = f"{self.seed}/{epoch}" if self.shuffle else None
        task = self.tasks[_order(len(self.tasks), seed)[index]]
        return GroupSpec(f"{self.exp_id}-e{epoch}-{slug(task.id)}", task, epoch)


@lru_cache(maxsize=8)
def _order(number: int, seed: str | None) -> list[int]:
    order = list(range(number))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order


def _never(step: int) -> bool:
    return False


class Validation(Struct, frozen=True, kw_only=True):
    """Tasks that are tried, greedily unless told otherwise, and never trained; every so many steps.

    One that was `reported`, by a collector before this one, is not done again.
    """

    tasks: Sequence[Task]
    every: int
    sampling: Sampling
    report: Callable[[int, list[RolloutResult]], None]
    reported: Callable[[int], bool] = _never


class GroupScheduler:
    def __init__(
        self,
        window: StalenessWindow,
        schedule: Schedule,
        *,
        collector: GroupRunner,
        ledger: RunState,
        spool: RolloutStore,
        validation: Validation | None = None,
    ) -> None:
        self._window = window
        self._schedule = schedule
        self._collector = collector
        self._ledger = ledger
        self._spool = spool
        self._validation = validation

    async def run(self) -> None:
        """Until every group has ended, and the validation after the last step if there is one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._validation:
                    tasks.create_task(self._validate(self._validation))
                for position in await asyncio.to_thread(self._positions):
                    if position >= await asyncio.to_thread(self._ledger.groups_begun):
                        await self._its_turn(position)
                    wish = self._schedule.group_spec(position)
                    done = await self._done()
                    await asyncio.to_thread(self._ledger.begin_group, wish.id, position, done)
                    tasks.create_task(self._group(wish))
                    await asyncio.sleep(0)  # it has begun, and there may be no room for another
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors

    def _positions(self) -> Iterable[int]:
        begun = [
            entry.position
            for entry in self._ledger.pending_groups()
            if self._wanted(entry) and not (entry.ready and self._kept(entry.id))
        ]
        return itertools.chain(begun, range(self._ledger.groups_begun(), self._window.groups))

    def _wanted(self, entry: PendingGroup) -> bool:
        """A run that was made shorter has begun groups that no step will take."""
        if self._ledger.published_step >= self._window.steps:
            return False
        return self._window.mode == "async" or entry.position < self._window.groups

    def _kept(self, group_id: str) -> bool:
        members, baseline = self._ledger.group_members(group_id)
        return all(map(self._spool.holds, (*members, *([baseline] if baseline else []))))

    async def _its_turn(self, position: int) -> None:
        while not (self._collector.has_room and self._window.admits(position, await self._done())):
            await asyncio.sleep(POLL_S)

    async def _done(self) -> int:
        return await asyncio.to_thread(lambda: self._ledger.published_step)

    async def _group(self, wish: GroupSpec) -> None:
        ended = await self._collector.start_group(wish)
        told = ended.rollout_ids, ended.baseline, ended.drop_reason
        await asyncio.to_thread(self._ledger.complete_group, wish.id, *told)

    async def _validate(self, validation: Validation) -> None:
        steps = self._window.steps
        due = sorted({*range(0, steps, validation.every), steps})
        for step in due:
            while await self._done() < step:
                await asyncio.sleep(POLL_S)
            # A step that was passed while an earlier validation ran is left out: its weights are gone.
            passed = step != due[-1] and await self._done() >= step + validation.every
            await self._validation_at(step, validation, left_out=passed or validation.reported(step))

    async def _validation_at(self, step: int, validation: Validation, *, left_out: bool) -> None:
        """Nothing of it stays in the spool, whatever a collector before this one left there."""
        exp_id = self._schedule.exp_id
        wishes = [
            GroupSpec(f"{exp_id}-val{step}-{slug(task.id)}", task, step, Split.VAL, validation.sampling)
            for task in validation.tasks
        ]
        if not left_out:
            groups = await self._collector.collect(wishes)
            finished = [f for group in groups for f in group.finished]
            await asyncio.to_thread(validation.report, step, finished)
        for wish in wishes:
            for rollout_id in self._collector.rollout_ids(wish):
                await asyncio.to_thread(self._spool.remove, rollout_id)


async def wait_for_own_weights(ledger: RunState, gateway: Gateway, *, frozen: bool) -> None:
    """Until the gateway samples with this run's weights; what it serves of another run teaches nothing."""
    told = False
    while not await asyncio.to_thread(_ours, ledger, await gateway.version(), frozen=frozen):
        if not told:
            log.warning("the gateway serves other weights; agents begin when this run's are published")
            told = True
        await asyncio.sleep(POLL_S)


def _ours(ledger: RunState, served: int, *, frozen: bool) -> bool:
    if ledger.base_version is None:
        return served == 0
    ahead = served - ledger.base_version - (0 if frozen else ledger.published_step)
    return ahead in (0, 1)  # a step is noted as done just after it is published


def slug(task_id: str) -> str:
    """A task id as part of an id: itself where that is allowed, else a digest."""
    if ID_PATTERN.fullmatch(task_id) and len(task_id) <= 40:
        return task_id
    return "x" + hashlib.sha256(task_id.encode()).hexdigest()[:16]
