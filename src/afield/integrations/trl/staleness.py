"""Staleness limits of the TRL worker: how many groups may run.

TRL refuses a row that it takes more than `staleness` versions after its oldest token was sampled. Between
two versions it takes `rows` rows, and at the first it takes one `step` more, since it fetches a step ahead.
The version at which a row is taken is therefore known in advance:

1. A group starts only if its rows are taken in time.
2. A group that ends early does not pass an older one that would then become too stale.
3. A trainer without rows left always gets another group.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class StalenessLimits(Struct, frozen=True, kw_only=True):
    """Step size and staleness of TRL's trainer."""

    step: int
    """Rows per optimizer step."""
    syncs: int = 1
    """Steps from one version to the next."""
    staleness: int
    """Largest age of a row when it is taken, in versions."""

    def __post_init__(self) -> None:
        for name, minimum in (("step", 1), ("syncs", 1), ("staleness", 0)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {minimum}")

    @property
    def rows(self) -> int:
        return self.step * self.syncs

    def versions_until(self, taken: int, ahead: int) -> int:
        """Versions until the last of `ahead` rows is taken, after `taken` rows at this version."""
        return max(0, (taken + ahead - 1) // self.rows)

    def admits(self, expected: int, *, taken: int, waiting: int, running: int) -> bool:
        """Whether a group of `expected` rows may start behind waiting rows and running groups."""
        before = waiting + running * expected
        return before == 0 or self.versions_until(taken, before + expected) <= self.staleness

    def may_pass(
        self, size: int, expected: int, *, taken: int, waiting: int, version: int, older: Iterable[int]
    ) -> bool:
        """Whether `size` rows may pass older groups, started at these versions, that still run.

        Groups that are too stale already are not waited for.
        """
        ahead = waiting + size
        for born in sorted(older):
            ahead += expected
            left = born + self.staleness - version
            if 0 <= left < self.versions_until(taken, ahead):
                return False
        return True
