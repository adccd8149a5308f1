"""Notifier interface: a queue of hints with leases and acknowledgements.

A message becomes available again when its lease expires. A message that cannot be used becomes a dead letter.
Lost messages do not lose outcomes, which are in the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable
from urllib.parse import unquote_plus

from msgspec import Struct

from afield import wire
from afield.errors import WireError
from afield.types import Attempt

LEASE_S = 10.0  # seconds until hints of a dead collector are delivered again
UNHINTED_PARTS = wire.OWN_PARTS - {wire.COMMITS}


class Leased(Struct, frozen=True, kw_only=True):
    """Message leased to this collector."""

    exp_id: str
    """Experiment whose queue it came from."""
    body: bytes
    """Message text; see `read_message`."""
    receipt: Any
    """Lease handle of the queue."""
    times: int = 1
    """Number of deliveries so far, including this one."""


class Notifier(Protocol):
    """Queue of hints per experiment. Methods raise Unavailable if it cannot be reached."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def address(self, exp_id: str) -> Mapping[str, Any]:
        """Fields of `_rollout` with the address for agents' hints; may be empty."""
        ...

    async def send(self, exp_id: str, body: bytes) -> None: ...

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        """Lease available messages; waits up to `wait_s` seconds for the first one."""
        ...

    async def extend(self, leased: Leased, seconds: float) -> None:
        """Set the lease to end in `seconds`; 0 returns the message at once."""
        ...

    async def ack(self, leased: Sequence[Leased]) -> None:
        """Remove messages. Repeating is harmless."""
        ...

    async def dead(self, letter: Leased, reason: str) -> None:
        """Move a message to the dead letters."""
        ...


@runtime_checkable
class ClearableNotifier(Notifier, Protocol):
    """Notifier that can list and remove messages leased by other collectors.

    With other notifiers, messages leased by a killed collector stay invisible until their lease expires.
    """

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        """Remove messages with these bodies, including leased ones. Repeating is harmless."""
        ...

    async def bodies(self, exp_id: str) -> list[bytes]:
        """Return the bodies of all messages in the queue, including leased ones."""
        ...


def read_message(body: bytes) -> list[tuple[str, Attempt]]:
    """Parse a message into (exp_id, attempt) pairs; raises WireError for an unknown message.

    Messages are hints of afield and S3 events, also wrapped by SNS. S3 events of commits and results refer to
    attempts; those of other objects, and S3's test event, return no pairs.
    """
    try:
        message = json.loads(body)
        if isinstance(message, dict) and message.get("Type") == "Notification":
            message = json.loads(message["Message"])
        if not isinstance(message, dict):
            raise WireError(f"a message is a {type(message).__name__}, not an object: {body[:200]!r}")
        if message.get("Event") == "s3:TestEvent":
            return []
        if "Records" in message:
            return [pair for record in message["Records"] for pair in _read_s3_event(record)]
        hint = wire.convert(message, wire.Hint, "a message")
        return [(hint.exp_id, Attempt.from_session_id(hint.session_id))]
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a message is neither a hint nor an S3 event ({error!r}): {body[:200]!r}") from error


def _read_s3_event(record: dict[str, Any]) -> list[tuple[str, Attempt]]:
    key = wire.read_key(unquote_plus(record["s3"]["object"]["key"]))
    if key is None or key[1] in UNHINTED_PARTS:
        return []
    exp_id, _, session_id = key
    return [(exp_id, Attempt.from_session_id(session_id))]
