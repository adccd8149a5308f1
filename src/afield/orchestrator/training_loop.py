"""Training loop: take completed groups, train, checkpoint, publish weights.

1. A step is safe when a checkpoint of it or of a later step has its final name. After a crash the loop
   continues from the newest checkpoint. Later steps are trained again on their rollouts, which were written
   before: no rollout counts twice in the weights, and none is lost.
2. Groups that exceed the staleness bound are dropped with a reason, or trained with a correction.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, structs

from afield.errors import DamagedFile, NoRewards, Unavailable
from afield.interfaces import AsyncSaver, BackgroundPublisher, Gateway, Publisher, StepReport, Trainer
from afield.interfaces.shared_weights import can_be_loaded
from afield.orchestrator.groups import StalenessWindow
from afield.orchestrator.state import (
    STEP_STATE_FILE,
    PendingGroup,
    RolloutStore,
    RunDirectory,
    RunState,
    StepState,
    poll_pause,
)
from afield.orchestrator.step_totals import StepTotals, carrying_spans
from afield.runs.exclusions import UntrainedReason
from afield.runs.token_account import TokenAccount, count_tokens
from afield.types import Group, Policy, RolloutResult, Trajectory, Turn
from afield.utils.durable_files import rename_whole

log = logging.getLogger(__name__)
MAX_STEPS_WITHOUT_REWARD = 3  # consecutive steps without a reward after which the run ends
T = TypeVar("T")
S = TypeVar("S", Trajectory, Turn)
RunBlocking = Callable[[Callable[[], Any]], Awaitable[Any]]


class LoopConfig(Struct, frozen=True, kw_only=True):
    """Settings of the training loop."""

    policy: str
    """Name of the model."""
    stale: Literal["drop", "correct"] = "drop"
    """Handling of groups that exceed the staleness bound: `drop` them, or `correct` with importance weights
    in the trainer's loss.
    """
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    checkpoint_every: int = 1
    """Steps between two checkpoints; the last step has one in any case."""
    async_checkpoints: bool = False
    """Whether checkpoints are written while the next step trains, by trainers that can."""
    keep_weights: int | None = 2
    """Number of newest exported weights to keep; None keeps all."""
    keep_rollouts_gb: float | None = None
    """Size of rollouts/ in 10^9 bytes above which files of the oldest steps are removed; None keeps all."""
    frozen: bool = False
    """Whether engines keep the initial weights: steps export none, and the version stays."""
    engine_dtype: str = "float32"
    """Dtype of the engines, to which published weights are rounded."""
    publish_timeout_s: float = 1800.0
    """Seconds to wait for the gateway to load weights or report its version; then the run ends."""


class StepMetrics(Struct, frozen=True, kw_only=True):
    """Metrics of one step: one line of metrics.jsonl."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Policy version after the step."""
    reward: float | None
    """Mean reward, with 0 for policy failures without one; None without rewards."""
    rollouts: int
    """Number of rollouts in the step's groups."""
    trained: int
    """Number of rollouts that were trained."""
    failed: int
    """Number of rollouts without a reward."""
    too_long: int = 0
    """Number of sequences that exceed the trainer's context and were not trained."""
    failures: dict[str, int]
    """Number of failed rollouts by failure kind, including policy failures."""
    refused: dict[str, int] = {}
    """Number of model calls that the gateway refused, by class of error."""
    refusal: str = ""
    """Message of a refused call, of the most common class; empty without one."""
    retried: int
    """Number of attempts beyond the first of each rollout."""
    dropped_groups: dict[str, str]
    """Reasons of dropped groups, by group id."""
    refilled_groups: int = 0
    """Number of groups with equal rewards that dynamic sampling replaced."""
    turns_per_rollout: float
    """Mean number of model calls per rollout."""
    tool_calls_per_rollout: float
    """Mean number of tool calls per rollout."""
    sampled_tokens: int
    """Tokens of the attempts that count: trained, excluded or untrained."""
    trained_tokens: int = 0
    """Tokens in the loss."""
    excluded_tokens: dict[str, int] = {}
    """Tokens of excluded turns, by reason (`exclusions.REASONS`)."""
    excluded_share: float = 0.0
    """Excluded tokens as a share of sampled tokens."""
    untrained_tokens: dict[str, int] = {}
    """Tokens of rollouts that contribute no gradient, by reason (`exclusions.UntrainedReason`)."""
    wasted_tokens: int
    """Tokens of failed attempts, of rollouts without a reward, and of dropped and replaced groups."""
    staleness: int
    """Largest number of policy versions between sampling and training a token."""
    staleness_mean: float = 0.0
    """Mean number of policy versions between sampling and training a token."""
    collect_s: float
    """Seconds that the step waited for its groups and read them."""
    train_s: float
    """Seconds of the training step."""
    agent: dict[str, float]
    """Metrics of agents, each averaged over the rollouts that report it."""
    trainer: dict[str, float]
    """Metrics of the trainer."""


class StepBatch(Struct, frozen=True):
    """Groups of one step."""

    groups: list[Group]
    """All groups of the step, including dropped ones."""
    dropped: dict[str, str]
    """Reasons of dropped groups, by group id."""
    version: int
    """Policy version that trains on them."""
    wasted: int
    """Sampled tokens that contribute no gradient; see `StepMetrics.wasted_tokens`."""
    refilled: int = 0
    """Number of groups that dynamic sampling replaced."""

    @property
    def usable(self) -> list[Group]:
        """Groups that were not dropped."""
        return [group for group in self.groups if group.id not in self.dropped]

    @property
    def finished(self) -> list[RolloutResult]:
        """Rollouts of all groups, without baselines."""
        return [result for group in self.groups for result in group.finished]

    @property
    def trained(self) -> list[RolloutResult]:
        """Rollouts of usable groups that count with a reward."""
        results = [result for group in self.usable for result in group.finished]
        return [result for result in results if result.outcome.reward_or_floor(0.0) is not None]


class UnfinishedCheckpoint(NamedTuple):
    """Checkpoint that the trainer writes while the next step trains."""

    state: StepState
    """State of the run after its step."""
    partial: Path
    """Temporary directory."""
    wait: Callable[[], None]
    """Waits until the trainer has written its files."""


class TrainingLoop:
    """Trains a policy on completed groups.

    - `window`: decides which completed groups make a step.
    - `epoch_of`: epoch of a group, by its position in the schedule.
    - `on_step`: called with the metrics of each step, after its weights are served.
    - `on_publish`: called with each version that the gateway serves, and the seconds that it took to load it.
    - `run_blocking`: runs trainer steps off the event loop.
    """

    def __init__(
        self,
        window: StalenessWindow,
        config: LoopConfig,
        *,
        epoch_of: Callable[[int], int],
        trainer: Trainer,
        gateway: Gateway,
        run_state: RunState,
        rollout_store: RolloutStore,
        run: RunDirectory,
        on_step: Callable[[StepMetrics], None],
        on_publish: Callable[[int, float], None] = lambda version, seconds: None,
        run_blocking: RunBlocking = asyncio.to_thread,
    ) -> None:
        self._window = window
        self._config = config
        self._epoch_of = epoch_of
        self._trainer = trainer
        self._gateway = gateway
        self._run_state = run_state
        self._rollout_store = rollout_store
        self._run = run
        self._on_step = on_step
        self._on_publish = on_publish
        self._run_blocking = run_blocking
        self._version = 0
        """Policy version that was published last."""
        self._last_restored_step = 0
        """Last step whose rollouts were put back into the store; 0 without one."""
        self._unfinished: UnfinishedCheckpoint | None = None

    async def run(self) -> None:
        """Run from the newest checkpoint to the last step."""
        state = await asyncio.to_thread(self._restore)
        await self._begin(state)
        steps_without_reward = 0
        for step in range(state.step + 1, self._window.steps + 1):
            batch = await self._step(step)
            rewarded = any(result.outcome.reward_or_floor(0.0) is not None for result in batch.finished)
            steps_without_reward = 0 if rewarded else steps_without_reward + 1
            if steps_without_reward == MAX_STEPS_WITHOUT_REWARD:
                failure = most_common_failure(batch.finished)
                raise NoRewards(
                    f"{MAX_STEPS_WITHOUT_REWARD} steps without a single reward;"
                    f" most common failure: {failure}"
                )
            del batch  # frees memory before the next batch is read
        await asyncio.to_thread(self._finish_checkpoint)
        await asyncio.to_thread(self._finish_publication)

    async def _begin(self, state: StepState) -> None:
        """Publish the current weights, with a higher version than the gateway served for another run."""
        async with self._bounded("say which weights it serves"):
            served = await self._gateway.version()
        await asyncio.to_thread(self._choose_base_version, state, served)
        await self._publish(state.step, await asyncio.to_thread(self._version_of, state.step))

    @asynccontextmanager
    async def _bounded(self, request: str) -> AsyncIterator[None]:
        """Limit a request of the gateway to `publish_timeout_s`; then raises Unavailable."""
        limit = asyncio.timeout(self._config.publish_timeout_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"the gateway did not {request} within {self._config.publish_timeout_s:g} s"
            raise Unavailable(f"{message}; start it again, then resume the run with --resume") from error

    def _choose_base_version(self, state: StepState, served: int) -> None:
        """Set the version of step 0 so that the next version is above all that the gateway has served."""
        if self._run_state.base_version is None:
            self._run_state.base_version = served + 1 if served else 0
        elif served > self._version_of(state.step):
            log.warning("the gateway has served version %d since; versions go on from there", served)
            before = self._run_state.base_version
            base = served + 1 - (0 if self._config.frozen else state.step)
            latest = before + max(self._last_restored_step, self._run_state.published_step)
            if served <= latest:  # this run's own versions, of steps that are trained again
                self._run_state.add_renumbering(served, base - before)
            self._run_state.base_version = base

    def _version_of(self, step: int) -> int:
        """Policy version after a step."""
        return (self._run_state.base_version or 0) + (0 if self._config.frozen else step)

    def _restore(self) -> StepState:
        """Load the newest intact checkpoint and bring run directory, run state and store in line with it."""
        while (state := self._run.last_state()) is not None:
            try:
                self._trainer.restore(self._run.checkpoint(state.step))
                break
            except DamagedFile as error:
                self._run.quarantine(state.step, str(error))
        self._restore_rollouts(state.step if state else 0)
        self._run.rewind(state)
        self._run_state.rewind(state.step if state else 0)
        rewind_published_step(self._run, self._run_state)
        if state is None:
            return StepState(0, 0, (), {})
        self._run_state.finish_step(state.step, state.groups, state.trained_rollouts)
        self._remove_rollouts(state.groups)  # the process may have been killed before it did
        return state

    def _restore_rollouts(self, done: int) -> None:
        """Put rollouts of steps whose checkpoint is lost back into the store, to train on them again."""
        for step in self._run.steps():
            if step > done:
                self._last_restored_step = step
                for finished in self._run.read_rollouts(step):
                    if not self._rollout_store.holds(finished.rollout.id):
                        self._rollout_store.put(finished)

    async def _step(self, step: int) -> StepBatch:
        """Collect, train, checkpoint and publish one step."""
        clock = asyncio.get_running_loop().time
        began = clock()
        batch = await asyncio.to_thread(self._read, await self._wait_for_groups(step))
        collected = clock()
        report = StepReport(rollouts=0, tokens=0)
        if batch.usable:
            report = await self._run_blocking(lambda: self._trainer.step(batch.usable))
        metrics = step_metrics(
            step=step,
            version=await asyncio.to_thread(self._version_of, step),
            batch=batch,
            report=report,
            seconds=(collected - began, clock() - collected),
        )
        try:
            metrics = await asyncio.to_thread(self._checkpoint, metrics, batch, report)
        except OSError as error:
            message = f"step {step} cannot be written to {self._run.path}: {error}"
            raise Unavailable(f"{message}; free disk space, then resume the run with --resume") from error
        await self._publish(step, metrics.version)
        self._on_step(metrics)
        return batch

    async def _wait_for_groups(self, step: int) -> list[PendingGroup]:
        """Wait until the groups of this step are complete."""
        pause = poll_pause()
        while (
            chosen := self._window.choose(step, await asyncio.to_thread(self._run_state.pending_groups))
        ) is None:
            await pause.sleep()
        return chosen

    def _read(self, chosen: Sequence[PendingGroup]) -> StepBatch:
        """Load the groups of a step and drop those that cannot be trained."""
        renumberings = self._run_state.renumberings()
        groups: list[Group] = []
        dropped: dict[str, str] = {}
        for pending in chosen:
            group = renumbered(self._group(pending), renumberings)
            groups.append(group)
            age = staleness(group, self._version)
            if pending.drop_reason:
                dropped[group.id] = pending.drop_reason
            elif age > self._window.staleness and self._config.stale == "drop":
                dropped[group.id] = f"sampled {age} versions ago; the bound is {self._window.staleness}"
        ids = [result.rollout.id for group in groups for result in all_results(group)]
        refilled, refilled_tokens = self._run_state.refilled([pending.position for pending in chosen])
        wasted = self._run_state.wasted_tokens(ids) + wasted_tokens(groups, dropped) + refilled_tokens
        return StepBatch(groups, dropped, self._version, wasted, refilled)

    def _group(self, pending: PendingGroup) -> Group:
        """Load the rollouts of a group."""
        members, baseline = self._run_state.group_members(pending.id)
        finished = tuple(map(self._rollout_store.get, members))
        rollout = finished[0].rollout
        return Group(
            id=pending.id,
            task_id=rollout.task.id,
            epoch=self._epoch_of(pending.position),
            split=rollout.split,
            finished=finished,
            baseline=self._rollout_store.get(baseline) if baseline else None,
        )

    def _checkpoint(self, metrics: StepMetrics, batch: StepBatch, report: StepReport) -> StepMetrics:
        """Write rollouts, weights and checkpoint; returns the metrics with those of the published weights.

        The checkpoint is written under a temporary name; its rename makes it count.
        """
        step, version = metrics.step, metrics.version
        self._run.check_present()
        self._finish_checkpoint()
        self._run.append_event("trained", value=step, seconds=metrics.train_s)
        self._write_rollouts(step, batch, report)
        if not self._config.frozen:
            shutil.rmtree(self._run.weights(version), ignore_errors=True)  # left by a crash in this step
            metrics = structs.replace(metrics, trainer={**metrics.trainer, **self._export(version)})
        groups = tuple(group.id for group in batch.groups)
        trained = tuple(result.rollout.id for result in batch.trained)
        state = StepState(step, version, trained, msgspec.to_builtins(metrics), groups)
        if step % self._config.checkpoint_every == 0 or step == self._window.steps:
            self._save(state)  # after the export: the checkpoint includes the published weights' state
        self._run_state.finish_step(step, groups, trained)
        self._run.append_metrics(state.metrics)
        self._remove_rollouts(groups)
        config = self._config
        self._run.prune(keep_checkpoints=config.keep_checkpoints, keep_weights=config.keep_weights)
        self._prune_rollouts()
        return metrics

    def _write_rollouts(self, step: int, batch: StepBatch, report: StepReport) -> None:
        """Write all rollouts of a step, with their advantages and the trainer's records."""
        advantages = report.advantages
        results = [result for group in batch.groups for result in all_results(group)]
        self._run.write_rollouts(
            step,
            [structs.replace(result, advantage=advantages.get(result.rollout.id)) for result in results],
            records=report.records,
        )

    def _save(self, state: StepState) -> None:
        """Write a checkpoint, or begin to."""
        final = self._run.checkpoint(state.step)
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if self._config.async_checkpoints and isinstance(self._trainer, AsyncSaver):
            self._unfinished = UnfinishedCheckpoint(state, partial, self._trainer.begin_save(partial))
        else:
            self._trainer.save(partial)
            self._complete_checkpoint(state, partial)

    def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and complete it."""
        if self._unfinished is None:
            return
        unfinished, self._unfinished = self._unfinished, None
        unfinished.wait()
        self._complete_checkpoint(unfinished.state, unfinished.partial)

    def _complete_checkpoint(self, state: StepState, partial: Path) -> None:
        """Give a checkpoint with all its files its final name, which makes it count.

        The weights of its version are complete on disk before.
        """
        self._finish_publication()
        (partial / STEP_STATE_FILE).write_bytes(msgspec.json.encode(state))
        rename_whole(partial, self._run.checkpoint(state.step), durable=self._run.durable)

    def _finish_publication(self) -> None:
        """Wait until the published weights are complete on disk."""
        if isinstance(self._trainer, BackgroundPublisher):
            self._trainer.finish_publication()

    def _export(self, version: int) -> dict[str, float]:
        """Write the weights for engines; returns metrics of their rounding."""
        path = self._run.weights(version)
        if isinstance(self._trainer, Publisher):
            return self._trainer.publish(path, version=version, dtype=self._config.engine_dtype)
        self._trainer.export(path)
        return {}

    def _prune_rollouts(self) -> None:
        """Remove files of the oldest steps while rollouts/ exceeds `keep_rollouts_gb`."""
        config = self._config
        if config.keep_rollouts_gb is None:
            return
        # Keeps the files that a step with a damaged checkpoint is trained from again.
        least = config.keep_checkpoints * config.checkpoint_every + 1
        removed = self._run.prune_rollouts(int(config.keep_rollouts_gb * 1e9), keep_steps=least)
        if removed:
            message = "rollouts of steps %s were removed: rollouts/ is above keep_rollouts_gb = %g"
            log.warning(message, ", ".join(map(str, removed)), config.keep_rollouts_gb)

    def _remove_rollouts(self, group_ids: Sequence[str]) -> None:
        """Remove the rollouts of trained groups from the store; rollouts/ has them."""
        for group_id in group_ids:
            members, baseline = self._run_state.group_members(group_id)
            for rollout_id in (*members, *([baseline] if baseline else [])):
                self._rollout_store.remove(rollout_id)

    async def _publish(self, step: int, version: int) -> None:
        """Have the gateway serve the weights of a step, and record when it does."""
        path = self._run.weights(version)
        if not await asyncio.to_thread(can_be_loaded, path):  # or killed before its files were written
            await asyncio.to_thread(self._export, version)
        began = time.monotonic()
        async with self._bounded(f"serve version {version}"):
            await self._gateway.publish(Policy(self._config.policy, version), str(path))
        self._version = version
        seconds = time.monotonic() - began
        self._on_publish(version, seconds)
        await asyncio.to_thread(self._run.append_event, "published", value=version, seconds=seconds)
        await asyncio.to_thread(self._mark_published, step)

    def _mark_published(self, step: int) -> None:
        self._run_state.published_step = step


def all_results(group: Group) -> tuple[RolloutResult, ...]:
    """Rollouts of a group, including the baseline."""
    return (*group.finished, *([group.baseline] if group.baseline else []))


def renumbered(group: Group, renumberings: Sequence[tuple[int, int]]) -> Group:
    """The group with the present numbers of the versions that sampled its tokens."""
    if not renumberings:
        return group

    def present_number(version: int) -> int:
        return version + sum(shift for served, shift in renumberings if version <= served)

    def renumber(sampled: S) -> S:
        spans = tuple(
            structs.replace(span, low=present_number(span.low), high=present_number(span.high))
            for span in sampled.versions
        )
        return structs.replace(sampled, versions=spans)

    finished = tuple(
        structs.replace(
            result,
            trajectories=tuple(map(renumber, result.trajectories)),
            turns=tuple(map(renumber, result.turns)),
        )
        for result in group.finished
    )
    return structs.replace(group, finished=finished)


def rewind_published_step(run: RunDirectory, run_state: RunState) -> None:
    """Go back to the newest checkpoint, so that no group begins for steps that are trained again first."""
    state = run.last_state()
    run_state.published_step = min(run_state.published_step, state.step if state else 0)


def staleness(group: Group, version: int) -> int:
    """Largest number of policy versions between sampling and `version`, over trainable tokens."""
    return max((version - span.low for span in carrying_spans(group)), default=0)


def wasted_tokens(groups: Sequence[Group], dropped: dict[str, str]) -> int:
    """Tokens of finished rollouts that contribute no gradient."""
    idle = [
        result
        for group in groups
        for result in group.finished
        if group.id in dropped or result.outcome.reward_or_floor(0.0) is None
    ]
    return sum(trajectory.owned for result in idle for trajectory in result.trajectories)


def step_metrics(
    *, step: int, version: int, batch: StepBatch, report: StepReport, seconds: tuple[float, float]
) -> StepMetrics:
    """Compute the metrics of a step; `seconds` are the times of collecting and training."""
    totals = StepTotals()
    for group in batch.groups:
        totals.add(group, version=batch.version, dropped=batch.dropped.get(group.id))
    account = token_account(batch, report)
    return StepMetrics(
        step=step,
        version=version,
        trained=report.rollouts,
        too_long=report.too_long,
        refilled_groups=batch.refilled,
        **account_metrics(account),
        wasted_tokens=batch.wasted,
        collect_s=round(seconds[0], 3),
        train_s=round(seconds[1], 3),
        trainer=dict(report.metrics),
        **totals.metrics(),
    )


def account_metrics(account: TokenAccount) -> dict[str, Any]:
    """Fields of `StepMetrics` with the token account."""
    return {
        "sampled_tokens": account.sampled,
        "trained_tokens": account.trained,
        "excluded_tokens": dict(account.excluded),
        "excluded_share": round(account.excluded_share, 6),
        "untrained_tokens": dict(account.untrained),
    }


def token_account(batch: StepBatch, report: StepReport) -> TokenAccount:
    """Token account of a step: the trainer's account plus the tokens of dropped groups."""
    dropped = count_tokens(
        result for group in batch.groups if group.id in batch.dropped for result in group.finished
    )
    trained = report.account or count_tokens(result for group in batch.usable for result in group.finished)
    return trained + dropped.idle(UntrainedReason.DROPPED_GROUP)


def most_common_failure(finished: Sequence[RolloutResult]) -> str:
    """Kind, reason and message of the most common failure."""
    failures = [result.outcome.failure for result in finished if result.outcome.failure]
    counts = Counter(f"{f.kind}/{f.reason}: {f.message}" for f in failures)
    return counts.most_common(1)[0][0] if counts else "no failure at all"
