"""What a notifier is to a transport: a queue of hints, each of which is leased until it is acknowledged.

A lease that runs out gives the message to the next who asks. A message that nobody can use goes to a
place for dead letters, where people can look at it, and stands in nobody's way. Losing messages loses
nothing: the store is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from msgspec import Struct

LEASE_S = 10.0  # using a hint takes milliseconds; a collector that died holds its own no longer than this


class Leased(Struct, frozen=True, kw_only=True):
    """A message that is ours for a while. `times` counts how often it was handed out, this time included."""

    exp_id: str
    body: bytes
    receipt: Any
    times: int = 1


class Notifier(Protocol):
    """Raises Unavailable when the queue cannot be reached."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def address(self, exp_id: str) -> Mapping[str, Any]:
        """The fields of `_rollout` that tell an agent where hints go; may be none."""
        ...

    async def send(self, exp_id: str, body: bytes) -> None: ...

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        """Returns as soon as there is something, and empty-handed after `wait_s`."""
        ...

    async def extend(self, leased: Leased, seconds: float) -> None:
        """Ours for so long from now on; 0 hands it to the next who asks."""
        ...

    async def ack(self, leased: Sequence[Leased]) -> None:
        """Done with these: they do not come again. Repeating it is harmless."""
        ...

    async def dead(self, letter: Leased, reason: str) -> None:
        """Put it where dead letters lie, and take it out of the queue."""
        ...


@runtime_checkable
class Clearing(Protocol):
    """A notifier that can list and take out messages it has not handed out to us.

    A collector that was killed holds leases; without this they run out after its work is done, and their
    messages stay where nobody asks for them any more.
    """

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        """Messages of these very words are gone, whoever has leased them. Repeating it is harmless."""
        ...

    async def bodies(self, exp_id: str) -> list[bytes]:
        """All messages that are in the queue, whoever has leased them."""
        ...
