"""TRL's `RolloutWorkerProtocol` on afield's collection.

Groups are begun in the order of the tasks, as the pace allows, sampled through the gateway and put into
the trainer's buffer row by row, a group at a time. Versions are those that sampled, as the gateway saw it.
What has no reward is left out and counted; if nothing has one for long, or the collection broke, the
trainer is told why when it asks for our health.
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
from afield.exclusions import UntrainedReason
from afield.integrations.trl.collector_thread import Collector, CollectorThread
from afield.integrations.trl.rows import MeanLength, RowConfig, rows
from afield.integrations.trl.staleness import StalenessLimits
from afield.orchestrator.groups import GroupSpec, read_group
from afield.orchestrator.training_loop import most_common_failure
from afield.token_account import ExclusionWatch, TokenAccount, count_tokens, metric_name
from afield.types import Group

log = logging.getLogger("afield.trl")
POLL_S = 0.05
RECENT = 16  # groups whose size is taken to be the next ones'
PATIENCE = 3  # steps' worth of groups without a single reward before it is given up
ENDED = "training has ended"


class CompletedRows(NamedTuple):
    """A group that has ended: what it gives the trainer, and what to forget once it has it."""

    rows: list[Any]
    members: Sequence[str]


class RolloutWorker:
    """`rollout_buffer` and `metrics_queue` are TRL's; the rest of its state is the event loop's alone."""

    def __init__(self, crew: CollectorThread, pace: StalenessLimits, recipe: RowConfig) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._crew = crew
        self._pace = pace
        self._recipe = recipe
        self._version = 0
        self._delivered = 0  # rows
        self._mark = pace.step  # taken when the version changed; the first takes a step more
        self._sizes: deque[int] = deque([crew.config.rollouts], maxlen=RECENT)  # of groups, in rows
        self._gathering: Future[None] | None = None
        self._beat = time.monotonic()
        self._lengths = MeanLength()
        self._running: dict[int, int] = {}  # position to the version it was begun at
        self._ready: dict[int, CompletedRows] = {}
        self._wishes: dict[int, GroupSpec] = {}
        self._barren = 0
        self._excluded = ExclusionWatch()
        self._ending = False

    # --- what TRL calls --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to collect. The weights that sample are there: TRL has sent them."""
        made = self._crew.start()
        self._beat = time.monotonic()
        if self._gathering is None:
            self._gathering = self._crew.spawn(self._gather(made))

    def stop(self) -> None:
        """End what runs; repeating is harmless, and so is a collection that is gone."""
        if self._gathering is not None and not self._ending and self._crew.alive:
            self._crew.call(self._end(self._crew.start()))

    def update_model_version(self, model_version: int) -> None:
        if self._version:
            self._mark += self._taken
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the collection, or that it does not move any more."""
        self._crew.check()
        if self._gathering is None:
            return
        if self._gathering.done() and not self._gathering.cancelled():
            self._gathering.result()
        silent = time.monotonic() - self._beat
        if silent > stale_after_s:
            raise Unavailable(
                f"the collection has not moved for {silent:.0f} s (heartbeat_stale_after_s ="
                f" {stale_after_s:g}) with {len(self._running)} groups under way; see {self._crew.run.logs}"
            )

    @property
    def _taken(self) -> int:
        """Rows that were taken since the version changed."""
        return self._delivered - self.rollout_buffer.qsize() - self._mark

    @property
    def _expected(self) -> int:
        return max(1, round(sum(self._sizes) / len(self._sizes)))

    # --- in the collection's thread --------------------------------------------------------------

    async def _gather(self, made: Collector) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                position = 0
                while await self._its_turn(made):
                    wish = made.schedule.group_spec(position)
                    self._running[position] = self._version
                    self._wishes[position] = wish
                    tasks.create_task(self._group(made, position, wish))
                    await asyncio.sleep(0)  # it has begun, and there may be no room for another
                    position += 1
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors

    async def _its_turn(self, made: Collector) -> bool:
        """Waits until another group may begin; False when none will."""
        while not self._ending:
            self._beat = time.monotonic()
            self._deliver(made)
            if made.collector.has_room and self._pace.admits(
                self._expected,
                taken=self._taken,
                waiting=self.rollout_buffer.qsize(),
                running=len(self._running),
            ):
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _group(self, made: Collector, position: int, wish: GroupSpec) -> None:
        ended = await made.collector.start_group(wish)
        if self._ending:
            return
        group = await asyncio.to_thread(read_group, made.spool, ended)
        given: list[Any] = []
        if ended.drop_reason is None:
            given = rows(group, self._recipe, number=position, base=made.base, lengths=self._lengths)
        self._note(group, given, ended.drop_reason)
        everyone = (*ended.rollout_ids, *([ended.baseline] if ended.baseline else []))
        self._ready[position] = CompletedRows(given, everyone)
        self._deliver(made)

    def _deliver(self, made: Collector) -> None:
        """Oldest first; a younger one only where no older one comes too late by it."""
        for position in sorted(self._ready):
            ready = self._ready[position]
            if not self._may_go(position, len(ready.rows)):
                return
            for row in ready.rows:
                row.enqueued_at = time.time()
                self._delivered += 1
                self.rollout_buffer.put(row)
            for rollout_id in ready.members:
                made.spool.remove(rollout_id)
            self._sizes.append(len(ready.rows))
            del self._ready[position], self._running[position], self._wishes[position]

    def _may_go(self, position: int, size: int) -> bool:
        return self._pace.may_pass(
            size,
            self._expected,
            taken=self._taken,
            waiting=self.rollout_buffer.qsize(),
            version=self._version,
            older=[born for p, born in self._running.items() if p < position and p not in self._ready],
        )

    def _note(self, group: Group, given: Sequence[Any], dropped: str | None) -> None:
        """Measures of a group, rollout by rollout; and patience with those that have no reward."""
        rewards = [r for f in group.finished if (r := f.outcome.reward_or_floor(0.0)) is not None]
        count = len(group.finished)
        self.metrics_queue.put(
            {
                "rollout/reward": (sum(rewards), len(rewards)),
                "rollout/failed_total": float(count - len(rewards)),
                "rollout/dropped_groups_total": float(dropped is not None),
                "rollout/turns_per_rollout": (sum(len(f.turns) for f in group.finished), count),
                "rollout/rows_per_rollout": (len(given), max(len(rewards), 1)),
                "rollout/attempts_per_rollout": (sum(f.attempts for f in group.finished), count),
                **self._tokens(group, given, dropped),
                "rollout/unused_turn_rewards_total": float(
                    unused_turn_rewards([group], credit="outcome", weights={})
                ),
            }
        )
        self._barren = 0 if rewards else self._barren + 1
        if self._barren >= PATIENCE * max(1, self._pace.step // self._expected):
            often = most_common_failure(group.finished)
            raise NoRewards(f"{self._barren} groups without a single reward; most often: {often}")

    def _tokens(self, group: Group, given: Sequence[Any], dropped: str | None) -> dict[str, Any]:
        """What became of a group's sampled tokens, by reason."""
        account = token_account(group, given, dropped)
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

    async def _end(self, made: Collector) -> None:
        """Sessions are ended wherever they run, within the time that takes at most."""
        self._ending = True
        wishes = list(self._wishes.values())
        for rollout_id in [one for wish in wishes for one in made.collector.rollout_ids(wish)]:
            made.conductor.cancel(rollout_id, ENDED)
        if ending := [asyncio.create_task(made.collector.start_group(wish)) for wish in wishes]:
            await asyncio.wait(ending, timeout=made.plan.deadlines.teardown_timeout_s)


def token_account(group: Group, given: Sequence[Any], dropped: str | None) -> TokenAccount:
    """Trained are rows with an advantage; what else has a reward has none, or was dropped with its group."""
    account = count_tokens(group.finished)
    if dropped is not None:
        return account.idle(UntrainedReason.DROPPED_GROUP)
    trained = sum(int(row.completion_mask.sum()) for row in given if row.advantage)
    untrained = Counter(account.untrained)
    untrained[UntrainedReason.NO_ADVANTAGE] += account.trained - trained
    return TokenAccount(trained=trained, excluded=account.excluded, untrained=+untrained)
