"""What an agent returned, read as rewards.

A number; `{"reward": x}`; or `{"rewards": number | {name: number} | [number, ...]}`, with optional
"metrics" (numbers) and "stop_reason". Every other key is kept as extra. Several rewards need an
explicit aggregation. Anything that is not a finite number where one belongs is a VerifierFailure
that shows it; an extra value JSON cannot hold is a TaskFailure that names its key.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import msgspec
from msgspec import Struct, field

from afield import wire
from afield.errors import TaskFailure, UsageError, VerifierFailure, WireError
from afield.sdk.classify import attributed, clean
from afield.types import Reason

Rewards = dict[str, float]
Aggregate = str | Mapping[str, float] | Callable[[Rewards], float] | None

KNOWN = ("reward", "rewards", "turn_rewards", "named_turn_rewards", "metrics", "stop_reason")
TURN = re.compile(r"(?:.*[-_])?t\d+|\d+")

NAMED: dict[str, Callable[[Rewards], float]] = {
    "mean": lambda rewards: sum(rewards.values()) / len(rewards),
    "sum": lambda rewards: sum(rewards.values()),
    "min": lambda rewards: min(rewards.values()),
    "max": lambda rewards: max(rewards.values()),
}


class Result(Struct, frozen=True, kw_only=True):
    reward: float
    rewards: Rewards = field(default_factory=dict)
    turn_rewards: Rewards = field(default_factory=dict)
    named_turn_rewards: dict[str, Rewards] = field(default_factory=dict)
    """Rewards with a name and a turn: by name, then by turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def read_result(value: object, aggregate: Aggregate = None) -> Result:
    if value is None:
        raise VerifierFailure("the agent returned nothing; it has to return its reward", Reason.REWARD)
    if not isinstance(value, Mapping):
        return Result(reward=number(value, "the reward"))
    if "reward" not in value and "rewards" not in value:
        raise VerifierFailure(
            f"the agent returned keys {shown(list(value))}, neither 'reward' nor 'rewards' among them",
            Reason.REWARD,
        )
    rewards = read_rewards(value["rewards"]) if "rewards" in value else {}
    # A reward beside several rewards is the agent's own aggregation of them.
    reward = number(value["reward"], "the reward") if "reward" in value else combine(rewards, aggregate)
    return Result(
        reward=reward,
        rewards=rewards,
        turn_rewards=_read_turn_rewards(value.get("turn_rewards")),
        named_turn_rewards=_read_named_turn_rewards(value.get("named_turn_rewards")),
        metrics=_read_metrics(value.get("metrics")),
        stop_reason=clean(str(value.get("stop_reason") or "")),
        extra=_read_extra({k: v for k, v in value.items() if k not in KNOWN}),
    )


def read_submission(value: object) -> wire.Submission:
    """What a judged agent returned. A reward in it is not its to give and is left out."""
    if not isinstance(value, Mapping):
        return wire.Submission()
    return wire.Submission(
        metrics=_read_metrics(value.get("metrics")),
        stop_reason=clean(str(value.get("stop_reason") or "")),
        artifacts=_read_extra({k: v for k, v in value.items() if k not in KNOWN}),
    )


def read_rewards(value: object) -> Rewards:
    if isinstance(value, Mapping):
        return {clean(str(name)): number(item, f"reward {name!r}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(i): number(item, f"reward {i}") for i, item in enumerate(value)}
    return {"reward": number(value, "the reward")}


def combine(rewards: Rewards, aggregate: Aggregate) -> float:
    """One number of several, the way the agent's author chose."""
    if not rewards:
        raise VerifierFailure("'rewards' is empty: there is no reward", Reason.REWARD)
    if aggregate is None:
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise VerifierFailure(
            f"{len(rewards)} rewards ({shown(list(rewards))}) and no aggregation: say"
            ' @afield.agent(aggregate="mean") or "sum", "min", "max", a function or weights by name',
            Reason.REWARD,
        )
    if isinstance(aggregate, Mapping):
        return number(_weighted(rewards, aggregate), "the weighted reward")
    with attributed(VerifierFailure):
        combined = (NAMED[aggregate] if isinstance(aggregate, str) else aggregate)(dict(rewards))
    return number(combined, "the aggregated reward")


def check_aggregate(aggregate: Aggregate) -> None:
    """Refuses a wrong aggregation where it is written, before anything runs."""
    if isinstance(aggregate, str) and aggregate not in NAMED:
        raise UsageError(f"unknown aggregate {aggregate!r}; choose one of: {', '.join(NAMED)}")
    if isinstance(aggregate, Mapping):
        for name, weight in aggregate.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UsageError(f"aggregate weight {weight!r} of {name!r} must be a finite number")
    elif not (aggregate is None or isinstance(aggregate, str) or callable(aggregate)):
        raise UsageError(f"aggregate {aggregate!r} must be a name, a function or weights by reward name")


def number(value: object, what: str) -> float:
    """A finite float of a number: bool, int, float, numpy and torch scalars, Decimal, Fraction."""
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        value = item()
    if isinstance(value, numbers.Real | Decimal):
        try:
            real = float(value)
        except (OverflowError, ValueError):
            real = math.nan
        if math.isfinite(real):
            return real
    raise VerifierFailure(f"{what} is {shown(value)}, not a finite number", Reason.REWARD)


def shown(value: object) -> str:
    with attributed(VerifierFailure):
        text = repr(value)
    return clean(text if len(text) <= 200 else f"{text[:200]}...")


def _weighted(rewards: Rewards, weights: Mapping[str, float]) -> float:
    if rewards.keys() != weights.keys():
        raise VerifierFailure(
            f"rewards {sorted(rewards)} do not match the weighted names {sorted(weights)}", Reason.REWARD
        )
    return sum(weights[name] * value for name, value in rewards.items())


def _read_named_turn_rewards(value: object) -> dict[str, Rewards]:
    """By name, and then by turn."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise VerifierFailure(
            f"'named_turn_rewards' is {shown(value)}, not an object: give each name its rewards by turn",
            Reason.REWARD,
        )
    named = ((clean(str(name)), item) for name, item in value.items())
    return {name: _read_turn_rewards(item, f"named_turn_rewards of {name!r}") for name, item in named}


def _read_turn_rewards(value: object, what: str = "turn_rewards") -> Rewards:
    """By turn, as `Outcome.turn_rewards` has them; a list is one for each call, in their order."""
    if value is None:
        return {}
    if not isinstance(value, Mapping | list | tuple):
        raise VerifierFailure(f"{what!r} is {shown(value)}, neither an object nor a list", Reason.REWARD)
    read = read_rewards(value)
    if stray := [name for name in read if not TURN.fullmatch(name)]:
        raise VerifierFailure(
            f"{what!r} names {stray[0]!r}, which is no turn: give the id of the model's response to it"
            " (such as chatcmpl-...-t3), or the number of the call, counted from 0",
            Reason.REWARD,
        )
    return read


def _read_metrics(value: object) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise VerifierFailure(f"'metrics' is {shown(value)}, not an object of numbers", Reason.REWARD)
    return {clean(str(name)): number(item, f"metric {name!r}") for name, item in value.items()}


def _read_extra(value: Mapping[object, object]) -> dict[str, Any]:
    """Copied through JSON, so that what the agent does to its objects later changes nothing."""
    extra: dict[str, Any] = {}
    for name, item in value.items():
        try:
            extra[clean(str(name))] = msgspec.json.decode(wire.encode(item))
        except WireError as error:
            raise TaskFailure(f"the agent returned {name!r}, which {error}", Reason.UPLOAD) from error
    return extra
