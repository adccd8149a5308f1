"""TOML and environment to plain values; the only reader of the environment.

Precedence: command line, then the file given with --config, then the defaults below. An unknown key
is an error that suggests the nearest known one. Components never see what is read here, only values.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct, structs

from afield.errors import UsageError
from afield.types import Task, check_id

T = TypeVar("T", bound=Struct)
PATHS = ("agent", "model", "tasks", "val_tasks", "limiter_file")
DEADLINES = (
    *("queue_s", "start_s", "first_call_s", "silence_s", "grade_s", "upload_s", "teardown_s", "life_s"),
    *("dead_s", "straggler_s"),
)
AMOUNTS = (
    *("temperature", "deadline_s", "lr", "grad_clip", "adam_eps", "sweep_s", "patience_s", "launch_rate"),
    *DEADLINES,
)
COUNTS = (
    *("steps", "epochs", "tasks_per_step", "rollouts", "workers", "concurrency", "minibatches", "quorum"),
    *("max_tokens", "max_calls", "max_context", "keep_weights", "engine_slots", "launching"),
    *("val_every", "val_rollouts", "straggler_after"),
)
NOT_NEGATIVE = (
    *("kl", "cold_start_s", "val_temperature", "extra"),
    *("retries_task", "retries_verifier", "retries_infrastructure"),
)
STALENESS = {"sync": 0, "one-step-off": 1, "async": 2}  # the default of each mode


class TrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a training run is made of; saved as run.json and read back by --resume."""

    agent: str
    model: str
    tasks: str = ""
    exp_id: str = ""  # names the rollouts; empty takes the run's id
    steps: int = 20
    epochs: int | None = None  # how often every task is attempted; sets the steps
    tasks_per_step: int = 8
    rollouts: int = 16
    seed: int = 0
    shuffle: bool = True
    # collection
    mode: Literal["sync", "one-step-off", "async"] = "sync"
    max_staleness: int | None = None  # in policy versions; None is 2 when asynchronous
    on_stale: Literal["drop", "correct"] = "drop"
    runtime: str = "process"
    transport: str = "files"
    deliver: Literal["store", "gateway"] = "store"
    workers: int = 2
    fresh_process: bool = False
    concurrency: int = 64
    deadline_s: float = 120.0  # of one attempt, from its launch to its outcome
    queue_s: float | None = None
    start_s: float = 120.0
    first_call_s: float | None = None
    silence_s: float | None = None
    grade_s: float | None = None
    upload_s: float = 5.0
    teardown_s: float = 30.0
    life_s: float | None = None
    dead_s: float = 15.0
    sweep_s: float = 5.0
    patience_s: float = 600.0  # how long a store or gateway that does not answer is waited for
    retries_task: int = 1
    retries_verifier: int = 1
    retries_infrastructure: int = 3
    quorum: int = 2
    extra: int = 0
    straggler_s: float | None = None
    straggler_after: int | None = None
    # how fast agents are launched and stopped
    launch_rate: float | None = None
    cold_start_s: float = 0.0
    launching: int | None = None
    limiter_file: str = ""  # one budget for all runs that name the same file
    # validation
    val_tasks: str = ""
    val_every: int = 5
    val_rollouts: int = 1
    val_temperature: float = 0.0
    # sampling
    temperature: float = 1.0
    max_tokens: int = 512
    max_calls: int | None = None
    max_context: int | None = None
    # learning
    trainer: str = "grpo"
    advantage: Literal["grpo", "remax"] = "grpo"
    lr: float = 1e-6
    minibatches: int = 1
    kl: float = 0.0
    grad_clip: float = 1.0
    adam_eps: float = 1e-8
    scale_advantages: bool = True
    freeze_weights: bool = False
    keep_weights: int | None = 2
    # a gateway that is running somewhere; or ours, with the engine behind it
    gateway: str = ""
    engine: str = "torch"
    engine_slots: int = 64
    engine_ledger: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        for name in AMOUNTS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be positive")
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be 0 or positive")
        self._check_staleness()
        self._check_places()
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed = {self.seed} must be between 0 and 2**63")
        if self.quorum > self.rollouts:
            raise ValueError(f"quorum {self.quorum} is more than the {self.rollouts} rollouts of a task")

    def _check_places(self) -> None:
        if self.exp_id:
            check_id(self.exp_id, "exp_id")
        if self.gateway and not self.gateway.startswith(("http://", "https://")):
            raise ValueError(f"gateway {self.gateway!r} must be its address, such as http://127.0.0.1:8400")

    def _check_staleness(self) -> None:
        given, fixed = self.max_staleness, STALENESS[self.mode]
        if self.mode == "async" and given is not None and given < 1:
            raise ValueError(f"max_staleness = {given} must be at least 1 in mode async; use mode sync for 0")
        if self.mode != "async" and given not in (None, fixed):
            raise ValueError(
                f"max_staleness = {given} belongs to mode async; in mode {self.mode} it is {fixed}"
            )

    @property
    def staleness(self) -> int:
        return STALENESS[self.mode] if self.max_staleness is None else self.max_staleness


def train_config(file: Path | None, given: Mapping[str, Any], **defaults: Any) -> TrainConfig:
    """`given` are the command line's values; those that are None were not given."""
    said = from_file(file) if file else {}
    said |= {key: value for key, value in given.items() if value is not None}
    if "steps" in said and "epochs" in said:
        raise UsageError("steps and epochs both say how long a run is; give one of them")
    return build(defaults | said, str(file) if file else "the command line")


def build(values: Mapping[str, Any], source: str) -> TrainConfig:
    known = structs.fields(TrainConfig)
    names = [field.name for field in known]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
            raise UsageError(f"unknown key {key!r} in {source}; {hint}")
    for field in known:
        if field.required and not values.get(field.name):
            raise UsageError(f"{field.name} is missing: give it on the command line or in --config")
    return converted(values, TrainConfig, source)


def converted(values: Mapping[str, Any], into: type[T], source: str) -> T:
    """Values to a Struct, every one checked. A word that is not one of a few is told which these are."""
    for field in structs.fields(into):
        words = get_args(field.type) if get_origin(field.type) is Literal else ()
        if words and (value := values.get(field.name, words[0])) not in words:
            raise UsageError(f"{source}: {field.name} = {value!r} must be one of: {', '.join(words)}")
    try:
        return msgspec.convert(dict(values), into)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {error}") from error


def from_file(file: Path) -> dict[str, Any]:
    """The [train] table; its paths count from where the file lies."""
    values = _read_toml(file, "train")
    return values | {key: located(key, values[key], file.parent) for key in PATHS if key in values}


def located(key: str, value: Any, base: Path) -> Any:
    """A path made absolute, so that a run can be resumed from anywhere."""
    if not isinstance(value, str):
        return value
    if key != "agent":
        return str((base / value).absolute()) if value else value
    place, colon, name = value.rpartition(":")
    return f"{(base / place).absolute()}{colon}{name}" if place.endswith(".py") else value


def _read_toml(path: Path, table: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no configuration file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if extra := sorted(set(document) - {table}):
        raise UsageError(f"{path} has unknown top-level keys {extra}; everything goes under [{table}]")
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{path}: {table} must be a table, [{table}], not {values!r}")
    return values


def read_tasks(path: Path) -> list[Task]:
    """A JSONL file: one object per line. `id` names a task; without one, its line does."""
    if not path.exists():
        raise UsageError(f"there is no task file {path}")
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give a JSONL file with one task per line")
    tasks: dict[str, Task] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _task(path, number, line)
        if task.id in tasks:
            raise UsageError(
                f"{path} line {number}: the id {task.id!r} was used before; ids name one task each"
            )
        tasks[task.id] = task
    if not tasks:
        raise UsageError(f"{path} has no tasks: write one JSON object per line")
    return list(tasks.values())


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        row = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {type(row).__name__}")
        given = row.get("id")
        return Task(f"line-{number}" if given is None else str(given), row)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} line {number}: {error}") from error


class Environment(Struct, frozen=True):
    """What afield takes from the environment."""

    admin_key: str | None
    runs: Path
    envs: Path  # where foreign programs are installed
    certificates: Path  # what was found out about chat templates

    @classmethod
    def read(cls) -> Self:
        given = os.environ.get("XDG_CACHE_HOME")
        cache = (Path(given) if given else Path.home() / ".cache") / "afield"
        return cls(
            os.environ.get("AFIELD_ADMIN_KEY") or None,
            Path(os.environ.get("AFIELD_RUNS", "runs")),
            cache / "envs",
            cache / "certificates",
        )


def agent_environment() -> dict[str, str]:
    """The environment an agent process inherits: ours without our secrets."""
    return {key: value for key, value in os.environ.items() if key != "AFIELD_ADMIN_KEY"}
