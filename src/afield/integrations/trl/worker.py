"""Rollout worker for TRL's asynchronous GRPO trainer (`RolloutWorkerProtocol`).

1. Starts groups in task order as the staleness limits allow; agents sample through the gateway.
2. Puts the rows of completed groups into the trainer's buffer, with the versions that the gateway recorded.
   Rollouts without a reward are left out and counted.
3. `check_health` raises when too many groups had no reward, or when the collection ended.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from afield.batches.rewards import unused_turn_rewards
from afield.errors import NoRewards, Unavailable, root_cause
from afield.integrations.trl.collector_thread import Collector, CollectorThread
from afield.integrations.trl.rows import MeanLength, RowConfig, samples
from afield.integrations.trl.staleness import StalenessLimits
from afield.orchestrator.groups import GroupSpec, read_group
from afield.orchestrator.training_loop import all_results, most_common_failure
from afield.runs.exclusions import UntrainedReason
from afield.runs.token_account import ExclusionWatch, TokenAccount, count_tokens, metric_name
from afield.types import Group

log = logging.getLogger(__name__)
POLL_S = 0.05
RECENT_GROUPS = 16
"""Groups over which the expected number of rows is averaged."""
MAX_STEPS_WITHOUT_REWARD = 3
"""Groups without any reward that end the collection, in optimizer steps."""
ENDED = "training has ended"


class CompletedRows(NamedTuple):
    """Samples of a completed group."""

    rows: list[Any]
    """TRL samples."""
    rollout_ids: Sequence[str]
    """Ids of the rollouts in the rollout store."""


class RolloutWorker:
    """Collects groups in the collector thread; TRL reads `rollout_buffer` and `metrics_queue`."""

    def __init__(self, collector: CollectorThread, limits: StalenessLimits, rows: RowConfig) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._collector = collector
        self._limits = limits
        self._row_config = rows
        self._version = 0
        self._delivered = 0  # rows given to TRL
        # Rows taken when the version changed; TRL takes one step more at the first version.
        self._mark = limits.step
        self._sizes: deque[int] = deque(
            [collector.config.rollouts], maxlen=RECENT_GROUPS
        )  # rows per group, of recent groups
        self._collecting: Future[None] | None = None
        self._heartbeat = time.monotonic()
        self._lengths = MeanLength()
        self._running: dict[int, int] = {}  # version at the start of each running group, by position
        self._ready: dict[int, CompletedRows] = {}
        self._specs: dict[int, GroupSpec] = {}
        self._groups_without_reward = 0
        self._excluded = ExclusionWatch()
        self._ending = False

    # --- called by TRL ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start collection. TRL calls this after it sent the weights."""
        collector = self._collector.start()
        self._heartbeat = time.monotonic()
        if self._collecting is None:
            self._collecting = self._collector.spawn(self._collect(collector))

    def stop(self) -> None:
        """End the running rollouts; idempotent."""
        if self._collecting is not None and not self._ending and self._collector.alive:
            self._collector.call(self._end(self._collector.start()))

    def update_model_version(self, model_version: int) -> None:
        if self._version:
            self._mark += self._taken
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the collection, or Unavailable if it makes no progress."""
        self._collector.check()
        if self._collecting is None:
            return
        if self._collecting.done() and not self._collecting.cancelled():
            self._collecting.result()
        idle_s = time.monotonic() - self._heartbeat
        if idle_s > stale_after_s:
            raise Unavailable(
                f"the collection of rollouts made no progress for {idle_s:.0f} s (heartbeat_stale_after_s ="
                f" {stale_after_s:g}) with {len(self._running)} groups running;"
                f" see {self._collector.run.logs}"
            )

    @property
    def _taken(self) -> int:
        """Rows taken since the version changed."""
        return self._delivered - self.rollout_buffer.qsize() - self._mark

    @property
    def _expected(self) -> int:
        return max(1, round(sum(self._sizes) / len(self._sizes)))

    # --- in the collector thread ----------------------------------------------------------------

    async def _collect(self, collector: Collector) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                position = 0
                while await self._may_start(collector):
                    spec = collector.schedule.group_spec(position)
                    self._running[position] = self._version
                    self._specs[position] = spec
                    tasks.create_task(self._group(collector, position, spec))
                    await asyncio.sleep(0)  # let it start before the next one is admitted
                    position += 1
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors

    async def _may_start(self, collector: Collector) -> bool:
        """Wait until another group may start; False at the end."""
        while not self._ending:
            self._heartbeat = time.monotonic()
            self._deliver(collector)
            if collector.groups.has_room and self._limits.admits(
                self._expected,
                taken=self._taken,
                waiting=self.rollout_buffer.qsize(),
                running=len(self._running),
            ):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _group(self, collector: Collector, position: int, spec: GroupSpec) -> None:
        ended = await collector.groups.start_group(spec)
        if self._ending:
            return
        group = await asyncio.to_thread(read_group, collector.rollout_store, ended)
        step = max(1, self._version)  # the first step that may train on them
        await asyncio.to_thread(collector.run.append_rollouts, step, all_results(group))
        built: list[Any] = []
        if ended.drop_reason is None:
            built = samples(
                group, self._row_config, number=position, base=collector.base, lengths=self._lengths
            )
        account = token_account(group, built, ended.drop_reason)
        await asyncio.to_thread(self._collector.record, step, group, account, ended.drop_reason)
        self._record(group, built, account, ended.drop_reason)
        rollout_ids = (*ended.rollout_ids, *([ended.baseline] if ended.baseline else []))
        self._ready[position] = CompletedRows(built, rollout_ids)
        self._deliver(collector)

    def _deliver(self, collector: Collector) -> None:
        """Deliver completed groups, oldest first; a younger one only if no older one becomes too stale by
        it."""
        for position in sorted(self._ready):
            ready = self._ready[position]
            if not self._may_go(position, len(ready.rows)):
                return
            for row in ready.rows:
                row.enqueued_at = time.time()
                self._delivered += 1
                self.rollout_buffer.put(row)
            for rollout_id in ready.rollout_ids:
                collector.rollout_store.remove(rollout_id)
            self._sizes.append(len(ready.rows))
            del self._ready[position], self._running[position], self._specs[position]

    def _may_go(self, position: int, size: int) -> bool:
        return self._limits.may_pass(
            size,
            self._expected,
            taken=self._taken,
            waiting=self.rollout_buffer.qsize(),
            version=self._version,
            older=[born for p, born in self._running.items() if p < position and p not in self._ready],
        )

    def _record(self, group: Group, built: Sequence[Any], account: TokenAccount, dropped: str | None) -> None:
        """Report metrics of a group; raises NoRewards after too many groups without a reward."""
        rewards = [r for f in group.finished if (r := f.outcome.reward_or_floor(0.0)) is not None]
        count = len(group.finished)
        self.metrics_queue.put(
            {
                "rollout/reward": (sum(rewards), len(rewards)),
                "rollout/failed_total": float(count - len(rewards)),
                "rollout/dropped_groups_total": float(dropped is not None),
                "rollout/turns_per_rollout": (sum(len(f.turns) for f in group.finished), count),
                "rollout/rows_per_rollout": (len(built), max(len(rewards), 1)),
                "rollout/attempts_per_rollout": (sum(f.attempts for f in group.finished), count),
                **self._tokens(account),
                "rollout/unused_turn_rewards_total": float(
                    unused_turn_rewards([group], credit="outcome", weights={})
                ),
            }
        )
        self._groups_without_reward = 0 if rewards else self._groups_without_reward + 1
        if self._groups_without_reward >= MAX_STEPS_WITHOUT_REWARD * max(
            1, self._limits.step // self._expected
        ):
            failure = most_common_failure(group.finished)
            raise NoRewards(
                f"{self._groups_without_reward} groups without a single reward; most often: {failure}"
            )

    def _tokens(self, account: TokenAccount) -> dict[str, Any]:
        """Token account of a group as metrics."""
        if warning := self._excluded.add(account):
            log.warning("%s", warning)
        sampled, excluded = account.sampled, sum(account.excluded.values())
        return {
            "rollout/sampled_tokens_total": float(sampled),
            "rollout/trained_tokens_total": float(account.trained),
            "rollout/excluded_tokens_total": float(excluded),
            "rollout/excluded_share": (excluded, max(sampled, 1)),
            **{
                f"rollout/excluded_tokens/{metric_name(r)}_total": float(n)
                for r, n in account.excluded.items()
            },
            **{
                f"rollout/untrained_tokens/{metric_name(r)}_total": float(n)
                for r, n in account.untrained.items()
            },
        }

    async def _end(self, collector: Collector) -> None:
        """End all sessions, within the teardown timeout."""
        self._ending = True
        specs = list(self._specs.values())
        for rollout_id in [rollout_id for spec in specs for rollout_id in collector.groups.rollout_ids(spec)]:
            collector.rollout_runner.cancel(rollout_id, ENDED)
        if ending := [asyncio.create_task(collector.groups.start_group(spec)) for spec in specs]:
            await asyncio.wait(ending, timeout=collector.rollout_config.deadlines.teardown_timeout_s)


def token_account(group: Group, built: Sequence[Any], dropped: str | None) -> TokenAccount:
    """Token account of a group: rows with an advantage are trained."""
    account = count_tokens(group.finished)
    if dropped is not None:
        return account.idle(UntrainedReason.DROPPED_GROUP)
    trained = sum(int(row.completion_mask.sum()) for row in built if row.advantage)
    untrained = Counter(account.untrained)
    untrained[UntrainedReason.NO_ADVANTAGE] += account.trained - trained
    return TokenAccount(trained=trained, excluded=account.excluded, untrained=+untrained)
