"""Turns, tool times and failures of a simulated agent, drawn from a seed."""

from __future__ import annotations

import math
import random

from msgspec import Struct


class Habits(Struct, frozen=True, kw_only=True):
    """Uniform numbers of turns and tokens; log-normal tools between turns; some attempts die on the way."""

    turns: tuple[int, int] = (4, 12)
    tokens: tuple[int, int] = (50, 300)
    tool_median_s: float = 0.2
    tool_sigma: float = 1.3
    failing: float = 0.05


class Life(Struct, frozen=True):
    """`tools[k]` seconds pass after turn k; it dies after `dies_after` tokens, if that is not None."""

    turns: tuple[int, ...]
    tools: tuple[float, ...]
    dies_after: int | None
    reward: float

    @property
    def tokens(self) -> int:
        return sum(self.turns)


def life_of(habits: Habits, seed: int, rollout_id: str, attempt: int) -> Life:
    chance = random.Random(f"{seed}/{rollout_id}/{attempt}")
    turns = tuple(chance.randint(*habits.tokens) for _ in range(chance.randint(*habits.turns)))
    mu = math.log(habits.tool_median_s)
    tools = tuple(chance.lognormvariate(mu, habits.tool_sigma) for _ in turns[1:])
    dies = chance.randrange(sum(turns)) if chance.random() < habits.failing else None
    return Life(turns, tools, dies, float(chance.random() < 0.5))
