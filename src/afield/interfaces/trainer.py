"""Trainer: groups in, new weights out. It blocks; the loop calls it from a thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from afield.token_account import TokenAccount
from afield.types import Group


class StepReport(Struct, frozen=True, kw_only=True):
    """What one update did; `metrics` is written to metrics.jsonl as it is. `too_long` rows were left out.

    `account` says what became of the tokens of its groups; without it, all that carry a reward count as
    trained.
    """

    rollouts: int
    tokens: int
    too_long: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    account: TokenAccount | None = None


class Trainer(Protocol):
    @property
    def context(self) -> int | None:
        """How many tokens a row may have; None is any number."""
        ...

    def step(self, groups: Sequence[Group]) -> StepReport:
        """One update from these groups. Raises before any weight changes when they do not line up.

        A row longer than the trainer can run is left out and named; its rollout's reward still counts.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the weights as an engine loads them."""
        ...

    def save(self, directory: Path) -> None:
        """Write all it needs to go on: weights, optimiser, random state."""
        ...

    def restore(self, directory: Path) -> None: ...


@runtime_checkable
class Publisher(Protocol):
    """A trainer that knows the dtype of the engines its weights are for, and tells how much arrived there."""

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        """Write the weights as `export` does, in `dtype`, as `version`; metrics of the publication.

        `update_kept` is the share of the update along its own direction that was published (1.0 is ideal),
        `update_norm` and `rounding_noise_norm` are norms over all weights. Repeating gives the same bits.
        """
        ...
