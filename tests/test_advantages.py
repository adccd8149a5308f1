"""Advantage estimators against formulas written out, over random groups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from afield.advantages import ESTIMATORS, AdvantageEstimator, compute_advantages
from afield.batches.rewards import turn_returns
from afield.errors import UsageError
from afield.types import FailureKind, Group, Outcome, Rollout, RolloutResult, Task
from support.random_groups import branching
from support.random_groups import group as group_of
from support.strategies import group, groups

HOWS = get_args(AdvantageEstimator)
rewards = st.lists(st.floats(-50, 50).map(lambda x: round(x, 2)), min_size=2, max_size=8)
batches = st.lists(rewards, min_size=1, max_size=4)


def batch_of(values: list[list[float]], greedy: float | None = None) -> list[Group]:
    made = []
    for g, members in enumerate(values):
        finished = tuple(rollout(f"g{g}-r{k}", f"g{g}", value) for k, value in enumerate(members))
        baseline = rollout(f"g{g}-greedy", f"g{g}", greedy) if greedy is not None else None
        made.append(structs.replace(group(), id=f"g{g}", finished=finished, baseline=baseline))
    return made


def rollout(id: str, group_id: str, reward: float) -> RolloutResult:
    wish = Rollout(id=id, exp_id="exp", group_id=group_id, task=Task("t", {}))
    return RolloutResult(rollout=wish, outcome=Outcome(rollout_id=id, attempt=1, reward=reward))


def flat(values: list[list[float]]) -> dict[str, float]:
    return {f"g{g}-r{k}": value for g, members in enumerate(values) for k, value in enumerate(members)}


def expected(how: str, values: list[list[float]], greedy: float) -> dict[str, float]:
    """By the textbook, with no epsilon; zero where the formula divides by zero."""
    if how == "remax":
        return flat([[v - greedy for v in members] for members in values])
    if how == "rloo":
        return flat([[v - (sum(members) - v) / (len(members) - 1) for v in members] for members in values])
    if how == "reinforce_plus_plus":
        everything = [v for members in values for v in members]
        mean, deviation = statistics.fmean(everything), statistics.stdev(everything)
        return flat([[over(v - mean, deviation) for v in members] for members in values])
    centred = [[v - statistics.fmean(members) for v in members] for members in values]
    if how == "dr_grpo":
        return flat(centred)
    if how == "grpo":
        return flat([[over(c, statistics.stdev(members)) for c in members] for members in centred])
    everyone = [c for members in centred for c in members]
    deviation = math.sqrt(sum(c * c for c in everyone) / (len(everyone) - 1))
    return flat([[over(c, deviation) for c in members] for members in centred])


def over(value: float, by: float) -> float:
    return value / by if by > 1e-9 else 0.0


@pytest.mark.parametrize("how", HOWS)
@given(values=batches, greedy=st.floats(-5, 5))
def test_every_estimator_is_its_formula(how: Any, values: list[list[float]], greedy: float) -> None:
    got = compute_advantages(batch_of(values, greedy), how, eps=0.0)
    assert got == pytest.approx(expected(how, values, greedy), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("how", HOWS)
@given(values=batches, kinds=st.lists(st.sampled_from(list(FailureKind)[1:]), min_size=1, max_size=3))
def test_failed_rollouts_are_left_out_of_every_baseline(how: Any, values, kinds) -> None:
    made = batch_of(values, 1.0)
    lost = group(*((None, kind) for kind in kinds)).finished
    lost = tuple(
        structs.replace(f, rollout=structs.replace(f.rollout, id=f"lost{n}", group_id="g0"))
        for n, f in enumerate(lost)
    )
    with_lost = [structs.replace(made[0], finished=(*lost, *made[0].finished)), *made[1:]]
    assert compute_advantages(with_lost, how) == compute_advantages(made, how)


@pytest.mark.parametrize("how", HOWS)
def test_what_cannot_be_compared_teaches_nothing(how: Any) -> None:
    for made in (batch_of([[0.3]]), batch_of([[0.1, 0.1, 0.1]])):
        assert set(compute_advantages(made, how).values()) == {0.0}
    assert compute_advantages([], how) == {}


def test_a_batch_teaches_under_global_normalisation_where_a_single_group_is_flat() -> None:
    made = batch_of([[1.0, 1.0], [0.0, 0.0]])
    assert set(compute_advantages(made, "reinforce_plus_plus_baseline").values()) == {0.0}
    got = compute_advantages(made, "reinforce_plus_plus", eps=0.0)
    assert [got[f"g{g}-r{k}"] for g in (0, 1) for k in (0, 1)] == pytest.approx(
        [0.8660254, 0.8660254, -0.8660254, -0.8660254]
    )


def test_a_wrong_estimator_and_a_repeated_rollout_are_refused() -> None:
    made = batch_of([[1.0, 0.0]])
    with pytest.raises(UsageError, match="unknown advantage 'gae'; choose one of: grpo, "):
        compute_advantages(made, "gae")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="more than once"):
        compute_advantages([*made, *made])


# --- by turn -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None)
@given(made=groups())
def test_turns_without_rewards_of_their_own_have_their_rollouts_advantage(
    how: Any, made: list[Group]
) -> None:
    """However many branches and turns a rollout has: it counts once."""
    plain = [without_turn_rewards(g) for g in made]
    whole = compute_advantages(plain, how)
    by_turn = compute_advantages(plain, how, returns=turn_returns(plain, outcome="last"))
    assert by_turn.keys() == whole.keys()
    for rollout_id, turns in by_turn.items():
        assert isinstance(turns, dict)
        assert list(turns.values()) == pytest.approx([whole[rollout_id]] * len(turns), rel=1e-6, abs=1e-6)


def without_turn_rewards(g: Group) -> Group:
    def bare(f: RolloutResult) -> RolloutResult:
        return structs.replace(f, outcome=structs.replace(f.outcome, turn_rewards={}))

    return structs.replace(
        g, finished=tuple(map(bare, g.finished)), baseline=bare(g.baseline) if g.baseline else None
    )


CENTRED: dict[str, Callable[[float, float], float]] = {
    "dr_grpo": lambda mine, other: (mine + other) / 2,
    "rloo": lambda mine, other: other,
}


@pytest.mark.parametrize("how", CENTRED)
def test_a_turn_is_compared_with_rollouts_not_with_turns(how: Any) -> None:
    """Three turns against one: the baseline is the mean of two rollouts, not of four turns."""
    long = branching("g-1", 1.0, turn_rewards={"t1": 0.5, "t3": 1.5})
    short = structs.replace(branching("g-2", 0.0), turns=branching("g-2", 0.0).turns[:1], trajectories=())
    made = [group_of(long, short)]
    got = compute_advantages(made, how, returns=turn_returns(made, outcome="last"))
    level = (3.0 + 2.5 + 2.5) / 3
    base = CENTRED[how](level, 0.0)
    assert got["g-1"] == pytest.approx({"t1": 3.0 - base, "t2": 2.5 - base, "t3": 2.5 - base})
    assert got["g-2"] == {}


def test_turns_are_divided_by_a_deviation_in_which_each_rollout_counts_once() -> None:
    made = [group_of(branching("g-1", 1.0, turn_rewards={"t1": 3.0}), branching("g-2", 0.0))]
    got = compute_advantages(made, "grpo", returns=turn_returns(made, outcome="last"), eps=0.0)
    mean = ((4 + 1 + 1) / 3 + 0) / 2
    squares = ((4 - mean) ** 2 + 2 * (1 - mean) ** 2) / 3 + mean**2
    assert got["g-1"] == pytest.approx(
        {
            "t1": (4 - mean) / math.sqrt(squares),
            **dict.fromkeys(("t2", "t3"), (1 - mean) / math.sqrt(squares)),
        }
    )


def test_a_rollout_without_returns_is_named() -> None:
    made = [group_of(branching("g-1", 1.0), branching("g-2", 0.0))]
    with pytest.raises(UsageError, match="rollout g-1 has no returns"):
        compute_advantages(made, returns={})


def test_every_named_estimator_is_registered() -> None:
    assert set(ESTIMATORS) == set(get_args(AdvantageEstimator))
