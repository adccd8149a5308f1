"""Rollouts for TRL's synchronous `GRPOTrainer`, through its `rollout_func`.

1. TRL takes one row per prompt: a rollout with branches is refused, or reduced to its main branch on request.
2. TRL ignores the sampler's log-probabilities unless its vLLM importance correction is on, so rollouts have
   to be on policy: weights are published before each collection, and tokens of other weights are refused.
3. TRL needs a row for every prompt: a rollout without a reward is a row without trained tokens, outside of
   the baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self

from afield.batches.rows import Row, rows_of
from afield.errors import UsageError
from afield.integrations.trl.collector_thread import Collector
from afield.integrations.trl.rollouts import TaskRows, as_tasks, check_sampling, configured, create_collector
from afield.integrations.trl.rows import check
from afield.integrations.trl.weights import WeightTransfer
from afield.orchestrator.groups import GroupSpec, slug
from afield.runs.token_account import count_tokens
from afield.types import Group, RolloutResult

Branches = Literal["refuse", "main"]


EMPTY = {"prompt_ids": [0], "completion_ids": [0], "env_mask": [0], "logprobs": [0.0]}
"""Columns of a rollout without anything to train."""


class SyncRollouts:
    """Rollouts for TRL's `GRPOTrainer`.

        with SyncRollouts(args, ...) as rollouts:
            GRPOTrainer(model=..., args=args, **rollouts.trainer_kwargs).train()

    Arguments are those of `Rollouts`; `branches` refuses a rollout with several rows, or keeps the main one.
    """

    def __init__(
        self,
        args: Any,
        *,
        model: str | Path,
        tasks: TaskRows,
        directory: str | Path | None = None,
        config: str | Path | None = None,
        branches: Branches = "refuse",
        **values: Any,
    ) -> None:
        check_sampling(args)
        self.tasks = as_tasks(tasks)
        self.config = configured(args, str(model), config, values)
        self.branches: Branches = branches
        self._by_id = {task.id: task for task in self.tasks}
        self._collector = create_collector(self.config, self.tasks, directory)
        self._weights = WeightTransfer(self._collector, keep=self.config.keep_weights)
        self._step: int | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        self._collector.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._collector.close()

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """Arguments of `GRPOTrainer` that make it train on these rollouts."""
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        prompts = Dataset.from_list([{"prompt": task.id} for task in self.tasks])
        return {"train_dataset": prompts, "rollout_func": self.rollout_func, "reward_funcs": [afield_reward]}

    def rollout_func(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Columns with one row per prompt, in order. Each task comes as often as it is to be attempted."""
        collector = self._collector.start()
        self._publish(trainer)
        step = self._weights.sent
        self._collector.steps.begin(step)
        groups = self._collector.call(collector.groups.collect(self._group_specs(prompts)))
        self._keep(collector, groups, step)
        corrected = bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)
        version = None if corrected else collector.base + self._weights.sent
        results = [finished for group in groups for finished in group.finished]
        rewards = [finished.outcome.reward_or_floor(0.0) for finished in results]
        columns = [self._columns(finished, version) for finished in results]
        self._forget(collector, groups)
        if all(reward is None for reward in rewards):
            raise UsageError(
                f"no rollout has a reward; failure of the first one: {results[0].outcome.failure}"
            )
        return {name: [row[name] for row in columns] for name in EMPTY} | {"outcome_reward": rewards}

    def _publish(self, trainer: Any) -> None:
        if trainer.accelerator.num_processes > 1:
            raise UsageError(
                f"rollout_func supports one process, not {trainer.accelerator.num_processes}; start one, or"
                " use AsyncGRPOTrainer"
            )
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise UsageError(
                "rollout_func does not support a model with adapters (peft_config); train all weights, or use"
                " AsyncGRPOTrainer, which merges adapters"
            )
        if trainer.state.global_step != self._step:
            self._weights.send_weights(iter(model.named_parameters()))
            self._step = trainer.state.global_step

    def _group_specs(self, prompts: Sequence[str]) -> list[GroupSpec]:
        number, specs = self.config.rollouts, []
        self._calls += 1
        seen: defaultdict[str, int] = defaultdict(int)
        for prompt, repeated in groupby(prompts):
            count = len(list(repeated))
            if prompt not in self._by_id:
                raise UsageError(
                    f"the prompt {prompt!r} is not a task id; create the trainer with"
                    " GRPOTrainer(..., **rollouts.trainer_kwargs)"
                )
            if count % number:
                raise UsageError(f"the prompt {prompt!r} comes {count} times, not num_generations={number}")
            for _ in range(count // number):
                name = f"{self._collector.run.id}-c{self._calls}-{slug(prompt)}-{seen[prompt]}"
                specs.append(GroupSpec(name, self._by_id[prompt], self._calls))
                seen[prompt] += 1
        return specs

    def _columns(self, finished: RolloutResult, version: int | None) -> dict[str, list[Any]]:
        rows = [row for row in rows_of(finished) if row.owned]
        if finished.outcome.reward_or_floor(0.0) is None or not rows:
            return EMPTY
        if len(rows) > 1 and self.branches == "refuse":
            raise UsageError(
                f"rollout {finished.rollout.id} has {len(rows)} branches, and rollout_func takes one"
                " row; use AsyncGRPOTrainer, which takes all, or branches='main' for the longest alone"
            )
        main = max(rows, key=lambda row: row.owned)
        check(finished, main, self.config.temperature)
        check_version(main, version)
        return {
            "prompt_ids": list(main.prompt_ids),
            "completion_ids": list(main.response_ids),
            "env_mask": list(main.response_mask),
            "logprobs": list(main.response_logprobs),
        }

    def _keep(self, collector: Collector, groups: Sequence[Group], step: int) -> None:
        """Write rollouts to the file of their step, and the step's metrics."""
        for group in groups:
            collector.run.append_rollouts(step, group.finished)
            self._collector.record(step, group, count_tokens(group.finished))
        self._collector.steps.collected(step)

    def _forget(self, collector: Collector, groups: Sequence[Group]) -> None:
        """Remove rollouts from the rollout store."""
        for group in groups:
            for finished in group.finished:
                collector.rollout_store.remove(finished.rollout.id)


def check_version(row: Row, version: int | None) -> None:
    """Refuse tokens of other weights: TRL takes the trainer's log-probabilities for the sampler's."""
    for span in row.trajectory.versions:
        if version is not None and (span.low, span.high) != (version, version):
            raise UsageError(
                f"rollout {row.rollout_id}: tokens {span.start} to {span.end} were sampled by version"
                f" {span.low} to {span.high}, the trainer is at {version}, and GRPOTrainer ignores the"
                " sampler's log-probabilities; publish to this gateway from one trainer only, turn on"
                " use_vllm with vllm_importance_sampling_correction, or use AsyncGRPOTrainer"
            )


def afield_reward(outcome_reward: list[float | None], **_: Any) -> list[float | None]:
    """Reward function for TRL: the reward of each rollout; None keeps it out of the baseline."""
    return outcome_reward
