"""Configuration of rollouts: group sizes, retries, deadlines and polling intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import field

from afield.orchestrator.deadlines import Deadlines
from afield.settings.sessions import SessionPolicies
from afield.types import (
    Budget,
    FailureKind,
    Outcome,
    RewardSource,
    Rollout,
    RolloutResult,
    Sampling,
    check_id,
)

DEFAULT_RETRIES = {FailureKind.TASK: 1, FailureKind.VERIFIER: 1, FailureKind.INFRASTRUCTURE: 3}


class RolloutConfig(SessionPolicies, frozen=True, kw_only=True):
    """Settings of rollout collection.

    `extra` and `straggler_s` cancel slow rollouts, which favors short ones; both are off by default.
    """

    exp_id: str
    """Experiment id, the prefix of stored outcomes."""
    model_id: str
    """Model name that agents send with each call."""
    rollouts: int = 8
    """Rollouts per group."""
    val_rollouts: int = 1
    """Rollouts per task in a validation."""
    quorum: int = 2
    """Rewards that a group needs to be trained."""
    extra: int = 0
    """Rollouts started beyond `rollouts`; once `rollouts` of them have a reward, the rest are cancelled."""
    straggler_s: float | None = None
    """Seconds after `straggler_after` rewards until the rest of a group is cancelled; None never cancels."""
    straggler_after: int | None = None
    """Rewards that start the straggler timer; None is all rollouts but one."""
    baseline: bool = False
    """Whether each group has one more, greedy rollout to compare with (ReMax)."""
    concurrency: int = 64
    """Rollouts that run at the same time."""
    deadlines: Deadlines = Deadlines()
    """Time limits of attempts and rollouts."""
    retries: Mapping[FailureKind, int] = field(default_factory=lambda: dict(DEFAULT_RETRIES))
    """Further attempts per failure kind: task 1, verifier 1, infrastructure 3."""
    sampling: Sampling = Sampling()
    """Sampling parameters of rollouts that have none of their own."""
    budget: Budget = Budget()
    """Limits of each session."""
    agent_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the agent, the same for all tasks; its `Context.args`."""
    deliver: Literal["store", "gateway"] = "store"
    """Where agents deliver outcomes: to the store, or to the gateway, which writes the store."""
    separate_verifier: bool = False
    """Whether a verifier in its own runtime grades submissions; needs `deliver` "gateway"."""
    reward_from: RewardSource = "agent"
    """Source of the rewards: the `agent`, whose result without one is a failure, or the `caller` after the
    rollout has ended."""
    no_turns: Literal["refuse", "flag", "accept"] = "flag"
    """A reward for a session without a recorded model call becomes a failure (`refuse`), gives a warning
    (`flag`), or is normal, because calls are not recorded (`accept`)."""
    rewards: tuple[str, ...] = ()
    """Names of the rewards that an outcome must have, and no others; empty accepts any."""
    max_reward: float = 1e6
    """Largest absolute reward; a larger one is a verifier failure."""
    poll_interval_s: float = 5.0
    """Seconds between two polls of the outcome store."""
    watch_interval_s: float = 1.0
    """Seconds between two reads of the sessions' state at the gateway."""
    unavailable_timeout_s: float = 600.0
    """Seconds for which a gateway or store that does not answer is retried."""
    trace_seed: str = ""
    """Name of the run in the ids of its traces; empty without traces."""
    call_timeout_s: float = 120.0
    """Seconds until one call to the gateway or the store is abandoned and repeated."""

    def __post_init__(self) -> None:
        check_id(self.exp_id, "exp_id")
        for name in ("rollouts", "val_rollouts", "quorum", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in (
            "poll_interval_s",
            "watch_interval_s",
            "unavailable_timeout_s",
            "call_timeout_s",
            "straggler_s",
            "max_reward",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value} must be positive")
        for kind, count in self.retries.items():
            if count < 0:
                raise ValueError(f"retries of {kind} = {count} must be 0 or more")
        if self.separate_verifier and self.deliver != "gateway":
            raise ValueError(f"a separate verifier needs deliver = 'gateway', not {self.deliver!r}")
        if self.reward_from == "caller":
            self._check_caller()
        after = self.straggler_after
        if after is not None and not 1 <= after <= self.rollouts:
            raise ValueError(f"straggler_after {after} must be between 1 and {self.rollouts}, the rollouts")

    def _check_caller(self) -> None:
        if self.separate_verifier:
            raise ValueError("a verifier and reward_from = 'caller' both give the rewards; choose one")
        if self.baseline:
            raise ValueError(
                "baseline needs a reward for its greedy rollout, which reward_from = 'caller' does not give;"
                " leave out baseline"
            )

    @property
    def max_verdicts(self) -> int:
        """Largest number of verifiers that are started for one submission."""
        return 1 + self.retries.get(FailureKind.VERIFIER, 0) if self.separate_verifier else 1

    @property
    def straggler_threshold(self) -> int:
        """Number of rewards that start the straggler timer of a group."""
        return self.straggler_after or max(1, self.rollouts - 1)


class RolloutObserver(Protocol):
    """Receives progress events for displays and metrics."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None: ...

    def rollout_finished(self, result: RolloutResult) -> None: ...
