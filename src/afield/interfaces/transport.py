"""Transport interface: brings outcomes back by an object store and a queue of hints.

1. The store is the truth. An attempt is decided once, by the first commit: the agent's outcome or the
   collector's fence.
2. Hints only say where to look. They are leased and acknowledged after use; a hint that nobody acknowledges
   is delivered again. If all hints are lost, sweeps of the store find every outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, Rollout
from afield.wire import Invocation, OutcomeRecord


class Fence(Struct, frozen=True):
    """The attempt was abandoned; a later outcome is refused."""

    reason: str
    """Why the collector abandoned it."""


class PendingAttempt(Struct, frozen=True):
    """An attempt whose outcome is awaited."""

    rollout: Rollout
    attempt: Attempt


class Transport(Protocol):
    """Every method raises Unavailable while the store cannot be reached; nothing is lost."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def held_s(self) -> float:
        """Seconds for which hints that a dead collector leased may stay invisible; 0 if acknowledging removes
        them all the same.
        """
        ...

    def address(self, exp_id: str) -> dict[str, Any]:
        """Fields of `_rollout` that tell agents of this experiment where to deliver."""
        ...

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        """Write data, commit and hint, in this order; returns whether this outcome counts.

        Repeating returns the same. A refused outcome is kept for `late`.
        """
        ...

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        """The committed outcome or fence of an attempt; None while it is undecided.

        Commits a result that an agent left without a commit, because it can only put one object.
        """
        ...

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        """Abandon an attempt unless it is decided already; returns the decision that counts."""
        ...

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        """Attempts that may have been decided; waits at most `wait_s`. May repeat, may miss some."""
        ...

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        """Remove the hints of these attempts; attempts without a hint are ignored."""
        ...

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        """Attempts with unacknowledged hints, also those that a dead collector leased.

        Empty if the queue cannot list its messages.
        """
        ...

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        """Which of these attempts have a decision or a result in the store."""
        ...

    async def late(self, exp_id: str) -> list[Attempt]:
        """Attempts whose outcome arrived after another decision and was refused."""
        ...
