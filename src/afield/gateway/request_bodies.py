"""Request bodies: read with a size limit, decompressed off the event loop.

1. A body is counted against its session while it arrives, while it is decompressed and while its call runs.
2. Decompression stops at the size limit; it never holds more than one slice above it.
3. Two threads decompress all but the first few kilobytes, slice by slice, in turn with other requests.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.http import MAX_BODY, Receive, Scope, header
from afield.gateway.session import Session

AT_ONCE = 64 * 1024  # decompressed bytes that are cheaper to make here than to hand to a thread
SLICE = 2 * 1024 * 1024
INPUT = 256 * 1024
RETRY_S = 1.0
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="afield-inflate")


class ClientGone(Exception):
    """The client closed the connection before its request was read."""


class BodyBytes:
    """Bytes of one request, counted against its session until the block ends."""

    def __init__(self, session: Session, limit: int) -> None:
        self._session = session
        self._limit = limit
        self._held = 0

    def __enter__(self) -> BodyBytes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.body_bytes -= self._held

    def take(self, size: int) -> None:
        held = self._session.body_bytes + size
        if held > self._limit:
            message = (
                f"the requests of session {self._session.id} in flight have {held} bytes;"
                f" {self._limit} are allowed at once"
            )
            refusal = ApiError(
                429, "too_many_bytes_in_flight", message, "send fewer large requests at a time"
            )
            refusal.retry_after_s = RETRY_S
            raise refusal
        self._session.body_bytes = held
        self._held += size


async def read_body(
    scope: Scope, receive: Receive, most: int = MAX_BODY, hint: str = "", held: BodyBytes | None = None
) -> bytes:
    """The body, decompressed."""
    return await decompressed(scope, await read_raw(scope, receive, most, hint, held), most, hint, held)


async def read_raw(
    scope: Scope, receive: Receive, most: int = MAX_BODY, hint: str = "", held: BodyBytes | None = None
) -> bytes:
    """The body as it was sent."""
    declared = int(header(scope, b"content-length") or 0)
    if declared > most:
        raise _too_large(f"has {declared}", most, hint)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(f"has over {most}", most, hint)
        if held is not None:
            held.take(len(parts[-1]))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def decompressed(
    scope: Scope, body: bytes, most: int = MAX_BODY, hint: str = "", held: BodyBytes | None = None
) -> bytes:
    encoding = header(scope, b"content-encoding")
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, "unsupported_encoding", f"content-encoding {encoding!r} is not read", "use gzip")
    try:
        return await _inflate(body, most, hint, held)
    except zlib.error as error:
        raise bad_request(f"the body is not {encoding}: {error}") from error


async def _inflate(body: bytes, most: int, hint: str, held: BodyBytes | None) -> bytes:
    parts: list[bytes] = []
    try:
        size = 0
        async for part in _slices(body):
            size += len(part)
            if size > most:
                raise _too_large(f"decompresses to over {most}", most, hint)
            if held is not None:
                held.take(len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        parts.clear()  # a refusal keeps its frames until it is answered


async def _slices(body: bytes) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
    view = memoryview(body)
    position = 0
    left = b""
    first = True
    while not stream.eof:
        data = left or view[position : position + INPUT]
        if not left:
            position += len(data)
            if not data:
                raise bad_request("the compressed body ends too early", "send all of it")
        if first and len(data) <= AT_ONCE:
            part = stream.decompress(data, AT_ONCE)
        else:
            part = await loop.run_in_executor(_THREADS, stream.decompress, data, SLICE)
        first = False
        left = stream.unconsumed_tail
        yield part
    if stream.unused_data or position < len(body):
        raise bad_request("bytes follow the end of the compressed body", "send one stream and no more")


def _too_large(size: str, most: int, hint: str) -> ApiError:
    return ApiError(413, "request_too_large", f"the body {size} bytes; {most} are allowed", hint)
