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

import msgspec

from afield.engines.http_connection import ConnectionPool, HttpConnection
from afield.errors import Unavailable

T = TypeVar("T")
JSON = {"content-type": "application/json"}
CALLERS_FAULT = {400, 413, 422}
SHOWN = 300
# Time between two reads of a stream: a share of its age, so that the first tokens arrive at once. The end of
# a stream is read at once too.
GAP, SHORTEST_GAP_S, LONGEST_GAP_S = 0.2, 0.002, 0.1
CONNECT_S = 10.0  # timeout of a new connection


class IdleTimer:
    """Calls `late` when `reset` was not called for `seconds`; the timer stops while `held()` is true.

    `reset` costs one assignment, unlike rescheduling a timeout for every read.
    """

    def __init__(self, seconds: float, held: Callable[[], bool], late: Callable[[], None]) -> None:
        self._seconds, self._held, self.late = seconds, held, late
        self._loop = asyncio.get_running_loop()
        self.active_at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._held():
            self.active_at = now
        left = self.active_at + self._seconds - now
        if left <= 0:
            self.late()
        else:
            self._timer = self._loop.call_later(left, self._look)

    def reset(self) -> None:
        """Restart the timeout."""
        self.active_at = self._loop.time()

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
        self._pool: ConnectionPool | None = None

    async def __aenter__(self) -> Self:
        # `IdleTimer` times idle connections; a reply may take as long as the model needs.
        self._pool = ConnectionPool(self.url, self._headers, connect_timeout_s=min(CONNECT_S, self._idle_s))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    async def status(
        self, method: str, path: str, body: Any = None, *, idle_s: float | None = None
    ) -> tuple[int, bytes]:
        """Status and body of a response with any status."""
        limit = idle_s or self._idle_s
        async with self._answer(method, path, body, {}, limit, still=False) as (response, _):
            return response.status, await response.read_all()

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
            data = await response.read_all()
            self._check(response.status, data)
            return data

    async def reads(self, path: str, body: Any, headers: dict[str, str]) -> AsyncGenerator[bytes]:
        """Bytes of a streamed response with status 200, as they arrive."""
        async with self._answer("POST", path, body, headers, self._idle_s, still=True) as (
            response,
            idle_timer,
        ):
            if response.status != 200:
                self._check(response.status, await response.read_all())
            started = idle_timer.active_at
            while data := await response.read():
                idle_timer.reset()
                yield data
                gap = min(LONGEST_GAP_S, GAP * (idle_timer.active_at - started))
                if gap > SHORTEST_GAP_S:
                    response.gather(gap)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Any, headers: dict[str, str], idle_s: float, *, still: bool
    ) -> AsyncIterator[tuple[HttpConnection, IdleTimer]]:
        if (pool := self._pool) is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        request = pool.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        connection = pool.take_idle() or await self._connect(pool)
        idle_timer = IdleTimer(
            idle_s,
            self._held if still else lambda: False,
            late=lambda: connection.fail(Unavailable(self._idle_message(idle_s))),
        )
        try:
            try:
                await connection.send(request)
            except ConnectionError:
                # The server may have dropped the idle connection; repeating a GET is harmless.
                if method != "GET" or connection.idle_since is None:
                    raise
                pool.put(connection)
                connection = await self._connect(pool)
                await connection.send(request)
            yield connection, idle_timer
        except OSError as error:
            raise Unavailable(f"{self.url} closed the connection: {error}") from error
        finally:
            idle_timer.end()
            pool.put(connection)

    async def _connect(self, pool: ConnectionPool) -> HttpConnection:
        try:
            return await pool.connect()
        except OSError as error:
            problem = error.strerror or str(error) or "it did not answer in time"
            raise Unavailable(f"cannot connect to {self.url}: {problem}") from error

    def _idle_message(self, idle_s: float) -> str:
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
            raise Unavailable(
                f"the engine's answer has more than {LONGEST >> 20} MiB without the end of an event; check"
                " that its address is that of a vLLM or SGLang server"
            )
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
