"""What each kind of place can be told: plain values, checked on construction, shared by all who need them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field, structs

from afield.exclusions import AbandonedAnswers, SideCalls

Thinking = Literal["preserve", "template", "per_turn"]
Escape = Literal["escape", "faithful", "reject"]
Render = Literal["fold", "strict"]
Unsupported = Literal["refuse", "ignore"]
ConstrainedTurns = Literal["train", "exclude", "ignore"]
ClientSampling = Literal["temperature", "top_p", "top_k", "seed"]


class SessionPolicies(Struct, frozen=True, kw_only=True):
    """What sessions do with what clients send, the same in every entry point: POST /sessions, RolloutClient,
    `afield train`, veRL and TRL.
    """

    client_sampling: tuple[ClientSampling, ...] = ()
    """Sampling settings that a request may choose for itself; all others are the trainer's. Default: none."""
    thinking: Thinking = "preserve"
    """What becomes of earlier reasoning in later prompts; see docs/concepts/tokens.md."""
    escape: Escape = "escape"
    """What becomes of control tokens in the text of messages; see docs/concepts/tokens.md."""
    render: Render = "fold"
    """What becomes of a conversation that the chat template would refuse: `fold` changes it by declared
    rules, and its turns say so with tags `render:RULE`; `strict` refuses it. See docs/concepts/tokens.md."""
    side_calls: SideCalls = "exclude"
    """Which side calls are kept out of the loss: `exclude` those that are declared or have a known
    fingerprint, only those that are `declared`, or none: `train`."""
    abandoned_answers: AbandonedAnswers = "exclude"
    """Whether answers to a repeated request are kept out of the loss that nothing continues, beside one that
    something does: `exclude`, or `train` for agents that sample a request several times on purpose."""
    unsupported: Unsupported = "refuse"
    """What becomes of a request with a parameter that is not supported: `refuse` it with 400, or `ignore` the
    parameter, and its turn says so with a tag `ignored:NAME`. See docs/reference/parameters.md."""
    constrained_turns: ConstrainedTurns = "train"
    """Whether turns that were sampled under a constraint (structured output, forced tool calls) are trained,
    with the constrained distribution on both sides, or kept out of the loss: `exclude`. `ignore` samples them
    without the constraint, and they say so with tags `ignored:NAME`."""


def policies_of(holder: SessionPolicies) -> dict[str, Any]:
    """The session policies among the fields of a struct, by name."""
    return {field.name: getattr(holder, field.name) for field in structs.fields(SessionPolicies)}


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one session; None is no limit. `disk_mb` bounds what it may write, `files` its open files."""

    cpus: float | None = 1.0
    memory_mb: int | None = 1024
    pids: int | None = 256
    disk_mb: int | None = 512
    files: int | None = 1024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be positive")


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env: {name!r} is no name of a variable; it must not be empty nor have an '='")
        if "\0" in value:
            raise ValueError(f"env: the value of {name} has a NUL character, which no system takes")


class SandboxOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents in sandboxes of this machine. `mounts` are paths they may read beside the system, the Python
    environment and their own folder; `allow` are HOST:PORT they may reach beside the gateway.
    """

    limits: Limits = Limits()
    mounts: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    without_bubblewrap: Literal["refuse", "process"] = "refuse"

    def __post_init__(self) -> None:
        _check_env(self.env)


class ContainerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents in containers of a Docker or Podman engine. `socket` is its address (unix:///... or tcp://...);
    empty takes DOCKER_HOST's or the usual places. `mounts` are HOST:CONTAINER[:ro]. `network` is bridge, or
    one of the engine's networks; `host` is what agents there call this machine, found out if empty.
    `command` replaces the image's own. `keep` are Linux capabilities that are not dropped, such as CHOWN.
    With `disk_mb` the image is read-only and only /tmp takes so much, in memory.
    """

    image: str = ""
    socket: str = ""
    pull: Literal["missing", "always", "never"] = "missing"
    command: tuple[str, ...] = ()
    network: str = "bridge"
    host: str = ""
    mounts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    # Images that were made for other places write beside their code; open files are bounded by the engine.
    limits: Limits = Limits(disk_mb=None, files=None)
    port: int = 8080
    user: str = ""
    runtime: str = ""
    init: bool = True
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_env(self.env)
        if not 0 < self.port < 65536:
            raise ValueError(f"port = {self.port} must be from 1 to 65535")
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:]*:/[^:]+(:ro)?", mount):
                raise ValueError(f"mount {mount!r} must be /HOST:/CONTAINER or /HOST:/CONTAINER:ro")


class AgentCoreOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents on AWS Bedrock AgentCore. `arn` is a runtime that exists; or one named `agent_name` is created,
    or updated, from `container_uri` and `role_arn`. `endpoint_url` is a compatible server (`afield
    agentcore-local`).
    `rate` counts session starts, `stop_rate` stops, each per second; `sessions` those alive at once.
    """

    arn: str = ""
    agent_name: str = ""
    container_uri: str = ""
    role_arn: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    qualifier: str = "DEFAULT"
    region: str = ""
    endpoint_url: str = ""
    bucket: str = ""
    rate: float = 25.0
    stop_rate: float = 25.0
    cold_start_s: float = 10.0
    sessions: int = 1000
    idle_s: int = 900
    max_rollout_s: int = 3600  # the lifetime of a session
    ready_s: float = 600.0

    def __post_init__(self) -> None:
        _check_env(self.env)
        for name in ("rate", "stop_rate", "sessions", "ready_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        if not 0 <= self.cold_start_s < math.inf:
            raise ValueError(f"cold_start_s = {self.cold_start_s} must be 0 or positive")


class KubernetesOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as Jobs. `secret` names a Secret whose entries become environment variables, by reference;
    `pull_secret` one that opens the image's registry. A pod that no node has room for is given up after
    `unschedulable_s`: raise it where nodes are added on demand. Of the limits, pids and files are the nodes'.
    """

    image: str = ""
    namespace: str = "default"
    kubeconfig: str = ""
    context: str = ""
    command: tuple[str, ...] = ()
    service_account: str = ""
    runtime_class: str = ""  # e.g. gvisor
    secret: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: str = ""
    non_root: bool = False
    port: int = 8080
    ttl_s: int = 300
    job_deadline_s: int = 3600
    unschedulable_s: float = 60.0

    def __post_init__(self) -> None:
        _check_env(self.env)
        for name, least in (("port", 1), ("ttl_s", 0), ("job_deadline_s", 1), ("unschedulable_s", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")


class RayOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as tasks of a Ray cluster. `address` empty starts one on this machine."""

    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    memory_mb: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    log_dir: str = ""


class LoraOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters in place of training every weight; `rank` 0 trains every weight. `targets` are names
    of linear layers, or "all-linear". What they add counts `alpha / rank`. Engines get the adapters alone,
    or the whole model with adapters merged.
    """

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all-linear",)
    publish: Literal["merged", "adapter"] = "adapter"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank = {self.rank} must be 0 (train every weight) or positive")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha = {self.alpha} must be positive")
        if not self.targets:
            raise ValueError("targets is empty; name linear layers, or leave it out for all of them")
        if not self.rank and (self.alpha, self.targets, self.publish) != (32.0, ("all-linear",), "adapter"):
            raise ValueError("rank = 0 trains every weight; give the others with a rank, such as 16")


class TrainerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the embedded trainer learns; docs/how-to/embedded-trainer.md explains each.

    `clip` [low, high] bounds the ratio to 1 - low and 1 + high; empty is what is usual for the loss.
    `dual_clip` bounds the ratio of tokens with a negative advantage (losses "ppo" and "dr_grpo"). `length`
    is what aggregate "constant" divides a rollout by. `importance` says how tokens that an older policy
    sampled are corrected for. `max_logprob_diff` refuses a batch in which sampler and trainer disagree by
    more about one token; None only reports it. `rewards` are the weights of named rewards, whose sum takes
    the place of the reward; credit "turns" gives each turn what came after it. `devices` above 1 shares the
    model out over as many GPUs.
    """

    loss: Literal["ppo", "cispo", "gspo", "dr_grpo"] = "ppo"
    clip: tuple[float, ...] = ()
    dual_clip: float = 3.0
    aggregate: Literal["auto", "rollout", "token", "constant"] = "auto"
    length: int | None = None
    importance: Literal["token", "sequence", "masked", "off"] = "token"
    importance_cap: float = 2.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    credit: Literal["outcome", "turns"] = "outcome"
    discount: float = 1.0
    epochs: int = 1
    weight_decay: float = 0.0
    layout: Literal["tree", "padded"] = "tree"
    max_tokens_per_pass: int = 16384
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpointing: bool = False
    lora: LoraOptions = LoraOptions()
    max_logprob_diff: float | None = None
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of published weights to the engine's dtype; nearest loses updates below its spacing."""
    device: str = ""  # cuda where there is one, else cpu
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "epochs", "max_tokens_per_pass", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        for name in ("entropy", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)} must be 0 or positive")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount = {self.discount} must be from 0 to 1")
        if not 1 <= self.importance_cap < math.inf:
            raise ValueError(f"importance_cap = {self.importance_cap} must be at least 1")
        if self.max_logprob_diff is not None and not 0 < self.max_logprob_diff < math.inf:
            raise ValueError(f"max_logprob_diff = {self.max_logprob_diff} must be positive")
        if wrong := [name for name, weight in self.rewards.items() if not math.isfinite(weight)]:
            raise ValueError(f"rewards.{wrong[0]} = {self.rewards[wrong[0]]} must be a finite number")
        self._check_clips()

    def _check_clips(self) -> None:
        if not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1; inf switches it off")
        if self.clip and (len(self.clip) != 2 or not all(0 <= part < math.inf for part in self.clip)):
            raise ValueError(f"clip = {list(self.clip)} must be two numbers, how far below and above 1")
