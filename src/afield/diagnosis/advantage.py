"""Advantage: comparisons within groups."""

from __future__ import annotations

from afield.diagnosis.evidence import Finding, RunEvidence, examples, share


def all_equal_rewards(run: RunEvidence) -> Finding | None:
    if not run.trains:
        return None
    groups = [[r for r in group if r.reward is not None] for group in run.grouped()]
    groups = [group for group in groups if len(group) >= 2]
    recent = groups[len(groups) // 2 :]
    equal = [group for group in recent if len({r.reward for r in group}) == 1]
    if not run.exceeds(len(equal), len(recent), 0.5):
        return None
    rewards = [r.reward or 0.0 for group in groups for r in group]
    best = max(rewards)
    if any(r < best for r in rewards) and sum(g[0].reward == best for g in equal) > 0.8 * len(equal):
        return None  # these tasks are solved
    values = sorted({group[0].reward or 0.0 for group in equal})
    return Finding(
        problem="all rollouts of a group get the same reward, so that advantages are zero and nothing is"
        " learned",
        evidence=(
            share(len(equal), len(recent), "groups of the second half"),
            "their rewards: " + ", ".join(f"{value:g}" for value in values[:5]),
        ),
        remedy="check the reward with `afield show RUN ROLLOUT`; if it is right, take tasks that the model"
        " solves sometimes, raise rollouts, or give partial rewards",
        rollouts=examples([rollout for group in equal for rollout in group]),
        commands=("afield show {run} --rollouts",),
        pages=(f"#/r/{{run}}/g/{equal[-1][0].group_id}",),
    )
