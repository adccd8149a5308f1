"""Everything a training run is made of, and its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from afield.errors import UsageError
from afield.options import (
    AgentCoreOptions,
    ContainerOptions,
    KubernetesOptions,
    RayOptions,
    SandboxOptions,
    SessionPolicies,
    TrainerOptions,
)
from afield.settings.values import check_keys, converted, from_file, merged
from afield.types import Sampling, check_id

Advantage = Literal["grpo", "remax", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
DEADLINES = (
    *(
        "queue_timeout_s",
        "launch_timeout_s",
        "first_call_timeout_s",
        "idle_timeout_s",
        "verifier_timeout_s",
        "upload_timeout_s",
        "teardown_timeout_s",
        "rollout_timeout_s",
    ),
    *("heartbeat_timeout_s", "straggler_s"),
)
AMOUNTS = (
    *(
        "temperature",
        "max_reward",
        "attempt_timeout_s",
        "lr",
        "grad_clip",
        "adam_eps",
        "poll_interval_s",
        "unavailable_timeout_s",
        "launch_rate",
        "keep_rollouts_gb",
        "keep_sessions_h",
    ),
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
APART = ("sandbox",)  # nothing but the gateway can be reached from there
ELSEWHERE = ("container", "agentcore", "kubernetes", "ray")  # this machine's files are not there
WHOLE_LR, LORA_LR = 1e-6, 1e-5
STALENESS = {"sync": 0, "one-step-off": 1, "async": 2}  # the default of each mode


class TrainConfig(SessionPolicies, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    process_per_rollout: bool = False
    concurrency: int = 64
    attempt_timeout_s: float = 120.0  # of one attempt, from its launch to its outcome
    queue_timeout_s: float | None = None
    launch_timeout_s: float = 120.0
    first_call_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    upload_timeout_s: float = 5.0
    teardown_timeout_s: float = 30.0
    rollout_timeout_s: float | None = None
    heartbeat_timeout_s: float = 15.0
    poll_interval_s: float = 5.0
    unavailable_timeout_s: float = 600.0  # how long a store or gateway that does not answer is waited for
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
    lr: float | None = None
    """Learning rate; None is 1e-6, and 1e-5 where LoRA trains."""
    minibatches: int = 1
    kl: float = 0.0
    grad_clip: float = 1.0
    adam_eps: float = 1e-8
    scale_advantages: bool = True
    max_reward: float = 1e6
    freeze_weights: bool = False
    learn: TrainerOptions = TrainerOptions()
    keep_weights: int | None = 2
    keep_rollouts_gb: float | None = 50.0  # of rollouts/; the oldest steps go first
    keep_sessions_h: float | None = 72.0  # in the store of our gateway, after they are over
    durable: bool = False  # survive power cuts, too
    # a gateway that is running somewhere; or ours, with the engine behind it
    gateway: str = ""
    gateway_host: str = "127.0.0.1"  # where ours listens
    gateway_port: int = 0  # 0 is any free one
    gateway_url: str = ""  # how agents reach ours, if not by that
    engine: str = "torch"
    engine_slots: int = 64
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype in which engines serve and weights are published; auto asks them. The embedded engine then takes
    float32 on a CPU and bfloat16 on a GPU."""
    max_submission_mb: int = 16  # of one outcome or reward at our gateway
    max_rewards: int = 10_000  # of one session
    path_keys: bool = False  # whether base URLs carry the session's key
    record_engine_calls: bool = False
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
        self._check_sampling()
        if self.quorum > self.rollouts:
            raise ValueError(f"quorum {self.quorum} is more than the {self.rollouts} rollouts of a task")

    def _check_sampling(self) -> None:
        for name in ("temperature", "val_temperature"):
            try:
                Sampling(temperature=getattr(self, name), max_tokens=self.max_tokens)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

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
    def learning_rate(self) -> float:
        """Adapters take about ten times the rate of whole weights, as trainers of this field set it."""
        if self.lr is not None:
            return self.lr
        return LORA_LR if self.learn.lora.rank else WHOLE_LR

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


def build(values: Mapping[str, Any], source: str) -> TrainConfig:
    check_keys(values, TrainConfig, source)
    for field in structs.fields(TrainConfig):
        if field.required and not values.get(field.name):
            raise UsageError(f"{field.name} is missing: give it on the command line or in --config")
    return converted(values, TrainConfig, source)
