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
from afield.interfaces import AsyncSaver, Gateway, Publisher, StepReport, Trainer
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
from afield.types import Group, Policy, RolloutResult, Trajectory
from afield.utils.durable_files import rename_whole

log = logging.getLogger(__name__)
MAX_STEPS_WITHOUT_REWARD = 3  # consecutive steps without a reward after which the run ends
T = TypeVar("T")
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
        return [group for group in self.groups if group.id not in self.dropped]

    @property
    def finished(self) -> list[RolloutResult]:
        return [f for group in self.groups for f in group.finished]


class UnfinishedCheckpoint(NamedTuple):
    """Checkpoint whose files are being written."""

    state: StepState
    """State of the run after its step."""
    partial: Path
    """Temporary directory."""
    final: Path
    """Directory after it is complete."""
    wait: Callable[[], None]
    """Waits until the trainer has written its files."""


def _nothing() -> None:
    pass


class TrainingLoop:
    """Trains a policy on completed groups. `run_blocking` runs trainer steps off the event loop."""

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
        self._last_rollouts = 0  # last step whose rollouts were put back into the store
        self._unfinished: UnfinishedCheckpoint | None = None

    async def run(self) -> None:
        """Run from the newest checkpoint to the last step."""
        state = await asyncio.to_thread(self._restore)
        await self._begin(state)
        steps_without_reward = 0
        for step in range(state.step + 1, self._window.steps + 1):
            batch = await self._step(step)
            rewarded = any(f.outcome.reward_or_floor(0.0) is not None for f in batch.finished)
            steps_without_reward = 0 if rewarded else steps_without_reward + 1
            if steps_without_reward == MAX_STEPS_WITHOUT_REWARD:
                failure = most_common_failure(batch.finished)
                raise NoRewards(
                    f"{MAX_STEPS_WITHOUT_REWARD} steps without a single reward;"
                    f" most common failure: {failure}"
                )
            del batch  # frees memory before the next batch is read
        await asyncio.to_thread(self._finish_checkpoint)

    async def _begin(self, state: StepState) -> None:
        """Publish the current weights, with a higher version than the gateway served for another run."""
        async with self._bounded("say which weights it serves"):
            served = await self._gateway.version()
        await asyncio.to_thread(self._choose_base_version, state, served)
        await self._publish(state.step, await asyncio.to_thread(self._version_of, state.step))

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        limit = asyncio.timeout(self._config.publish_timeout_s)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            message = f"the gateway did not {what} within {self._config.publish_timeout_s:g} s"
            raise Unavailable(f"{message}; start it again, then resume the run with --resume") from error

    def _choose_base_version(self, state: StepState, served: int) -> None:
        if self._run_state.base_version is None:
            self._run_state.base_version = served + 1 if served else 0
        elif served > self._version_of(state.step):
            log.warning("the gateway has served version %d since; versions go on from there", served)
            before = self._run_state.base_version
            base = served + 1 - (0 if self._config.frozen else state.step)
            latest = before + max(self._last_rollouts, self._run_state.published_step)
            if served <= latest:  # this run's own versions, of steps that are trained again
                self._run_state.add_renumbering(served, base - before)
            self._run_state.base_version = base

    def _version_of(self, step: int) -> int:
        return (self._run_state.base_version or 0) + (0 if self._config.frozen else step)

    def _restore(self) -> StepState:
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
                self._last_rollouts = step
                for finished in self._run.read_rollouts(step):
                    if not self._rollout_store.holds(finished.rollout.id):
                        self._rollout_store.put(finished)

    async def _step(self, step: int) -> StepBatch:
        clock = asyncio.get_running_loop().time
        began = clock()
        batch = await asyncio.to_thread(self._read, await self._wait_for_groups(step))
        collected = clock()
        report = StepReport(rollouts=0, tokens=0)
        if batch.usable:
            report = await self._run_blocking(lambda: self._trainer.step(batch.usable))
        line = step_metrics(
            step=step,
            version=await asyncio.to_thread(self._version_of, step),
            batch=batch,
            report=report,
            seconds=(collected - began, clock() - collected),
        )
        try:
            line = await asyncio.to_thread(self._checkpoint, line, batch, report)
        except OSError as error:
            message = f"step {step} cannot be written to {self._run.path}: {error}"
            raise Unavailable(f"{message}; free disk space, then resume the run with --resume") from error
        await self._publish(step, line.version)
        self._on_step(line)
        return batch

    async def _wait_for_groups(self, step: int) -> list[PendingGroup]:
        pause = poll_pause()
        while (
            chosen := self._window.choose(step, await asyncio.to_thread(self._run_state.pending_groups))
        ) is None:
            await pause.sleep()
        return chosen

    def _read(self, entries: Sequence[PendingGroup]) -> StepBatch:
        renumberings = self._run_state.renumberings()
        groups: list[Group] = []
        dropped: dict[str, str] = {}
        for entry in entries:
            group = renumbered(self._group(entry), renumberings)
            groups.append(group)
            stale = staleness(group, self._version)
            if entry.drop_reason:
                dropped[group.id] = entry.drop_reason
            elif stale > self._window.staleness and self._config.stale == "drop":
                dropped[group.id] = f"sampled {stale} versions ago; the bound is {self._window.staleness}"
        ids = [f.rollout.id for group in groups for f in all_results(group)]
        refilled, tokens = self._run_state.refilled([entry.position for entry in entries])
        return StepBatch(
            groups,
            dropped,
            self._version,
            self._run_state.wasted_tokens(ids) + wasted_tokens(groups, dropped) + tokens,
            refilled,
        )

    def _group(self, entry: PendingGroup) -> Group:
        members, baseline = self._run_state.group_members(entry.id)
        finished = tuple(map(self._rollout_store.get, members))
        rollout = finished[0].rollout
        return Group(
            id=entry.id,
            task_id=rollout.task.id,
            epoch=self._epoch_of(entry.position),
            split=rollout.split,
            finished=finished,
            baseline=self._rollout_store.get(baseline) if baseline else None,
        )

    def _checkpoint(self, line: StepMetrics, batch: StepBatch, report: StepReport) -> StepMetrics:
        """Write rollouts, weights and checkpoint; returns the metrics with those of the published weights.

        The checkpoint is written under a temporary name; its rename makes it count.
        """
        step, version = line.step, line.version
        self._run.check_present()
        self._finish_checkpoint()
        self._run.append_event("trained", value=step, seconds=line.train_s)
        results = [f for group in batch.groups for f in all_results(group)]
        advantages = report.advantages
        self._run.write_rollouts(
            step,
            [structs.replace(f, advantage=advantages.get(f.rollout.id)) for f in results],
            records=report.records,
        )
        carrying = [f for group in batch.usable for f in group.finished]
        trained = tuple(f.rollout.id for f in carrying if f.outcome.reward_or_floor(0.0) is not None)
        if not self._config.frozen:
            shutil.rmtree(self._run.weights(version), ignore_errors=True)  # left by a crash in this step
            line = structs.replace(line, trainer={**line.trainer, **self._export(version)})
        groups = tuple(group.id for group in batch.groups)
        state = StepState(step, version, trained, msgspec.to_builtins(line), groups)
        if step % self._config.checkpoint_every == 0 or step == self._window.steps:
            self._save(state)  # after the export: the checkpoint includes the published weights' state
        self._run_state.finish_step(step, groups, trained)
        self._run.append_metrics(state.metrics)
        self._remove_rollouts(groups)
        config = self._config
        self._run.prune(keep_checkpoints=config.keep_checkpoints, keep_weights=config.keep_weights)
        self._prune_rollouts()
        return line

    def _save(self, state: StepState) -> None:
        """Write a checkpoint, or begin to."""
        final = self._run.checkpoint(state.step)
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        wait: Callable[[], None] = _nothing
        if self._config.async_checkpoints and isinstance(self._trainer, AsyncSaver):
            wait = self._trainer.begin_save(partial)
        else:
            self._trainer.save(partial)
        self._unfinished = UnfinishedCheckpoint(state, partial, final, wait)
        if wait is _nothing:
            self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Give the checkpoint that is being written its final name, once it is complete."""
        if self._unfinished is None:
            return
        unfinished, self._unfinished = self._unfinished, None
        unfinished.wait()
        (unfinished.partial / STEP_STATE_FILE).write_bytes(msgspec.json.encode(unfinished.state))
        rename_whole(unfinished.partial, unfinished.final, durable=self._run.durable)

    def _export(self, version: int) -> dict[str, float]:
        path = self._run.weights(version)
        if isinstance(self._trainer, Publisher):
            return self._trainer.publish(path, version=version, dtype=self._config.engine_dtype)
        self._trainer.export(path)
        return {}

    def _prune_rollouts(self) -> None:
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
        for group_id in group_ids:
            members, baseline = self._run_state.group_members(group_id)
            for rollout_id in (*members, *([baseline] if baseline else [])):
                self._rollout_store.remove(rollout_id)

    async def _publish(self, step: int, version: int) -> None:
        path = self._run.weights(version)
        if not path.exists():
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

    def now(version: int) -> int:
        return version + sum(shift for served, shift in renumberings if version <= served)

    def moved(row: Trajectory) -> Trajectory:
        spans = (structs.replace(s, low=now(s.low), high=now(s.high)) for s in row.versions)
        return structs.replace(row, versions=tuple(spans))

    return structs.replace(
        group,
        finished=tuple(
            structs.replace(f, trajectories=tuple(map(moved, f.trajectories))) for f in group.finished
        ),
    )


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
        f
        for group in groups
        for f in group.finished
        if group.id in dropped or f.outcome.reward_or_floor(0.0) is None
    ]
    return sum(t.owned for f in idle for t in f.trajectories)


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
    dropped = count_tokens(f for group in batch.groups if group.id in batch.dropped for f in group.finished)
    trained = report.account or count_tokens(f for group in batch.usable for f in group.finished)
    return trained + dropped.idle(UntrainedReason.DROPPED_GROUP)


def most_common_failure(finished: Sequence[RolloutResult]) -> str:
    """Kind, reason and message of the most common failure."""
    failures = [f.outcome.failure for f in finished if f.outcome.failure]
    counts = Counter(f"{f.kind}/{f.reason}: {f.message}" for f in failures)
    return counts.most_common(1)[0][0] if counts else "no failure at all"
