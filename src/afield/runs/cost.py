"""Cost of a run: tokens and hours at their prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

FIRST_STEPS, LAST_STEPS = 2, 3
"""Steps whose mean rewards are compared."""
Query = Callable[..., list[dict[str, Any]]]
"""Rows of a SELECT on the index of the run."""
USAGE = """
WITH busy AS (
  SELECT started AS a, ended AS b FROM rollouts WHERE started IS NOT NULL AND ended IS NOT NULL
  UNION ALL SELECT t, t + seconds FROM events WHERE rollout IS NULL),
reached AS (SELECT a, b, max(b) OVER
  (ORDER BY a ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS r FROM busy)
SELECT count(*) AS rollouts, coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
  coalesce(sum(sampled_tokens), 0) AS sampled_tokens, coalesce(sum(reward >= ?), 0) AS successes,
  (SELECT coalesce(sum(max(0, b - max(a, coalesce(r, a)))), 0) FROM reached) / 3600.0 AS hours
FROM rollouts
"""
"""Usage of a run. Hours are those in which a rollout ran or a step was trained."""


class Prices(Struct, frozen=True, kw_only=True):
    """Prices in the settings of a run, in any currency; 0 is none."""

    prompt_price: float = 0.0
    """Price of a million prompt tokens."""
    sampled_price: float = 0.0
    """Price of a million sampled tokens."""
    engine_price: float = 0.0
    """Price of an hour of all engines together."""


class Cost(Struct, frozen=True, kw_only=True):
    """Cost of a run, in the currency of its prices."""

    total: float
    """Cost of all rollouts and hours of the run."""
    per_rollout: float
    """Cost of a rollout."""
    per_success: float | None
    """Cost of a rollout that passes, of an evaluation; None for other runs, and if none passes."""
    per_reward: float | None
    """Cost of a point of mean reward gained from the first steps to the last ones; None for evaluations, and
    if nothing was gained."""
    prompt_tokens: int
    """Prompt tokens of the attempts that count, whole in every call."""
    sampled_tokens: int
    """Sampled tokens of the attempts that count."""
    hours: float
    """Hours in which a rollout ran or a step was trained."""


class _Passing(Struct):
    pass_reward: float = 1.0


def cost_of(directory: Path, kind: str, query: Query, pass_reward: float | None = None) -> Cost | None:
    """Cost of a run; None if its settings have no prices, or nothing that they price was recorded.

    The reward that passes is that of the last summary if it is not given.
    """
    prices = _read(directory / "run.json", Prices)
    if prices == Prices():
        return None
    bar = _read(directory / "summary.json", _Passing).pass_reward if pass_reward is None else pass_reward
    [usage] = query(USAGE, bar)
    tokens = usage["prompt_tokens"] * prices.prompt_price + usage["sampled_tokens"] * prices.sampled_price
    total = tokens / 1e6 + usage["hours"] * prices.engine_price
    if not total:
        return None
    gain = None
    if kind != "eval":
        lines = query("SELECT line FROM steps WHERE split='train' ORDER BY step")
        first, last = first_and_last_reward([msgspec.json.decode(row["line"]) for row in lines])
        gain = last - first if first is not None and last is not None else None
    successes = usage["successes"] if kind == "eval" else 0
    return Cost(
        total=total,
        per_rollout=total / usage["rollouts"],
        per_success=total / successes if successes else None,
        per_reward=total / gain if gain is not None and gain > 0 else None,
        prompt_tokens=usage["prompt_tokens"],
        sampled_tokens=usage["sampled_tokens"],
        hours=usage["hours"],
    )


def describe_cost(cost: Cost, kind: str) -> str:
    """Cost in one line."""
    text = f"{cost.total:.4g}, {cost.per_rollout:.4g} per rollout"
    if kind == "eval":
        return f"{text}, " + (
            "no success" if cost.per_success is None else f"{cost.per_success:.4g} per success"
        )
    if cost.per_reward is None:
        return f"{text}, no reward gained"
    return f"{text}, {cost.per_reward:.4g} per point of mean reward gained"


def first_and_last_reward(lines: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Mean reward of the first two steps, and of the last three without them; of few steps, fewer."""
    begin = min(FIRST_STEPS, len(lines) // 2)
    return mean_reward_of(lines[: begin or 1]), mean_reward_of(lines[begin:][-LAST_STEPS:])


def mean_reward_of(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean reward over the rollouts of these steps; None without rewards."""
    counted = [
        (line["reward"], line["rollouts"] - line["failed"]) for line in lines if line["reward"] is not None
    ]
    total = sum(n for _, n in counted)
    return round(math.fsum(reward * n for reward, n in counted) / total, 4) if total else None


def _read(path: Path, kind: type[Any]) -> Any:
    """Fields of a JSON file; their defaults without the file, or if it is not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return kind()
