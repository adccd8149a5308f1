"""Rollouts for TRL's asynchronous GRPO trainer (`AsyncGRPOTrainer`).

    rollouts = Rollouts(args, agent="agent.py:agent", model="path/to/model", tasks=rows)
    AsyncGRPOTrainer(model="path/to/model", args=args, **rollouts.trainer_kwargs).train()

Rollouts per task, temperature, length and staleness come from the trainer's own arguments; all other
settings are those of `afield train`. Gateway and agents start when training starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import msgspec

from afield import factory, wire
from afield.datasets import read_tasks
from afield.errors import UsageError, WireError
from afield.integrations.trl.collector_thread import CollectorThread
from afield.integrations.trl.rows import RowConfig, RowWeighting, TrlEstimator
from afield.integrations.trl.staleness import StalenessLimits
from afield.integrations.trl.weights import WeightTransfer
from afield.integrations.trl.worker import RolloutWorker
from afield.orchestrator.state import RunDirectory
from afield.settings.environment import Environment
from afield.settings.train import TrainConfig, build
from afield.settings.values import from_file, merged, with_paths
from afield.types import Task

TRAINER_ARGUMENTS = {
    "rollouts": "num_generations",
    "temperature": "temperature",
    "max_tokens": "max_completion_length",
    "max_staleness": "max_staleness",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
}
"""Settings that the trainer's own arguments replace, with the names of these."""
UNUSED_SETTINGS = (
    *("trainer", "mode", "minibatches", "kl", "grad_clip", "adam_eps", "freeze_weights", "on_stale", "learn"),
    *("tasks_per_step", "val_tasks", "val_every", "val_rollouts", "val_temperature"),
)
"""Settings of other trainers, which have no effect here."""
TaskRows = str | Path | Iterable[Mapping[str, Any]]


class Rollouts:
    """Rollout worker and weight transfer for `AsyncGRPOTrainer`.

    `tasks` is a JSONL file or an iterable of rows, such as a `datasets.Dataset`. `directory` is for
    weights, logs and rollouts (default: runs/trl-...). `weigh` is "rollout", or "token" as in TRL.
    """

    def __init__(
        self,
        args: Any,
        *,
        model: str | Path,
        tasks: TaskRows,
        directory: str | Path | None = None,
        config: str | Path | None = None,
        weigh: RowWeighting = "rollout",
        **values: Any,
    ) -> None:
        check(args)
        self.tasks = as_tasks(tasks)
        self.config = configured(args, str(model), config, values)
        collector = create_collector(self.config, self.tasks, directory)
        self.run = collector.run
        limits = StalenessLimits(
            step=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            syncs=args.weight_sync_steps,
            staleness=args.max_staleness,
        )
        rows = RowConfig(
            temperature=args.temperature,
            advantage=advantage_of(self.config),
            weigh=weigh,
        )
        self.worker = RolloutWorker(collector, limits, rows)
        self.weights = WeightTransfer(
            collector, keep=self.config.keep_weights, report=self.worker.metrics_queue.put
        )

    @property
    def dataset(self) -> Any:
        """Dataset of task ids, by which TRL counts epochs."""
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        return Dataset.from_list([{"prompt": task.id} for task in self.tasks])

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """Arguments of `AsyncGRPOTrainer` that make it train on these rollouts."""
        return {
            "train_dataset": self.dataset,
            "rollout_worker": self.worker,
            "weight_transfer": self.weights,
        }


def check(args: Any) -> None:
    """Refuse trainer arguments that cannot work here."""
    if args.token_budget is None:
        raise UsageError(
            "token_budget is not set, so TRL would ask a vLLM server for it: set token_budget=0 for steps of"
            " per_device_train_batch_size rows, or the most tokens that one forward pass may have"
        )
    check_sampling(args)


def check_sampling(args: Any) -> None:
    if args.top_p != 1.0 or args.top_k or args.min_p or args.repetition_penalty != 1.0:
        sampling = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        raise UsageError(
            f"{sampling}: TRL's loss does not know of truncated sampling; leave these as they are by default"
        )


def configured(args: Any, model: str, file: str | Path | None, values: Mapping[str, Any]) -> TrainConfig:
    """Settings of `afield train`: keyword arguments over the file, and the trainer's own arguments."""
    from_toml = from_file(Path(file), TrainConfig, "train") if file else {}
    keywords = with_paths(values, TrainConfig, Path.cwd())
    check_credit(merged(from_toml, keywords).get("learn", {}))
    for name in keywords:
        if name in TRAINER_ARGUMENTS:
            raise UsageError(
                f"{name} is the trainer's: give it as {TRAINER_ARGUMENTS[name]} in its arguments"
            )
        if name in UNUSED_SETTINGS:
            raise UsageError(f"{name} has no effect, since TRL is the trainer; leave it out")
    constrained = merged(from_toml, keywords).get("constrained_turns", "exclude")
    if constrained == "train":
        raise UsageError(
            "constrained_turns = 'train': TRL rescores without the masks of constrained turns; leave it out,"
            " set 'ignore' to sample without constraints, or train with the embedded trainer"
        )
    kept = {
        k: v
        for k, v in merged(from_toml, keywords).items()
        if k not in (*TRAINER_ARGUMENTS, *UNUSED_SETTINGS, "tasks")
    }
    kept["constrained_turns"] = constrained
    from_trainer = {
        "model": str(Path(model).absolute()),
        "rollouts": args.num_generations,
        "temperature": args.temperature,
        "max_tokens": args.max_completion_length,
    }
    config = build(merged({"seed": args.seed, **kept}, from_trainer), str(file or "Rollouts"))
    factory.check_choices(config)
    return config


def check_credit(learn: Any) -> None:
    """Refuse credit and reward settings of other trainers: ignoring them would change the training."""
    options = learn if isinstance(learn, Mapping) else {}
    if options.get("credit", "outcome") != "outcome":
        raise UsageError(
            f"learn.credit = {options['credit']!r} is not supported by TRL, which takes one advantage per"
            " row; leave it out, and rollouts learn from their reward, or train with `afield train` or veRL"
        )
    if options.get("rewards"):
        raise UsageError(
            "learn.rewards is not supported by TRL; leave it out, and let agents return the weighted sum as"
            " their reward"
        )


def advantage_of(config: TrainConfig) -> TrlEstimator:
    """The estimator; TRL takes rows as they come, so none may normalise over a whole batch."""
    if config.advantage == "grpo" and not config.scale_advantages:
        return "dr_grpo"
    for estimator in get_args(TrlEstimator):
        if estimator == config.advantage:
            return estimator
    raise UsageError(
        f"advantage {config.advantage!r} needs the whole batch;"
        f" with TRL choose one of: {', '.join(get_args(TrlEstimator))}"
    )


def as_tasks(source: TaskRows) -> list[Task]:
    if isinstance(source, str | Path):
        return read_tasks(Path(source))
    tasks: dict[str, Task] = {}
    for number, row in enumerate(source, 1):
        try:
            copied: dict[str, Any] = msgspec.json.decode(wire.encode(dict(row)))
            task = Task(str(copied.get("id", f"row-{number}")), copied)
        except (WireError, ValueError, TypeError) as error:
            raise UsageError(f"row {number} of the tasks: {error}") from error
        if task.id in tasks:
            raise UsageError(
                f"row {number} of the tasks: the id {task.id!r} was used before; give each task its own id"
            )
        tasks[task.id] = task
    if not tasks:
        raise UsageError("there are no tasks: give at least one row")
    return list(tasks.values())


def create_collector(config: TrainConfig, tasks: list[Task], directory: str | Path | None) -> CollectorThread:
    """A collector in a new run directory; one with rollouts of another run is refused."""
    environment = Environment.read()
    name = f"trl-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"
    run = RunDirectory(Path(directory) if directory else environment.runs / name)
    if run.has_begun:
        raise UsageError(f"{run.path} holds another run's rollouts; name a fresh directory")
    return CollectorThread(config, run, tasks, environment.admin_key)
