"""Rewards: reading an agent's return value, aggregation, and the `Reward` base class.

An agent returns a number; a list of numbers; `{"reward": x}`; or
`{"rewards": number | {name: number} | [number, ...]}`, with optional "turn_rewards", "named_turn_rewards",
"metrics" (numbers) and "stop_reason". Other keys are kept as `extra`. Several named rewards need an
aggregation; of a list without one, the last counts, as in the AgentCore toolkit. A value that is not a
finite number raises VerifierFailure with that value; an extra value that JSON cannot hold raises TaskFailure
with its key.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct, field

from afield import wire
from afield.errors import TaskFailure, UsageError, VerifierFailure, WireError
from afield.sdk.classify import attributed, clean
from afield.types import Reason, RewardSource

Rewards = dict[str, float]
Aggregate = str | Mapping[str, float] | Callable[[Rewards], float] | None

RESULT_KEYS = ("reward", "rewards", "turn_rewards", "named_turn_rewards", "metrics", "stop_reason")
AGENT_REWARD = "agent_reward"
"""Metric with the reward that an agent returned although the caller gives the rewards."""
TURN_ID = re.compile(r"(?:.*[-_])?t\d+|\d+")

AGGREGATES: dict[str, Callable[[Rewards], float]] = {
    "mean": lambda rewards: sum(rewards.values()) / len(rewards),
    "sum": lambda rewards: sum(rewards.values()),
    "min": lambda rewards: min(rewards.values()),
    "max": lambda rewards: max(rewards.values()),
}


class AgentResult(Struct, frozen=True, kw_only=True):
    """An agent's return value."""

    reward: float | None
    """The rollout's reward, aggregated if there are several; None if the caller gives it later."""
    rewards: Rewards = field(default_factory=dict)
    """Rewards by name; those of a list have their index as name."""
    turn_rewards: Rewards = field(default_factory=dict)
    """Rewards of single turns, by response id or call number."""
    named_turn_rewards: dict[str, Rewards] = field(default_factory=dict)
    """Rewards of single turns by name, then by turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to log with the rollout."""
    stop_reason: str = ""
    """Why the agent stopped, in its own words."""
    extra: dict[str, Any] = field(default_factory=dict)
    """All other keys, copied through JSON."""


def read_result(
    value: object, aggregate: Aggregate = None, reward_from: RewardSource = "agent"
) -> AgentResult:
    """Read what an agent returned; raises VerifierFailure or TaskFailure.

    With rewards from the caller, an agent needs no reward; one that it returns is a metric.
    """
    if reward_from == "caller":
        return _read_unrewarded(value)
    if value is None:
        raise VerifierFailure("the agent returned None; return its reward, a number", Reason.REWARD)
    if isinstance(value, list | tuple):
        value = {"rewards": value}
    if not isinstance(value, Mapping):
        return AgentResult(reward=number(value, "the reward"))
    if "reward" not in value and "rewards" not in value:
        raise VerifierFailure(
            f"the agent returned a dict with keys {_repr(list(value))}; add 'reward' or 'rewards'",
            Reason.REWARD,
        )
    rewards = read_rewards(value["rewards"]) if "rewards" in value else {}
    if aggregate is None and isinstance(value.get("rewards"), list | tuple):
        aggregate = _last
    # With both keys, "reward" is the agent's own aggregation of "rewards".
    reward = number(value["reward"], "the reward") if "reward" in value else combine(rewards, aggregate)
    return AgentResult(
        reward=reward,
        rewards=rewards,
        turn_rewards=_read_turn_rewards(value.get("turn_rewards")),
        named_turn_rewards=_read_named_turn_rewards(value.get("named_turn_rewards")),
        metrics=_read_metrics(value.get("metrics")),
        stop_reason=clean(str(value.get("stop_reason") or "")),
        extra=_read_extra({k: v for k, v in value.items() if k not in RESULT_KEYS}),
    )


def _read_unrewarded(value: object) -> AgentResult:
    """Result of an agent whose reward the caller gives; a reward in it becomes a metric."""
    if value is None:
        return AgentResult(reward=None)
    if isinstance(value, list | tuple):
        value = {"rewards": value}
    if isinstance(value, str | bytes):
        raise VerifierFailure(f"the agent returned {_repr(value)}; return it in a dict", Reason.REWARD)
    if not isinstance(value, Mapping):
        return AgentResult(reward=None, metrics={AGENT_REWARD: number(value, "the reward")})
    own = {} if value.get("reward") is None else {AGENT_REWARD: number(value["reward"], "the reward")}
    return AgentResult(
        reward=None,
        rewards={} if value.get("rewards") is None else read_rewards(value["rewards"]),
        turn_rewards=_read_turn_rewards(value.get("turn_rewards")),
        named_turn_rewards=_read_named_turn_rewards(value.get("named_turn_rewards")),
        metrics=_read_metrics(value.get("metrics")) | own,
        stop_reason=clean(str(value.get("stop_reason") or "")),
        extra=_read_extra({k: v for k, v in value.items() if k not in RESULT_KEYS}),
    )


def read_submission(value: object) -> wire.Submission:
    """Read what an agent with a verifier returned; its own rewards are ignored."""
    if not isinstance(value, Mapping):
        return wire.Submission()
    return wire.Submission(
        metrics=_read_metrics(value.get("metrics")),
        stop_reason=clean(str(value.get("stop_reason") or "")),
        artifacts=_read_extra({k: v for k, v in value.items() if k not in RESULT_KEYS}),
    )


def read_rewards(value: object) -> Rewards:
    """Named rewards of a number, a dict or a list."""
    if isinstance(value, Mapping):
        return {clean(str(name)): number(item, f"reward {name!r}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(i): number(item, f"reward {i}") for i, item in enumerate(value)}
    return {"reward": number(value, "the reward")}


def combine(rewards: Rewards, aggregate: Aggregate) -> float:
    """Aggregate several rewards into one."""
    if not rewards:
        raise VerifierFailure("'rewards' is empty; return at least one reward", Reason.REWARD)
    if aggregate is None:
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise VerifierFailure(
            f"{len(rewards)} rewards ({_repr(list(rewards))}) without an aggregation; use"
            ' @afield.agent(aggregate="mean"), or "sum", "min", "max", a function, or weights by name',
            Reason.REWARD,
        )
    if isinstance(aggregate, Mapping):
        return number(_weighted(rewards, aggregate), "the weighted reward")
    with attributed(VerifierFailure):
        combined = (AGGREGATES[aggregate] if isinstance(aggregate, str) else aggregate)(dict(rewards))
    return number(combined, "the aggregated reward")


def _last(rewards: Rewards) -> float:
    return list(rewards.values())[-1]


def check_aggregate(aggregate: Aggregate) -> None:
    """Raise UsageError for an invalid aggregation, when the agent is decorated."""
    if isinstance(aggregate, str) and aggregate not in AGGREGATES:
        raise UsageError(f"unknown aggregate {aggregate!r}; choose one of: {', '.join(AGGREGATES)}")
    if isinstance(aggregate, Mapping):
        for name, weight in aggregate.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UsageError(f"aggregate weight {weight!r} of {name!r} must be a finite number")
    elif not (aggregate is None or isinstance(aggregate, str) or callable(aggregate)):
        raise UsageError(f"aggregate {aggregate!r} must be a name, a function or weights by reward name")


def number(value: object, label: str) -> float:
    """A finite float from bool, int, float, Decimal, Fraction, numpy or torch scalar."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    if isinstance(value, numbers.Real | Decimal):
        try:
            real = float(value)
        except (OverflowError, ValueError):
            real = math.nan
        if math.isfinite(real):
            return real
    raise VerifierFailure(f"{label} is {_repr(value)}; it must be a finite number", Reason.REWARD)


def _repr(value: object) -> str:
    with attributed(VerifierFailure):
        text = repr(value)
    return clean(text if len(text) <= 200 else f"{text[:200]}...")


def _weighted(rewards: Rewards, weights: Mapping[str, float]) -> float:
    if rewards.keys() != weights.keys():
        raise VerifierFailure(
            f"rewards {sorted(rewards)} do not match the aggregation weights {sorted(weights)};"
            " return the same names",
            Reason.REWARD,
        )
    return sum(weights[name] * value for name, value in rewards.items())


def _read_named_turn_rewards(value: object) -> dict[str, Rewards]:
    """Turn rewards by name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise VerifierFailure(
            f"'named_turn_rewards' is {_repr(value)}; it must be a dict of turn rewards by name",
            Reason.REWARD,
        )
    named = ((clean(str(name)), item) for name, item in value.items())
    return {name: _read_turn_rewards(item, f"named_turn_rewards of {name!r}") for name, item in named}


def _read_turn_rewards(value: object, label: str = "turn_rewards") -> Rewards:
    """Rewards by turn; a list has one per model call, in order."""
    if value is None:
        return {}
    if not isinstance(value, Mapping | list | tuple):
        raise VerifierFailure(f"{label!r} is {_repr(value)}; it must be a dict or a list", Reason.REWARD)
    rewards = read_rewards(value)
    if unknown := [name for name in rewards if not TURN_ID.fullmatch(name)]:
        raise VerifierFailure(
            f"{label!r} has the key {unknown[0]!r}; use the id of the model's response"
            " (such as chatcmpl-...-t3) or the number of the call, counted from 0",
            Reason.REWARD,
        )
    return rewards


def _read_metrics(value: object) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise VerifierFailure(f"'metrics' is {_repr(value)}; it must be a dict of numbers", Reason.REWARD)
    return {clean(str(name)): number(item, f"metric {name!r}") for name, item in value.items()}


def _read_extra(value: Mapping[object, object]) -> dict[str, Any]:
    """A copy through JSON, so that later changes by the agent have no effect."""
    extra: dict[str, Any] = {}
    for name, item in value.items():
        try:
            extra[clean(str(name))] = msgspec.json.decode(wire.encode(item))
        except WireError as error:
            raise TaskFailure(f"the agent returned {name!r}, which {error}", Reason.UPLOAD) from error
    return extra


# --- graders -------------------------------------------------------------------------------------


class Reward:
    """Base class for graders: subclasses define `__call__`, sync or async, with keyword arguments.

    `__call__` returns a number, a list of numbers or a dict of named numbers. An exception in it becomes a
    VerifierFailure, so that a grader's error does not count against the agent.
    """

    name: str = ""
    """Name in error messages (default: the class's name)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if "__call__" in cls.__dict__:
            cls.__call__ = _graded(cls.__dict__["__call__"])

    def __call__(self, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, **kwargs) -> float")


def _graded(grade: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(grade)
    def call(self: Reward, *args: Any, **kwargs: Any) -> Any:
        with attributed(VerifierFailure):
            value = grade(self, *args, **kwargs)
        return (
            _await_grade(value, self.name) if inspect.isawaitable(value) else _check_grade(value, self.name)
        )

    async def later(self: Reward, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    # Frameworks check whether a callable is a coroutine function to decide how to call it.
    return functools.wraps(grade)(later) if inspect.iscoroutinefunction(grade) else call


async def _await_grade(value: Awaitable[Any], name: str) -> Any:
    with attributed(VerifierFailure):
        value = await value
    return _check_grade(value, name)


def _check_grade(value: object, name: str) -> float | list[float] | dict[str, float]:
    if isinstance(value, list | tuple):
        return list(read_rewards(value).values())
    return read_rewards(value) if isinstance(value, Mapping) else number(value, f"reward {name!r}")
