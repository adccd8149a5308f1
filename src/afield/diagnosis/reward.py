"""Reward: verifiers, and properties of rollouts that rewards follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from afield.diagnosis.evidence import Finding, RolloutFacts, RunEvidence, examples, most_common, share
from afield.diagnosis.infrastructure import ended_by_infrastructure
from afield.types import FailureKind

Z = NormalDist().inv_cdf(0.975)
MIN_CORRELATION = 0.7
"""Correlation of reward and length within groups that its interval must exceed."""
MIN_ROLLOUTS = 32
"""Rollouts that a correlation needs."""
MIN_CONSTANT, MIN_TASKS = 16, 4
"""Attempts and tasks with the same reward that make it suspicious."""


def verifier_failures(run: RunEvidence) -> Finding | None:
    failed = [rollout for rollout in run.rollouts if rollout.failure_kind == FailureKind.VERIFIER]
    if not run.exceeds(len(failed), len(run.rollouts), 0.05):
        return None
    return Finding(
        problem="the verifier fails, so that finished work gets no reward",
        evidence=(
            share(len(failed), len(run.rollouts), "rollouts"),
            most_common(rollout.failure_message for rollout in failed),
        ),
        remedy="run the verifier on the work that `afield show` prints, and fix what its traceback names;"
        " verifier_timeout_s bounds it",
        rollouts=examples(failed),
        files=("logs/",),
        commands=("afield show {run} --failed",),
    )


def constant_reward(run: RunEvidence) -> Finding | None:
    """The same reward below 1 for all attempts at many tasks, in a run that does not train.

    Attempts that `infrastructure_zeros` explains do not count.
    """
    rewarded = [r for r in run.rollouts if r.reward is not None and not ended_by_infrastructure(r)]
    rewards = {rollout.reward for rollout in rewarded}
    tasks = {rollout.task_id for rollout in rewarded}
    if run.trains or len(rewards) != 1 or len(rewarded) < MIN_CONSTANT or len(tasks) < MIN_TASKS:
        return None
    (reward,) = rewards
    if reward is None or reward >= 1.0:
        return None  # all tasks may be solved
    return Finding(
        problem=f"all attempts at {len(tasks)} tasks get the reward {reward:g}, which tells nothing about the"
        " model",
        evidence=(f"{len(rewarded)} of {len(rewarded)} rewards are {reward:g}",),
        remedy="check the reward with `afield show RUN ROLLOUT`; if it is right, these tasks are too hard for"
        " the model: evaluate on easier ones",
        rollouts=examples(rewarded),
        commands=("afield show {run} --rollouts",),
    )


def truncation_as_success(run: RunEvidence) -> Finding | None:
    rewarded = [r for r in run.rollouts if r.reward is not None and r.turns]
    best = max((r.reward or 0.0 for r in rewarded), default=0.0)
    cut = [r for r in rewarded if r.fact("cut_end")]
    passed = [r for r in cut if (r.reward or 0.0) >= best > 0]
    complete = [r.reward or 0.0 for r in rewarded if not r.fact("cut_end")]
    if not run.exceeds(len(passed), len(rewarded), 0.05):
        return None
    if not run.single and len(passed) < len(cut) / 4:
        return None
    return Finding(
        problem="rollouts whose last reply was cut off get the full reward, so that the model learns not to"
        " end",
        evidence=(
            share(len(passed), len(cut), f"rollouts with a cut-off reply have reward {best:g}"),
            f"{len(complete)} complete rollouts have a mean reward of"
            f" {sum(complete) / max(1, len(complete)):.3g}",
        ),
        remedy="give no reward if the reply's finish_reason is 'length', or raise max_tokens",
        rollouts=examples(passed),
        commands=("afield show {run} --sort tokens",),
    )


def reward_follows_length(run: RunEvidence) -> Finding | None:
    cells: dict[tuple[str, int], list[RolloutFacts]] = {}
    for group in run.grouped():
        for rollout in group:
            if rollout.reward is not None and rollout.turns:
                cells.setdefault((rollout.group_id, rollout.turns), []).append(rollout)
    kept = [cell for cell in cells.values() if len(cell) >= 3 and len({r.sampled_tokens for r in cell}) > 1]
    comparable = [rollout for cell in kept for rollout in cell]
    degrees = len(comparable) - len(kept) - 2
    if len(comparable) < MIN_ROLLOUTS or degrees < 8:
        return None
    # Binary rewards follow the length of the one right answer: only graded ones show a rule of length.
    if len({rollout.reward for rollout in comparable}) < 5:
        return None
    correlation = _within(kept)
    low, high = _interval(correlation, degrees)
    if low < MIN_CORRELATION:
        return None
    return Finding(
        problem="the reward follows the length of the replies: longer is better, whatever they say",
        evidence=(
            f"correlation of reward and sampled tokens {correlation:.2f} (95 % interval {low:.2f} to"
            f" {high:.2f}) within {len(kept)} groups of {len(comparable)} rollouts with equally many turns",
        ),
        remedy="compare the longest and the shortest rollout of a group; take length out of the reward, or"
        " subtract a penalty for it",
        rollouts=tuple(r.id for r in sorted(comparable, key=lambda r: -r.sampled_tokens)[:2]),
        commands=("afield show {run} --sort tokens",),
    )


def _within(cells: Sequence[Sequence[RolloutFacts]]) -> float:
    """Correlation of reward and sampled tokens after subtracting the means of each cell."""
    xx = yy = xy = 0.0
    for cell in cells:
        x = sum(r.sampled_tokens for r in cell) / len(cell)
        y = sum(r.reward or 0.0 for r in cell) / len(cell)
        for rollout in cell:
            dx, dy = rollout.sampled_tokens - x, (rollout.reward or 0.0) - y
            xx, yy, xy = xx + dx * dx, yy + dy * dy, xy + dx * dy
    return xy / math.sqrt(xx * yy) if xx and yy else 0.0


def _interval(correlation: float, degrees: int) -> tuple[float, float]:
    """Fisher's interval of a correlation."""
    bounded = max(-0.999999, min(0.999999, correlation))
    center, margin = math.atanh(bounded), Z / math.sqrt(degrees - 1)
    return math.tanh(center - margin), math.tanh(center + margin)
