"""Ids that contain turn ids, so that echoed responses identify their turn.

For response ids, item ids, thinking signatures and encrypted reasoning. Tool-call ids need none: the
session knows their turns. An id names a turn of its own session only, and `prompts` checks the content,
so that a forged one has no effect.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

TURN = re.compile(r"t[0-9]{1,18}")
_SUMMARY = "afield-summary"
_ID = re.compile(r"[a-z]+_(t[0-9]{1,18})(?:_\d+)?")


def call_id(turn_id: str, index: int, style: str = "free") -> str:
    """Returns a tool-call id. Templates that render ids get nine letters and digits."""
    if style == "free":
        return f"call_{turn_id}_{index}"
    return hashlib.blake2b(f"{turn_id}/{index}".encode(), digest_size=16).hexdigest()[:9]


def item_id(kind: str, turn_id: str, index: int | None = None) -> str:
    """Returns an item id such as `resp_t3`, `msg_t3_0`, `rs_t3`."""
    return f"{kind}_{turn_id}" if index is None else f"{kind}_{turn_id}_{index}"


def response_id(session_id: str, turn_id: str) -> str:
    """Returns a response id that names session and turn."""
    return f"resp_{_tag(session_id)}_{turn_id}"


def turn_of_response(id: str, session_id: str) -> str | None:
    head, _, turn_id = id.rpartition("_")
    return turn_id if head == f"resp_{_tag(session_id)}" and TURN.fullmatch(turn_id) else None


def _tag(session_id: str) -> str:
    return hashlib.blake2b(session_id.encode(), digest_size=6).hexdigest()


def turn_of_id(id: str) -> str | None:
    match = _ID.fullmatch(id)
    return match[1] if match else None


def seal(turn_id: str) -> str:
    """Encodes a turn id for opaque fields: signatures and encrypted reasoning."""
    return base64.b64encode(f"afield/{turn_id}".encode()).decode()


def unseal(sealed: str) -> str | None:
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, _, turn_id = text.partition("/")
    return turn_id if name == "afield" and TURN.fullmatch(turn_id) else None


def seal_summary(turn_id: str, text: str) -> str:
    """Encodes a summary as the content of a compaction item."""
    return base64.b64encode(f"{_SUMMARY}/{turn_id}/{text}".encode("utf-8", "replace")).decode()


def unseal_summary(sealed: str) -> tuple[str, str] | None:
    """Returns the turn and the text of a summary; None if it is not from this gateway."""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, _, rest = text.partition("/")
    turn_id, _, summary = rest.partition("/")
    return (turn_id, summary) if name == _SUMMARY and TURN.fullmatch(turn_id) else None
