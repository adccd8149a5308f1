"""The door: what TRL's asynchronous GRPO trainer needs to learn from an agent that runs unchanged elsewhere.

    rollouts = Rollouts(args, agent="agent.py:agent", model="path/to/model", tasks=rows)
    AsyncGRPOTrainer(model="path/to/model", args=args, **rollouts.trainer_kwargs).train()

What the trainer's own arguments say (rollouts of a task, temperature, length, staleness) is taken from
them; everything else has the keys of `afield train`. Nothing is started before training begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import msgspec

from afield import factory, wire
from afield.errors import UsageError, WireError
from afield.integrations.trl.collector_thread import CollectorThread
from afield.integrations.trl.rows import RowConfig, RowWeighting, TrlEstimator
from afield.integrations.trl.staleness import StalenessLimits
from afield.integrations.trl.weights import WeightTransfer
from afield.integrations.trl.worker import RolloutWorker
from afield.orchestrator.state import RunDirectory
from afield.settings.environment import Environment
from afield.settings.tasks import read_tasks
from afield.settings.train import TrainConfig, build
from afield.settings.values import from_file, merged, with_paths
from afield.types import Task

TAKEN = {  # by the trainer's own argument
    "rollouts": "num_generations",
    "temperature": "temperature",
    "max_tokens": "max_completion_length",
    "max_staleness": "max_staleness",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
}
IDLE = (  # what only the other trainers read
    *("trainer", "mode", "minibatches", "kl", "grad_clip", "adam_eps", "freeze_weights", "on_stale", "learn"),
    *("tasks_per_step", "val_tasks", "val_every", "val_rollouts", "val_temperature"),
)
Rows = str | Path | Iterable[Mapping[str, Any]]


class Rollouts:
    """`tasks` is a JSONL file, or rows (a `datasets.Dataset` is some). `directory` keeps weights, logs and
    what was sampled; runs/trl-... unless told otherwise. `weigh` is "rollout", or "token" as TRL does."""

    def __init__(
        self,
        args: Any,
        *,
        model: str | Path,
        tasks: Rows,
        directory: str | Path | None = None,
        config: str | Path | None = None,
        weigh: RowWeighting = "rollout",
        **values: Any,
    ) -> None:
        check(args)
        self.tasks = as_tasks(tasks)
        self.config = configured(args, str(model), config, values)
        crew = open_collector(self.config, self.tasks, directory)
        self.run = crew.run
        pace = StalenessLimits(
            step=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            syncs=args.weight_sync_steps,
            staleness=args.max_staleness,
        )
        recipe = RowConfig(
            temperature=args.temperature,
            advantage=advantage_of(self.config),
            weigh=weigh,
        )
        self.worker = RolloutWorker(crew, pace, recipe)
        self.weights = WeightTransfer(
            crew, keep=self.config.keep_weights, report=self.worker.metrics_queue.put
        )

    @property
    def dataset(self) -> Any:
        """What TRL counts epochs by."""
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        return Dataset.from_list([{"prompt": task.id} for task in self.tasks])

    @property
    def trainer_kwargs(self) -> dict[str, Any]:
        """The trainer's arguments that make it learn from these rollouts."""
        return {
            "train_dataset": self.dataset,
            "rollout_worker": self.worker,
            "weight_transfer": self.weights,
        }


def check(args: Any) -> None:
    """What in the trainer's arguments cannot work here."""
    if args.token_budget is None:
        raise UsageError(
            "token_budget is not set, so TRL would ask a vLLM server for it: set token_budget=0 for steps of"
            " per_device_train_batch_size rows, or the most tokens that one forward pass may have"
        )
    check_sampling(args)


def check_sampling(args: Any) -> None:
    if args.top_p != 1.0 or args.top_k or args.min_p or args.repetition_penalty != 1.0:
        told = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        raise UsageError(
            f"{told}: TRL's loss does not know of truncated sampling; leave these as they are by default"
        )


def configured(args: Any, model: str, file: str | Path | None, values: Mapping[str, Any]) -> TrainConfig:
    """The values of `afield train`: given here, else from the file; the trainer's own from its arguments."""
    said = from_file(Path(file), TrainConfig, "train") if file else {}
    given = with_paths(values, TrainConfig, Path.cwd())
    check_credit(merged(said, given).get("learn", {}))
    for name in given:
        if name in TAKEN:
            raise UsageError(f"{name} is the trainer's: give it as {TAKEN[name]} in its arguments")
        if name in IDLE:
            raise UsageError(f"{name} does nothing here, where TRL trains; leave it out")
    constrained = merged(said, given).get("constrained_turns", "exclude")
    if constrained == "train":
        raise UsageError(
            "constrained_turns = 'train': TRL rescores without the masks of constrained turns; leave it out,"
            " set 'ignore' to sample without constraints, or train with the embedded trainer"
        )
    kept = {k: v for k, v in merged(said, given).items() if k not in (*TAKEN, *IDLE, "tasks")}
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
    """A file may have settings for other trainers; these say what is learned, so they are not passed over."""
    told = learn if isinstance(learn, Mapping) else {}
    if told.get("credit", "outcome") != "outcome":
        raise UsageError(
            f"learn.credit = {told['credit']!r} cannot be had with TRL, which takes one advantage for a whole"
            " row; leave it out, and rollouts learn from their reward, or train with `afield train` or veRL"
        )
    if told.get("rewards"):
        raise UsageError(
            "learn.rewards are not weighed where TRL trains; leave them out, and let agents give the reward"
            " that counts"
        )


def advantage_of(config: TrainConfig) -> TrlEstimator:
    """TRL takes rows as they come, so that nothing can be normalised over a whole batch."""
    if config.advantage == "grpo" and not config.scale_advantages:
        return "dr_grpo"
    for how in get_args(TrlEstimator):
        if how == config.advantage:
            return how
    raise UsageError(
        f"advantage {config.advantage!r} needs the whole batch;"
        f" with TRL choose one of: {', '.join(get_args(TrlEstimator))}"
    )


def as_tasks(given: Rows) -> list[Task]:
    if isinstance(given, str | Path):
        return read_tasks(Path(given))
    tasks: dict[str, Task] = {}
    for number, row in enumerate(given, 1):
        try:
            copied: dict[str, Any] = msgspec.json.decode(wire.encode(dict(row)))
            task = Task(str(copied.get("id", f"row-{number}")), copied)
        except (WireError, ValueError, TypeError) as error:
            raise UsageError(f"row {number} of the tasks: {error}") from error
        if task.id in tasks:
            raise UsageError(f"row {number} of the tasks: the id {task.id!r} was used before")
        tasks[task.id] = task
    if not tasks:
        raise UsageError("there are no tasks: give at least one row")
    return list(tasks.values())


def open_collector(config: TrainConfig, tasks: list[Task], directory: str | Path | None) -> CollectorThread:
    """Rollouts that another run left would be taken for this one's, so the directory has to be fresh."""
    environment = Environment.read()
    name = f"trl-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:4]}"
    run = RunDirectory(Path(directory) if directory else environment.runs / name)
    if run.has_begun:
        raise UsageError(f"{run.path} holds another run's rollouts; name a fresh directory")
    return CollectorThread(config, run, tasks, environment.admin_key)
