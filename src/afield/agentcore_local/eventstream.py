"""Messages of AWS's binary event streams: a length-prefixed frame with headers and two checksums."""

from __future__ import annotations

import struct
import zlib

import msgspec

CONTENT_TYPE = "application/vnd.amazon.eventstream"
STRING = 7


def event(kind: str, body: object) -> bytes:
    headers = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    return frame(headers, msgspec.json.encode(body))


def exception(kind: str, body: object) -> bytes:
    headers = {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}
    return frame(headers, msgspec.json.encode(body))


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    head = b"".join(_header(name.encode(), value.encode()) for name, value in headers.items())
    prelude = struct.pack(">II", 12 + len(head) + len(payload) + 4, len(head))
    prelude += struct.pack(">I", zlib.crc32(prelude))
    message = prelude + head + payload
    return message + struct.pack(">I", zlib.crc32(message))


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(name)) + name + struct.pack(">BH", STRING, len(value)) + value
