"""Trainer: groups in, new weights out. It blocks; the loop calls it from a thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from afield.types import Group


class StepReport(Struct, frozen=True, kw_only=True):
    """What one update did; `metrics` is written to metrics.jsonl as it is."""

    rollouts: int
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    def step(self, groups: Sequence[Group]) -> StepReport:
        """One update from these groups. Raises before any weight changes when they do not line up."""
        ...

    def export(self, directory: Path) -> None:
        """Write the weights as an engine loads them."""
        ...

    def save(self, directory: Path) -> None:
        """Write all it needs to go on: weights, optimiser, random state."""
        ...

    def restore(self, directory: Path) -> None: ...
