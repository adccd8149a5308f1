"""Notifier interface: a queue of hints, leased until they are acknowledged.

A lease that expires makes the message available again. A message that cannot be used becomes a dead letter.
Losing messages loses no outcome: the store holds all of them.
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

LEASE_S = 10.0  # handling a hint takes milliseconds; the hints of a dead collector return after this
UNHINTED_PARTS = wire.OWN_PARTS - {wire.COMMITS}


class Leased(Struct, frozen=True, kw_only=True):
    """A message leased to this collector."""

    exp_id: str
    """Experiment whose queue it came from."""
    body: bytes
    """The message; see `read_message`."""
    receipt: Any
    """The queue's own handle of the lease."""
    times: int = 1
    """Number of deliveries so far, including this one."""


class Notifier(Protocol):
    """A queue of hints per experiment. Raises Unavailable when it cannot be reached."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def address(self, exp_id: str) -> Mapping[str, Any]:
        """Fields of `_rollout` with the address for agents' hints; may be empty."""
        ...

    async def send(self, exp_id: str, body: bytes) -> None: ...

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        """Lease what is there, waiting up to `wait_s` for the first message."""
        ...

    async def extend(self, leased: Leased, seconds: float) -> None:
        """Let the lease end `seconds` from now; 0 returns the message at once."""
        ...

    async def ack(self, leased: Sequence[Leased]) -> None:
        """Remove messages. Repeating it is harmless."""
        ...

    async def dead(self, letter: Leased, reason: str) -> None:
        """Move a message to the dead letters."""
        ...


@runtime_checkable
class ClearableNotifier(Notifier, Protocol):
    """A notifier that can list and remove messages leased by others.

    Without it, the leases of a killed collector expire after the work is done, and their messages stay.
    """

    async def clear(self, exp_id: str, bodies: Sequence[bytes]) -> None:
        """Remove messages with these bodies, whoever leased them. Repeating it is harmless."""
        ...

    async def bodies(self, exp_id: str) -> list[bytes]:
        """Bodies of all messages in the queue, whoever leased them."""
        ...


def read_message(body: bytes) -> list[tuple[str, Attempt]]:
    """(exp_id, attempt) pairs that a message names; raises WireError for an unknown message.

    Messages are afield's hints and S3 events, also wrapped by SNS. S3 events name keys; commits and results
    name attempts, other objects and S3's test event name none.
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
