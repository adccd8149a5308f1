"""How far collection may run ahead of the trainer: arithmetic, without any I/O.

A step takes so many rows, and TRL refuses a row when it takes it more than `staleness` versions after the
oldest token of it was sampled. So no more groups are begun than the steps until then can take, and a group
that ended early does not go before an older one that would then come too late.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class Pace(Struct, frozen=True, kw_only=True):
    """`rows` are taken from one version of the weights to the next; `expected` is what a group has, if
    nothing of it fails or branches."""

    rows: int
    expected: int
    staleness: int

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("expected", 1), ("staleness", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")

    def admits(self, waiting: int, running: int) -> bool:
        """Whether another group may begin while so many rows wait and so many groups run."""
        return waiting + running * self.expected < max(self.staleness, 1) * self.rows

    def may_pass(self, size: int, *, waiting: int, version: int, older: Iterable[int]) -> bool:
        """Whether `size` rows may go before older groups, begun at these versions, that still run.

        A group that is too late already is waited for by nobody.
        """
        ahead = waiting + size
        for born in sorted(older):
            ahead += self.expected
            last = born + self.staleness
            if version <= last < version + (ahead - 1) // self.rows:
                return False
        return True
