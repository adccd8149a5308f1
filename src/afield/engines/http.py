"""How engines that live behind a URL are asked: one connection pool, silence noticed, errors named.

Every failure of the far side is `Unavailable` and names the URL: refused or dropped connections,
5xx, bytes that are not the expected JSON, and silence. Silence is counted between two reads, and
not at all, for calls, while `held` says that the server was told to keep still. A 400, 413 or 422 is the
caller's fault: ValueError. Closing an answer closes its connection, which servers take as a cancel.
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
# How long a stream is left alone between reads: a share of its age, so the first tokens come at once.
GAP, SHORTEST_GAP_S, LONGEST_GAP_S = 0.03, 0.002, 0.03
KEEP_S = 4.0  # uvicorn drops idle connections after 5


class Silence:
    """Calls `late` when nothing was heard for too long. Being heard costs one assignment."""

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
        self.heard = self._loop.time()

    def end(self) -> None:
        self._timer.cancel()


class Http:
    """A server at `url`. `held` tells whether it was asked to keep still."""

    def __init__(
        self, url: str, *, api_key: str | None, idle_s: float, held: Callable[[], bool] = lambda: False
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {**JSON, **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._idle_s, self._held = idle_s, held
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S)
        # Silence is our own business, see `Silence`; how long an answer takes in all is the model's.
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
        """What came back, whatever the status."""
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
        """The body of a good answer; one that calls for tokens may stand `still` while the server is held."""
        limit = idle_s or self._idle_s
        async with self._answer(method, path, body, headers or {}, limit, still=still) as (response, _):
            data = await response.read()
            self._check(response.status, data)
            return data

    async def reads(self, path: str, body: Any, headers: dict[str, str]) -> AsyncGenerator[bytes]:
        """The bytes of a good answer, as much at a time as has arrived."""
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
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Silence]]:
        if self._session is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        data = None if body is None else msgspec.json.encode(body)
        silence = Silence(idle_s, self._held if still else lambda: False, late=lambda: None)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(None) as limit:
                silence.late = lambda: limit.reschedule(0)
                asking = self._session.request(method, self.url + path, data=data, headers=headers)
                response = await asking
            hung = Unavailable(self._silent(idle_s))
            got = response
            silence.late = lambda: got.content.set_exception(hung)
            yield response, silence
        except TimeoutError as error:
            raise Unavailable(self._silent(idle_s)) from error
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"cannot connect to {self.url}: {error.os_error.strerror or error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{self.url} broke off: {type(error).__name__}: {error}") from error
        finally:
            silence.end()
            if response is not None:
                # An answer read to its end gives its connection back; any other is cut off.
                _ = response.release() if response.content.at_eof() else response.close()

    def _silent(self, idle_s: float) -> str:
        return f"{self.url} was silent for {idle_s:g} s; it hangs, or the time allowed is too short"

    def _check(self, status: int, data: bytes) -> None:
        if status == 200:
            return
        told = f"{self.url} answers {status}: {_message(data)}"
        raise ValueError(told) if status in CALLERS_FAULT else Unavailable(told)

    def decode(self, data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            shown = data[:SHOWN].decode(errors="replace")
            raise Unavailable(f"{self.url} sent what is not expected ({error}): {shown}") from error


async def _let_gather(response: aiohttp.ClientResponse, seconds: float) -> None:
    """Leave a stream alone for a moment, so that the next read brings several tokens for the price of one."""
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
    """What the server says went wrong, without the wrapping if there is the usual one."""
    try:
        body = msgspec.json.decode(data)
        return str(body["error"]["message"])[:SHOWN]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return data[:SHOWN].decode(errors="replace")
