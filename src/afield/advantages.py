"""Advantage estimators: GRPO, Dr. GRPO, RLOO, REINFORCE++ and ReMax.

Every rollout counts once in every mean and deviation, however many branches, turns or tokens it has.
Rollouts without a reward (task, verifier and infrastructure failures) have no advantage and stay out of the
baseline. With per-turn `returns` each turn has its own advantage, and a rollout counts with the mean of its
turns. A group with a single reward, or with equal rewards only, has advantages of exactly zero.

To add an estimator: write a function and add a line to `ESTIMATORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

from afield.errors import UsageError
from afield.settings.trainer import AdvantageEstimator
from afield.types import Group, RolloutResult

Returns = Mapping[str, Mapping[str, float]]
"""Returns by rollout id and turn id."""
TurnAdvantages = float | Mapping[str, float]
"""Advantages of one rollout: one for all of its turns, or one by turn id."""
Advantages = dict[str, float | dict[str, float]]
"""Advantages by rollout id."""
_WHOLE = ""  # turn id of a rollout's only score


def check_given(group: Group) -> None:
    """Raise UsageError if a rollout of the group succeeded and waits for its reward."""
    if pending := [f.rollout.id for f in group.finished if f.outcome.reward_pending]:
        raise UsageError(
            f"group {group.id}: the rewards of {len(pending)} of {len(group.finished)} rollouts are still to"
            f" be given, such as that of {pending[0]}; give them with RolloutClient.reward"
        )


def rewards_of(group: Group, floor: float = 0.0) -> dict[str, float]:
    """Rewards to train with, by rollout id; raises UsageError while one of them is still to be given."""
    check_given(group)
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
    """Advantage of each rollout with a reward, or of each of its turns.

    `floor` is the reward of a policy failure without one. `returns` are per-turn returns of the rollouts and,
    for `remax`, of the baselines; see `batches.rewards.turn_returns`. `eps` is added to standard deviations,
    which are sample deviations (n - 1).
    """
    if estimator not in ESTIMATORS:
        choices = ", ".join(get_args(AdvantageEstimator))
        raise UsageError(f"unknown advantage {estimator!r}; choose one of: {choices}")
    scores = _scores(groups, floor, returns, greedy=estimator == "remax")
    advantages = ESTIMATORS[estimator](scores, eps)
    if returns is None:
        return {rollout_id: score.turns[_WHOLE] for rollout_id, score in advantages.items()}
    return {rollout_id: score.turns for rollout_id, score in advantages.items()}


# --- scores --------------------------------------------------------------------------------------


class Score(NamedTuple):
    """Reward or returns of one rollout."""

    level: float
    """Reward of the rollout, or the mean of its turns; used in baselines."""
    turns: dict[str, float]
    """Score by turn id; a single entry without per-turn returns."""

    @property
    def values(self) -> list[float]:
        return list(self.turns.values()) or [self.level]

    @property
    def mean_square(self) -> float:
        """Mean square over the turns, so that every rollout counts the same."""
        return math.fsum(v * v for v in self.values) / len(self.values)

    def __sub__(self, baseline: float) -> Score:
        return Score(self.level - baseline, {turn: v - baseline for turn, v in self.turns.items()})

    def __truediv__(self, deviation: float) -> Score:
        return Score(self.level / deviation, {turn: v / deviation for turn, v in self.turns.items()})

    @property
    def zero(self) -> Score:
        return Score(0.0, dict.fromkeys(self.turns, 0.0))


Scores = dict[str, Score]


class GroupScores(NamedTuple):
    """Scores of a group's rollouts, and of its greedy baseline if it has one."""

    rollouts: Scores
    """Scores by rollout id."""
    greedy: float | None
    """Score of the greedy baseline; None without one."""

    @property
    def mean(self) -> float:
        return math.fsum(score.level for score in self.rollouts.values()) / len(self.rollouts)

    @property
    def comparable(self) -> bool:
        """Whether there are at least two rollouts, with different scores."""
        return len(self.rollouts) > 1 and not _all_equal(self.rollouts)


def _scores(
    groups: Iterable[Group], floor: float, returns: Returns | None, *, greedy: bool
) -> list[GroupScores]:
    scores: list[GroupScores] = []
    seen: set[str] = set()
    for group in groups:
        check_given(group)
        rollouts = _of_rollouts(group.finished, floor, returns)
        if repeated := [rollout_id for rollout_id in rollouts if rollout_id in seen]:
            raise UsageError(f"rollouts {repeated} are in the batch more than once; train on each once")
        seen |= rollouts.keys()
        baseline = [group.baseline] if greedy and group.baseline else []
        levels = [score.level for score in _of_rollouts(baseline, floor, returns).values()]
        scores.append(GroupScores(rollouts, levels[0] if levels else None))
    return scores


def _of_rollouts(finished: Iterable[RolloutResult], floor: float, returns: Returns | None) -> Scores:
    """Scores of the rollouts that have a reward."""
    scores: Scores = {}
    for result in finished:
        rollout_id, reward = result.rollout.id, result.outcome.reward_or_floor(floor)
        if reward is None:
            continue
        if returns is not None and rollout_id not in returns:
            raise UsageError(
                f"rollout {rollout_id} has no returns;"
                " compute the returns from the same groups as the advantages"
            )
        turns = {_WHOLE: reward} if returns is None else dict(returns[rollout_id])
        level = math.fsum(turns.values()) / len(turns) if turns else reward
        scores[rollout_id] = Score(level, turns)
    return scores


# --- estimators ----------------------------------------------------------------------------------


def grpo(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the group's mean, divided by the group's deviation."""
    batch: Scores = {}
    for group in groups:
        batch |= _normalised(_centred(group), eps)
    return batch


def dr_grpo(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the group's mean, not divided."""
    del eps
    batch: Scores = {}
    for group in groups:
        batch |= _centred(group)
    return batch


def rloo(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the mean of the group's other rollouts."""
    del eps
    batch: Scores = {}
    for group in groups:
        if not group.comparable:
            batch |= {rollout_id: score.zero for rollout_id, score in group.rollouts.items()}
            continue
        total, others = math.fsum(s.level for s in group.rollouts.values()), len(group.rollouts) - 1
        batch |= {i: score - (total - score.level) / others for i, score in group.rollouts.items()}
    return batch


def reinforce_plus_plus(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the batch's mean, divided by the batch's deviation."""
    batch = {rollout_id: score for group in groups for rollout_id, score in group.rollouts.items()}
    if not batch:
        return {}
    mean = math.fsum(score.level for score in batch.values()) / len(batch)
    return _normalised({rollout_id: score - mean for rollout_id, score in batch.items()}, eps)


def reinforce_plus_plus_baseline(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the group's mean, divided by the batch's deviation."""
    return _normalised(dr_grpo(groups, eps), eps)


def remax(groups: Sequence[GroupScores], eps: float) -> Scores:
    """Score minus the score of the group's greedy baseline; zero if the baseline has no reward."""
    del eps
    batch: Scores = {}
    for group in groups:
        for rollout_id, score in group.rollouts.items():
            batch[rollout_id] = score.zero if group.greedy is None else score - group.greedy
    return batch


ESTIMATORS: dict[str, Callable[[Sequence[GroupScores], float], Scores]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


def _centred(group: GroupScores) -> Scores:
    if not group.comparable:
        return {rollout_id: score.zero for rollout_id, score in group.rollouts.items()}
    mean = group.mean
    return {rollout_id: score - mean for rollout_id, score in group.rollouts.items()}


def _normalised(centred: Scores, eps: float) -> Scores:
    if len(centred) < 2 or _all_equal(centred):
        return {rollout_id: score.zero for rollout_id, score in centred.items()}
    squares = math.fsum(score.mean_square for score in centred.values())
    deviation = math.sqrt(squares / (len(centred) - 1)) + eps
    return {rollout_id: score / deviation for rollout_id, score in centred.items()}


def _all_equal(scores: Scores) -> bool:
    values = {value for score in scores.values() for value in score.values}
    return len(values) <= 1
