"""HTTP helpers on ASGI: headers, JSON responses, event streams, request bodies.

Request bodies have a size limit. All but small ones are decompressed in two threads, slice by slice.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from afield.gateway.api_error import ApiError, bad_request
from afield.wire import json_problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Count = Callable[[int], None]

T = TypeVar("T")
KEYED = "/k/"
MAX_BODY = 64 * 1024 * 1024
ENCODER = msgspec.json.Encoder()


def header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def query(scope: Scope) -> dict[str, str]:
    text = scope.get("query_string", b"").decode("latin-1")
    return dict(parse_qsl(text)) if text else {}


def key_of(scope: Scope) -> str:
    """Returns the API key from the header or query parameter of any dialect."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    key = bearer or header(scope, b"x-api-key") or header(scope, b"x-goog-api-key")
    return key or ("" if b"key=" not in scope.get("query_string", b"") else query(scope).get("key", ""))


def path_key(path: str) -> tuple[str, str] | None:
    """Splits `/k/KEY/...` into key and rest."""
    if not path.startswith(KEYED):
        return None
    key, slash, rest = path[len(KEYED) :].partition("/")
    return key, slash + rest


def json_body(body: bytes, into: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(json_problem(body, error), _choices(str(error), into)) from error


def _choices(problem: str, into: type) -> str:
    """Lists the allowed values for an unknown enum value."""
    if not problem.startswith("Invalid enum value") or "$." not in problem:
        return ""
    name = re.split(r"\W", problem.rpartition("$.")[2])[0]
    words = _words(get_type_hints(into).get(name))
    return f"choose from: {', '.join(words)}" if words else ""


def _words(kind: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)
    parts = [_words(part) if get_args(part) else [part] for part in get_args(kind)]
    return [word for part in parts for word in part if isinstance(word, str)]


class PlainText(str):
    """A response body in the Prometheus text format."""


async def send_json(send: Send, status: int, value: object, retry_after_s: float | None = None) -> None:
    plain = isinstance(value, PlainText)
    body = value.encode() if plain else ENCODER.encode(value)
    kind = b"text/plain; version=0.0.4" if plain else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", f"{retry_after_s:g}".encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class ByteStream:
    """An event stream. The response starts with the first event, so that early errors have a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.content_type = b"text/event-stream"
        self.started = False
        self.sent = 0
        self.delivered = False  # set at the end of an answer, not of an error

    async def emit(self, body: bytes) -> None:
        if body:
            await self._begin()
            self.sent += 1
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close(self, last: bytes = b"") -> None:
        await self._begin()
        self.sent += 1
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self) -> None:
        if not self.started:
            self.started = True
            headers = [(b"content-type", self.content_type), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})


# --- request bodies ---

AT_ONCE = 64 * 1024
"""Size up to which a body is decompressed on the event loop, in bytes."""
SLICE = 2 * 1024 * 1024
INPUT = 256 * 1024
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="afield-inflate")


class ClientGone(Exception):
    """The client disconnected before its request was read."""


async def read_body(
    scope: Scope,
    receive: Receive,
    limit: int = MAX_BODY,
    hint: str = "",
    count: Count | None = None,
) -> bytes:
    """Reads and decompresses the body. `count` is called with the size of each part."""
    return await decompressed(scope, await read_raw(scope, receive, limit, hint, count), limit, hint, count)


async def read_raw(
    scope: Scope,
    receive: Receive,
    limit: int = MAX_BODY,
    hint: str = "",
    count: Count | None = None,
) -> bytes:
    """Reads the body without decompressing it."""
    declared = int(header(scope, b"content-length") or 0)
    if declared > limit:
        raise _too_large(f"has {declared}", limit, hint)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(f"has over {limit}", limit, hint)
        if count is not None:
            count(len(parts[-1]))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def decompressed(
    scope: Scope,
    body: bytes,
    limit: int = MAX_BODY,
    hint: str = "",
    count: Count | None = None,
) -> bytes:
    encoding = header(scope, b"content-encoding")
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ApiError(415, "unsupported_encoding", f"content-encoding {encoding!r} is not read", "use gzip")
    try:
        return await _inflate(body, limit, hint, count)
    except zlib.error as error:
        raise bad_request(f"the body is not {encoding}: {error}") from error


async def _inflate(body: bytes, limit: int, hint: str, count: Count | None) -> bytes:
    parts: list[bytes] = []
    try:
        size = 0
        async for part in _slices(body):
            size += len(part)
            if size > limit:
                raise _too_large(f"decompresses to over {limit}", limit, hint)
            if count is not None:
                count(len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        parts.clear()  # the error's traceback would keep them alive


async def _slices(body: bytes) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
    view = memoryview(body)
    position = 0
    unconsumed = b""
    first = True
    while not stream.eof:
        data = unconsumed or view[position : position + INPUT]
        if not unconsumed:
            position += len(data)
            if not data:
                raise bad_request("the compressed body ends too early", "send all of it")
        if first and len(data) <= AT_ONCE:
            part = stream.decompress(data, AT_ONCE)
        else:
            part = await loop.run_in_executor(_THREADS, stream.decompress, data, SLICE)
        first = False
        unconsumed = stream.unconsumed_tail
        yield part
    if stream.unused_data or position < len(body):
        raise bad_request("bytes follow the end of the compressed body", "send one stream and no more")


def _too_large(size: str, limit: int, hint: str) -> ApiError:
    return ApiError(413, "request_too_large", f"the body {size} bytes; {limit} are allowed", hint)
