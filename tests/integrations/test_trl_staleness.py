"""How far collection runs ahead of TRL's trainer: never too far, and never so little that it starves."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.integrations.trl.staleness import StalenessLimits


class Trainer:
    """Takes rows as TRL's does: the batch of the next step before it trains this one."""

    def __init__(self, pace: StalenessLimits) -> None:
        self.pace = pace
        self.buffer: deque[int] = deque()  # the version each row was sampled at
        self.version, self.steps, self.taken, self.mark = 1, 0, 0, pace.step
        self.stale = 0

    def advance(self) -> None:
        while self.buffer:
            self.stale = max(self.stale, self.version - self.buffer.popleft())
            self.taken += 1
            if self.taken >= (self.steps + 2) * self.pace.step:
                self.steps += 1
                if self.steps % self.pace.syncs == 0:
                    self.version, self.mark = self.version + 1, self.taken


def collected(pace: StalenessLimits, size: int, seed: int, groups: int) -> Trainer:
    """Groups that take from one to forty moments each, and a trainer that never waits longer than it must."""
    rng, trainer = random.Random(seed), Trainer(pace)
    running: dict[int, tuple[int, int]] = {}  # position to version and moments left
    ready: list[int] = []
    begun = moments = 0
    while begun < groups or running:
        moments += 1
        assert moments < 100_000, "nobody moves any more"
        since, waiting = trainer.taken - trainer.mark, len(trainer.buffer)
        if begun < groups and pace.admits(size, taken=since, waiting=waiting, running=len(running)):
            running[begun] = (trainer.version, rng.choice((1, 2, 3, 40)))
            begun += 1
        for position, (born, left) in list(running.items()):
            running[position] = (born, left - 1)
            if left == 1:
                ready.append(position)
        for position in sorted(ready):
            older = [born for p, (born, _) in running.items() if p < position and p not in ready]
            since, waiting = trainer.taken - trainer.mark, len(trainer.buffer)
            if not pace.may_pass(
                size, size, taken=since, waiting=waiting, version=trainer.version, older=older
            ):
                break
            trainer.buffer.extend([running.pop(position)[0]] * size)
            ready.remove(position)
        trainer.advance()
    return trainer


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 16), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**16))
def test_trainer_gets_all_rows_it_asks_for_and_none_above_the_staleness_bound(
    share: int, size: int, syncs: int, staleness: int, seed: int
) -> None:
    pace = StalenessLimits(step=share * size, syncs=syncs, staleness=staleness)
    trainer = collected(pace, size, seed, groups=80)
    assert trainer.stale <= staleness
    assert trainer.taken == 80 * size


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 2), st.integers(0, 2**16))
def test_steps_that_no_number_of_groups_fills_are_filled_all_the_same(
    step: int, size: int, staleness: int, seed: int
) -> None:
    assert (
        collected(StalenessLimits(step=step, staleness=staleness), size, seed, groups=40).taken == 40 * size
    )


def test_a_pace_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="step = 0 must be at least 1"):
        StalenessLimits(step=0, staleness=1)
