"""Estimates of evaluations against scipy and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from afield.utils.statistics import clustered_mean, paired_difference, pass_at_k, t_cdf, t_quantile, wilson


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(attempts: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(attempts)))
    subsets = list(itertools.combinations(attempts, k))
    assert pass_at_k(len(attempts), sum(attempts), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_attempts() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 attempts"):
        pass_at_k(4, 2, 5)


@given(st.floats(0.5, 1e4), st.floats(-30, 30), st.floats(0.501, 0.9999))
def test_student_t_agrees_with_scipy(degrees: float, t: float, p: float) -> None:
    assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), abs=1e-10)
    assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-8)


def test_equal_clusters_have_the_interval_of_their_means() -> None:
    values = {"a": [1.0, 3.0], "b": [2.0, 6.0], "c": [5.0, 5.0]}
    means = [2.0, 4.0, 5.0]
    estimate = clustered_mean(values)
    interval = stats.t.interval(0.95, 2, loc=sum(means) / 3, scale=stats.sem(means))
    assert (estimate.low, estimate.high) == pytest.approx(interval)
    assert (estimate.tasks, estimate.attempts) == (3, 6)


def test_attempts_that_repeat_each_other_count_once() -> None:
    once = clustered_mean({str(n): [float(n % 2)] for n in range(10)}, share=True)
    often = clustered_mean({str(n): [float(n % 2)] * 50 for n in range(10)}, share=True)
    assert often[:4] == pytest.approx(once[:4])


def test_shares_stay_between_zero_and_one_and_are_never_certain() -> None:
    for value in (0.0, 1.0):
        estimate = clustered_mean({str(n): [value] * 4 for n in range(5)}, share=True)
        assert estimate.low is not None and estimate.high is not None
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
        assert estimate.high - estimate.low > 0.3


def test_wilson_agrees_with_scipy() -> None:
    for successes, attempts in ((0, 5), (3, 10), (10, 10), (250, 1000)):
        interval = stats.binomtest(successes, attempts).proportion_ci(method="wilson")
        assert wilson(successes / attempts, attempts) == pytest.approx((interval.low, interval.high))


def test_one_task_has_no_interval() -> None:
    estimate = clustered_mean({"a": [0.0, 1.0]})
    assert (estimate.mean, estimate.standard_error, estimate.low) == (0.5, None, None)


def test_a_paired_test_agrees_with_scipy_and_ignores_other_tasks() -> None:
    first = {"a": [1.0, 0.0], "b": [1.0], "c": [0.5, 0.5], "only first": [1.0]}
    second = {"a": [0.0, 0.0], "b": [1.0, 0.0], "c": [0.25], "only second": [0.0]}
    difference = paired_difference(first, second)
    expected = stats.ttest_rel([0.5, 1.0, 0.5], [0.0, 0.5, 0.25])
    assert difference.p_value == pytest.approx(expected.pvalue)
    assert (difference.estimate.tasks, difference.better, difference.worse) == (3, 3, 0)
    assert math.isclose(difference.estimate.mean, 1.25 / 3)
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference({"a": [1.0]}, {"b": [1.0]})


def test_interval_of_high_skill_covers_although_few_tasks_fail() -> None:
    """pass@4 of 50 tasks with skills of Beta(2, 0.5): most values are 1, which hides how tasks differ."""
    rng = random.Random(3)
    table = [pass_at_k(8, n, 4) for n in range(9)]
    truth = 1 - math.prod((0.5 + n) / (2.5 + n) for n in range(4))
    hits = 0
    for _ in range(400):
        skills = [rng.betavariate(2.0, 0.5) for _ in range(50)]
        values = {str(n): [table[sum(rng.random() < s for _ in range(8))]] for n, s in enumerate(skills)}
        estimate = clustered_mean(values, share=True)
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= truth <= estimate.high
    assert 0.93 <= hits / 400 <= 0.98
