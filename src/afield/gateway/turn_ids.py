"""Marks: turn ids in what we hand out, so that a client that echoes it tells us which turn it means.

Tool-call ids need none: a session knows which turn each of its calls belongs to. Marks are for what
else comes back word for word: response ids, item ids, thinking signatures, encrypted reasoning. A
mark names a turn of its own session only, and lineage checks it by content; a forged one gains nothing.
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
    """The id of a tool call. Where a template shows it to the model it is nine letters and digits, which
    every such template takes, and tells nothing."""
    if style == "free":
        return f"call_{turn_id}_{index}"
    return hashlib.blake2b(f"{turn_id}/{index}".encode(), digest_size=16).hexdigest()[:9]


def item_id(kind: str, turn_id: str, index: int | None = None) -> str:
    """`resp_t3`, `msg_t3_0`, `rs_t3`: readable, and valid wherever clients check the form of ids."""
    return f"{kind}_{turn_id}" if index is None else f"{kind}_{turn_id}_{index}"


def response_id(session_id: str, turn_id: str) -> str:
    """The id of a response, by which a client may leave the history to us: it names its session too."""
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
    """For fields that clients take for ciphertext: signatures and encrypted reasoning."""
    return base64.b64encode(f"afield/{turn_id}".encode()).decode()


def unseal(sealed: str) -> str | None:
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, _, turn_id = text.partition("/")
    return turn_id if name == "afield" and TURN.fullmatch(turn_id) else None


def seal_summary(turn_id: str, text: str) -> str:
    """A summary that comes back as the content of a compaction item."""
    return base64.b64encode(f"{_SUMMARY}/{turn_id}/{text}".encode("utf-8", "replace")).decode()


def unseal_summary(sealed: str) -> tuple[str, str] | None:
    """The turn that sampled it, and its text; None for what is not ours."""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, _, rest = text.partition("/")
    turn_id, _, summary = rest.partition("/")
    return (turn_id, summary) if name == _SUMMARY and TURN.fullmatch(turn_id) else None
