"""HTTP client for inference servers: connection pool, idle timeout, errors, server-sent events.

1. Server failures raise `Unavailable` with the URL: refused or dropped connections, 5xx, unexpected JSON,
   no bytes for `idle_s`. Status 400, 413 and 422 are the caller's fault: ValueError.
2. The idle timeout counts between two reads, and stops while generation is paused (`held`).
3. Closing a response early closes its connection, which servers treat as a cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from afield.errors import Unavailable

T = TypeVar("T")
JSON = {"content-type": "application/json"}
CALLERS_FAULT = {400, 413, 422}
SHOWN = 300
# Pause between two reads of a stream: a share of its age, so that the first tokens arrive at once.
GAP, SHORTEST_GAP_S, LONGEST_GAP_S = 0.03, 0.002, 0.03
KEEP_S = 4.0  # uvicorn drops idle connections after 5


class IdleTimer:
    """Calls `late` when `hear` was not called for `seconds`; the timer stops while `held()` is true.

    `hear` costs one assignment, unlike rescheduling a timeout for every read.
    """

    def __init__(self, seconds: float, held: Callable[[], bool], late: Callable[[], None]) -> None:
        self._seconds, self._held, self.late = seconds, held, late
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._held():
            self.heard = now
        left = self.heard + self._seconds - now
        if left <= 0:
            self.late()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def hear(self) -> None:
        """Restart the timeout."""
        self.heard = self._loop.time()

    def end(self) -> None:
        """Stop the timer."""
        self._timer.cancel()


class EngineHttpClient:
    """HTTP client of one server. `held` returns whether its generation is paused."""

    def __init__(
        self, url: str, *, api_key: str | None, idle_s: float, held: Callable[[], bool] = lambda: False
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {**JSON, **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._idle_s, self._held = idle_s, held
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
        # `IdleTimer` times idle connections; a reply may take as long as the model needs.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, self._idle_s))
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def status(
        self, method: str, path: str, body: Any = None, *, idle_s: float | None = None
    ) -> tuple[int, bytes]:
        """Status and body of a response with any status."""
        limit = idle_s or self._idle_s
        async with self._answer(method, path, body, {}, limit, still=False) as (response, _):
            return response.status, await response.read()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        idle_s: float | None = None,
        still: bool = False,
    ) -> bytes:
        """Body of a response; raises unless the status is 200. With `still`, a paused server may be idle."""
        limit = idle_s or self._idle_s
        async with self._answer(method, path, body, headers or {}, limit, still=still) as (response, _):
            data = await response.read()
            self._check(response.status, data)
            return data

    async def reads(self, path: str, body: Any, headers: dict[str, str]) -> AsyncGenerator[bytes]:
        """Bytes of a streamed response with status 200, as they arrive."""
        async with self._answer("POST", path, body, headers, self._idle_s, still=True) as (response, silence):
            if response.status != 200:
                self._check(response.status, await response.read())
            started = silence.heard
            while data := await response.content.readany():
                silence.hear()
                yield data
                gap = min(LONGEST_GAP_S, GAP * (silence.heard - started))
                if gap > SHORTEST_GAP_S:
                    await _let_gather(response, gap)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Any, headers: dict[str, str], idle_s: float, *, still: bool
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, IdleTimer]]:
        if self._session is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        data = None if body is None else msgspec.json.encode(body)
        silence = IdleTimer(idle_s, self._held if still else lambda: False, late=lambda: None)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(None) as limit:
                silence.late = lambda: limit.reschedule(0)
                response = await self._session.request(method, self.url + path, data=data, headers=headers)
            content, hung = response.content, Unavailable(self._silent(idle_s))
            silence.late = lambda: content.set_exception(hung)
            yield response, silence
        except TimeoutError as error:
            raise Unavailable(self._silent(idle_s)) from error
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"cannot connect to {self.url}: {error.os_error.strerror or error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self.url} closed the connection: {type(error).__name__}: {error}") from error
        finally:
            silence.end()
            if response is not None:
                # A response read to its end returns its connection to the pool; any other closes it.
                _ = response.release() if response.content.at_eof() else response.close()

    def _silent(self, idle_s: float) -> str:
        return f"{self.url} sent nothing for {idle_s:g} s; restart it if it hangs, or raise its idle timeout"

    def _check(self, status: int, data: bytes) -> None:
        if status == 200:
            return
        message = f"{self.url} answers {status}: {_message(data)}"
        raise ValueError(message) if status in CALLERS_FAULT else Unavailable(message)

    def decode(self, data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode a JSON body; raises Unavailable if it is invalid."""
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            excerpt = data[:SHOWN].decode(errors="replace")
            raise Unavailable(f"{self.url} sent an unexpected response ({error}): {excerpt}") from error


async def _let_gather(response: aiohttp.ClientResponse, seconds: float) -> None:
    """Pause reading, so that one read returns several tokens."""
    transport = response.connection.transport if response.connection else None
    if transport is None or transport.is_closing():
        return
    transport.pause_reading()
    try:
        await asyncio.sleep(seconds)
    finally:
        if not transport.is_closing():
            transport.resume_reading()


def _message(data: bytes) -> str:
    """The server's error message: `error.message` of the body, else the body."""
    try:
        body = msgspec.json.decode(data)
        return str(body["error"]["message"])[:SHOWN]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return data[:SHOWN].decode(errors="replace")


# --- server-sent events ---------------------------------------------------------------------------

LONGEST = 64 << 20


class SseParser:
    """Incremental parser of server-sent events; input may be split at any byte."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Parse bytes; returns the data of every completed event, without comments and other fields."""
        data = self._rest + data
        held = b""
        if b"\r" in data:
            # A carriage return at the end may be half of a CRLF.
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n")
        *blocks, rest = data.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > LONGEST:
            raise Unavailable(f"an event has more than {LONGEST >> 20} MiB; this is not an event stream")
        return [event for block in blocks if (event := _data(block))]

    @property
    def unfinished(self) -> bool:
        """Whether an incomplete event is pending."""
        return bool(self._rest.strip())


def _data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = (line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
