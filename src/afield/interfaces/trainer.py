"""Trainer interface: train on groups, export weights, save and restore checkpoints.

Calls block; the training loop runs them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from afield.runs.token_account import TokenAccount
from afield.types import Group


class StepReport(Struct, frozen=True, kw_only=True):
    """Result of one training step."""

    rollouts: int
    """Number of rollouts that were trained."""
    tokens: int
    """Number of tokens in the loss."""
    too_long: int = 0
    """Number of sequences that exceed the trainer's context and were not trained."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the trainer, written to metrics.jsonl unchanged."""
    account: TokenAccount | None = None
    """Token account of the groups; None counts all tokens with a reward as trained."""
    advantages: dict[str, float] = field(default_factory=dict)
    """Advantages by rollout id, each averaged over the rollout's turns; empty if the trainer has none."""
    records: dict[str, bytes] = field(default_factory=dict)
    """Encoded training records (`training_record.TokenRecord`) by rollout id; empty if it keeps none."""


class Trainer(Protocol):
    """Trains a policy on groups of rollouts."""

    @property
    def context(self) -> int | None:
        """Largest number of tokens in a sequence; None is no limit."""
        ...

    def step(self, groups: Sequence[Group]) -> StepReport:
        """Train one step on these groups. Raises before any weight changes if they are inconsistent.

        Sequences that exceed `context` are not trained and logged; the rollout's reward still counts.
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
class AsyncSaver(Protocol):
    """Trainer that writes checkpoints while it trains on."""

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Copy the state and begin to write a checkpoint of it.

        The returned function waits until it is complete; at most one checkpoint is written at a time.
        """
        ...


@runtime_checkable
class Publisher(Protocol):
    """Trainer that exports weights in the engines' dtype and measures the rounding."""

    def publish(self, directory: Path, *, version: int, dtype: str) -> dict[str, float]:
        """Write the weights as `export` does, in `dtype`, and return metrics of the rounding.

        `update_kept` is the part of the update, projected on its direction, that survives rounding (1.0 is
        ideal); `update_norm` and `rounding_noise_norm` are norms over all weights. `shared_weights` is 1.0 if
        engines can load the version from memory. Repeating a version writes the same bits.
        """
        ...


@runtime_checkable
class BackgroundPublisher(Protocol):
    """Publisher whose versions may be loaded before all their files are written; see `shared_weights`."""

    def finish_publication(self) -> None:
        """Wait until the files of the newest published version are complete.

        Raises Unavailable if they cannot be written. Repeating it is harmless.
        """
        ...
