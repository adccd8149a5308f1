"""How rollouts are collected, and who is told of it: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from msgspec import field

from afield.options import SessionPolicies
from afield.orchestrator.deadlines import Deadlines
from afield.types import Budget, FailureKind, Outcome, Rollout, RolloutResult, Sampling, check_id

DEFAULT_RETRIES = {FailureKind.TASK: 1, FailureKind.VERIFIER: 1, FailureKind.INFRASTRUCTURE: 3}


class RolloutConfig(SessionPolicies, frozen=True, kw_only=True):
    """How rollouts are collected.

    `rollouts` of a task make a group, `val_rollouts` in validation. `extra` ones are begun beyond that,
    and what is still running when enough have a reward is cut. With `straggler_s`, rollouts that are
    still running so long after `straggler_after` of their group have a reward are cut (all but one,
    unless told otherwise). Both favour short rollouts, so both are off unless asked for. With
    `baseline` a group has one greedy rollout more, to be measured against. Agents deliver to the store,
    or to their gateway, which writes the store. Who is `judged` hands in to the gateway, and a verifier
    gives the reward. `rewards` names those that an outcome must have, and no others, if training weighs
    named ones. A reward whose absolute value is above `max_reward` is the verifier's failure.
    A call to the gateway or the store is given up after `call_timeout_s` and repeated; for
    `unavailable_timeout_s` in all.
    """

    exp_id: str
    model_id: str
    rollouts: int = 8
    val_rollouts: int = 1
    quorum: int = 2
    extra: int = 0
    straggler_s: float | None = None
    straggler_after: int | None = None
    baseline: bool = False
    concurrency: int = 64
    deadlines: Deadlines = Deadlines()
    retries: Mapping[FailureKind, int] = field(default_factory=lambda: dict(DEFAULT_RETRIES))
    sampling: Sampling = Sampling()
    budget: Budget = Budget()
    deliver: Literal["store", "gateway"] = "store"
    separate_verifier: bool = False
    no_turns: Literal["refuse", "flag"] = "flag"
    """What becomes of a reward for a session without a single model call: a failure, or a warning."""
    rewards: tuple[str, ...] = ()
    max_reward: float = 1e6
    poll_interval_s: float = 5.0
    watch_interval_s: float = 1.0
    unavailable_timeout_s: float = 600.0
    call_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_id(self.exp_id, "exp_id")
        for name in ("rollouts", "val_rollouts", "quorum", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in (
            "poll_interval_s",
            "watch_s",
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
            raise ValueError("a verifier gets what agents hand in at the gateway: deliver must be 'gateway'")
        after = self.straggler_after
        if after is not None and not 1 <= after <= self.rollouts:
            raise ValueError(f"straggler_after {after} must be between 1 and {self.rollouts}, the rollouts")

    @property
    def max_verdicts(self) -> int:
        """How often what was handed in is graded, at most, until a verifier does not fail."""
        return 1 + self.retries.get(FailureKind.VERIFIER, 0) if self.separate_verifier else 1

    @property
    def straggler_threshold(self) -> int:
        """How many rewards of a group start the clock of its stragglers."""
        return self.straggler_after or max(1, self.rollouts - 1)


class RolloutObserver(Protocol):
    """Told of progress; for screens and metrics, never for decisions."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None: ...

    def rollout_finished(self, result: RolloutResult) -> None: ...
