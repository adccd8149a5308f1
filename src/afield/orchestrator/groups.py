"""Group scheduler: order of tasks, staleness window and group runner.

1. `Schedule` orders the tasks of each epoch and returns one `GroupSpec` per position.
2. `StalenessWindow` decides which groups may start and which completed groups make a step. It does no I/O.
3. `GroupRunner` runs the rollouts of one group until all have ended. A failed rollout is masked alone; a
   group with fewer than `quorum` rewards is dropped with a reason.
4. `GroupScheduler` starts groups in the order of the schedule, as the window and free slots allow, and runs
   validations in between. Groups that an earlier process started come first.
5. With `DynamicSampling`, a group whose rewards are all equal is replaced by a group of another task.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct, structs

from afield.batches.rewards import weighted_sum
from afield.errors import UsageError, root_cause
from afield.interfaces import Gateway
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.reward_function import GroupRewards
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import PendingGroup, RolloutStore, RolloutSummary, RunState, poll_pause
from afield.types import (
    ID_PATTERN,
    Group,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    too_few_rewards,
)

log = logging.getLogger(__name__)
MAX_EXP_ID = 64
"""Largest length of an experiment id; the rest of a rollout id is epoch, task and number."""
STRAGGLER_MESSAGE = "cut: enough of its group were done"
"""Failure message of a rollout that is cancelled because its group has enough rewards."""
Mode = Literal["sync", "one-step-off", "async"]


class GroupSpec(Struct, frozen=True):
    """A group to run: one task in one epoch."""

    id: str
    """Group id."""
    task: Task
    """Task of all rollouts."""
    epoch: int
    """Epoch of the data set, from 0; for a validation, the step."""
    split: Split = Split.TRAIN
    """Training or validation."""
    sampling: Sampling | None = None
    """Sampling parameters; None uses those of the RolloutConfig."""


class CompletedGroup(Struct, frozen=True):
    """Group whose rollouts have all ended; their results are in the rollout store."""

    spec: GroupSpec
    """Group that has ended."""
    rollout_ids: tuple[str, ...]
    """Ids of its rollouts, without the baseline."""
    baseline: str | None
    """Rollout id of the greedy baseline; None without one."""
    drop_reason: str | None
    """Why the group cannot be trained; None if it can."""
    outcomes: tuple[Outcome, ...] = ()
    """Outcomes of its rollouts and of the baseline."""
    tokens: int = 0
    """Trainable tokens of its rollouts."""


class DynamicSampling(Struct, frozen=True, kw_only=True):
    """Replaces groups with equal rewards, which contribute no gradient, by groups of other tasks (DAPO)."""

    max_refills: int
    """Largest number of replacements of one group; the last one stays, whatever its rewards."""
    weights: Mapping[str, float] = {}
    """Weights of named rewards; empty compares the reward itself."""
    turns: bool = False
    """Whether rewards of turns count, with credit `turns`."""

    def replaces(self, completed: CompletedGroup) -> bool:
        """Whether a group that could be trained has equal rewards only."""
        if completed.drop_reason is not None:
            return False
        rewarded = [outcome for outcome in completed.outcomes if outcome.reward_or_floor(0.0) is not None]
        return len({self._score(outcome) for outcome in rewarded}) == 1

    def _score(self, outcome: Outcome) -> tuple[float, ...]:
        """All rewards that give an outcome its advantages."""
        reward = outcome.reward_or_floor(0.0) or 0.0
        if self.weights and outcome.reward is not None:
            reward = weighted_sum(outcome, self.weights)
        if not self.turns:
            return (reward,)
        named = [value for rewards in outcome.named_turn_rewards.values() for value in rewards.values()]
        return (reward, *outcome.turn_rewards.values(), *named)


# --- order and staleness -------------------------------------------------------------------------


class Schedule(Struct, frozen=True):
    """Order of the tasks over all epochs; depends on the seed only."""

    tasks: Sequence[Task]
    """Tasks of one epoch."""
    exp_id: str
    """Experiment id, the prefix of all group and rollout ids; at most 64 characters."""
    seed: int = 0
    """Seed of the order."""
    shuffle: bool = True
    """Whether each epoch has a random order; else all have the order of `tasks`."""

    def __post_init__(self) -> None:
        if len(self.exp_id) > MAX_EXP_ID:
            raise UsageError(
                f"exp_id {self.exp_id!r} has {len(self.exp_id)} characters, too many for rollout ids;"
                f" name the experiment or the run with at most {MAX_EXP_ID}"
            )

    def epoch(self, position: int) -> int:
        """Epoch of a position, from 0."""
        return position // len(self.tasks)

    def group_spec(self, position: int) -> GroupSpec:
        """Group at a position, from 0, in the order of all epochs."""
        epoch, index = divmod(position, len(self.tasks))
        seed = f"{self.seed}/{epoch}" if self.shuffle else None
        task = self.tasks[_order(len(self.tasks), seed)[index]]
        return GroupSpec(f"{self.exp_id}-e{epoch}-{slug(task.id)}", task, epoch)

    def refill(self, position: int, number: int) -> GroupSpec:
        """The group that takes this position after `number` replacements, from 1.

        Its tasks are those of the epoch in another random order, beginning with tasks not tried there.
        """
        epoch = self.epoch(position)
        first = self.group_spec(position).task
        order = _order(len(self.tasks), f"{self.seed}/refill/{position}")
        others = [self.tasks[index] for index in order if self.tasks[index].id != first.id] or [first]
        task = others[(number - 1) % len(others)]
        return GroupSpec(f"{self.exp_id}-e{epoch}-{slug(task.id)}-p{position}n{number}", task, epoch)


@lru_cache(maxsize=8)
def _order(count: int, seed: str | None) -> list[int]:
    """Indices of `count` tasks in the order of a seed; None keeps their order."""
    order = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order


def slug(task_id: str) -> str:
    """Part of a rollout id for a task id: the id itself if its characters allow it, else a digest."""
    if ID_PATTERN.fullmatch(task_id) and len(task_id) <= 40:
        return task_id
    return "x" + hashlib.sha256(task_id.encode()).hexdigest()[:16]


class StalenessWindow(Struct, frozen=True, kw_only=True):
    """Limits the number of policy versions between sampling and training a group.

    A group that begins after `n` published steps samples with version `n` or later, and step k trains at
    version k - 1, so `n + staleness + 1` is the last step that may take it. Two rules keep this bound:

    1. No more groups begin than the steps until then can take.
    2. A step takes the oldest ready groups, and waits if later steps could not take the others in time.
    """

    mode: Mode
    """`sync` collects a step with the weights of the previous step; `one-step-off` collects the next step
    while one trains; both take groups in the order of the schedule. `async` takes ready groups in any order.
    """
    groups: int
    """Number of groups in the whole run."""
    batch: int
    """Number of groups per step; the last step takes the rest."""
    staleness: int = 0
    """Largest age in policy versions: 0 for `sync`, 1 for `one-step-off`, 1 or more for `async`."""
    strict: bool = True
    """Whether a step waits for groups that are about to exceed the bound; if not, groups may exceed it."""

    def __post_init__(self) -> None:
        fixed = {"sync": 0, "one-step-off": 1}.get(self.mode, self.staleness)
        if self.staleness != fixed:
            raise ValueError(f"mode {self.mode} has a staleness of {fixed}, not {self.staleness}")
        if self.mode == "async" and self.staleness < 1:
            raise ValueError(f"mode async needs a staleness of at least 1, not {self.staleness}")

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return -(-self.groups // self.batch)

    def admits(self, position: int, published_step: int) -> bool:
        """Whether the group at this position may begin after `published_step` steps."""
        return position < min(self.groups, (published_step + self.staleness + 1) * self.batch)

    def choose(self, step: int, pending: Sequence[PendingGroup]) -> list[PendingGroup] | None:
        """Return the groups of this step, oldest first; None while it has to wait."""
        size = min(self.batch, self.groups - (step - 1) * self.batch)
        ordered = sorted(pending, key=lambda group: (group.begun_after_step, group.position))
        if self.mode != "async":
            ordered = sorted(pending, key=lambda group: group.position)[:size]
        chosen = [group for group in ordered if group.ready][:size]
        if len(chosen) < size:
            return None
        return chosen if not self.strict or self._leaves_time(step, ordered, chosen) else None

    def _leaves_time(
        self, step: int, pending: Sequence[PendingGroup], chosen: Sequence[PendingGroup]
    ) -> bool:
        """Whether later steps can take all other groups before they exceed the bound."""
        taken = {group.id for group in chosen}
        others = [group for group in pending if group.id not in taken]
        # Groups by the last step that may take them.
        due = Counter(max(group.begun_after_step + self.staleness + 1, step) for group in others)
        due_groups = 0
        for last_step in sorted(due):
            due_groups += due[last_step]
            if due_groups > (last_step - step) * self.batch:
                return False
        return True


# --- one group -----------------------------------------------------------------------------------


class GroupRunner:
    """Runs all rollouts of a group, and cancels stragglers if configured."""

    def __init__(
        self,
        config: RolloutConfig,
        rollout_runner: RolloutRunner,
        rollout_store: RolloutStore,
        rewards: GroupRewards | None = None,
    ) -> None:
        """`rewards` gives the rewards of a group once its rollouts have ended; None leaves them to others."""
        self._config = config
        self._rollout_runner = rollout_runner
        self._rollout_store = rollout_store
        self._rewards = rewards

    @property
    def has_room(self) -> bool:
        """Whether another rollout would start at once."""
        return self._rollout_runner.has_room

    async def collect(self, specs: Sequence[GroupSpec]) -> list[Group]:
        """Run these groups and return them in the order of `specs`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self.start_group(spec)) for spec in specs]
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors
        return [await asyncio.to_thread(read_group, self._rollout_store, task.result()) for task in running]

    def start_group(self, spec: GroupSpec) -> Coroutine[None, None, CompletedGroup]:
        """Start all rollouts of a group at once; the returned coroutine waits for their end.

        Repeating runs only the rollouts that have not ended.
        """
        running = {rollout.id: self._rollout_runner.start(rollout) for rollout in self._rollouts(spec)}
        baseline = self._baseline(spec)
        baseline_task = self._rollout_runner.start(baseline) if baseline else None
        return self._complete(spec, running, baseline_task)

    async def _complete(
        self,
        spec: GroupSpec,
        running: dict[str, asyncio.Task[RolloutSummary]],
        baseline_task: asyncio.Task[RolloutSummary] | None,
    ) -> CompletedGroup:
        """Wait for the rollouts of a group, get their rewards, and decide whether it can be trained."""
        train = spec.split is Split.TRAIN
        await (self._until_enough(running) if train else asyncio.wait(running.values()))
        if baseline_task:
            await asyncio.wait([baseline_task])
        outcomes = [task.result().outcome for task in running.values()]
        if self._rewards is not None:
            outcomes = await self._rewards.reward(spec.id, tuple(running))
        drop_reason = too_few_rewards(outcomes, self._config.quorum if train else 1)
        baseline = baseline_task.result() if baseline_task else None
        if baseline:
            drop_reason = drop_reason or baseline_drop_reason(baseline)
            outcomes.append(baseline.outcome)
        return CompletedGroup(
            spec=spec,
            rollout_ids=tuple(running),
            baseline=baseline.outcome.rollout_id if baseline else None,
            drop_reason=drop_reason,
            outcomes=tuple(outcomes),
            tokens=sum(task.result().tokens for task in running.values()),
        )

    def rollout_ids(self, spec: GroupSpec) -> list[str]:
        """Ids of a group's rollouts, without the baseline."""
        return [rollout.id for rollout in self._rollouts(spec)]

    def _rollouts(self, spec: GroupSpec) -> list[Rollout]:
        train = spec.split is Split.TRAIN
        count = self._config.rollouts + self._config.extra if train else self._config.val_rollouts
        return [self._rollout(spec, f"r{k}", spec.sampling) for k in range(count)]

    def _baseline(self, spec: GroupSpec) -> Rollout | None:
        if not self._config.baseline or spec.split is not Split.TRAIN:
            return None
        return self._rollout(spec, "baseline", greedy(self._config.sampling))

    def _rollout(self, spec: GroupSpec, name: str, sampling: Sampling | None) -> Rollout:
        return Rollout(
            id=f"{spec.id}-{name}",
            exp_id=self._config.exp_id,
            group_id=spec.id,
            task=spec.task,
            split=spec.split,
            sampling=sampling,
        )

    async def _until_enough(self, running: dict[str, asyncio.Task[RolloutSummary]]) -> None:
        """Wait until all rollouts have ended, or until enough have ended and the rest are cancelled."""
        config, loop = self._config, asyncio.get_running_loop()
        pending = set(running.values())
        cut_at: float | None = None
        while pending:
            timeout = None if cut_at is None else max(0.0, cut_at - loop.time())
            _, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            rewarded = sum(_has_reward(task) for task in running.values())
            if config.straggler_s is not None and cut_at is None and rewarded >= config.straggler_threshold:
                cut_at = loop.time() + config.straggler_s
            enough = config.extra > 0 and rewarded >= config.rollouts
            if pending and (enough or (cut_at is not None and loop.time() >= cut_at)):
                for rollout_id, task in running.items():
                    if task in pending:
                        self._rollout_runner.cancel(rollout_id, STRAGGLER_MESSAGE)
                await asyncio.wait(pending)
                return


def greedy(sampling: Sampling) -> Sampling:
    """Return these parameters with greedy decoding."""
    return structs.replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


def baseline_drop_reason(baseline: RolloutSummary) -> str | None:
    """Return why the greedy baseline has no reward; None if it has one."""
    failure = baseline.outcome.failure
    if failure is None or baseline.outcome.reward_or_floor(0.0) is not None:
        return None
    return f"its baseline carries no reward ({failure.kind}/{failure.reason}: {failure.message[:200]})"


def read_group(rollout_store: RolloutStore, completed: CompletedGroup) -> Group:
    """Load the rollouts of a completed group."""
    spec = completed.spec
    return Group(
        id=spec.id,
        task_id=spec.task.id,
        epoch=spec.epoch,
        split=spec.split,
        finished=tuple(rollout_store.get(rollout_id) for rollout_id in completed.rollout_ids),
        baseline=rollout_store.get(completed.baseline) if completed.baseline else None,
    )


def _has_reward(task: asyncio.Task[RolloutSummary]) -> bool:
    """Whether a rollout has ended with a reward, or with one that its caller will give."""
    if not task.done() or task.cancelled() or task.exception():
        return False
    outcome = task.result().outcome
    return outcome.reward_pending or outcome.reward_or_floor(0.0) is not None


# --- all groups ----------------------------------------------------------------------------------


def _never_reported(step: int) -> bool:
    return False


class Validation(Struct, frozen=True, kw_only=True):
    """Validation tasks, run every few steps and never trained."""

    tasks: Sequence[Task]
    """Tasks of the validation split."""
    every: int
    """Steps between two validations; one also runs before the first and after the last step."""
    once: bool = False
    """Whether the one before the first step is enough, because the weights never change."""
    sampling: Sampling
    """Sampling parameters of validation rollouts."""
    report: Callable[[int, list[RolloutResult]], None]
    """Called with the step and its finished rollouts."""
    reported: Callable[[int], bool] = _never_reported
    """Whether the validation of a step was reported before, by an earlier process."""


def validation_specs(exp_id: str, step: int, tasks: Iterable[Task], sampling: Sampling) -> list[GroupSpec]:
    """Groups of a validation or an evaluation; equal ids give equal random numbers."""
    return [
        GroupSpec(f"{exp_id}-val{step}-{slug(task.id)}", task, step, Split.VAL, sampling) for task in tasks
    ]


class GroupScheduler:
    """Collector of a training run: runs groups and writes them to run state and rollout store.

    - `window`: decides when a group may start.
    - `schedule`: order of the tasks.
    - `group_runner`: runs the rollouts of a group.
    - `validation`: validation to run every few steps; None runs none.
    - `dynamic_sampling`: replaces groups with equal rewards; None keeps them.
    """

    def __init__(
        self,
        window: StalenessWindow,
        schedule: Schedule,
        *,
        group_runner: GroupRunner,
        run_state: RunState,
        rollout_store: RolloutStore,
        validation: Validation | None = None,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> None:
        self._window = window
        self._schedule = schedule
        self._group_runner = group_runner
        self._run_state = run_state
        self._rollout_store = rollout_store
        self._validation = validation
        self._dynamic_sampling = dynamic_sampling

    async def run(self) -> None:
        """Run until every group and the validation after the last step have ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._validation:
                    tasks.create_task(self._validate(self._validation))
                for position in await asyncio.to_thread(self._positions):
                    await self._wait_for_turn(position)
                    spec = await asyncio.to_thread(self._spec, position)
                    step = await self._published_step()
                    await asyncio.to_thread(self._run_state.begin_group, spec.id, position, step)
                    tasks.create_task(self._run_group(position, spec))
                    await asyncio.sleep(0)  # the group takes its slots before `has_room` is read again
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors

    def _positions(self) -> Iterable[int]:
        """Positions to run: groups that an earlier process began and did not complete, then new ones."""
        unfinished = [
            group.position
            for group in self._run_state.pending_groups()
            if self._needed(group) and not (group.ready and self._is_stored(group.id))
        ]
        return itertools.chain(unfinished, range(self._run_state.groups_begun(), self._window.groups))

    def _needed(self, group: PendingGroup) -> bool:
        """Whether a step will take this group; False after a run was made shorter."""
        if self._run_state.published_step >= self._window.steps:
            return False
        return self._window.mode == "async" or group.position < self._window.groups

    def _is_stored(self, group_id: str) -> bool:
        rollout_ids, baseline = self._run_state.group_members(group_id)
        return all(map(self._rollout_store.holds, (*rollout_ids, *([baseline] if baseline else []))))

    async def _wait_for_turn(self, position: int) -> None:
        """Wait until a concurrency slot is free and the window admits the group."""
        pause = poll_pause()
        while not (
            self._group_runner.has_room and self._window.admits(position, await self._published_step())
        ):
            await pause.sleep()

    async def _published_step(self) -> int:
        """Last step whose weights are served; 0 before the first."""
        return await asyncio.to_thread(lambda: self._run_state.published_step)

    def _spec(self, position: int) -> GroupSpec:
        """Group that takes this position now: the scheduled one, or its last replacement."""
        refills, _ = self._run_state.refilled([position])
        return self._schedule.refill(position, refills) if refills else self._schedule.group_spec(position)

    async def _run_group(self, position: int, spec: GroupSpec) -> None:
        """Run a group and its replacements, and record the last one as completed."""
        completed = await self._group_runner.start_group(spec)
        while (replacement := await asyncio.to_thread(self._refill, position, completed)) is not None:
            spec = replacement
            completed = await self._group_runner.start_group(spec)
        await asyncio.to_thread(
            self._run_state.complete_group,
            spec.id,
            completed.rollout_ids,
            completed.baseline,
            completed.drop_reason,
        )

    def _refill(self, position: int, completed: CompletedGroup) -> GroupSpec | None:
        """Replace a group with equal rewards; returns the group that takes its position, or None."""
        rule = self._dynamic_sampling
        refills, _ = self._run_state.refilled([position])
        if rule is None or refills >= rule.max_refills or not rule.replaces(completed):
            return None
        ids = [*completed.rollout_ids, *([completed.baseline] if completed.baseline else [])]
        tokens = completed.tokens + self._run_state.wasted_tokens(ids)
        replacement = self._schedule.refill(position, refills + 1)
        self._run_state.refill_group(
            completed.spec.id, replacement.id, self._run_state.published_step, tokens
        )
        for rollout_id in ids:
            self._rollout_store.remove(rollout_id)
        log.info(
            "group %s: all rewards are equal; task %s takes its place", completed.spec.id, replacement.task.id
        )
        return replacement

    async def _validate(self, validation: Validation) -> None:
        """Run each validation once its step is published."""
        steps = self._window.steps
        due = [0] if validation.once else sorted({*range(0, steps, validation.every), steps})
        for step in due:
            pause = poll_pause()
            while await self._published_step() < step:
                await pause.sleep()
            # Skips a step that was passed while an earlier validation ran: its weights are no longer served.
            passed = step != due[-1] and await self._published_step() >= step + validation.every
            await self._validate_step(step, validation, skip=passed or validation.reported(step))

    async def _validate_step(self, step: int, validation: Validation, *, skip: bool) -> None:
        """Run one validation, then remove its rollouts, also those of an earlier process, from the store."""
        exp_id = self._schedule.exp_id
        specs = validation_specs(exp_id, step, validation.tasks, validation.sampling)
        if not skip:
            groups = await self._group_runner.collect(specs)
            results = [result for group in groups for result in group.finished]
            await asyncio.to_thread(validation.report, step, results)
        for spec in specs:
            for rollout_id in self._group_runner.rollout_ids(spec):
                await asyncio.to_thread(self._rollout_store.remove, rollout_id)


async def wait_for_own_weights(run_state: RunState, gateway: Gateway, *, frozen: bool) -> None:
    """Wait until the gateway samples with this run's weights, not with those of another run."""
    logged, pause = False, poll_pause()
    while not await asyncio.to_thread(_serves_own, run_state, await gateway.version(), frozen=frozen):
        if not logged:
            log.warning(
                "scheduler: the gateway serves other weights; waiting until this run publishes its own"
            )
            logged = True
        await pause.sleep()


def _serves_own(run_state: RunState, served: int, *, frozen: bool) -> bool:
    if run_state.base_version is None:
        return served == 0
    ahead = served - run_state.base_version - (0 if frozen else run_state.published_step)
    return ahead in (0, 1)  # a step is published to the gateway just before the run state records it
