"""What must be true of a simulated run, whatever its numbers: read off the steps the trainer was given."""

from __future__ import annotations

from collections import Counter

from bench.collect.simulation.agent_schedule import life_of
from bench.collect.simulation.run import Result, schedule_of

FRESH = 1_000_003  # a seed whose lives nobody has lived


def wishes(result: Result) -> list[str]:
    """The groups of the data set, in their order."""
    schedule = schedule_of(result.setting)
    return [schedule.group_spec(n).id for n in range(result.setting.groups)]


def problems(result: Result) -> list[str]:
    """Nothing lost, nothing twice, no step of another size, nothing too stale."""
    setting, differences = result.setting, list[str]()
    order = wishes(result)
    groups = Counter(group for step in result.steps for group in step.groups)
    if groups != Counter(order):
        odd = {g: groups[g] for g in {*groups, *order} if groups[g] != 1}
        differences.append(f"groups that were not trained exactly once: {odd}")
    rollouts = Counter(rollout for step in result.steps for rollout in step.rollouts)
    if twice := [rollout for rollout, times in rollouts.items() if times > 1]:
        differences.append(f"rollouts trained twice: {twice}")
    if len(rollouts) + result.cut != setting.groups * setting.rollouts:
        differences.append(
            f"{len(rollouts)} rollouts trained and {result.cut} cut of {setting.groups} groups"
        )
    sizes = [len(step.groups) for step in result.steps]
    full, rest = divmod(setting.groups, setting.batch)
    if sizes != [setting.batch] * full + [rest] * bool(rest):
        differences.append(f"steps of {sizes} groups")
    if result.stalest > setting.staleness:
        differences.append(
            f"tokens {result.stalest} versions old were trained; the bound is {setting.staleness}"
        )
    return differences


def latest(result: Result) -> int:
    """How many steps after its turn the most unlucky group was trained."""
    turn = {group: n // result.setting.batch for n, group in enumerate(wishes(result))}
    return max(n - turn[group] for n, step in enumerate(result.steps) for group in step.groups)


def fairness(result: Result) -> dict[str, float]:
    """Whether lengths decide what is trained, or when.

    The lengths that were trained against as many drawn anew, and those of the first half of the steps
    against those of the second; p-values of two-sample Kolmogorov-Smirnov tests.
    """
    setting = result.setting
    trained = [length for step in result.steps for length in step.lengths]
    fresh = [
        life_of(setting.habits, setting.seed + FRESH, f"{group}-r{k}", 1).tokens
        for group in wishes(result)
        for k in range(setting.rollouts)
    ]
    middle = len(trained) // 2
    return {
        "trained_mean": round(sum(trained) / len(trained), 1),
        "drawn_mean": round(sum(fresh) / len(fresh), 1),
        "p_trained_as_drawn": round(_ks_p_value(trained, fresh), 4),
        "p_early_as_late": round(_ks_p_value(trained[:middle], trained[middle:]), 4),
    }


def _ks_p_value(first: list[int], second: list[int]) -> float:
    from scipy import stats  # takes half a second, which every worker of the tests would spend

    return float(stats.ks_2samp(first, second).pvalue)
