"""Gateway processes on one port: session ownership and forwarding.

A hash of its id assigns a session to one process. The front (see `front`) passes a connection to the
process of its first request. A request for another process's session is forwarded over that process's
private socket. Weights and engines are broadcast. The sockets are in a directory of this user only.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from afield.errors import Unavailable
from afield.gateway.api_error import ApiError, engine_down, unauthorized
from afield.gateway.http import Receive, Scope, Send, decompressed, header, key_of, path_key, read_raw
from afield.gateway.session_keys import header_session_id, session_named_by, split_header_key

_SESSION = re.compile(r"/(?:s|sessions)/(?!states$)([^/]+)")
_TO_ALL = {
    ("POST", "/policy"),
    ("POST", "/policy/pause"),
    ("POST", "/policy/resume"),
    ("POST", "/engines"),
    ("DELETE", "/engines"),
    ("DELETE", "/keys"),
}
_PART = re.compile(r"^/(engines|keys)/.*")
_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"host", b"content-length"}
TIMEOUT_S = 900.0
PASSED = "passed"


def owner(session_id: str, count: int) -> int:
    return zlib.crc32(session_id.encode()) % count


def session_of(path: str, scope: Scope, key: str) -> str | None:
    """Returns the session of a request, by path, key, or the header that the key names."""
    match = _SESSION.match(path)
    if match or not (parts := split_header_key(key)):
        return match[1] if match else session_named_by(key)
    value = header(scope, parts.header.encode("latin-1", "replace"))
    return header_session_id(parts.id, value) if value else None


def socket_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"


class Shard:
    """This process of `count`; `async with` opens the connections to the others."""

    def __init__(self, index: int, count: int, folder: Path) -> None:
        self.index = index
        self.count = count
        self._folder = folder
        self._peers: dict[int, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=TIMEOUT_S)
        for index in range(self.count):
            if index != self.index:
                connector = aiohttp.UnixConnector(str(socket_path(self._folder, index)), limit=0)
                self._peers[index] = aiohttp.ClientSession(
                    connector=connector, timeout=timeout, auto_decompress=False
                )
        return self

    async def __aexit__(self, *exc: object) -> None:
        for peer in self._peers.values():
            await peer.close()

    def owns(self, session_id: str) -> bool:
        return owner(session_id, self.count) == self.index

    def own_id(self, make: Callable[[], str]) -> str:
        """Returns a new session id that this process owns."""
        while not self.owns(session_id := make()):
            pass
        return session_id

    async def elsewhere(
        self, scope: Scope, receive: Receive, send: Send, admits: Callable[[str], bool]
    ) -> Receive | None:
        """Forwards a request to its session's process; else returns the ASGI receive for its body.

        Bodies are forwarded as sent, and read only for a key that `admits` accepts.
        """
        if not _passed(scope):  # came over the private socket
            return receive
        key = key_of(scope)
        session_id = session_of(scope["path"], scope, key)
        opens = (scope["method"], scope["path"].rstrip("/")) == ("POST", "/sessions")
        if not opens and (session_id is None or self.owns(session_id)):
            return receive
        if not admits(key):
            raise unauthorized()
        body = await read_raw(scope, receive)
        if opens:
            session_id = _id_in(await decompressed(scope, body))
            if session_id is None or self.owns(session_id):
                return _again(body, receive)
        assert session_id is not None
        await self._forward(owner(session_id, self.count), scope, body, receive, send)
        return None

    async def tell_others(self, scope: Scope, body: bytes) -> None:
        """Broadcasts a request; an error of any process fails it."""
        path = _PART.sub(r"/\1", scope["path"]).rstrip("/")
        if _passed(scope) and (scope["method"], path) in _TO_ALL:
            # Weights one after the other: the processes share the engines.
            if path == "/policy":
                answers = [await self._ask(i, scope, body) for i in self._peers]
            else:
                answers = await asyncio.gather(*(self._ask(i, scope, body) for i in self._peers))
            for status, answer in answers:
                if status >= 400:
                    raise _refusal(status, answer)

    async def gather(self, path: str, key: str) -> list[bytes]:
        """Returns the responses of the other processes to a GET, without failed ones."""
        answers = await asyncio.gather(*(self._ask(i, _asking("GET", path, key), b"") for i in self._peers))
        return [answer for status, answer in answers if status == 200]

    def homes(self, session_ids: Iterable[str]) -> dict[int, list[str]]:
        """Groups session ids by process."""
        homes: dict[int, list[str]] = {}
        for session_id in session_ids:
            homes.setdefault(owner(session_id, self.count), []).append(session_id)
        return homes

    async def ask(self, path: str, bodies: Mapping[int, bytes], key: str) -> list[bytes]:
        """Returns the responses of several processes to a POST each; raises if one fails."""
        scope = _asking("POST", path, key)
        answers = await asyncio.gather(*(self._ask(index, scope, body) for index, body in bodies.items()))
        for status, answer in answers:
            if status >= 400:
                raise _refusal(status, answer)
        return [answer for _, answer in answers]

    async def _ask(self, index: int, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """Sends a request with a decompressed body."""
        plain = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
        try:
            async with self._request(index, {**scope, "headers": plain}, body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"gateway process {index} does not answer: {error}") from error

    async def _forward(self, index: int, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        watch = asyncio.create_task(_cancel_when_gone(receive, task))
        try:
            async with self._request(index, scope, body) as response:
                headers = [(k, v) for k, v in response.raw_headers if k.lower() != b"transfer-encoding"]
                await send({"type": "http.response.start", "status": response.status, "headers": headers})
                async for piece in response.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"gateway process {index} does not answer: {error}") from error
        finally:
            watch.cancel()

    def _request(self, index: int, scope: Scope, body: bytes) -> Any:
        query = scope.get("query_string", b"").decode("latin-1")
        url = f"http://peer{scope['path']}" + (f"?{query}" if query else "")
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in _HOP]
        return self._peers[index].request(scope["method"], url, data=body or None, headers=headers)


def _asking(method: str, path: str, key: str) -> Scope:
    headers = [(b"authorization", f"Bearer {key}".encode())]
    return {"method": method, "path": path, "query_string": b"", "headers": headers}


def _refusal(status: int, answer: bytes) -> ApiError:
    """Rebuilds the error of another process."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return ApiError(status, error["type"], error["message"], error["hint"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        text = answer[:300].decode(errors="replace")
        return engine_down(f"another gateway process failed with {status}: {text}")


def _passed(scope: Scope) -> bool:
    """Returns whether the request came over an external connection (see `server`)."""
    return bool(scope.get("state", {}).get(PASSED))


def _id_in(body: bytes) -> str | None:
    try:
        fields = msgspec.json.decode(body or b"{}")
    except msgspec.MsgspecError:
        return None
    session_id = fields.get("id") if isinstance(fields, dict) else None
    return session_id if isinstance(session_id, str) else None


def _again(body: bytes, receive: Receive) -> Receive:
    """Returns an ASGI receive that replays a body."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def once_more() -> Any:
        return messages.pop() if messages else await receive()

    return once_more


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[Any] | None) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if task:
        task.cancel()


def route(head: bytes, count: int) -> int:
    """Returns the process of a connection, by the head of its first request."""
    lines = head.split(b"\r\n")
    path = [*lines[0].split(b" "), b"", b""][1].decode("latin-1").partition("?")[0]
    pairs = [line.partition(b":") for line in lines[1:] if b":" in line]
    scope: Scope = {"headers": [(name.lower(), value.strip()) for name, _, value in pairs]}
    key, rest = path_key(path) or (key_of(scope), path)
    session_id = session_of(rest, scope, key)
    if session_id is None:
        session_id = header(scope, b"user-agent")
    return owner(session_id, count)
