"""Groups to advantages, at rollout level.

The number of branches or turns of a rollout gives it no extra weight: every rollout has one
advantage, whatever it consists of. Rollouts that carry no reward (task, verifier and infrastructure
failures) have none and stay out of the baseline.
"""

from __future__ import annotations

import math

from afield.types import Group


def rewards_of(group: Group, floor: float = 0.0) -> dict[str, float]:
    """Rollout id to the reward that trains."""
    pairs = ((f.rollout.id, f.outcome.reward_or_floor(floor)) for f in group.finished)
    return {rollout_id: reward for rollout_id, reward in pairs if reward is not None}


def grpo(group: Group, *, floor: float = 0.0, scale: bool = True, eps: float = 1e-4) -> dict[str, float]:
    """Reward minus the group's mean; divided by its standard deviation when `scale` is set.

    The deviation is the sample's (n - 1). A group in which all rewards are equal teaches nothing:
    its advantages are exactly zero.
    """
    rewards = rewards_of(group, floor)
    if len(rewards) < 2:
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(rewards.values()) / len(rewards)
    centred = {rollout_id: reward - mean for rollout_id, reward in rewards.items()}
    if max(rewards.values()) == min(rewards.values()):
        return dict.fromkeys(rewards, 0.0)
    if not scale:
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred.values()) / (len(centred) - 1))
    return {rollout_id: c / (deviation + eps) for rollout_id, c in centred.items()}


def remax(group: Group, *, floor: float = 0.0) -> dict[str, float]:
    """Reward minus that of the group's greedy baseline. Without a baseline that carries a reward there is
    nothing to compare with, and the group teaches nothing.
    """
    rewards = rewards_of(group, floor)
    measure = group.baseline.outcome.reward_or_floor(floor) if group.baseline else None
    if measure is None:
        return dict.fromkeys(rewards, 0.0)
    return {rollout_id: reward - measure for rollout_id, reward in rewards.items()}
