"""Training settings: everything a training run is made of, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import structs

from afield.errors import UsageError
from afield.settings.fields import (
    PATH,
    RESUMABLE,
    Bound,
    Count,
    CountOrZero,
    FilePath,
    Metavar,
    NotNegative,
    Positive,
    SettingsGroup,
    Target,
    marked,
)
from afield.settings.gateway import LimitSettings
from afield.settings.rollouts import (
    AgentSettings,
    Deadlines,
    Delivery,
    GatewayAddress,
    LaunchSettings,
    RetrySettings,
    check_gateway_address,
)
from afield.settings.runtimes import (
    AgentCoreOptions,
    ContainerOptions,
    KubernetesOptions,
    RayOptions,
    SandboxOptions,
)
from afield.settings.sessions import SessionPolicies
from afield.settings.trainer import AdvantageEstimator, EngineDtype, TrainerOptions
from afield.settings.values import check_keys, converted, from_file, merged
from afield.types import Sampling, check_id

NO_FILES = ("sandbox",)
"""Runtimes whose agents reach the gateway and nothing else."""
REMOTE = ("container", "agentcore", "kubernetes", "ray")
"""Runtimes whose agents do not see this machine's files."""
FULL_LR, LORA_LR = 1e-6, 1e-5
STALENESS = {"sync": 0, "one-step-off": 1, "async": 2}
"""Default staleness of each mode, in policy versions."""


class TaskSettings(SettingsGroup, frozen=True, kw_only=True):
    """Model, tasks and number of steps."""

    title: ClassVar[str] = "Tasks and steps"

    model: Annotated[str, Metavar("DIR"), PATH]
    """Model directory to start from, in Hugging Face format."""
    tasks: FilePath = ""
    """Tasks: a JSONL or Parquet file, a Hugging Face dataset directory, or a directory of Harbor tasks. `id`
    names a task, else its position does."""
    exp_id: str = ""
    """Experiment id, the prefix of rollout ids. Default: train, or the run's name if a gateway or store may
    be shared; rollouts of the same id, seed and weights are sampled alike."""
    steps: Annotated[Count, RESUMABLE] = 20
    """Training steps."""
    epochs: Count | None = None
    """Passes over the tasks, instead of steps."""
    tasks_per_step: Count = 8
    """Tasks attempted in each step, each by a group of rollouts."""
    rollouts: Count = 16
    """Rollouts of each task, which form a group."""
    seed: Annotated[int, Bound(at_least=0, at_most=(1 << 63) - 1)] = 0
    """Seed of task order, sampling and learning."""
    shuffle: bool = True
    """Shuffle the tasks anew in every epoch."""


class CollectSettings(SettingsGroup, frozen=True, kw_only=True):
    """Order of collecting and training, groups, and who gives rewards."""

    title: ClassVar[str] = "Collecting"

    mode: Literal["sync", "one-step-off", "async"] = "sync"
    """Order of collecting and training: sync alternates them, one-step-off collects the next step while one
    trains, async does not wait."""
    max_staleness: int | None = None
    """Largest number of policy versions between sampling and training; default in mode async: 2."""
    on_stale: Literal["drop", "correct"] = "drop"
    """Groups that are staler than allowed: drop them, or correct with importance weights."""
    quorum: Count = 2
    """Smallest number of rewards with which a group is trained."""
    extra: CountOrZero = 0
    """Rollouts started beyond `rollouts`; the slowest are cancelled."""
    straggler_s: Positive | None = None
    """Seconds after which the rest of a group is cancelled, counted from the reward that straggler_after
    names."""
    straggler_after: Count | None = None
    """Rewards of a group that start the straggler clock; default: all but one."""
    max_reward: Positive = 1e6
    """Largest absolute value of a reward; a larger one makes the rollout fail."""
    deliver: Delivery = "auto"
    """Destination of outcomes that agents send: the outcome store, or their gateway; auto takes what they can
    reach."""
    verifier: Target = ""
    """Function that gives the rewards instead of the agent, FILE.py:NAME."""
    verifier_runtime: Literal["process", "sandbox", "ray"] = "sandbox"
    """Runtime in which verifiers run."""


class ValidationSettings(SettingsGroup, frozen=True, kw_only=True):
    """Validation on tasks that are never trained."""

    title: ClassVar[str] = "Validation"

    val_tasks: FilePath = ""
    """Validation tasks, in the same formats."""
    val_every: Count = 5
    """Steps between two validations."""
    val_rollouts: Count = 1
    """Rollouts of each validation task."""
    val_temperature: NotNegative = 0.0
    """Sampling temperature of validation; 0 is greedy."""


class SamplingSettings(SettingsGroup, frozen=True, kw_only=True):
    """Sampling parameters and budgets."""

    title: ClassVar[str] = "Sampling"

    temperature: Positive = 1.0
    """Sampling temperature. Requests cannot change it unless client_sampling says so."""
    max_tokens: Count = 512
    """Largest number of tokens sampled per model call."""
    max_calls: Count | None = None
    """Largest number of model calls per attempt."""
    max_context: Count | None = None
    """Largest number of tokens of prompt and reply per model call."""


class LearningSettings(SettingsGroup, frozen=True, kw_only=True):
    """Trainer, advantage estimator and optimizer."""

    title: ClassVar[str] = "Learning"

    trainer: str = "grpo"
    """Trainer: grpo is the embedded one; veRL and TRL are started by their own commands."""
    advantage: AdvantageEstimator = "grpo"
    """Advantage estimator."""
    lr: Positive | None = None
    """Learning rate; default: 1e-6, with LoRA 1e-5."""
    minibatches: Count = 1
    """Optimizer updates per step."""
    kl: NotNegative = 0.0
    """Weight of the KL penalty to the starting policy."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation, with advantage grpo."""
    freeze_weights: bool = False
    """Collect rollouts without training."""
    learn: TrainerOptions = TrainerOptions()
    """Options of the embedded trainer, such as learn.loss=cispo."""


class StorageSettings(SettingsGroup, frozen=True, kw_only=True):
    """Disk use of a run."""

    title: ClassVar[str] = "Storage"

    keep_weights: Annotated[Count | None, RESUMABLE] = 2
    """Weight versions kept on disk."""
    keep_rollouts_gb: Annotated[Positive | None, RESUMABLE] = 50.0
    """Size of rollouts/ in 10^9 bytes above which the oldest steps are removed, except the last three; None
    keeps all."""
    keep_sessions_h: Annotated[Positive | None, RESUMABLE] = 72.0
    """Hours after which a completed session leaves the store of the started gateway; None keeps all."""
    durable: Annotated[bool, RESUMABLE] = False
    """Survive power cuts: fsync every write."""


class GatewayChildSettings(SettingsGroup, frozen=True, kw_only=True):
    """Engine of the gateway that the run starts."""

    title: ClassVar[str] = "Engine"

    engine: Annotated[str, Metavar("KIND[=WHERE]")] = "torch"
    """Engine of the started gateway: torch (embedded), vllm=URL, sglang=URL, or scripted=FILE."""
    engine_slots: Count = 64
    """Calls that the embedded engine runs at once."""
    engine_dtype: EngineDtype = "auto"
    """Dtype in which engines serve and weights are published. `auto` asks the engine; the embedded one takes
    float32 on a CPU and bfloat16 on a GPU."""
    engine_start_timeout_s: Annotated[NotNegative, RESUMABLE] = 300.0
    """Seconds that the engine of the started gateway has to load its model and answer."""
    record_engine_calls: bool = False
    """Write every engine call to engine-calls.jsonl in the run's directory, for checking."""


class RuntimeTables(SettingsGroup, frozen=True, kw_only=True):
    """Options of each runtime, as tables of the configuration file."""

    title: ClassVar[str] = "Runtimes"

    sandbox: Annotated[SandboxOptions, RESUMABLE] = SandboxOptions()
    """Options of the runtime `sandbox`."""
    container: Annotated[ContainerOptions, RESUMABLE] = ContainerOptions()
    """Options of the runtime `container`."""
    agentcore: Annotated[AgentCoreOptions, RESUMABLE] = AgentCoreOptions()
    """Options of the runtime `agentcore`."""
    kubernetes: Annotated[KubernetesOptions, RESUMABLE] = KubernetesOptions()
    """Options of the runtime `kubernetes`."""
    ray: Annotated[RayOptions, RESUMABLE] = RayOptions()
    """Options of the runtime `ray`."""


class TrainConfig(
    TaskSettings,
    AgentSettings,
    CollectSettings,
    Deadlines,
    RetrySettings,
    LaunchSettings,
    SamplingSettings,
    SessionPolicies,
    ValidationSettings,
    LearningSettings,
    StorageSettings,
    GatewayAddress,
    GatewayChildSettings,
    LimitSettings,
    RuntimeTables,
    frozen=True,
    kw_only=True,
):
    """Everything a training run is made of; saved as run.json and read back by --resume."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_staleness()
        self._check_runtime()
        for name in ("temperature", "val_temperature"):
            try:
                Sampling(temperature=getattr(self, name), max_tokens=self.max_tokens)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if self.quorum > self.rollouts:
            raise ValueError(f"quorum {self.quorum} is more than the {self.rollouts} rollouts of a task")

    def _check_runtime(self) -> None:
        if self.exp_id:
            check_id(self.exp_id, "exp_id")
        check_gateway_address(self)
        if self.deliver == "store" and self.runtime_name in NO_FILES:
            raise ValueError(
                f"agents in a {self.runtime_name} cannot reach the store; leave deliver out, or use 'gateway'"
            )
        if self.gateway_url and not (self.gateway_port or self.gateway):
            raise ValueError(
                "gateway_url is the address of the started gateway for agents; give its gateway_port as well"
            )
        if self.deliver == "store" and self.verifier:
            raise ValueError(
                "a verifier gets submissions from the gateway; use deliver = 'gateway' or leave it out"
            )

    def _check_staleness(self) -> None:
        staleness, fixed = self.max_staleness, STALENESS[self.mode]
        if self.mode == "async" and staleness is not None and staleness < 1:
            raise ValueError(
                f"max_staleness = {staleness} must be at least 1 in mode async; use mode sync for 0"
            )
        if self.mode != "async" and staleness not in (None, fixed):
            raise ValueError(
                f"max_staleness = {staleness} needs mode async; mode {self.mode} has a staleness of {fixed}"
            )

    @property
    def runtime_name(self) -> str:
        """Runtime without the argument after `=`."""
        return self.runtime.partition("=")[0]

    @property
    def delivery(self) -> Literal["store", "gateway"]:
        """Where agents send outcomes: to the gateway if they cannot reach the store or a verifier judges."""
        if self.deliver != "auto":
            return self.deliver
        unreachable = self.runtime_name in NO_FILES or (
            self.runtime_name in REMOTE and not self.stored_remotely
        )
        return "gateway" if unreachable or self.verifier else "store"

    @property
    def outcomes(self) -> str:
        """Specification of the transport; a bucket of the AgentCore options is one."""
        bucket = self.agentcore.bucket if self.runtime_name == "agentcore" else ""
        return f"s3://{bucket}" if bucket and self.transport == "files" else self.transport

    @property
    def stored_remotely(self) -> bool:
        return "://" in self.outcomes and not self.outcomes.startswith("files:")

    @property
    def learning_rate(self) -> float:
        """Adapters take about ten times the rate of full training, as other trainers set it."""
        if self.lr is not None:
            return self.lr
        return LORA_LR if self.learn.lora.rank else FULL_LR

    @property
    def staleness(self) -> int:
        return STALENESS[self.mode] if self.max_staleness is None else self.max_staleness


RESUMABLE_KEYS = marked(TrainConfig, RESUMABLE)
"""Keys whose value may change when a run is resumed."""


def train_config(file: Path | None, flags: Mapping[str, Any], **defaults: Any) -> TrainConfig:
    """Settings of a new run: flags over the file over `defaults`; flags that are None were not given."""
    values = from_file(file, TrainConfig, "train") if file else {}
    values = merged(values, {key: value for key, value in flags.items() if value is not None})
    if "steps" in values and "epochs" in values:
        raise UsageError("steps and epochs both set the length of a run; give one of them")
    return build(merged(defaults, values), str(file) if file else "the command line")


def build(values: Mapping[str, Any], source: str) -> TrainConfig:
    check_keys(values, TrainConfig, source)
    for field in structs.fields(TrainConfig):
        if field.required and not values.get(field.name):
            raise UsageError(f"{field.name} is missing: give it on the command line or in --config")
    return converted(values, TrainConfig, source)
