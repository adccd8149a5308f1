"""Training settings: everything a training run is made of, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field, structs

from afield.errors import UsageError
from afield.settings.environment import environment_layer
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
from afield.settings.gateway import (
    LimitSettings,
    ManagedEngineSettings,
    RelayLinkSettings,
    TelemetrySettings,
)
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
from afield.settings.trainer import (
    AdvantageEstimator,
    EngineDtype,
    LRScheduleName,
    TrainerOptions,
    WeightTransferName,
)
from afield.settings.values import (
    SettingsLayer,
    SettingsLayers,
    Source,
    check_keys,
    converted,
    file_layer,
    merged,
)
from afield.types import Sampling, check_id

NO_FILES = ("sandbox",)
"""Runtimes whose agents reach the gateway and nothing else."""
WITH_PYTHON = ("process", "sandbox")
"""Runtimes that start the interpreter of `python`."""
REMOTE = ("container", "agentcore", "kubernetes", "ray")
"""Runtimes whose agents do not see this machine's files."""
FULL_LR, LORA_LR = 1e-6, 1e-5
STALENESS = {"sync": 0, "one-step-off": 1, "async": 2}
"""Default staleness of each mode, in policy versions."""


class TaskSettings(SettingsGroup, frozen=True, kw_only=True):
    """Model, tasks and number of steps."""

    title: ClassVar[str] = "Tasks and steps"

    model: Annotated[str, Metavar("DIR"), PATH]
    """Model directory to start from, in Hugging Face format; ORG/NAME is downloaded from the hub into the
    working directory."""
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
    """Largest number of policy versions between sampling and training; in mode async 2 by default."""
    on_stale: Literal["drop", "correct"] = "drop"
    """Groups that are staler than allowed: drop them, or correct with importance weights."""
    quorum: Count = 2
    """Smallest number of rollouts with a reward that a group needs to be trained."""
    extra: CountOrZero = 0
    """Rollouts of each group to start in addition to `rollouts`; the slowest are cancelled."""
    straggler_s: Positive | None = None
    """Seconds from the moment a group has straggler_after rewards until its unfinished rollouts are
    cancelled."""
    straggler_after: Count | None = None
    """Number of rewards in a group after which straggler_s begins to count; default: all but one."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with groups of other tasks, as DAPO does."""
    max_refills: Count = 3
    """With dynamic_sampling: largest number of replacements of one group; the last one is kept."""
    max_reward: Positive = 1e6
    """Largest absolute value of a reward; a rollout with a larger one fails."""
    deliver: Delivery = "auto"
    """Destination of outcomes that agents send: the outcome store, or their gateway; auto selects the
    gateway if agents cannot reach the store, or if a verifier gives the rewards."""
    reward_function: Target = ""
    """Function FILE.py:NAME that computes the rewards of a group's rollouts together, in the collector, after
    they have ended; without it, agents or the verifier give them."""


class ValidationSettings(SettingsGroup, frozen=True, kw_only=True):
    """Validation on tasks that are never trained."""

    title: ClassVar[str] = "Validation"

    val_tasks: FilePath = ""
    """Validation tasks, in the formats of `tasks`."""
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
    top_p: Annotated[float, Bound(above=0, at_most=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability; 1 is off. Only without training:
    the embedded trainer cannot reproduce truncated distributions."""
    top_k: CountOrZero = 0
    """Number of likeliest tokens to sample from; 0 is off. Only without training, as top_p."""
    max_tokens: Count = 512
    """Largest number of tokens sampled in one model call."""
    max_calls: Count | None = None
    """Largest number of model calls per attempt."""
    max_context: Count | None = None
    """Largest number of tokens of prompt and reply together in one model call."""


class LearningSettings(SettingsGroup, frozen=True, kw_only=True):
    """Trainer, advantage estimator and optimizer."""

    title: ClassVar[str] = "Learning"

    trainer: str = "grpo"
    """Trainer: grpo is the embedded one; veRL and TRL are started by their own commands."""
    advantage: AdvantageEstimator = "grpo"
    """Advantage estimator."""
    lr: Positive | None = None
    """Learning rate; default: 1e-6, with LoRA 1e-5."""
    lr_schedule: LRScheduleName = "constant"
    """Learning rate after the warm-up; `linear` and `cosine` decay to min_lr_ratio at the last step."""
    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises linearly to lr."""
    min_lr_ratio: Annotated[float, Bound(at_least=0, at_most=1)] = 0.0
    """Learning rate at the end of a decay, as a share of lr."""
    minibatches: Count = 1
    """Optimizer updates per step."""
    kl: NotNegative = 0.0
    """Weight of the KL penalty against the starting policy."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    scale_advantages: bool = True
    """With advantage grpo: divide advantages by the standard deviation of the group's rewards."""
    freeze_weights: bool = False
    """Collect rollouts without training."""
    record_training: Annotated[bool, RESUMABLE] = False
    """Write log-probability, entropy, ratio, importance weight, advantage and mask of every token to
    rollouts/step-N.tokens, 21 bytes per token."""
    learn: TrainerOptions = TrainerOptions()
    """Options of the embedded trainer, such as learn.loss=cispo."""


class StorageSettings(SettingsGroup, frozen=True, kw_only=True):
    """Disk use of a run."""

    title: ClassVar[str] = "Storage"

    checkpoint_every: Annotated[Count, RESUMABLE] = 1
    """Steps between two checkpoints. After a crash, later steps are trained again on their rollouts."""
    keep_checkpoints: Annotated[Count, RESUMABLE] = 2
    """Checkpoints kept on disk."""
    async_checkpoints: Annotated[bool, RESUMABLE] = False
    """Write checkpoints while the next step trains, from a copy in CPU memory."""
    keep_weights: Annotated[Count | None, RESUMABLE] = 2
    """Weight versions kept on disk."""
    keep_rollouts_gb: Annotated[Positive | None, RESUMABLE] = 50.0
    """Size of rollouts/ in 10^9 bytes above which the oldest steps are removed, except the last three; None
    keeps all."""
    keep_sessions_h: Annotated[Positive | None, RESUMABLE] = 72.0
    """Hours after which a completed session leaves the store of the started gateway; None keeps all."""
    durable: Annotated[bool, RESUMABLE] = False
    """Survive power cuts: call fsync after every write."""


class PriceSettings(SettingsGroup, frozen=True, kw_only=True):
    """Prices, of which the cost of a run is computed."""

    title: ClassVar[str] = "Prices"

    prompt_price: Annotated[NotNegative, RESUMABLE] = 0.0
    """Price of a million prompt tokens, in any currency; every call counts its whole prompt. 0 is none."""
    sampled_price: Annotated[NotNegative, RESUMABLE] = 0.0
    """Price of a million sampled tokens; 0 is none."""
    engine_price: Annotated[NotNegative, RESUMABLE] = 0.0
    """Price of an hour of all GPUs and engines of the run together; 0 is none."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingSettings(SettingsGroup, frozen=True, kw_only=True):
    """Experiment trackers that get the metrics of a run."""

    title: ClassVar[str] = "Tracking"

    track: Annotated[tuple[TrackerName, ...], RESUMABLE] = ()
    """Experiment trackers that get the settings and the metrics of steps and validations. A tracker that
    fails never ends a run."""
    track_project: str = "afield"
    """Project of the run in the experiment trackers (in MLflow, the experiment)."""
    track_name: str = ""
    """Name of the run in the experiment trackers. Default: the run's name."""
    track_uri: Annotated[Mapping[str, str], Metavar("TRACKER=URI"), RESUMABLE] = field(default_factory=dict)
    """Address for each tracker: TensorBoard's log directory, the W&B or MLflow server, trackio's Space.
    Default: the run's directory, or what the tracker's own variables say."""


class GatewayChildSettings(SettingsGroup, frozen=True, kw_only=True):
    """Engine of the gateway that the run starts."""

    title: ClassVar[str] = "Engine"

    engine: Annotated[str, Metavar("KIND[=WHERE]")] = "torch"
    """Engine of the started gateway: torch (embedded), vllm (starts servers), vllm=URL, sglang=URL,
    relay=vllm:NAME for a server behind a relay, or scripted=FILE for tests."""
    engine_slots: CountOrZero = 0
    """Calls that the embedded engine runs at once; 0 selects 64 on a CPU, and on a GPU as many as fit into
    its free memory."""
    engine_dtype: EngineDtype = "auto"
    """Dtype in which engines serve and weights are published; `auto` uses the engine's own. The embedded
    engine uses float32 on a CPU and bfloat16 on a GPU."""
    weight_transfer: Annotated[WeightTransferName, RESUMABLE] = "auto"
    """Way of new weights to engines: memory shares them with engines on the same machine and writes the file
    afterwards, disk writes it first. auto selects memory if trainer and engine can share it on a CPU."""
    engine_start_timeout_s: Annotated[NotNegative, RESUMABLE] = 300.0
    """Seconds that the engine of the started gateway has to load its model and answer."""
    record_engine_calls: bool = False
    """Write every engine call to engine-calls.jsonl in the run's directory, to compare it with the recorded
    turns."""


class GatewayPoolSettings(SettingsGroup, frozen=True, kw_only=True):
    """Gateways that the run starts."""

    title: ClassVar[str] = "Gateway pool"

    gateways: Count = 1
    """Gateways that the run starts. Each session stays on one of them, and a lost gateway is replaced."""
    on: Literal["process", "ray"] = "process"
    """Place of the started gateways: processes of this machine, or actors on the nodes of the Ray cluster in
    [train.ray]."""
    gateway_store: Annotated[str, Metavar("DIR"), PATH] = ""
    """Directory of the gateways' stores, on a file system that all nodes mount. With it, another node
    takes over the sessions of a lost node; without it, afield retries their attempts."""


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
    """Options of the runtime `ray`, and of gateways on Ray."""


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
    TrackingSettings,
    PriceSettings,
    GatewayAddress,
    GatewayChildSettings,
    GatewayPoolSettings,
    ManagedEngineSettings,
    LimitSettings,
    RelayLinkSettings,
    TelemetrySettings,
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
                self._sampling(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if self.sampling.truncated and not self.freeze_weights:
            name = f"top_p = {self.top_p:g}" if self.top_p < 1 else f"top_k = {self.top_k}"
            raise ValueError(
                f"{name} truncates the distribution, which the trainer cannot reproduce; train with top_p = 1"
                " and top_k = 0, or sample without training: `afield eval`, or --freeze-weights"
            )
        if self.record_training and self.freeze_weights:
            raise ValueError("record_training records what training computes; leave out freeze_weights")
        if self.learn.overlong_buffer > self.max_tokens:
            raise ValueError(
                f"learn.overlong_buffer = {self.learn.overlong_buffer} is more than max_tokens ="
                f" {self.max_tokens}; it is the part of a reply in which length is penalised"
            )
        if self.quorum > self.rollouts:
            raise ValueError(f"quorum {self.quorum} is more than the {self.rollouts} rollouts of a task")

        if self.dynamic_sampling and self.advantage in ("reinforce_plus_plus",):
            raise ValueError(
                f"dynamic_sampling compares rewards within groups, but advantage {self.advantage} does not;"
                " leave it out, or use reinforce_plus_plus_baseline"
            )

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of training rollouts."""
        return self._sampling(self.temperature)

    @property
    def val_sampling(self) -> Sampling:
        """Sampling parameters of validation and evaluation."""
        return self._sampling(self.val_temperature)

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(
            temperature=temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens
        )

    def _check_runtime(self) -> None:
        if self.exp_id:
            check_id(self.exp_id, "exp_id")
        check_gateway_address(self)
        if self.deliver == "store" and self.runtime_name in NO_FILES:
            raise ValueError(
                f"agents in a {self.runtime_name} cannot reach the store; leave deliver out, or use 'gateway'"
            )
        if self.python and self.runtime_name not in WITH_PYTHON:
            raise ValueError(
                f"python = {self.python!r} is for the runtimes {' and '.join(WITH_PYTHON)}, not"
                f" {self.runtime_name}; leave it out"
            )
        if self.gateway_url and not (self.gateway_port or self.gateway):
            raise ValueError(
                "gateway_url is the address of the started gateway for agents; give its gateway_port as well"
            )
        if self.relay and self.gateway:
            raise ValueError(
                f"relay = {self.relay!r} is only for a gateway that the run starts, and gateway ="
                f" {self.gateway!r} is already running; leave relay out, and start that gateway with --relay"
            )
        self._check_pool()
        if self.reward_function and self.verifier:
            raise ValueError("verifier and reward_function both give the rewards; leave one of them out")
        if self.reward_function and self.advantage == "remax":
            raise ValueError(
                "advantage = 'remax' needs a reward of the greedy rollout, and reward_function gives none;"
                " choose another advantage"
            )
        if self.deliver == "store" and self.verifier:
            raise ValueError(
                "a verifier gets submissions from the gateway; use deliver = 'gateway' or leave it out"
            )

    def _check_pool(self) -> None:
        if self.gateway_store and not self.pooled:
            raise ValueError("gateway_store is for several gateways; set gateways above 1, or on = 'ray'")
        if self.pooled and self.engine == "vllm":
            raise ValueError(
                "engine = 'vllm' starts servers for one gateway, but the run starts several; start vLLM and"
                " give its address: engine = 'vllm=URL'"
            )
        if self.pooled and self.gateway:
            raise ValueError(f"gateway = {self.gateway!r} is a running one; leave out gateways and on")
        if self.gateways > 1 and self.gateway_url:
            raise ValueError(
                f"gateway_url = {self.gateway_url!r} is the address of one gateway, but gateways ="
                f" {self.gateways}; leave one of them out"
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
    def pooled(self) -> bool:
        """Whether the run starts a pool of gateways instead of a single one."""
        return self.gateways > 1 or self.on != "process"

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


PREFIX = "AFIELD_TRAIN"


def train_layers(file: Path | None, *layers: SettingsLayer) -> SettingsLayers:
    """Sources of a run's settings: the file, the environment, then `layers`."""
    below = (file_layer(file, TrainConfig, "train"),) if file else ()
    return SettingsLayers((*below, environment_layer(PREFIX, TrainConfig), *layers))


def train_config(file: Path | None, flags: Mapping[str, Any] | SettingsLayer, **defaults: Any) -> TrainConfig:
    """Settings of a new run: flags over the environment over the file over `defaults`.

    Flags that are None were not given.
    """
    if not isinstance(flags, SettingsLayer):
        flags = SettingsLayer(
            {k: v for k, v in flags.items() if v is not None}, lambda key: "the command line"
        )
    layers = train_layers(file, flags)
    values = layers.values
    if "steps" in values and "epochs" in values:
        raise UsageError("steps and epochs both set the length of a run; give one of them")
    return build(merged(defaults, values), layers.origin)


def build(values: Mapping[str, Any], source: Source) -> TrainConfig:
    check_keys(values, TrainConfig, source)
    for required in (setting.name for setting in structs.fields(TrainConfig) if setting.required):
        if not values.get(required):
            raise UsageError(f"{required} is missing: give it on the command line or in --config")
    return converted(values, TrainConfig, source)
