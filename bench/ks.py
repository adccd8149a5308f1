"""Two-sample Kolmogorov-Smirnov: how likely two samples of one distribution differ at least this much.

The probability is exact for distributions without ties and otherwise errs towards a larger p. It takes
len(a) x len(b) steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def statistic(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest distance between the two empirical distribution functions."""
    first, second = sorted(a), sorted(b)
    return max(
        abs(bisect_right(first, x) / len(first) - bisect_right(second, x) / len(second))
        for x in {*first, *second}
    )


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """P(D >= the distance seen) if all orders in which the two samples may interleave are equally likely.

    A walk through the orders: `inside[j]` is the share of those with i of `a` and j of `b` seen that have
    never been as far apart.
    """
    if not a or not b:
        raise ValueError(f"two samples are needed, not {len(a)} and {len(b)} values")
    m, n = len(a), len(b)
    far = statistic(a, b) * m * n - 0.5  # in units of 1 / (m * n), in which all distances are whole numbers
    inside = [1.0 if j * m < far else 0.0 for j in range(n + 1)]
    for i in range(1, m + 1):
        inside[0] = 1.0 if i * n < far else 0.0
        for j in range(1, n + 1):
            near = abs(i * n - j * m) < far
            inside[j] = (inside[j] * i + inside[j - 1] * j) / (i + j) if near else 0.0
    return max(0.0, 1.0 - inside[n])
