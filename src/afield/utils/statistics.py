"""Statistics of evaluations: pass@k, clustered means, intervals and paired tests.

1. `pass_at_k` is the unbiased estimator of "at least one of k attempts succeeds" from n attempts.
2. `clustered_mean` has a standard error that is robust to attempts of one task being alike (CR2: the
   residuals of each task are divided by the square root of 1 minus its leverage), and an interval of
   Student's t with Satterthwaite's degrees of freedom. For values between 0 and 1, such as shares, it is
   Wilson's interval with the number of independent attempts that would have this standard error. That error
   counts `PRIOR_TASKS` tasks more at each end, since the tasks that were not solved, or were, may be too few
   to show how much tasks differ.
3. `wilson` is the interval of a share.
4. `paired_difference` compares two policies on the tasks that both attempted.

The module needs no third-party library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

CONFIDENCE = 0.95
PRIOR_TASKS = 0.25
"""Tasks with the value 0, and as many with the value 1, that the variance of a share counts besides those
that were seen. `bench/eval.py` measures the coverage that follows."""
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


class Estimate(NamedTuple):
    """A mean with its standard error and confidence interval."""

    mean: float
    """Estimated mean."""
    standard_error: float | None
    """Standard error, clustered by task; None with fewer than two tasks."""
    low: float | None
    """Lower end of the confidence interval; None without a standard error."""
    high: float | None
    """Upper end of the confidence interval; None without a standard error."""
    tasks: int
    """Number of tasks (clusters)."""
    attempts: int
    """Number of attempts."""


class Difference(NamedTuple):
    """Difference of two policies over the tasks that both attempted."""

    estimate: Estimate
    """Mean over tasks of the difference between the tasks' means."""
    p_value: float | None
    """Two-sided p-value of a paired t-test over tasks; None with fewer than two tasks."""
    better: int
    """Tasks in which the first policy has the higher mean."""
    worse: int
    """Tasks in which the first policy has the lower mean."""


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` attempts succeeds.

    1 - C(n-c, k) / C(n, k), computed as a product; raises ValueError for k above the number of attempts.
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"pass@{k} needs at least {k} attempts and at most as many successes; got {attempts}"
        )
    if attempts - successes < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(attempts - successes + 1, attempts + 1))


def clustered_mean(
    values: Mapping[str, Sequence[float]],
    confidence: float = CONFIDENCE,
    *,
    share: bool = False,
    prior_tasks: float = PRIOR_TASKS,
) -> Estimate:
    """Mean over all attempts; `values` are those of each task, between 0 and 1 if it is a `share`.

    `prior_tasks` is for shares of successes; use 0 for other values between 0 and 1.

    Every attempt has the same weight. With the same number of attempts in each task, the standard error is
    that of the tasks' means.
    """
    clusters = [list(attempts) for attempts in values.values() if attempts]
    total, number = sum(map(len, clusters)), len(clusters)
    if not total:
        raise ValueError("a mean needs at least one attempt")
    mean = math.fsum(value for attempts in clusters for value in attempts) / total
    if number < 2:
        return Estimate(mean, None, None, None, number, total)
    shares = [len(attempts) / total for attempts in clusters]
    sums = [math.fsum(value - mean for value in attempts) / total for attempts in clusters]
    terms = [residual**2 / (1.0 - share) for residual, share in zip(sums, shares, strict=True)]
    error = math.sqrt(math.fsum(terms))
    quantile = t_quantile(0.5 + confidence / 2, round(_degrees(shares), 6))
    low, high = mean - quantile * error, mean + quantile * error
    if share:
        low, high = wilson(mean, max(1.0, _independent_attempts(mean, error, number, prior_tasks)), quantile)
    return Estimate(mean, error, low, high, number, total)


def _independent_attempts(mean: float, error: float, tasks: int, prior: float) -> float:
    """Independent attempts whose share would have this standard error, with `prior` tasks at each end."""
    added = prior * (mean**2 + (1 - mean) ** 2) / tasks
    variance = (error**2 * (tasks - 1) + added) / (tasks - 1 + 2 * prior)
    share = (mean * tasks + prior) / (tasks + 2 * prior)
    # Values that all agree say as much as one attempt of each task.
    return share * (1 - share) / variance if variance else tasks


def _degrees(shares: Sequence[float]) -> float:
    """Satterthwaite's degrees of freedom of the CR2 variance of a mean, for clusters of these shares.

    The variance is a quadratic form of independent residual sums with variances proportional to the shares;
    equal shares give the number of clusters minus one.
    """
    # Rows g of G = A (I - H): a_g (e_g - p_g 1), with a_g = 1 / sqrt(1 - p_g), under var(e_g) = p_g.
    a = [1.0 / (1.0 - share) for share in shares]  # squared adjustments
    trace = math.fsum(a[g] * p * (1.0 - p) for g, p in enumerate(shares))
    # cov(g, h) = sqrt(a_g a_h) * (p_g [g=h] - p_g p_h), since the shares add up to 1.
    off = math.fsum(a[g] * p * p for g, p in enumerate(shares)) ** 2
    own = math.fsum((a[g] * p * p) ** 2 for g, p in enumerate(shares))
    diagonal = math.fsum((a[g] * p * (1.0 - p)) ** 2 for g, p in enumerate(shares))
    return max(1.0, trace**2 / (diagonal + off - own))


def wilson(share: float, attempts: float, quantile: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a share of independent attempts, by default of 95 %."""
    if not 0 <= share <= 1 or attempts <= 0:
        raise ValueError(f"a share of {share} in {attempts} attempts is not one between 0 and 1")
    center = share + quantile**2 / (2 * attempts)
    margin = quantile * math.sqrt(share * (1 - share) / attempts + quantile**2 / (4 * attempts**2))
    scale = 1 + quantile**2 / attempts
    low, high = (center - margin) / scale, (center + margin) / scale
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding may push an end past the share


def paired_difference(
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    confidence: float = CONFIDENCE,
) -> Difference:
    """Compare two policies by task; tasks that one of them did not attempt are left out."""
    common = [task for task in first if first[task] and second.get(task)]
    if not common:
        raise ValueError("they have no task in common")
    means = {task: (_mean(first[task]), _mean(second[task])) for task in common}
    differences = {task: [a - b] for task, (a, b) in means.items()}
    estimate = clustered_mean(differences, confidence)
    attempts = sum(len(first[task]) + len(second[task]) for task in common)
    p_value = None
    if estimate.standard_error is not None:
        if estimate.standard_error:
            t = abs(estimate.mean) / estimate.standard_error
            p_value = 2 * (1 - t_cdf(t, estimate.tasks - 1))
        else:
            p_value = 1.0 if estimate.mean == 0 else 0.0
    return Difference(
        estimate._replace(attempts=attempts),
        p_value,
        sum(a > b for a, b in means.values()),
        sum(a < b for a, b in means.values()),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- distributions -----------------------------------------------------------------------------------


def t_cdf(t: float, degrees: float) -> float:
    """Distribution function of Student's t."""
    total = degrees + t * t
    tail = 0.5 * _incomplete_beta(degrees / total, t * t / total, degrees / 2, 0.5)
    return 1 - tail if t > 0 else tail


@lru_cache(maxsize=1024)
def t_quantile(p: float, degrees: float) -> float:
    """Quantile of Student's t, by bisection."""
    if p < 0.5:
        return -t_quantile(1 - p, degrees)
    low, high = 0.0, 2.0
    while t_cdf(high, degrees) < p:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """Regularized incomplete beta function of x = 1 - `rest`, by Lentz's continued fraction."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(rest, x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1 + numerator * d, tiny)
            c = _away_from_zero(1 + numerator / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a


def _away_from_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
