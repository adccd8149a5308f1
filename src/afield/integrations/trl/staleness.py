"""How far collection may run ahead of the trainer: arithmetic, without any I/O.

TRL refuses a row when it takes it more than `staleness` versions after the oldest token of it was sampled.
From one version of the weights to the next it takes `rows` rows, and at the first it takes those of one
`step` more, since it always fetches a step ahead. So it is known when a row will be taken: no more groups
are begun than that allows, and a group that ended early does not go before an older one that would then
come too late. A trainer that has nothing left to take always gets another group.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class StalenessLimits(Struct, frozen=True, kw_only=True):
    step: int
    syncs: int = 1  # steps from one version to the next
    staleness: int

    def __post_init__(self) -> None:
        for name, least in (("step", 1), ("syncs", 1), ("staleness", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")

    @property
    def rows(self) -> int:
        return self.step * self.syncs

    def versions_until(self, taken: int, ahead: int) -> int:
        """How many versions from now the last of `ahead` rows is taken, when `taken` were at this one."""
        return max(0, (taken + ahead - 1) // self.rows)

    def admits(self, expected: int, *, taken: int, waiting: int, running: int) -> bool:
        """Whether a group of `expected` rows may begin, behind rows that wait and groups that run."""
        before = waiting + running * expected
        return before == 0 or self.versions_until(taken, before + expected) <= self.staleness

    def may_pass(
        self, size: int, expected: int, *, taken: int, waiting: int, version: int, older: Iterable[int]
    ) -> bool:
        """Whether `size` rows may go before older groups, begun at these versions, that still run.

        A group that is too late already is waited for by nobody.
        """
        ahead = waiting + size
        for born in sorted(older):
            ahead += expected
            left = born + self.staleness - version
            if 0 <= left < self.versions_until(taken, ahead):
                return False
        return True
