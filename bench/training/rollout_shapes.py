"""Rollouts of random tokens: a shared prompt, sub-agents, and a row per turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

PROMPT, TURN, SAMPLED = 2048, 192, 64  # a turn is what came in and, half as long, what was sampled


class Row(NamedTuple):
    """A sequence, the ranges in it that were sampled, and what its rollout earned."""

    ids: tuple[int, ...]
    owned: tuple[tuple[int, int], ...]
    advantage: float


class Maker:
    """Conversations of random tokens."""

    def __init__(self, vocabulary: int, scale: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary
        self.prompt, self.turn, self.sampled = PROMPT // scale, TURN // scale, SAMPLED // scale

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocabulary) for _ in range(count))

    def advantage(self) -> float:
        return self._random.choice((-1.0, 1.0)) * self._random.uniform(0.5, 1.5)

    def conversation(self, prompt: tuple[int, ...], turns: int, advantage: float) -> Row:
        """`turns` turns after a prompt, each what a tool returned and then what was sampled."""
        ids, owned = prompt, list[tuple[int, int]]()
        for _ in range(turns):
            ids += self.tokens(self.turn)
            owned.append((len(ids) - self.sampled, len(ids)))
        return Row(ids, tuple(owned), advantage)


def shared_prompt(vocabulary: int, scale: int) -> list[Row]:
    """8 rollouts of 12 turns that share a prompt."""
    make = Maker(vocabulary, scale, 1)
    prompt = make.tokens(make.prompt)
    return [make.conversation(prompt, 12, make.advantage()) for _ in range(8)]


def sub_agents(vocabulary: int, scale: int) -> list[Row]:
    """16 rollouts of 4 trajectories: a main one of 8 turns, and 3 sub-agents of 4 turns on errands of their
    own. All rollouts share the prompt of the one, all sub-agents that of the other.
    """
    make = Maker(vocabulary, scale, 2)
    prompt, briefing = make.tokens(make.prompt), make.tokens(make.prompt // 2)
    rows: list[Row] = []
    for _ in range(16):
        earned = make.advantage()
        rows.append(make.conversation(prompt, 8, earned))
        rows += [make.conversation(briefing + make.tokens(make.sampled), 4, earned) for _ in range(3)]
    return rows


def per_turn(rows: Sequence[Row]) -> list[Row]:
    """A row for every turn, with all that came before it: what an engine saw, call by call."""
    return [Row(row.ids[:end], ((start, end),), row.advantage) for row in rows for start, end in row.owned]
