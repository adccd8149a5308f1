"""Groups to advantages, at rollout level (pure).

Every rollout counts once in every mean and deviation, however many branches, turns or tokens it has.
Rollouts that carry no reward (task, verifier and infrastructure failures) have no advantage and stay out of
the baseline. With per-turn `returns` each turn has its own advantage, and a rollout stands for the mean of
its turns: where all turns return the rollout's reward, both ways give the same numbers.
A group with nothing to compare with, or in which all are equal, teaches nothing: exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from afield.errors import UsageError
from afield.types import Group, RolloutResult

AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"
]
Returns = Mapping[str, Mapping[str, float]]  # rollout id, turn id
Advantages = dict[str, float | dict[str, float]]  # by rollout: one for all of it, or one for each turn
_WHOLE = ""  # stands for all turns


def rewards_of(group: Group, floor: float = 0.0) -> dict[str, float]:
    """Rollout id to the reward that trains."""
    pairs = ((f.rollout.id, f.outcome.reward_or_floor(floor)) for f in group.finished)
    return {rollout_id: reward for rollout_id, reward in pairs if reward is not None}


def compute_advantages(
    groups: Iterable[Group],
    estimator: AdvantageEstimator = "grpo",
    *,
    floor: float = 0.0,
    returns: Returns | None = None,
    eps: float = 1e-4,
) -> Advantages:
    """What each rollout that carries a reward, or each of its turns, has earned.

    - `grpo`: minus the group's mean, divided by its deviation; `dr_grpo`: without dividing
    - `rloo`: minus the mean of the group's other rollouts
    - `reinforce_plus_plus`: minus the batch's mean, divided by its deviation; `reinforce_plus_plus_baseline`:
      minus the group's mean, then divided by the batch's deviation
    - `remax`: minus the group's greedy baseline; without one that carries a reward, zero

    Deviations are the sample's (n - 1); `eps` is added to them. `returns` are by turn, of the rollouts and,
    for `remax`, of the baselines too; see `batches.rewards.turn_returns`.
    """
    earned = _advantages(groups, estimator, floor, returns, eps)
    if returns is None:
        return {rollout_id: stake.turns[_WHOLE] for rollout_id, stake in earned.items()}
    return {rollout_id: stake.turns for rollout_id, stake in earned.items()}


def grpo(group: Group, *, floor: float = 0.0, scale: bool = True, eps: float = 1e-4) -> dict[str, float]:
    """Of one group; divided by its deviation when `scale` is set."""
    earned = _advantages([group], "grpo" if scale else "dr_grpo", floor, None, eps)
    return {rollout_id: stake.turns[_WHOLE] for rollout_id, stake in earned.items()}


def remax(group: Group, *, floor: float = 0.0) -> dict[str, float]:
    """Of one group: reward minus that of its greedy baseline."""
    earned = _advantages([group], "remax", floor, None, 0.0)
    return {rollout_id: stake.turns[_WHOLE] for rollout_id, stake in earned.items()}


class _Stake(NamedTuple):
    """What a rollout got, turn by turn, and the one number that stands for it."""

    level: float
    turns: dict[str, float]

    @property
    def values(self) -> list[float]:
        return list(self.turns.values()) or [self.level]

    @property
    def square(self) -> float:
        """A mean, so that a rollout of many turns counts as much as any other."""
        return math.fsum(v * v for v in self.values) / len(self.values)

    def minus(self, other: float) -> _Stake:
        return _Stake(self.level - other, {turn: v - other for turn, v in self.turns.items()})

    def over(self, by: float) -> _Stake:
        return _Stake(self.level / by, {turn: v / by for turn, v in self.turns.items()})

    @property
    def nothing(self) -> _Stake:
        return _Stake(0.0, dict.fromkeys(self.turns, 0.0))


def _advantages(
    groups: Iterable[Group], estimator: AdvantageEstimator, floor: float, returns: Returns | None, eps: float
) -> dict[str, _Stake]:
    if estimator not in get_args(AdvantageEstimator):
        raise UsageError(
            f"unknown advantage {estimator!r}; choose one of: {', '.join(get_args(AdvantageEstimator))}"
        )
    batch: dict[str, _Stake] = {}
    for group in groups:
        stakes = _stakes(group.finished, floor, returns)
        if repeated := [i for i in stakes if i in batch]:
            raise UsageError(f"rollouts {repeated} are in the batch more than once; train on each once")
        greedy = (
            _stakes([group.baseline] if group.baseline else [], floor, returns)
            if estimator == "remax"
            else {}
        )
        below = _baselines(estimator, stakes, [stake.level for stake in greedy.values()])
        if below is None:
            batch |= {i: stake.nothing for i, stake in stakes.items()}
            continue
        centred = {i: stake.minus(below[i]) for i, stake in stakes.items()}
        batch |= _normalised(centred, eps) if estimator == "grpo" else centred
    if estimator == "reinforce_plus_plus" and batch:
        mean = math.fsum(stake.level for stake in batch.values()) / len(batch)
        batch = {i: stake.minus(mean) for i, stake in batch.items()}
    if estimator.startswith("reinforce"):
        batch = _normalised(batch, eps)
    return batch


def _stakes(finished: Iterable[RolloutResult], floor: float, returns: Returns | None) -> dict[str, _Stake]:
    """Of the rollouts that carry a reward."""
    stakes: dict[str, _Stake] = {}
    for one in finished:
        rollout_id, reward = one.rollout.id, one.outcome.reward_or_floor(floor)
        if reward is None:
            continue
        if returns is not None and rollout_id not in returns:
            raise UsageError(
                f"rollout {rollout_id} has no returns; make them of the groups that are compared"
            )
        turns = {_WHOLE: reward} if returns is None else dict(returns[rollout_id])
        level = math.fsum(turns.values()) / len(turns) if turns else reward
        stakes[rollout_id] = _Stake(level, turns)
    return stakes


def _baselines(
    estimator: AdvantageEstimator, stakes: dict[str, _Stake], greedy: list[float]
) -> dict[str, float] | None:
    """What each rollout is compared with; None where there is nothing to learn from comparing."""
    if estimator == "reinforce_plus_plus":
        return dict.fromkeys(stakes, 0.0)
    if estimator == "remax":
        return dict.fromkeys(stakes, greedy[0]) if greedy else None
    if len(stakes) < 2 or _all_equal(stakes):
        return None
    total = math.fsum(stake.level for stake in stakes.values())
    if estimator == "rloo":
        return {i: (total - stake.level) / (len(stakes) - 1) for i, stake in stakes.items()}
    return dict.fromkeys(stakes, total / len(stakes))


def _normalised(centred: dict[str, _Stake], eps: float) -> dict[str, _Stake]:
    if len(centred) < 2 or _all_equal(centred):
        return {i: stake.nothing for i, stake in centred.items()}
    squares = math.fsum(stake.square for stake in centred.values())
    deviation = math.sqrt(squares / (len(centred) - 1)) + eps
    return {i: stake.over(deviation) for i, stake in centred.items()}


def _all_equal(stakes: dict[str, _Stake]) -> bool:
    values = {value for stake in stakes.values() for value in stake.values}
    return len(values) <= 1
