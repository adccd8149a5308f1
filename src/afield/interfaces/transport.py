"""Transport: how outcomes come back. A store that is the truth, and a queue that only hints.

An attempt is decided once, by whoever first writes its commit: the agent with an outcome, or the
collector with a fence. A hint is leased, not taken: whoever acts on it acknowledges it afterwards, and one
that nobody acknowledges comes again. With every hint lost, sweeps find all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, Rollout
from afield.wire import Invocation, OutcomeRecord


class Fence(Struct, frozen=True):
    """The attempt was given up; an outcome of it that comes late is refused."""

    reason: str


class PendingAttempt(Struct, frozen=True):
    """An attempt whose decision somebody waits for."""

    rollout: Rollout
    attempt: Attempt


class Transport(Protocol):
    """When the store cannot be reached, every verb raises Unavailable, with what to do; nothing is lost."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def held_s(self) -> float:
        """How long hints that a collector had leased when it died may stay away; 0 where acknowledging
        takes them out all the same.
        """
        ...

    def address(self, exp_id: str) -> dict[str, Any]:
        """The fields of `_rollout` that tell an agent of this experiment where to deliver."""
        ...

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        """Write data, commit and hint, in this order. Whether this outcome stands.

        Delivering the same again answers the same. An outcome that was refused is kept apart; see `late`.
        """
        ...

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        """What the store says of an attempt; None while it is open.

        A result that an agent left without a commit (it knows only how to put one object) is committed here.
        """
        ...

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        """Give an attempt up, unless it is decided already; answers with what stands."""
        ...

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        """Attempts that may have been decided; waits at most `wait_s`. May repeat, may miss some."""
        ...

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        """These hints were acted on and need not come again. One that was not hinted is ignored."""
        ...

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        """Attempts whose hints nobody has acknowledged, whoever has leased them: a collector that died after
        it noted how a rollout ended, too. Empty where the queue cannot list its messages.
        """
        ...

    async def sweep(self, waiting: Sequence[PendingAttempt]) -> list[Attempt]:
        """Which of these the store holds a decision for, or a result to decide on, hints or not."""
        ...

    async def late(self, exp_id: str) -> list[Attempt]:
        """Attempts whose outcome came after they had been decided otherwise, and was refused."""
        ...
