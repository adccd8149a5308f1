"""Which group may begin, and which groups make a step: the arithmetic of asynchrony, without any I/O.

Groups are begun in the order of the data set. One that is begun when `done` steps are done samples with
version `done` or later, and step k trains at version k - 1, so its last step is `done + staleness + 1`.
No more are begun than the steps until then can take, and a step never leaves more urgent groups behind
than later steps can take: so the bound holds, every group is taken once, and none starves. Within that,
a step takes the oldest groups that are ready, and waits for nothing that can wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from afield.orchestrator.run_state import PendingGroup

Mode = Literal["sync", "one-step-off", "async"]


class StalenessWindow(Struct, frozen=True, kw_only=True):
    """`groups` in all, `batch` a step; the last step takes what is left.

    In mode `sync` a step's groups are collected with the weights of the step before; in `one-step-off`
    the next step's are collected while a step trains. In both a step takes the next groups of the data
    set, whatever else is ready. With `strict` unset a step waits for no urgent group, which may then
    turn out staler than the bound.
    """

    mode: Mode
    groups: int
    batch: int
    staleness: int = 0
    strict: bool = True

    def __post_init__(self) -> None:
        fixed = {"sync": 0, "one-step-off": 1}.get(self.mode, self.staleness)
        if self.staleness != fixed:
            raise ValueError(f"mode {self.mode} has a staleness of {fixed}, not {self.staleness}")
        if self.mode == "async" and self.staleness < 1:
            raise ValueError(f"mode async needs a staleness of at least 1, not {self.staleness}")

    @property
    def steps(self) -> int:
        return -(-self.groups // self.batch)

    def admits(self, position: int, done: int) -> bool:
        """Whether the group at this position may begin when `done` steps are done."""
        return position < min(self.groups, (done + self.staleness + 1) * self.batch)

    def choose(self, step: int, untaken: Sequence[PendingGroup]) -> list[PendingGroup] | None:
        """The groups of this step, oldest first; None when it has to wait for some."""
        size = min(self.batch, self.groups - (step - 1) * self.batch)
        ordered = sorted(untaken, key=lambda entry: (entry.begun_after_step, entry.position))
        if self.mode != "async":
            ordered = sorted(untaken, key=lambda entry: entry.position)[:size]
        chosen = [entry for entry in ordered if entry.ready][:size]
        if len(chosen) < size:
            return None
        return chosen if not self.strict or self._leaves_time(step, ordered, chosen) else None

    def _leaves_time(
        self, step: int, untaken: Sequence[PendingGroup], chosen: Sequence[PendingGroup]
    ) -> bool:
        """Whether the steps after this one can still take all others in time."""
        taken = {entry.id for entry in chosen}
        due = Counter(
            max(e.begun_after_step + self.staleness + 1, step) for e in untaken if e.id not in taken
        )
        left = 0
        for last in sorted(due):
            left += due[last]
            if left > (last - step) * self.batch:
                return False
        return True
