"""What is asked of agents and what comes of it: tasks, rollouts, attempts, outcomes, groups."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Self

from msgspec import Struct, field

from afield.types.policy import Sampling
from afield.types.turns import Exclusion, Trajectory, Turn

ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_id(value: str, what: str) -> None:
    if not ID_PATTERN.fullmatch(value) or value in {".", ".."}:
        raise ValueError(f"{what} {value!r} must be 1 to 128 characters of A-Z a-z 0-9 . _ -")


class Split(StrEnum):
    TRAIN = "train"
    VAL = "val"


class Task(Struct, frozen=True):
    """What an agent is asked: an id and a JSON object; attempted many times."""

    id: str
    input: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id")
        if "_rollout" in self.input:
            raise ValueError(f"task {self.id!r} has a field '_rollout', which is reserved; rename it")


class Rollout(Struct, frozen=True, kw_only=True):
    """The wish for one attempt at one task: the unit of work, retry and bookkeeping.

    `sampling` is set where it is not that of all others: greedy for validation and for a group's baseline.
    """

    id: str
    exp_id: str
    group_id: str
    task: Task
    split: Split = Split.TRAIN
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        check_id(self.id, "rollout id")
        check_id(self.exp_id, "experiment id")
        check_id(self.group_id, "group id")


class Attempt(Struct, frozen=True):
    """One try of a rollout, counted from 1. Its session has the same id."""

    rollout_id: str
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"attempt {self.n} of {self.rollout_id!r}: attempts count from 1")
        check_id(self.session_id, "session id")

    @property
    def session_id(self) -> str:
        return f"{self.rollout_id}.{self.n}"

    @classmethod
    def from_session_id(cls, session_id: str) -> Self:
        rollout_id, dot, n = session_id.rpartition(".")
        if not dot or not n.isdigit():
            raise ValueError(f"session id {session_id!r} is not of the form ROLLOUT.N")
        return cls(rollout_id, int(n))


class FailureKind(StrEnum):
    """Who a failure belongs to. It decides what happens next; see `errors.RETRIED`."""

    POLICY = "policy"
    TASK = "task"
    VERIFIER = "verifier"
    INFRASTRUCTURE = "infrastructure"


class Reason(StrEnum):
    """Why, within a kind."""

    RAISED = "raised"
    REWARD = "reward"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CONTEXT = "context"
    LAUNCH = "launch"
    DIED = "died"
    ENGINE = "engine"
    UPLOAD = "upload"
    CANCELLED = "cancelled"


class Failure(Struct, frozen=True):
    kind: FailureKind
    reason: Reason
    message: str
    traceback: str = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of an attempt: a reward, or the typed failure in its place.

    A policy failure may carry a reward too (the agent gave one before it ran out of budget). `turn_rewards`
    are by turn: its id, the id of the response that the agent got for it, or the number of the call, from 0.
    """

    rollout_id: str
    attempt: int
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    stop_reason: str = ""

    def __post_init__(self) -> None:
        Attempt(self.rollout_id, self.attempt)
        of_turns = ((f"reward of turn {turn}", value) for turn, value in self.turn_rewards.items())
        named = (*self.rewards.items(), *self.metrics.items(), *of_turns)
        for name, value in (("reward", self.reward), *named):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} {value} of {self.session_id} is not a finite number")
        if self.reward is None and self.failure is None:
            raise ValueError(f"the outcome of {self.session_id} has neither a reward nor a failure")
        if self.reward is not None and self.failure and self.failure.kind is not FailureKind.POLICY:
            raise ValueError(f"{self.session_id}: a {self.failure.kind} failure never carries a reward")

    @property
    def session_id(self) -> str:
        return f"{self.rollout_id}.{self.attempt}"

    def reward_or_floor(self, floor: float) -> float | None:
        """The number that trains, or None when this outcome stays out of the baseline."""
        if self.reward is not None:
            return self.reward
        return floor if self.failure and self.failure.kind is FailureKind.POLICY else None


class Finished(Struct, frozen=True, kw_only=True):
    """A rollout with what came of it: its last attempt's outcome, what that trains, and the turns to read."""

    rollout: Rollout
    outcome: Outcome
    trajectories: tuple[Trajectory, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    turns: tuple[Turn, ...] = ()
    attempts: int = 1


class Group(Struct, frozen=True, kw_only=True):
    """The finished rollouts of one task that are compared with each other.

    `baseline` is the greedy rollout they are measured against where the algorithm wants one (ReMax); it is
    never trained.
    """

    id: str
    task_id: str
    epoch: int
    split: Split
    finished: tuple[Finished, ...]
    baseline: Finished | None = None

    def __post_init__(self) -> None:
        ids = [f.rollout.id for f in self.finished]
        if len(set(ids)) != len(ids):
            raise ValueError(f"group {self.id} holds a rollout twice: {sorted(ids)}")
        everyone = (*self.finished, *([self.baseline] if self.baseline else []))
        if stray := [f.rollout.id for f in everyone if f.rollout.group_id != self.id]:
            raise ValueError(f"group {self.id} holds rollouts of other groups: {stray}")

    def unusable_because(self, quorum: int) -> str | None:
        """Why this group cannot be trained on; None when it can."""
        return too_few_rewards([f.outcome for f in self.finished], quorum)


def too_few_rewards(outcomes: Sequence[Outcome], quorum: int) -> str | None:
    """Says so when fewer than `quorum` of a group's outcomes carry a reward; None when enough do."""
    carrying = sum(outcome.reward_or_floor(0.0) is not None for outcome in outcomes)
    if carrying >= quorum:
        return None
    kinds = sorted({str(outcome.failure.kind) for outcome in outcomes if outcome.failure})
    return f"{carrying} of {len(outcomes)} rollouts carry a reward ({', '.join(kinds)} failures)"
