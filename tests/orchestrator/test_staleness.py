"""Which group begins when, and which groups make a step: the laws of asynchrony."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from afield.batches.verification import check_against_turns
from afield.orchestrator.groups import Mode, StalenessWindow
from afield.orchestrator.state import PendingGroup
from afield.orchestrator.training_loop import renumbered
from afield.trajectories import linear
from support.training_groups import finished, forest, group


class Run:
    """A collector and a trainer as the window sees them; groups become ready in any order."""

    def __init__(self, window: StalenessWindow, rng: random.Random) -> None:
        self.window = window
        self.rng = rng
        self.done = 0
        self.entries: dict[str, PendingGroup] = {}
        self.begun = 0
        self.steps: list[list[PendingGroup]] = []

    def begin(self) -> None:
        while self.window.admits(self.begun, self.done) and self.rng.random() < 0.8:
            entry = PendingGroup(f"g{self.begun}", self.begun, self.done, False, None)
            self.entries[entry.id] = entry
            self.begun += 1

    def finish_one(self) -> bool:
        open_ones = [e for e in self.entries.values() if not e.ready]
        if not open_ones:
            return False
        # Late ones are late for long: whoever comes first is often not the first.
        chosen = self.rng.choice(open_ones[-3:] if self.rng.random() < 0.7 else open_ones)
        self.entries[chosen.id] = PendingGroup(
            chosen.id, chosen.position, chosen.begun_after_step, True, None
        )
        return True

    def train(self) -> bool:
        step = self.done + 1
        chosen = self.window.choose(step, list(self.entries.values()))
        if chosen is None:
            return False
        for entry in chosen:
            del self.entries[entry.id]
        self.steps.append(chosen)
        self.done = step
        return True

    def to_the_end(self) -> None:
        while self.done < self.window.steps:
            self.begin()
            if not (self.rng.random() < 0.5 and self.train()) and not self.finish_one():
                moved = self.train() or self.begun < self.window.groups
                assert moved, f"stuck at step {self.done + 1}: {self.entries}"


@given(
    st.sampled_from(["sync", "one-step-off", "async"]),
    st.integers(1, 60),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 10_000),
)
def test_every_group_is_taken_once_and_in_time(
    mode: Mode, groups: int, batch: int, bound: int, seed: int
) -> None:
    bound = {"sync": 0, "one-step-off": 1}.get(mode, bound)
    run = Run(StalenessWindow(mode=mode, groups=groups, batch=batch, staleness=bound), random.Random(seed))
    run.to_the_end()
    taken = Counter(entry.id for step in run.steps for entry in step)
    assert taken == Counter(f"g{n}" for n in range(groups))
    for step, entries in enumerate(run.steps, 1):
        assert len(entries) == min(batch, groups - (step - 1) * batch)
        assert max(step - 1 - entry.begun_after_step for entry in entries) <= bound


def test_in_step_a_step_is_the_next_piece_of_the_data_set() -> None:
    for mode, bound in (("sync", 0), ("one-step-off", 1)):
        run = Run(StalenessWindow(mode=mode, groups=10, batch=4, staleness=bound), random.Random(3))
        run.to_the_end()
        taken = [[entry.position for entry in step] for step in run.steps]
        assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def entry(position: int, born: int, ready: bool = True) -> PendingGroup:
    return PendingGroup(f"g{position}", position, born, ready, None)


def test_a_step_waits_for_no_straggler_that_can_wait() -> None:
    window = StalenessWindow(mode="async", groups=100, batch=2, staleness=2)
    late = [entry(0, 0, ready=False), entry(1, 0), entry(2, 0), entry(3, 0)]
    assert [e.position for e in window.choose(1, late) or []] == [1, 2]


def test_a_step_waits_for_a_straggler_that_cannot() -> None:
    window = StalenessWindow(mode="async", groups=100, batch=2, staleness=1)
    late = [entry(0, 0, ready=False), entry(5, 1), entry(6, 1), entry(7, 1)]
    assert window.choose(2, late) is None
    loose = StalenessWindow(mode="async", groups=100, batch=2, staleness=1, strict=False)
    assert [e.position for e in loose.choose(2, late) or []] == [5, 6]


def test_more_is_never_begun_than_can_be_trained_in_time() -> None:
    window = StalenessWindow(mode="async", groups=100, batch=4, staleness=2)
    assert window.admits(11, 0) and not window.admits(12, 0)
    assert window.admits(12, 1) and not window.admits(100, 90)


@pytest.mark.parametrize(("mode", "bound"), [("sync", 1), ("one-step-off", 0), ("async", 0)])
def test_a_bound_that_the_mode_cannot_have_is_refused(mode: Mode, bound: int) -> None:
    with pytest.raises(ValueError, match="staleness"):
        StalenessWindow(mode=mode, groups=8, batch=4, staleness=bound)


def test_rollouts_whose_versions_get_other_numbers_still_agree_with_their_turns() -> None:
    """A run that goes on below a version that its gateway has served counts on above it."""
    tree = forest(0)
    result = structs.replace(
        finished("r0", 1.0, linear(tree).trajectories), turns=tuple(tree[f"t{n}"] for n in range(2))
    )
    check_against_turns([group(result)])
    moved = renumbered(group(result), [(1, 2)])
    check_against_turns([moved])
    (result,) = moved.finished
    assert {span.low for turn in result.turns for span in turn.versions} == {2}
