"""Reward weighting, per-turn rewards and discounted returns.

1. `weigh_rewards` replaces each reward by the weighted sum of the outcome's named rewards.
2. `turn_returns` computes the discounted return of every trained turn.
3. `validated_outcome` turns an outcome with invalid rewards into a verifier failure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import structs

from afield.errors import UsageError
from afield.settings.trainer import Credit
from afield.turn_tree import listed, turn_named
from afield.types import Failure, FailureKind, Group, Outcome, Reason, RolloutResult, TurnStatus

# --- named rewards -------------------------------------------------------------------------------


def weigh_rewards(groups: Iterable[Group], weights: Mapping[str, float]) -> list[Group]:
    """Replace each reward by the weighted sum of the outcome's named rewards.

    A turn's reward becomes its unnamed reward plus the weighted sum of its named ones. Failures without a
    reward are unchanged.
    """
    if not weights:
        raise UsageError("no weights: name each reward, such as {'format': 0.2, 'answer': 0.8}")
    if wrong := [name for name, weight in weights.items() if not math.isfinite(weight)]:
        raise UsageError(f"weight {weights[wrong[0]]} of reward {wrong[0]!r} is not a finite number")
    return [
        structs.replace(
            group,
            finished=tuple(_weigh(finished, weights) for finished in group.finished),
            baseline=_weigh(group.baseline, weights) if group.baseline else None,
        )
        for group in groups
    ]


def _weigh(finished: RolloutResult, weights: Mapping[str, float]) -> RolloutResult:
    outcome = finished.outcome
    reward = None if outcome.reward is None else weighted_sum(outcome, weights)
    by_turn = outcome.turn_rewards
    if outcome.named_turn_rewards and outcome.reward_or_floor(0.0) is not None:
        by_turn = turn_rewards(finished, weights)
    return structs.replace(finished, outcome=structs.replace(outcome, reward=reward, turn_rewards=by_turn))


def weighted_sum(outcome: Outcome, weights: Mapping[str, float]) -> float:
    """Weighted sum of the named rewards. Raises UsageError unless names and weights match."""
    where = f"rollout {outcome.rollout_id}"
    named = outcome.rewards.keys() | outcome.named_turn_rewards.keys()
    if missing := sorted(weights.keys() - named):
        there = ", ".join(sorted(named)) or "none"
        raise UsageError(f"{where} has no reward named {missing[0]!r}; it has: {there}")
    if unknown := sorted(named - weights.keys()):
        raise UsageError(f"{where}: reward {unknown[0]!r} has no weight; give it one, 0 to leave it out")
    return math.fsum(weights[name] * value for name, value in outcome.rewards.items())


# --- rewards of turns ----------------------------------------------------------------------------


def turn_returns(
    groups: Iterable[Group],
    *,
    outcome: Literal["last", "leave"],
    discount: float = 1.0,
    floor: float = 0.0,
) -> dict[str, dict[str, float]]:
    """Discounted return of each trained turn, by rollout id and turn id.

    Turns are ordered by commit, across branches. `outcome` "last" adds the rollout's own reward (or the
    floor) to its last trained turn; "leave" ignores it. Baselines have returns; rollouts without a reward
    have none.
    """
    if not 0 <= discount <= 1:
        raise UsageError(f"discount {discount} must be from 0 to 1")
    if outcome not in ("last", "leave"):
        raise UsageError(f"unknown outcome {outcome!r}; choose one of: last, leave")
    by_rollout: dict[str, dict[str, float]] = {}
    for group in groups:
        for finished in (*group.finished, *([group.baseline] if group.baseline else [])):
            reward = finished.outcome.reward_or_floor(floor)
            if reward is not None:
                final = reward if outcome == "last" else 0.0
                by_rollout[finished.rollout.id] = _returns(finished, final, discount)
    return by_rollout


def _returns(finished: RolloutResult, final: float, discount: float) -> dict[str, float]:
    rewards, trained = turn_rewards(finished), trained_turns(finished)
    returns: dict[str, float] = {}
    running = 0.0
    for turn_id in reversed(trained):
        running = rewards.get(turn_id, 0.0) + (final if turn_id == trained[-1] else 0.0) + discount * running
        returns[turn_id] = running
    return {turn_id: returns[turn_id] for turn_id in trained}


def trained_turns(finished: RolloutResult) -> list[str]:
    """Ids of trained turns in commit order, or in row order if turns were not recorded."""
    owned = [turn.id for row in finished.trajectories for turn in row.turns]
    if not finished.turns:
        return owned
    order = {turn.id: n for n, turn in enumerate(finished.turns)}
    if lost := [turn_id for turn_id in owned if turn_id not in order]:
        raise UsageError(
            f"rollout {finished.rollout.id}, turn {lost[0]}: a row has it, but the rollout does not"
        )
    return sorted(owned, key=order.__getitem__)


def turn_rewards(finished: RolloutResult, weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Rewards by the id of trained turns: the unnamed reward and, with `weights`, the weighted named ones.

    The reward of a turn that is not trained counts for the trained turn before it, if there is one.
    """
    rewards = by_trained_turn(finished, finished.outcome.turn_rewards)
    for name, named in finished.outcome.named_turn_rewards.items() if weights is not None else ():
        for turn_id, value in by_trained_turn(finished, named).items():
            rewards[turn_id] = rewards.get(turn_id, 0.0) + (weights or {})[name] * value
    return rewards


def by_trained_turn(finished: RolloutResult, by_name: Mapping[str, float]) -> dict[str, float]:
    """Rewards by the ids of trained turns."""
    if not by_name:
        return {}
    trained = trained_turns(finished)
    turn_ids = [turn.id for turn in finished.turns] or trained
    answered = [turn.id for turn in finished.turns if turn.status is TurnStatus.COMMITTED] or trained
    named: dict[str, float] = {}
    for name, value in by_name.items():
        turn_id = turn_named(name, turn_ids, answered)
        where = f"rollout {finished.rollout.id}, turn {name!r}"
        if turn_id is None:
            raise UsageError(
                f"{where} has a reward, but there is no such turn; there are: {listed(turn_ids)}"
            )
        if turn_id in named:
            raise UsageError(f"{where} has two rewards: it is turn {turn_id}, which already has one")
        named[turn_id] = value
    rewards: dict[str, float] = {}
    before, owned = None, set(trained)
    for turn_id in turn_ids:
        before = turn_id if turn_id in owned else before
        if turn_id in named and before is not None:
            rewards[before] = rewards.get(before, 0.0) + named[turn_id]
    return rewards


def unused_turn_rewards(groups: Iterable[Group], *, credit: Credit, weights: Mapping[str, float]) -> int:
    """Number of per-turn rewards that training ignores.

    Credit "outcome" ignores all of them; credit "turns" ignores named ones without weights.
    """
    outcomes = [finished.outcome for group in groups for finished in group.finished]
    named = sum(len(turns) for outcome in outcomes for turns in outcome.named_turn_rewards.values())
    if credit == "outcome":
        return named + sum(len(outcome.turn_rewards) for outcome in outcomes)
    return 0 if weights else named


# --- validation ----------------------------------------------------------------------------------


def validated_outcome(
    finished: RolloutResult, names: Iterable[str] = (), max_reward: float = math.inf
) -> Outcome:
    """Return the outcome, or a verifier failure if a reward has an unknown turn or name or is out of bounds.

    `names` are the rewards with a weight. An outcome that has a failure keeps it and loses its rewards.
    """
    outcome = finished.outcome
    if outcome.reward_or_floor(0.0) is None:
        return outcome
    try:
        check_rewards(finished, names, max_reward)
    except UsageError as error:
        wrong = Failure(FailureKind.VERIFIER, Reason.REWARD, str(error))
        failure = outcome.failure or wrong
        nothing = {"reward": None, "rewards": {}, "turn_rewards": {}, "named_turn_rewards": {}}
        return structs.replace(outcome, failure=failure, **nothing)
    return outcome


def check_rewards(finished: RolloutResult, names: Iterable[str] = (), max_reward: float = math.inf) -> None:
    """Raise UsageError if a reward has an unknown turn or name or is out of bounds."""
    outcome = finished.outcome
    _check_size(outcome, max_reward)
    for rewards in (outcome.turn_rewards, *outcome.named_turn_rewards.values()):
        by_trained_turn(finished, rewards)
    if outcome.reward is not None and (weights := dict.fromkeys(names, 1.0)):
        weighted_sum(outcome, weights)


def _check_size(outcome: Outcome, max_reward: float) -> None:
    of_turns = ((f"reward of turn {turn}", value) for turn, value in outcome.turn_rewards.items())
    named = ((f"reward {name!r}", value) for name, value in outcome.rewards.items())
    of_both = (
        (f"reward {name!r} of turn {turn}", value)
        for name, turns in outcome.named_turn_rewards.items()
        for turn, value in turns.items()
    )
    for name, value in (("reward", outcome.reward or 0.0), *named, *of_turns, *of_both):
        if abs(value) > max_reward:
            raise UsageError(
                f"{name} {value:g} of {outcome.session_id} is beyond max_reward = {max_reward:g};"
                " scale rewards down, or raise max_reward"
            )
