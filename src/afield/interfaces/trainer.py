"""Trainer interface: groups in, new weights out. Calls block; the loop uses a thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from afield.token_account import TokenAccount
from afield.types import Group


class StepReport(Struct, frozen=True, kw_only=True):
    """Result of one training step."""

    rollouts: int
    """Number of rollouts that were trained."""
    tokens: int
    """Number of tokens in the loss."""
    too_long: int = 0
    """Number of sequences longer than the trainer's context, which were left out."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Written to metrics.jsonl as they are."""
    account: TokenAccount | None = None
    """Tokens of the groups by what became of them; None counts all with a reward as trained."""


class Trainer(Protocol):
    @property
    def context(self) -> int | None:
        """Largest number of tokens in a sequence; None is no limit."""
        ...

    def step(self, groups: Sequence[Group]) -> StepReport:
        """Train one step on these groups. Raises before any weight changes if they are inconsistent.

        Sequences that are too long are left out and logged; the rollout's reward still counts.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write the weights in the format that engines load."""
        ...

    def save(self, directory: Path) -> None:
        """Write a checkpoint: weights, optimizer and random state."""
        ...

    def restore(self, directory: Path) -> None:
        """Read a checkpoint; raises DamagedFile if it is incomplete."""
        ...


@runtime_checkable
class Publisher(Protocol):
    """A trainer that publishes weights in the engines' dtype and measures the rounding."""

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        """Write the weights as `export` does, in `dtype`, as `version`; metrics of the publication.

        `update_kept` is the share of the update along its own direction that was published (1.0 is ideal),
        `update_norm` and `rounding_noise_norm` are norms over all weights. Repeating gives the same bits.
        """
        ...
