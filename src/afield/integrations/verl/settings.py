"""veRL settings: the `afield` block of veRL's configuration.

Precedence: Hydra (command line, then YAML), then AFIELD_VERL_* environment variables, then the [verl] table
of the TOML file that `afield.file` names. Sampling, lengths, group size and validation come from veRL's own
keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct, field

from afield.errors import UsageError
from afield.integrations.verl.rows import CreditAssignment
from afield.settings.environment import environment_layer
from afield.settings.fields import Bound, Count
from afield.settings.rollouts import (
    AgentSettings,
    Deadlines,
    GatewayAddress,
    LaunchSettings,
    RetrySettings,
    check_gateway_address,
)
from afield.settings.sessions import ConstrainedTurns, SessionPolicies
from afield.settings.trainer import Credit, check_reward_weights
from afield.settings.values import SettingsLayer, SettingsLayers, converted, file_layer, with_paths
from afield.types import Budget, Sampling, check_id

PREFIX = "AFIELD_VERL"
ANY_ROWS = ("grpo", "gae", "reinforce_plus_plus", "remax")
"""Estimators that compare sessions or use no baseline of the group; all others compare rows."""
BY_TOKEN = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that use the position of rewards in a row; all others sum a row's rewards, grpo those of the
last row."""
LONGEST_NAME = 64


class VerlSettings(
    AgentSettings,
    Deadlines,
    RetrySettings,
    LaunchSettings,
    GatewayAddress,
    SessionPolicies,
    frozen=True,
    kw_only=True,
):
    """Keys of the `afield` block: those that `afield train` shares, and veRL's own."""

    title: ClassVar[str] = "veRL"

    constrained_turns: ConstrainedTurns = "exclude"
    """Turns sampled under a constraint. `exclude` keeps them out of the loss, `ignore` samples without the
    constraint; veRL's trainer cannot rescore them under their masks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the runtime, such as {limits: {memory_mb: 512}}."""
    engine: str | list[str] = "torch"
    """Inference engine behind `actor_rollout_ref.rollout.name=afield`: torch, vllm, vllm=URL, sglang=URL, or
    a list of them."""
    name: str = ""
    """Experiment name; default: veRL's project and experiment names."""
    folder: str = ""
    """Directory of the run; default: `afield` under trainer.default_local_dir."""
    quorum: Count | None = None
    """Rewards that a group needs to be trained; default: 2, or the group's size if that is smaller."""
    fruitless: Count = 32
    """Groups in a row without enough rewards after which training ends."""
    floor: float = 0.0
    """Reward of a policy failure that has none."""
    branches: Literal["auto", "all", "main"] = "auto"
    """Rows of a session that branched: all of them, or the longest. `auto` is all, if veRL's estimator
    compares sessions."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of named rewards, whose sum replaces the reward."""
    credit: Credit = "outcome"
    """Credit assignment, as for the embedded trainer."""
    discount: Annotated[float, Bound(at_least=0, at_most=1)] = 1.0
    """Discount of later rewards per turn, with credit `turns`."""
    max_tokens: Count | None = None
    """Tokens sampled per model call; default: veRL's response_length."""
    max_calls: Count | None = None
    """Model calls per attempt."""
    max_context: Count | None = None
    """Tokens of prompt and reply per model call; default: veRL's max_model_len, else prompt_length plus
    response_length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.constrained_turns == "train":
            raise ValueError(
                "constrained_turns = 'train': veRL rescores without the masks of constrained turns; leave it"
                " at 'exclude', sample without constraints ('ignore'), or train with the embedded trainer"
            )
        if not math.isfinite(self.floor):
            raise ValueError(f"floor = {self.floor} must be a finite number")
        check_reward_weights(self.rewards)
        if self.name:
            check_id(self.name, "name")
        check_gateway_address(self)


class VerlTrainer(Struct, frozen=True, kw_only=True):
    """Rollout settings from veRL's own keys."""

    name: str
    """Experiment name."""
    folder: str
    """Directory of the run."""
    backend: str
    """Rollout backend: `afield`, `vllm` or `sglang`."""
    model: str
    """Model path."""
    rollouts: int
    """Rollouts per prompt in training."""
    val_rollouts: int
    """Rollouts per prompt in validation."""
    sampling: Sampling
    """Sampling parameters in training."""
    val_sampling: Sampling
    """Sampling parameters in validation."""
    budget: Budget
    """Limits of a session."""
    estimator: str
    """Advantage estimator."""
    loss_agg_mode: str
    """Loss aggregation mode."""
    mode: str
    """Trainer mode, such as `sync` or `separate_async`."""
    hybrid: bool
    """Whether veRL's rollout servers share the trainer's devices."""
    refills: bool
    """Whether veRL replaces a failed group by another."""


class VerlRun(Struct, frozen=True):
    """Settings of a veRL job, from the `afield` block and from veRL's own keys."""

    settings: VerlSettings
    """Settings of the `afield` block."""
    trainer: VerlTrainer
    """Settings from veRL's own keys."""

    @property
    def quorum(self) -> int:
        return self.settings.quorum or min(2, self.trainer.rollouts)

    @property
    def branches(self) -> Literal["all", "main"]:
        return "all" if self.settings.branches == "auto" else self.settings.branches

    @property
    def credit(self) -> CreditAssignment:
        settings = self.settings
        return CreditAssignment(
            weights=settings.rewards,
            turns=settings.credit == "turns",
            discount=settings.discount,
            one_sum=self.trainer.estimator not in BY_TOKEN,
        )

    @property
    def weighted(self) -> bool:
        """Whether rows carry weights; needed for veRL's mean over rows instead of tokens."""
        return self.trainer.loss_agg_mode == "seq-mean-token-mean" and self.branches == "all"


def read(config: Mapping[str, Any]) -> VerlRun:
    """Read and check the settings in veRL's configuration, a DictConfig or a plain mapping."""
    whole = plain(config)
    settings = read_settings(whole.get("afield") or {})
    run = VerlRun(settings, _trainer(whole, settings))
    _check(run, whole)
    return run


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if type(config) is dict:
        return config
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


def read_settings(block: Mapping[str, Any]) -> VerlSettings:
    if not isinstance(block, Mapping):
        raise UsageError(f"afield = {block!r} must be a block of keys, such as +afield.agent=agent.py:agent")
    block = {key: value for key, value in block.items() if value is not None}
    variables = environment_layer(PREFIX, VerlSettings)
    file = block.pop("file", "") or variables.values.get("file", "")
    hydra = SettingsLayer(with_paths(block, VerlSettings, Path.cwd()), lambda key: "afield")
    above = (
        SettingsLayer({k: v for k, v in variables.values.items() if k != "file"}, variables.origin),
        hydra,
    )
    below = (file_layer(Path(file).expanduser(), VerlSettings, "verl"),) if file else ()
    layers = SettingsLayers((*below, *above))
    return converted(layers.values, VerlSettings, layers.origin)


def _trainer(config: dict[str, Any], settings: VerlSettings) -> VerlTrainer:
    trainer, actor_rollout_ref = config["trainer"], config["actor_rollout_ref"]
    rollout, actor = actor_rollout_ref["rollout"], actor_rollout_ref["actor"]
    val, sampler = rollout["val_kwargs"], trainer.get("v1", {}).get("sampler", {})
    longest = rollout.get("max_model_len") or rollout["prompt_length"] + rollout["response_length"]
    max_tokens = settings.max_tokens or rollout["response_length"]
    named = f"{trainer['project_name']}-{trainer['experiment_name']}"
    mode = trainer.get("v1", {}).get("trainer_mode", "sync")
    return VerlTrainer(
        name=settings.name or re.sub(r"[^A-Za-z0-9.-]", "-", named)[:LONGEST_NAME],
        folder=settings.folder or str(Path(trainer["default_local_dir"]) / "afield"),
        backend=rollout["name"],
        model=actor_rollout_ref["model"]["path"],
        rollouts=rollout["n"],
        val_rollouts=val["n"],
        sampling=_sampling(rollout, max_tokens),
        val_sampling=_sampling(val, max_tokens),
        budget=Budget(calls=settings.max_calls, context=settings.max_context or longest),
        estimator=config["algorithm"]["adv_estimator"],
        loss_agg_mode=actor["loss_agg_mode"],
        mode=mode,
        hybrid=bool(actor_rollout_ref.get("hybrid_engine", True)),
        refills=mode != "sync" or bool(sampler.get("sync_refill_failed_groups")),
    )


def _sampling(values: Mapping[str, Any], max_tokens: int) -> Sampling:
    """Sampling parameters from veRL's keys, in which a top_k of -1 is off."""
    try:
        return Sampling(
            temperature=float(values["temperature"]),
            top_p=float(values["top_p"]),
            top_k=max(0, int(values["top_k"])),
            max_tokens=max_tokens,
        )
    except ValueError as error:
        raise UsageError(f"actor_rollout_ref.rollout: {error}") from error


def _check(run: VerlRun, config: dict[str, Any]) -> None:
    settings, trainer = run.settings, run.trainer
    if run.quorum > trainer.rollouts:
        message = f"afield.quorum={run.quorum} is more than the {trainer.rollouts} rollouts of a group"
        raise UsageError(f"{message}; lower it, or raise actor_rollout_ref.rollout.n")
    if not config["actor_rollout_ref"]["rollout"].get("calculate_log_probs", True):
        raise UsageError(
            "veRL would drop the log-probabilities that were recorded while sampling: set"
            " actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if trainer.estimator not in ANY_ROWS and settings.branches == "auto":
        message = (
            f"with algorithm.adv_estimator={trainer.estimator} veRL compares rows instead of sessions, so"
        )
        raise UsageError(
            f"{message} a session that branches would count several times: say afield.branches=main to train"
            " the longest row of each, or afield.branches=all if your agents never branch or you want that"
        )
