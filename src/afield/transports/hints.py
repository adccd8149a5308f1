"""What a queue's message says: afield's own hint, or an S3 event (also wrapped by SNS).

An S3 event tells keys, form-encoded; commits and results name attempts, other objects name none.
The event S3 sends when a notification is set up names none either.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote_plus

from afield import wire
from afield.errors import WireError
from afield.types import Attempt

Notice = tuple[str, Attempt]
ASIDE = wire.OWN_PARTS - {wire.COMMITS}


def read(body: bytes) -> list[Notice]:
    """(exp_id, attempt) of each that the message is about; WireError when it is none of ours."""
    try:
        said = json.loads(body)
        if isinstance(said, dict) and said.get("Type") == "Notification":
            said = json.loads(said["Message"])
        if not isinstance(said, dict):
            raise WireError(f"a message is a {type(said).__name__}, not an object: {body[:200]!r}")
        if said.get("Event") == "s3:TestEvent":
            return []
        if "Records" in said:
            return [notice for record in said["Records"] for notice in _of_event(record)]
        hint = wire.convert(said, wire.Hint, "a message")
        return [(hint.exp_id, Attempt.from_session_id(hint.session_id))]
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a message is neither a hint nor an S3 event ({error!r}): {body[:200]!r}") from error


def _of_event(record: dict[str, Any]) -> list[Notice]:
    key = wire.read_key(unquote_plus(record["s3"]["object"]["key"]))
    if key is None or key[1] in ASIDE:
        return []
    exp_id, _, session_id = key
    return [(exp_id, Attempt.from_session_id(session_id))]
