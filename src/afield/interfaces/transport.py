"""Transport interface: outcomes in an object store, hints in a queue.

1. The store decides. The first commit of an attempt counts: the agent's outcome or the collector's fence.
2. Hints say where to look. They are leased and acknowledged after use; a hint without acknowledgement is
   delivered again. If hints are lost, sweeps of the store find every outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, RewardSource, Rollout
from afield.wire import Invocation, OutcomeRecord


class Fence(Struct, frozen=True):
    """Decision that an attempt is abandoned; a later outcome is refused."""

    reason: str
    """Why the collector abandoned the attempt."""


class PendingAttempt(Struct, frozen=True):
    """Attempt without a decision."""

    rollout: Rollout
    """Rollout that is tried."""
    attempt: Attempt
    """Attempt to wait for."""
    reward_from: RewardSource = "agent"
    """Source of the reward; with "agent" a result without a reward is a failure."""


class Transport(Protocol):
    """Delivers outcomes. Methods raise Unavailable while the store cannot be reached; no outcome is lost."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def held_s(self) -> float:
        """Seconds for which hints leased by a dead collector stay hidden; 0 if `acknowledge` removes them."""
        ...

    def address(self, exp_id: str) -> dict[str, Any]:
        """Fields of `_rollout` with the address to which agents of this experiment deliver."""
        ...

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        """Write data, commit and hint, in this order; returns whether this outcome counts.

        Repeating returns the same. A refused outcome is kept for `late`.
        """
        ...

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        """Return the committed outcome or fence of an attempt; None while it is undecided. Writes nothing."""
        ...

    async def commit_result(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        """Commit the result of an agent that writes a single object and no commit.

        Returns the decision that counts, or None if there is no such result.
        """
        ...

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        """Abandon an attempt unless it is decided already; returns the decision that counts."""
        ...

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        """Return attempts that may have been decided, after at most `wait_s` seconds.

        Attempts may be repeated or missing.
        """
        ...

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        """Remove the hints of these attempts; attempts without a hint are ignored."""
        ...

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        """Return attempts with unacknowledged hints, including those leased by a dead collector.

        Empty if the queue cannot list its messages.
        """
        ...

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        """Return those attempts that have a decision or a result in the store."""
        ...

    async def late(self, exp_id: str) -> list[Attempt]:
        """Return attempts whose outcome was refused because it arrived after another decision."""
        ...
