"""The `afield` block of veRL's configuration, as values.

What Hydra composes (command line first, then YAML) counts before AFIELD_VERL_* in the environment, and
that before the table [verl] of the TOML file that `afield.file` names. A key nobody knows is refused with
the nearest one. What veRL has keys for is read from those: sampling, lengths, group size, validation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from afield.errors import UsageError
from afield.integrations.verl.rows import CreditAssignment
from afield.options import ConstrainedTurns, SessionPolicies
from afield.settings import converted, from_environment, from_file, located, merged
from afield.types import Budget, FailureKind, Sampling, check_id

PREFIX = "AFIELD_VERL"
PLACED = ("agent", "limiter_file")  # paths, which count from where the trainer was started
# Estimators that compare sessions, or nothing; all others compare the rows of a group.
ANY_ROWS = ("grpo", "gae", "reinforce_plus_plus", "remax")
# Estimators that look at where in a row a reward is; all others take the sum of a row, grpo that of the last.
BY_TOKEN = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
DEADLINES = (
    "queue_timeout_s",
    "launch_timeout_s",
    "first_call_timeout_s",
    "idle_timeout_s",
    "verifier_timeout_s",
    "upload_timeout_s",
    "teardown_timeout_s",
    "rollout_timeout_s",
)
AMOUNTS = (
    *DEADLINES,
    "attempt_timeout_s",
    "heartbeat_timeout_s",
    "unavailable_timeout_s",
    "poll_interval_s",
    "launch_rate",
)
COUNTS = ("workers", "concurrency", "quorum", "fruitless", "max_tokens", "max_calls")
SIZES = ("max_context", "launching")
NOT_NEGATIVE = ("retries_task", "retries_verifier", "retries_infrastructure", "cold_start_s")
LONGEST_NAME = 64


class Settings(SessionPolicies, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`quorum` rewards make a group fit for training (2 unless the group is smaller). `floor` is the reward
    of a policy failure that has none. After `fruitless` groups in a row that cannot be trained, training ends
    instead of going on for ever. `branches` says which rows of a session that branched are trained;
    `auto` is all, where veRL compares sessions. `options` is what the runtime is told. `rewards`, `credit`
    and `discount` say what veRL learns from, as they do for the embedded trainer; see `rows.Credit`.
    """

    constrained_turns: ConstrainedTurns = "exclude"
    """Always `exclude`: veRL's trainer does not rescore under the masks that replies were sampled with."""
    agent: str = ""
    runtime: str = "process"
    options: Mapping[str, Any] = field(default_factory=dict)
    transport: str = "files"
    engine: str | list[str] = "torch"  # of the rollout backend `afield`; see `keeper`
    gateway: str = ""  # one that runs already; its admin key is AFIELD_ADMIN_KEY
    gateway_host: str = "127.0.0.1"  # where ours listens
    gateway_port: int = 0
    gateway_url: str = ""
    name: str = ""  # of the experiment; empty takes veRL's project and experiment names
    folder: str = ""  # empty is `afield` under trainer.default_local_dir
    workers: int = 2
    process_per_rollout: bool = False
    concurrency: int = 64
    attempt_timeout_s: float = 300.0
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
    unavailable_timeout_s: float = 600.0
    retries_task: int = 1
    retries_verifier: int = 1
    retries_infrastructure: int = 3
    quorum: int | None = None
    fruitless: int = 32
    floor: float = 0.0
    branches: Literal["auto", "all", "main"] = "auto"
    rewards: Mapping[str, float] = field(default_factory=dict)
    credit: Literal["outcome", "turns"] = "outcome"
    discount: float = 1.0
    max_tokens: int | None = None  # of one call; None is veRL's response_length
    max_calls: int | None = None
    max_context: int | None = None  # None is veRL's max_model_len, or prompt and response length
    launch_rate: float | None = None
    cold_start_s: float = 0.0
    launching: int | None = None
    limiter_file: str = ""

    def __post_init__(self) -> None:
        for names, least in (((*COUNTS, *SIZES), 1), (NOT_NEGATIVE, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not least <= value < math.inf:
                    raise ValueError(f"{name} = {value} must be at least {least}")
        for name in AMOUNTS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be positive")
        if self.constrained_turns == "train":
            raise ValueError(
                "constrained_turns = 'train': veRL rescores without the masks of constrained turns; leave it"
                " at 'exclude', sample without constraints ('ignore'), or train with the embedded trainer"
            )
        if not math.isfinite(self.floor):
            raise ValueError(f"floor = {self.floor} must be a finite number")
        self._check_credit()
        if self.name:
            check_id(self.name, "name")
        if self.gateway and not self.gateway.startswith(("http://", "https://")):
            raise ValueError(f"gateway {self.gateway!r} must be an address, such as http://127.0.0.1:8400")

    def _check_credit(self) -> None:
        if wrong := [name for name, weight in self.rewards.items() if not math.isfinite(weight)]:
            raise ValueError(f"rewards.{wrong[0]} = {self.rewards[wrong[0]]} must be a finite number")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount = {self.discount} must be from 0 to 1")

    @property
    def retries(self) -> dict[FailureKind, int]:
        return {
            FailureKind.TASK: self.retries_task,
            FailureKind.VERIFIER: self.retries_verifier,
            FailureKind.INFRASTRUCTURE: self.retries_infrastructure,
        }


class Trainer(Struct, frozen=True, kw_only=True):
    """What veRL's own keys say of rollouts."""

    name: str
    folder: str
    backend: str
    model: str
    rollouts: int
    val_rollouts: int
    sampling: Sampling
    val_sampling: Sampling
    budget: Budget
    estimator: str
    loss_agg_mode: str
    mode: str
    hybrid: bool  # whether veRL's own rollout servers share the trainer's devices
    refills: bool  # whether a group that failed is replaced by another


class Given(Struct, frozen=True):
    settings: Settings
    trainer: Trainer

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
        """Whether rows say what they weigh: only this mean of veRL's counts rows instead of tokens."""
        return self.trainer.loss_agg_mode == "seq-mean-token-mean" and self.branches == "all"


def read(config: Mapping[str, Any]) -> Given:
    """From veRL's whole configuration: a DictConfig, or the same as a plain mapping."""
    whole = plain(config)
    settings = _settings(whole.get("afield") or {})
    given = Given(settings, _trainer(whole, settings))
    _check(given, whole)
    return given


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    if type(config) is dict:
        return config
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


def _settings(block: Mapping[str, Any]) -> Settings:
    if not isinstance(block, Mapping):
        raise UsageError(f"afield = {block!r} must be a block of keys, such as +afield.agent=agent.py:agent")
    given = merged(from_environment(PREFIX), {key: v for key, v in block.items() if v is not None})
    file = given.pop("file", "")
    here = {key: located(key, given[key], Path.cwd()) for key in PLACED if key in given}
    below = from_file(Path(file).expanduser(), "verl") if file else {}
    return converted(merged(below, given | here), Settings, "afield")


def _trainer(config: dict[str, Any], settings: Settings) -> Trainer:
    trainer, actor_rollout_ref = config["trainer"], config["actor_rollout_ref"]
    rollout, actor = actor_rollout_ref["rollout"], actor_rollout_ref["actor"]
    val, sampler = rollout["val_kwargs"], trainer.get("v1", {}).get("sampler", {})
    longest = rollout.get("max_model_len") or rollout["prompt_length"] + rollout["response_length"]
    max_tokens = settings.max_tokens or rollout["response_length"]
    named = f"{trainer['project_name']}-{trainer['experiment_name']}"
    mode = trainer.get("v1", {}).get("trainer_mode", "sync")
    return Trainer(
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


def _sampling(told: Mapping[str, Any], max_tokens: int) -> Sampling:
    """veRL has -1 for no top_k."""
    try:
        return Sampling(
            temperature=float(told["temperature"]),
            top_p=float(told["top_p"]),
            top_k=max(0, int(told["top_k"])),
            max_tokens=max_tokens,
        )
    except ValueError as error:
        raise UsageError(f"actor_rollout_ref.rollout: {error}") from error


def _check(given: Given, config: dict[str, Any]) -> None:
    settings, trainer = given.settings, given.trainer
    if given.quorum > trainer.rollouts:
        told = f"afield.quorum={given.quorum} is more than the {trainer.rollouts} rollouts of a group"
        raise UsageError(f"{told}; lower it, or raise actor_rollout_ref.rollout.n")
    if not config["actor_rollout_ref"]["rollout"].get("calculate_log_probs", True):
        raise UsageError(
            "rollouts bring their log-probabilities, and without them nobody would notice a drift:"
            " set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if trainer.estimator not in ANY_ROWS and settings.branches == "auto":
        told = f"with algorithm.adv_estimator={trainer.estimator} veRL compares rows instead of sessions, so"
        raise UsageError(
            f"{told} a session that branches would count several times: say afield.branches=main to train"
            " the longest row of each, or afield.branches=all if your agents never branch or you want that"
        )
