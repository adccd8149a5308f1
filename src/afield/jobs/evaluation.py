"""Evaluation: attempts of an agent on tasks, with learning off.

1. `evaluate` runs groups as a training run's validation does: the same ids, random numbers, runtimes and
   verifiers. A run that is started again continues: each attempt counts once, and attempts that
   infrastructure failures left out run again.
2. `summarize` computes mean reward and pass@k from the run's index, with intervals clustered by task.
   Attempts without a reward, such as infrastructure failures, are left out and counted, never zeros.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec import Struct

from afield.errors import root_cause
from afield.interfaces import Gateway
from afield.jobs.training import open_collector
from afield.orchestrator.config import RolloutObserver
from afield.orchestrator.groups import validation_specs
from afield.orchestrator.state import RunDirectory, RunInfo, RunState
from afield.runs.cost import Cost, cost_of
from afield.runs.index import RolloutRow
from afield.settings.train import TrainConfig
from afield.types import FailureKind, Task
from afield.utils.statistics import PRIOR_TASKS, Estimate, clustered_mean, pass_at_k

log = logging.getLogger(__name__)
STEP = 0
"""Step in the ids of an evaluation; a training run has it for the validation before its first step."""


class TaskResult(Struct, frozen=True, kw_only=True):
    """Attempts of one task."""

    task: str
    """Task id."""
    attempts: int
    """Attempts with a reward."""
    passed: int
    """Attempts whose reward is at least the passing one."""
    reward: float | None
    """Mean reward; None if no attempt has one."""
    left_out: int
    """Attempts without a reward."""
    seconds: float | None
    """Mean seconds of an attempt; None if unknown."""
    question: str
    """First characters of the task's question."""


class EvalSummary(Struct, frozen=True, kw_only=True):
    """Result of an evaluation."""

    run: str
    """Path of the run directory."""
    agent: str
    """Agent that was evaluated."""
    model: str
    """Model directory or name."""
    sampling: dict[str, Any]
    """Sampling parameters."""
    tasks: int
    """Number of tasks with a reward."""
    attempts: int
    """Number of attempts with a reward."""
    requested: int
    """Number of attempts that were asked for."""
    left_out: dict[str, int]
    """Attempts without a reward, by failure kind and reason."""
    reward: Estimate | None
    """Mean reward over attempts, clustered by task; None without a reward."""
    pass_at: dict[str, Estimate]
    """Mean over tasks of pass@k, by k; a task with fewer than k attempts is left out of its k."""
    pass_reward: float
    """Smallest reward that passes."""
    sampled_tokens: int
    """Tokens that all attempts sampled."""
    seconds: float | None
    """Mean seconds of an attempt; None if unknown."""
    refused: dict[str, int]
    """Refused model calls by class of error."""
    cost: Cost | None
    """Cost of all attempts; None without prices."""
    by_task: list[TaskResult]
    """Results of each task, in the order of the tasks."""


async def evaluate(
    config: TrainConfig,
    run: RunDirectory,
    tasks: Sequence[Task],
    info: RunInfo,
    observer: RolloutObserver,
    *,
    admin_key: str | None = None,
    endpoint: AbstractAsyncContextManager[Gateway] | None = None,
) -> None:
    """Run all attempts that no earlier process finished, and those with infrastructure failures."""
    async with open_collector(
        config, run, tasks, info, observer, admin_key=admin_key, endpoint=endpoint
    ) as collector:
        specs = validation_specs(collector.rollout_config.exp_id, STEP, tasks, config.val_sampling)
        ids = [rollout_id for spec in specs for rollout_id in collector.groups.rollout_ids(spec)]
        if number := await asyncio.to_thread(retry_left_out, collector.run_state, ids):
            log.warning("infrastructure failures left out %d attempts; they run again", number)
        try:
            async with asyncio.TaskGroup() as running:
                watching = running.create_task(_raise_death(collector.child)) if collector.child else None
                await asyncio.gather(*map(collector.groups.start_group, specs))
                if watching is not None:
                    watching.cancel()
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors


def retry_left_out(run_state: RunState, rollout_ids: Iterable[str]) -> int:
    """Let rollouts run again that ended with an infrastructure failure; returns their number."""
    number = 0
    for rollout_id in rollout_ids:
        summary = run_state.rollout_summary(rollout_id)
        failure = summary.outcome.failure if summary else None
        if summary and failure and failure.kind is FailureKind.INFRASTRUCTURE:
            run_state.retry_rollout(summary.outcome)
            number += 1
    return number


async def _raise_death(child: Any) -> None:
    raise await child.died()


def summarize(run: RunDirectory, tasks: Sequence[Task], attempts: int, pass_reward: float) -> EvalSummary:
    """Compute the result of an evaluation from the index of its run.

    `attempts` were asked for; a run with more of them, from an earlier call, counts all.
    """
    rows = run.index.rollouts("split='val'")
    by_task: dict[str, list[RolloutRow]] = {task.id: [] for task in tasks}
    for row in rows:
        if row.task_id in by_task:
            by_task[row.task_id].append(row)
    attempts = max(attempts, *map(len, by_task.values()))
    rewards = {
        task: [row.reward for row in of_task if row.reward is not None] for task, of_task in by_task.items()
    }
    counted = [row for of_task in by_task.values() for row in of_task]
    info = run.info
    refused: Counter[str] = Counter()
    for row in counted:
        refused.update(row.refused)
    return EvalSummary(
        run=str(run.path),
        agent=info.agent,
        model=info.model,
        sampling=info.sampling,
        tasks=sum(bool(values) for values in rewards.values()),
        attempts=sum(map(len, rewards.values())),
        requested=attempts * len(tasks),
        left_out=dict(
            Counter(
                f"{row.failure_kind}/{row.failure_reason}" if row.failure_kind else "reward pending"
                for row in counted
                if row.reward is None
            )
        ),
        reward=mean_reward(rewards),
        pass_at={
            str(k): estimate for k in pass_ks(attempts) if (estimate := mean_pass(rewards, k, pass_reward))
        },
        pass_reward=pass_reward,
        sampled_tokens=sum(row.sampled_tokens for row in counted),
        seconds=_mean([row.seconds for row in counted if row.seconds is not None]),
        refused=dict(refused),
        cost=cost_of(run.path, "eval", run.index.query, pass_reward),
        by_task=[task_result(task, of_task, pass_reward) for task, of_task in by_task.items()],
    )


def task_result(task: str, rows: Sequence[RolloutRow], pass_reward: float) -> TaskResult:
    rewards = [row.reward for row in rows if row.reward is not None]
    return TaskResult(
        task=task,
        attempts=len(rewards),
        passed=sum(reward >= pass_reward for reward in rewards),
        reward=_mean(rewards),
        left_out=len(rows) - len(rewards),
        seconds=_mean([row.seconds for row in rows if row.seconds is not None]),
        question=rows[0].question if rows else "",
    )


def mean_reward(rewards: Mapping[str, Sequence[float]]) -> Estimate | None:
    """Mean over all attempts, with an interval clustered by task."""
    if not any(rewards.values()):
        return None
    shares = all(0 <= reward <= 1 for values in rewards.values() for reward in values)
    successes = all(reward in (0, 1) for values in rewards.values() for reward in values)
    return clustered_mean(rewards, share=shares, prior_tasks=PRIOR_TASKS if successes else 0.0)


def mean_pass(rewards: Mapping[str, Sequence[float]], k: int, pass_reward: float) -> Estimate | None:
    """Mean over tasks of pass@k; None if no task has k attempts."""
    passes = {
        task: [pass_at_k(len(values), sum(value >= pass_reward for value in values), k)]
        for task, values in rewards.items()
        if len(values) >= k
    }
    if not passes:
        return None
    attempts = sum(len(rewards[task]) for task in passes)
    return clustered_mean(passes, share=True)._replace(attempts=attempts)


def pass_ks(attempts: int) -> list[int]:
    """Powers of two up to the number of attempts, and that number."""
    powers = [1 << n for n in range(attempts.bit_length()) if 1 << n <= attempts]
    return sorted({*powers, attempts})


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
