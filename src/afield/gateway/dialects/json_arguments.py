"""A call's arguments in dialects where they are a JSON object rather than text.

What is a JSON object travels word for word. What a model sampled in its place travels as text under
one key, and comes back as that text.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from afield.gateway.api_error import bad_request
from afield.gateway.dialects.base import encode

UNPARSED = "__unparsedToolInput"
OBJECT = msgspec.json.Decoder(dict[str, Raw])


def as_object(arguments: str) -> str:
    """The text of a JSON object that any client can read."""
    text = arguments if arguments.strip() else "{}"
    try:
        OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return encode({UNPARSED: arguments}).decode()
    return text


def as_arguments(given: Raw, where: str) -> str:
    """The arguments of a call a client sends back."""
    try:
        text = bytes(given).decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"{where}: the arguments of a call are not UTF-8: {error}") from error
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise bad_request(f"{where}: the arguments of a call are {text[:40]}, not an object")
    return _as_sampled(text) if UNPARSED in text else text


def _as_sampled(text: str) -> str:
    given = OBJECT.decode(text)
    inner = given.get(UNPARSED)
    if len(given) != 1 or inner is None or not bytes(inner).startswith(b'"'):
        return text
    return msgspec.json.decode(inner)
