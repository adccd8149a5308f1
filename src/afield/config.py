"""TOML and environment to plain values; the only reader of the environment.

Precedence: command line, then the file given with --config, then the defaults below. An unknown key
is an error that suggests the nearest known one. Components never see what is read here, only values.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct, structs

from afield.errors import UsageError
from afield.options import (
    AgentCoreOptions,
    ContainerOptions,
    KubernetesOptions,
    LearnOptions,
    RayOptions,
    SandboxOptions,
)
from afield.types import Task, check_id

T = TypeVar("T", bound=Struct)
Advantage = Literal["grpo", "remax", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
PATHS = ("agent", "verifier", "model", "tasks", "val_tasks", "limiter_file")
TARGETS = ("agent", "verifier")
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
    *("max_submission_mb", "max_rewards"),
    *("val_every", "val_rollouts", "straggler_after"),
)
NOT_NEGATIVE = (
    *("kl", "cold_start_s", "val_temperature", "extra", "gateway_port"),
    *("retries_task", "retries_verifier", "retries_infrastructure"),
)
SECRET = ("AFIELD_ADMIN_KEY", "AFIELD_OUTCOMES")
APART = ("sandbox",)  # nothing but the gateway can be reached from there
ELSEWHERE = ("container", "agentcore", "kubernetes", "ray")  # this machine's files are not there
KINDS = {  # of values, for people
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
STALENESS = {"sync": 0, "one-step-off": 1, "async": 2}  # the default of each mode


class TrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a training run is made of; saved as run.json and read back by --resume."""

    agent: str = ""  # what runs; places that run an image, or are served elsewhere, need none
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
    deliver: Literal["auto", "store", "gateway"] = "auto"
    verifier: str = ""  # who gives the rewards, if not the agent itself
    verifier_runtime: str = "sandbox"
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
    advantage: Advantage = "grpo"
    lr: float = 1e-6
    minibatches: int = 1
    kl: float = 0.0
    grad_clip: float = 1.0
    adam_eps: float = 1e-8
    scale_advantages: bool = True
    freeze_weights: bool = False
    learn: LearnOptions = LearnOptions()
    keep_weights: int | None = 2
    # a gateway that is running somewhere; or ours, with the engine behind it
    gateway: str = ""
    gateway_host: str = "127.0.0.1"  # where ours listens
    gateway_port: int = 0  # 0 is any free one
    gateway_url: str = ""  # how agents reach ours, if not by that
    engine: str = "torch"
    engine_slots: int = 64
    max_submission_mb: int = 16  # of one outcome or reward at our gateway
    max_rewards: int = 10_000  # of one session
    engine_ledger: bool = False
    # what each kind of place is told
    sandbox: SandboxOptions = SandboxOptions()
    container: ContainerOptions = ContainerOptions()
    agentcore: AgentCoreOptions = AgentCoreOptions()
    kubernetes: KubernetesOptions = KubernetesOptions()
    ray: RayOptions = RayOptions()

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
        for name in ("gateway", "gateway_url"):
            value = getattr(self, name)
            if value and not value.startswith(("http://", "https://")):
                raise ValueError(f"{name} {value!r} must be an address, such as http://127.0.0.1:8400")
        if self.deliver == "store" and self.place in APART:
            raise ValueError(
                f"deliver = 'store' is out of reach in a {self.place}; leave it out, or 'gateway'"
            )
        if self.gateway_url and not (self.gateway_port or self.gateway):
            raise ValueError("gateway_url says how agents reach our gateway; give its gateway_port as well")
        if self.deliver == "store" and self.verifier:
            raise ValueError("a verifier gets what agents hand in at the gateway; leave deliver out")

    def _check_staleness(self) -> None:
        given, fixed = self.max_staleness, STALENESS[self.mode]
        if self.mode == "async" and given is not None and given < 1:
            raise ValueError(f"max_staleness = {given} must be at least 1 in mode async; use mode sync for 0")
        if self.mode != "async" and given not in (None, fixed):
            raise ValueError(
                f"max_staleness = {given} belongs to mode async; in mode {self.mode} it is {fixed}"
            )

    @property
    def place(self) -> str:
        """The kind of runtime, without what it is told in the same word."""
        return self.runtime.partition("=")[0]

    @property
    def delivery(self) -> Literal["store", "gateway"]:
        """Agents that cannot reach the run's files, or may not give rewards, deliver to their gateway."""
        if self.deliver != "auto":
            return self.deliver
        apart = self.place in APART or (self.place in ELSEWHERE and not self.stored_elsewhere)
        return "gateway" if apart or self.verifier else "store"

    @property
    def outcomes(self) -> str:
        """The transport's specification; a bucket given for AgentCore is one."""
        bucket = self.agentcore.bucket if self.place == "agentcore" else ""
        return f"s3://{bucket}" if bucket and self.transport == "files" else self.transport

    @property
    def stored_elsewhere(self) -> bool:
        return "://" in self.outcomes and not self.outcomes.startswith("files:")

    @property
    def staleness(self) -> int:
        return STALENESS[self.mode] if self.max_staleness is None else self.max_staleness


def train_config(file: Path | None, given: Mapping[str, Any], **defaults: Any) -> TrainConfig:
    """`given` are the command line's values; those that are None were not given."""
    said = from_file(file) if file else {}
    said = merged(said, {key: value for key, value in given.items() if value is not None})
    if "steps" in said and "epochs" in said:
        raise UsageError("steps and epochs both say how long a run is; give one of them")
    return build(merged(defaults, said), str(file) if file else "the command line")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of both, key by key; elsewhere `above` counts."""
    both = dict(below)
    for key, value in above.items():
        tables = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if tables else value
    return both


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` or `TABLE.KEY=VALUE`; a value is read as TOML has it, or is text."""
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UsageError(f"--set {word!r} must be KEY=VALUE or TABLE.KEY=VALUE")
        value: Any = text
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merged(values, value)
    return values


def build(values: Mapping[str, Any], source: str) -> TrainConfig:
    _check_keys(values, TrainConfig, source)
    for field in structs.fields(TrainConfig):
        if field.required and not values.get(field.name):
            raise UsageError(f"{field.name} is missing: give it on the command line or in --config")
    return converted(values, TrainConfig, source)


def _check_keys(values: Mapping[str, Any], into: type[Struct], source: str, table: str = "") -> None:
    """Keys, and words of which there are only a few, in all tables."""
    known = {field.name: field for field in structs.fields(into)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {table + near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise UsageError(f"unknown key {table + key!r} in {source}; {hint}")
        inner = known[key].type
        words = get_args(inner) if get_origin(inner) is Literal else ()
        if words and value not in words:
            raise UsageError(f"{source}: {table}{key} = {value!r} must be one of: {', '.join(words)}")
        if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, Mapping):
            _check_keys(value, inner, source, f"{table}{key}.")


def converted(values: Mapping[str, Any], into: type[T], source: str) -> T:
    """Values to a Struct, every one checked. What is wrong is told by its key, with what would be right."""
    _check_keys(values, into, source)
    try:
        return msgspec.convert(dict(values), into)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {_told(str(error), values)}") from error


def _told(problem: str, values: Any) -> str:
    """What msgspec says of `$.sandbox.limits.cpus`, in the words of who wrote sandbox.limits.cpus."""
    problem, _, where = problem.partition(" - at `$")
    key = where.removeprefix(".").removesuffix("`")
    wrong = re.fullmatch(r"Expected `(.+)`, got `.+`", problem)
    if not key or not wrong:
        return f"{key}: {problem}" if key else problem
    kinds = " or ".join(KINDS.get(kind, kind) for kind in wrong[1].split(" | ") if kind != "null")
    if "[...]" in key:  # of a table with names of the user's own, where the others may be secrets
        return f"all values of {key.partition('[')[0]} must be {kinds}"
    for part in re.findall(r"[^.\[\]]+", key):
        values = values[part] if isinstance(values, Mapping) else values[int(part)]
    return f"{key} = {values!r} must be {kinds}"


def from_file(file: Path, table: str = "train") -> dict[str, Any]:
    """One table; its paths count from where the file lies."""
    values = _read_toml(file, table)
    return values | {key: located(key, values[key], file.parent) for key in PATHS if key in values}


def located(key: str, value: Any, base: Path) -> Any:
    """A path made absolute, so that a run can be resumed from anywhere."""
    if not isinstance(value, str):
        return value
    if key not in TARGETS:
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
    outcomes: str = ""  # where a gateway's outcomes go; an address may hold a password, which argv would show

    @classmethod
    def read(cls) -> Self:
        given = os.environ.get("XDG_CACHE_HOME")
        cache = (Path(given) if given else Path.home() / ".cache") / "afield"
        return cls(
            os.environ.get("AFIELD_ADMIN_KEY") or None,
            Path(os.environ.get("AFIELD_RUNS", "runs")),
            cache / "envs",
            cache / "certificates",
            os.environ.get("AFIELD_OUTCOMES", ""),
        )


def from_environment(prefix: str) -> dict[str, Any]:
    """The values of PREFIX_KEY and PREFIX_TABLE__KEY, read as `assigned` reads them; an empty one is none."""
    given = {name: value for name, value in os.environ.items() if name.startswith(f"{prefix}_") and value}
    keys = {name: name.removeprefix(f"{prefix}_").lower().replace("__", ".") for name in given}
    return assigned([f"{keys[name]}={value}" for name, value in given.items()])


def agent_environment() -> dict[str, str]:
    """The environment an agent process inherits: ours without our secrets."""
    return {key: value for key, value in os.environ.items() if key not in SECRET}


def lend(values: Mapping[str, str]) -> None:
    """Into this process's environment, for libraries that look only there."""
    os.environ.update(values)
