"""Tasks to groups: every rollout of a task, compared with each other or explained.

Groups come out complete, every rollout with its outcome: a reward, or a typed failure that masks this one
rollout and no other. Nothing is padded, and what broke is never a reward of 0. A group with fewer than
`quorum` rewards is dropped with a reason. The work on one rollout is `conduct`'s; which group begins
when, and which step takes it, is `window`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

from msgspec import Struct, structs

from afield.errors import root_cause
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.rollout_store import RolloutStore
from afield.orchestrator.run_state import RolloutSummary
from afield.types import Group, Rollout, Sampling, Split, Task, too_few_rewards

CUT = "cut: enough of its group were done"


class GroupSpec(Struct, frozen=True):
    """A task to be attempted, and in which epoch of the data set; `sampling` where it is not the plan's."""

    id: str
    task: Task
    epoch: int
    split: Split = Split.TRAIN
    sampling: Sampling | None = None


class CompletedGroup(Struct, frozen=True):
    """A group whose rollouts have all ended, without their data; `dropped` says why it cannot train."""

    spec: GroupSpec
    rollout_ids: tuple[str, ...]
    baseline: str | None
    drop_reason: str | None


class GroupRunner:
    def __init__(self, plan: RolloutConfig, conductor: RolloutRunner, spool: RolloutStore) -> None:
        self._plan = plan
        self._conductor = conductor
        self._spool = spool

    @property
    def has_room(self) -> bool:
        return self._conductor.has_room

    async def collect(self, wishes: Sequence[GroupSpec]) -> list[Group]:
        """All these groups, complete, in the order they were asked for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.start_group(wish)) for wish in wishes]
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors
        return [await asyncio.to_thread(read_group, self._spool, task.result()) for task in running]

    def start_group(self, wish: GroupSpec) -> Coroutine[None, None, CompletedGroup]:
        """Run all rollouts of a group to their end; repeating runs only what has not ended.

        They are under way when this returns; awaiting it waits for them.
        """
        rollouts, baseline = self._rollouts(wish), self._baseline(wish)
        measured = {rollout.id: self._conductor.start(rollout) for rollout in rollouts}
        beside = self._conductor.start(baseline) if baseline else None
        return self._ended(wish, measured, baseline, beside)

    async def _ended(
        self,
        wish: GroupSpec,
        measured: dict[str, asyncio.Task[RolloutSummary]],
        baseline: Rollout | None,
        beside: asyncio.Task[RolloutSummary] | None,
    ) -> CompletedGroup:
        train = wish.split is Split.TRAIN
        await (self._until_enough(measured) if train else asyncio.wait(measured.values()))
        if beside:
            await asyncio.wait([beside])
        notes = [task.result() for task in measured.values()]
        dropped = too_few_rewards([n.outcome for n in notes], self._plan.quorum if train else 1)
        if beside:
            dropped = dropped or baseline_drop_reason(beside.result())
        return CompletedGroup(wish, tuple(measured), baseline.id if baseline else None, dropped)

    def rollout_ids(self, wish: GroupSpec) -> list[str]:
        """The ids of its rollouts."""
        return [rollout.id for rollout in self._rollouts(wish)]

    def _rollouts(self, wish: GroupSpec) -> list[Rollout]:
        train = wish.split is Split.TRAIN
        number = self._plan.rollouts + self._plan.extra if train else self._plan.val_rollouts
        return [self._rollout(wish, f"r{k}", wish.sampling) for k in range(number)]

    def _baseline(self, wish: GroupSpec) -> Rollout | None:
        if not self._plan.baseline or wish.split is not Split.TRAIN:
            return None
        return self._rollout(wish, "baseline", greedy(self._plan.sampling))

    def _rollout(self, wish: GroupSpec, name: str, sampling: Sampling | None) -> Rollout:
        return Rollout(
            id=f"{wish.id}-{name}",
            exp_id=self._plan.exp_id,
            group_id=wish.id,
            task=wish.task,
            split=wish.split,
            sampling=sampling,
        )

    async def _until_enough(self, running: dict[str, asyncio.Task[RolloutSummary]]) -> None:
        """Until all have ended; stragglers are cut where the plan says so."""
        plan, loop = self._plan, asyncio.get_running_loop()
        pending = set(running.values())
        cut_at: float | None = None
        while pending:
            left = None if cut_at is None else max(0.0, cut_at - loop.time())
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            rewarded = sum(_rewarded(task) for task in running.values())
            if plan.straggler_s is not None and cut_at is None and rewarded >= plan.straggler_threshold:
                cut_at = loop.time() + plan.straggler_s
            enough = plan.extra > 0 and rewarded >= plan.rollouts
            if pending and (enough or (cut_at is not None and loop.time() >= cut_at)):
                for rollout_id, task in running.items():
                    if task in pending:
                        self._conductor.cancel(rollout_id, CUT)
                await asyncio.wait(pending)
                return


def greedy(sampling: Sampling) -> Sampling:
    return structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


def baseline_drop_reason(baseline: RolloutSummary) -> str | None:
    """Why a group has nothing to be measured against; None when it has."""
    failure = baseline.outcome.failure
    if failure is None or baseline.outcome.reward_or_floor(0.0) is not None:
        return None
    return f"its baseline carries no reward ({failure.kind}/{failure.reason}: {failure.message[:200]})"


def read_group(spool: RolloutStore, ended: CompletedGroup) -> Group:
    wish = ended.spec
    return Group(
        id=wish.id,
        task_id=wish.task.id,
        epoch=wish.epoch,
        split=wish.split,
        finished=tuple(spool.get(rollout_id) for rollout_id in ended.rollout_ids),
        baseline=spool.get(ended.baseline) if ended.baseline else None,
    )


def _rewarded(task: asyncio.Task[RolloutSummary]) -> bool:
    if not task.done() or task.cancelled() or task.exception():
        return False
    return task.result().outcome.reward_or_floor(0.0) is not None
