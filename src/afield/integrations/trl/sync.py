"""The limited mode: TRL's synchronous `GRPOTrainer` through its `rollout_func`.

It takes one row for every prompt, so a rollout with branches is refused, or reduced to its main branch
where that was asked for. It ignores the log-probabilities of the sampler unless its vLLM importance
correction is on, so that rollouts have to be on policy: the trainer's weights are published before each
collection, and a token that other weights sampled is refused. A rollout without a reward keeps its place,
since TRL needs one for every prompt, with nothing of it trained and out of the baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from afield.errors import UsageError
from afield.integrations.trl.collector_thread import Collector
from afield.integrations.trl.rollouts import Rows, as_tasks, check_sampling, configured, open_collector
from afield.integrations.trl.rows import check
from afield.integrations.trl.weights import WeightTransfer
from afield.orchestrator.groups import GroupSpec, slug
from afield.types import Group, RolloutResult, Trajectory

Branches = Literal["refuse", "main"]


class Row(NamedTuple):
    prompt_ids: list[int]
    completion_ids: list[int]
    env_mask: list[int]
    logprobs: list[float]
    reward: float | None


class SyncRollouts:
    """Rollouts for TRL's `GRPOTrainer`.

        with SyncRollouts(args, ...) as rollouts:
            GRPOTrainer(model=..., args=args, **rollouts.trainer_kwargs).train()

    Arguments are those of `Rollouts`; `branches` says what becomes of a rollout with several rows.
    """

    def __init__(
        self,
        args: Any,
        *,
        model: str | Path,
        tasks: Rows,
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
        self._crew = open_collector(self.config, self.tasks, directory)
        self._weights = WeightTransfer(self._crew, keep=self.config.keep_weights)
        self._step: int | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        self._crew.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._crew.close()

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """The trainer's arguments that make it learn from these rollouts."""
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        prompts = Dataset.from_list([{"prompt": task.id} for task in self.tasks])
        return {"train_dataset": prompts, "rollout_func": self.rollout_func, "reward_funcs": [afield_reward]}

    def rollout_func(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """One row for every prompt, in their order. They come as often as a task is to be attempted."""
        made = self._crew.start()
        self._publish(trainer)
        wishes = self._wishes(prompts)
        groups = self._crew.call(made.collector.collect(wishes))
        corrected = bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)
        version = None if corrected else made.base + self._weights.sent
        rows = [self._row(finished, version) for group in groups for finished in group.finished]
        self._forget(made, groups)
        if all(row.reward is None for row in rows):
            raise UsageError(
                f"no rollout has a reward; the first one: {groups[0].finished[0].outcome.failure}"
            )
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "outcome_reward": [row.reward for row in rows],
        }

    def _publish(self, trainer: Any) -> None:
        if trainer.accelerator.num_processes > 1:
            raise UsageError("rollout_func collects in one process; use AsyncGRPOTrainer with several")
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            raise UsageError("rollout_func takes no adapters here; use AsyncGRPOTrainer, which merges them")
        if trainer.state.global_step != self._step:
            self._weights.send_weights(iter(model.named_parameters()))
            self._step = trainer.state.global_step

    def _wishes(self, prompts: Sequence[str]) -> list[GroupSpec]:
        number, wishes = self.config.rollouts, []
        self._calls += 1
        seen: defaultdict[str, int] = defaultdict(int)
        for prompt, repeated in groupby(prompts):
            count = len(list(repeated))
            if prompt not in self._by_id:
                raise UsageError(
                    f"the prompt {prompt!r} is not a task id; pass trainer_kwargs to the trainer"
                )
            if count % number:
                raise UsageError(f"the prompt {prompt!r} comes {count} times, not num_generations={number}")
            for _ in range(count // number):
                name = f"{self._crew.run.id}-c{self._calls}-{slug(prompt)}-{seen[prompt]}"
                wishes.append(GroupSpec(name, self._by_id[prompt], self._calls))
                seen[prompt] += 1
        return wishes

    def _row(self, finished: RolloutResult, version: int | None) -> Row:
        reward = finished.outcome.reward_or_floor(0.0)
        trajectories = [t for t in finished.trajectories if t.owned]
        if reward is None or not trajectories:
            return Row([0], [0], [0], [0.0], reward)
        if len(trajectories) > 1 and self.branches == "refuse":
            raise UsageError(
                f"rollout {finished.rollout.id} has {len(trajectories)} branches, and rollout_func takes one"
                " row; use AsyncGRPOTrainer, which takes all, or branches='main' for the longest alone"
            )
        main = max(trajectories, key=lambda t: t.owned)
        check(finished, main, self.config.temperature)
        check_version(finished, main, version)
        start = main.turns[0].start
        return Row(
            list(main.token_ids[:start]),
            list(main.token_ids[start:]),
            list(main.loss_mask[start:]),
            list(main.logprobs[start:]),
            reward,
        )

    def _forget(self, made: Collector, groups: Sequence[Group]) -> None:
        for group in groups:
            for finished in group.finished:
                made.spool.remove(finished.rollout.id)


def check_version(finished: RolloutResult, trajectory: Trajectory, version: int | None) -> None:
    """TRL takes the trainer's log-probabilities for the sampler's: right for its own weights only."""
    for span in trajectory.versions:
        if version is not None and (span.low, span.high) != (version, version):
            raise UsageError(
                f"rollout {finished.rollout.id}: tokens {span.start} to {span.end} were sampled by version"
                f" {span.low} to {span.high}, the trainer is at {version}, and GRPOTrainer ignores the"
                " sampler's log-probabilities; publish to this gateway from one trainer only, turn on"
                " use_vllm with vllm_importance_sampling_correction, or use AsyncGRPOTrainer"
            )


def afield_reward(outcome_reward: list[float | None], **_: Any) -> list[float | None]:
    """The reward that came back with each rollout; None keeps it out of the baseline."""
    return outcome_reward
