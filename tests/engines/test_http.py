"""The HTTP client of engines: responses in every framing, reuse of connections, failures."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from afield.engines import http_connection
from afield.engines.http import EngineHttpClient
from afield.engines.http_connection import BUFFER, ConnectionPool, HttpConnection
from afield.errors import Unavailable
from support.certificates import certificate
from support.engine_calls import BOUND_S

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"content-length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
UNTIL_CLOSE = OK + b"content-type: text/plain\r\n\r\nhello"
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request with the next of `replies`: bytes, or a function that writes them."""

    def __init__(self, *replies: bytes | Reply) -> None:
        self.replies = list(replies)
        self.requests: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        """Set when a client closed its connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                self.requests.append(head + body)
                reply = self.replies.pop(0)
                if not isinstance(reply, bytes):
                    await reply(reader, writer)
                    continue
                writer.write(reply)
                await writer.drain()
                if reply == UNTIL_CLOSE or b"onnection: close" in reply or not reply:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def client(
    server: Server, path: str = "", idle_s: float = 30.0, held: Callable[[], bool] = lambda: False
) -> AsyncIterator[EngineHttpClient]:
    async with asyncio.timeout(BOUND_S):
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}{path}"
        async with listener, EngineHttpClient(url, api_key="k", idle_s=idle_s, held=held) as http:
            yield http


@pytest.mark.parametrize("reply", [SIZED, CHUNKED, UNTIL_CLOSE, b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED])
async def test_a_body_in_every_framing_is_read(reply: bytes) -> None:
    async with client(Server(reply, reply)) as http:
        assert await http.ask("GET", "/a") == b"hello"
        assert await http.ask("POST", "/a", {"b": 1}) == b"hello"


@pytest.mark.parametrize("reply", [SIZED, CHUNKED, UNTIL_CLOSE])
async def test_a_response_may_arrive_in_single_bytes(reply: bytes) -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for n in range(len(reply)):
            writer.write(reply[n : n + 1])
            await asyncio.sleep(0)
        if reply == UNTIL_CLOSE:
            writer.close()

    async with client(Server(slowly, slowly)) as http:
        assert await http.ask("GET", "/a") == b"hello"
        assert b"".join([part async for part in http.reads("/a", None, {})]) == b"hello"


async def test_the_request_has_the_path_the_headers_and_the_body() -> None:
    server = Server(SIZED, SIZED)
    async with client(server, "/base/") as http:
        await http.ask("POST", "/a?b=c", {"d": "é"}, headers={"x-session-id": "s"})
        await http.ask("POST", "/empty")
        host = http.url.removeprefix("http://").removesuffix("/base").encode()
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/a?b=c HTTP/1.1"
    assert {b"host: " + host, b"authorization: Bearer k", b"x-session-id: s"} <= set(lines)
    assert {b"content-type: application/json", b"content-length: 10"} <= set(lines)
    assert body == '{"d":"é"}'.encode()
    assert b"content-length: 0\r\n" in server.requests[1]


async def test_a_url_with_a_user_sends_its_password() -> None:
    server = Server(SIZED)
    async with (
        client(server) as plain,
        EngineHttpClient(plain.url.replace("//", "//me:p%40ss@"), api_key=None, idle_s=30.0) as http,
    ):
        await http.ask("GET", "/a")
    assert b"authorization: Basic bWU6cEBzcw==\r\n" in server.requests[0]
    assert b"host: 127.0.0.1:" in server.requests[0]


async def test_a_header_of_two_lines_is_refused() -> None:
    server = Server(SIZED)
    async with client(server) as http:
        with pytest.raises(ValueError, match="the header x-session-id is not one line of text"):
            await http.ask("GET", "/a", headers={"x-session-id": "s\r\nx: y"})
    assert not server.requests


async def test_a_connection_is_used_again_unless_the_server_closes_it() -> None:
    server = Server(SIZED, CHUNKED, OK + b"Connection: close\r\ncontent-length: 0\r\n\r\n", SIZED)
    async with client(server) as http:
        for _ in range(4):
            await http.ask("GET", "/a")
    assert server.connections == 2


async def test_an_idle_connection_that_the_server_dropped_is_not_used() -> None:
    closed = asyncio.Event()

    async def then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SIZED)
        await writer.drain()
        writer.close()
        closed.set()

    server = Server(then_close, SIZED)
    async with client(server) as http:
        await http.ask("POST", "/a")
        await closed.wait()
        await asyncio.sleep(0.05)
        assert await http.ask("POST", "/a") == b"hello"
    assert server.connections == 2


async def test_an_idle_connection_expires_even_if_the_event_loop_was_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "KEEP_S", 0.05)
    server = Server(SIZED, SIZED)
    async with client(server) as http:
        await http.ask("POST", "/a")
        time.sleep(0.1)  # noqa: ASYNC251
        await http.ask("POST", "/a")
    assert server.connections == 2


async def test_a_get_is_repeated_when_an_idle_connection_breaks_and_a_post_is_not() -> None:
    server = Server(SIZED, b"", SIZED, b"")
    async with client(server) as http:
        assert await http.ask("GET", "/a") == b"hello"
        assert await http.ask("GET", "/a") == b"hello"
        with pytest.raises(Unavailable, match=r"closed the connection: the response is incomplete"):
            await http.ask("POST", "/a")
    assert len(server.requests) == 4


async def test_unrequested_bytes_end_the_connection() -> None:
    server = Server(SIZED + SIZED.replace(b"hello", b"wrong"), SIZED)
    async with client(server) as http:
        assert await http.ask("GET", "/a") == b"hello"
        assert await http.ask("GET", "/a") == b"hello"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (SIZED[:-1], "the response is incomplete"),
        (CHUNKED[:-5], "the response is incomplete"),
        (b"SSH-2.0-OpenSSH\r\n", "the response is not HTTP"),
        (CHUNKED.replace(b"3;x=y", b"x;"), "the response is not HTTP"),
    ],
)
async def test_a_response_that_is_broken_names_the_server(reply: bytes, problem: str) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        await writer.drain()
        writer.close()

    async with client(Server(broken, broken)) as http:
        with pytest.raises(Unavailable, match=f"{http.url} closed the connection: {problem}"):
            await http.ask("POST", "/a")
        with pytest.raises(Unavailable, match=problem):
            async for _ in http.reads("/a", None, {}):
                pass


async def test_what_arrived_before_a_failure_is_read() -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-7])
        await writer.drain()
        writer.close()

    parts: list[bytes] = []
    async with client(Server(broken)) as http:
        with pytest.raises(Unavailable):
            async for part in http.reads("/a", None, {}):
                parts.append(part)
                await asyncio.sleep(0.05)
    assert b"".join(parts).startswith(b"he")


async def test_a_stream_that_is_left_closes_its_connection() -> None:
    forever = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n")
        await writer.drain()
        assert not await reader.read()
        forever.set()

    async with client(Server(endless)) as http:
        async with aclosing(http.reads("/a", None, {})) as reads:
            assert await anext(reads) == b"he"
        await forever.wait()


async def test_a_client_that_is_closed_ends_its_requests() -> None:
    requested = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set()
        await reader.read()

    async with client(Server(silent)) as http:
        asking = asyncio.create_task(http.ask("POST", "/a"))
        await requested.wait()
        await http.__aexit__()
        with pytest.raises(Unavailable, match="the engine was closed"):
            await asking


async def test_a_reader_that_is_slow_stops_the_server() -> None:
    size, sent = 16 * BUFFER, 0

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        part = bytes(BUFFER)
        for _ in range(size // BUFFER):
            writer.write(part)
            await writer.drain()
            sent += BUFFER

    async with client(Server(large)) as http, aclosing(http.reads("/a", None, {})) as reads:
        received = len(await anext(reads))
        await asyncio.sleep(0.5)
        assert sent < size // 2
        async for part in reads:
            received += len(part)
    assert received == sent == size


async def test_a_silent_server_is_unavailable_and_a_paused_one_is_not() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        writer.write(SIZED)

    held = True
    async with client(Server(late, late), idle_s=0.3, held=lambda: held) as http:
        assert await http.ask("POST", "/a", still=True) == b"hello"
        held = False
        with pytest.raises(Unavailable, match=r"sent nothing for 0.3 s"):
            await http.ask("POST", "/a", still=True)


LONG_S = 3600.0


@asynccontextmanager
async def connection(server: Server) -> AsyncIterator[HttpConnection]:
    """A connection whose response has begun."""
    async with client(server) as http:
        pool = ConnectionPool(http.url, {}, 10.0)
        taken = await pool.connect()
        try:
            await taken.send(pool.request("GET", "/a", None, {}))
            yield taken
        finally:
            pool.put(taken)
            pool.close()


async def test_what_is_gathered_is_one_read_and_the_end_does_not_wait() -> None:
    async def in_parts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (CHUNKED[:-17], CHUNKED[-17:-5], CHUNKED[-5:]):
            writer.write(part)
            await asyncio.sleep(0.02)

    async with connection(Server(in_parts)) as taken:
        assert await taken.read() == b"he"
        taken.gather(LONG_S)
        assert await taken.read() == b"llo"
        assert await taken.read() == b""
        taken.gather(LONG_S)
        assert await taken.read() == b""
        assert taken.reusable


async def test_a_failure_does_not_wait_for_what_is_gathered() -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED[:-17])
        await asyncio.sleep(0.05)
        writer.write(CHUNKED[-17:-5])
        await writer.drain()
        writer.close()

    async with connection(Server(broken)) as taken:
        assert await taken.read() == b"he"
        taken.gather(LONG_S)
        assert await taken.read() == b"llo"
        taken.gather(LONG_S)
        with pytest.raises(ConnectionError, match="the response is incomplete"):
            await taken.read()


async def test_gathering_ends_with_its_time_and_with_a_full_buffer() -> None:
    more = asyncio.Event()

    async def large(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"content-length: %d\r\n\r\nhe" % (2 * BUFFER + 4))
        await asyncio.sleep(0.02)
        writer.write(b"ll")
        await more.wait()
        writer.write(bytes(2 * BUFFER))
        await reader.read()

    async with connection(Server(large)) as taken:
        assert await taken.read() == b"he"
        taken.gather(0.05)
        assert await taken.read() == b"ll"
        taken.gather(LONG_S)
        more.set()
        assert len(await taken.read()) >= BUFFER


async def test_tls_is_verified_against_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.chain, files.key)
    server = Server(CHUNKED, SIZED)
    async with asyncio.timeout(BOUND_S):
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{listener.sockets[0].getsockname()[1]}"
        async with listener:
            async with EngineHttpClient(url, api_key="k", idle_s=5.0, held=lambda: False) as http:
                with pytest.raises(Unavailable, match="certificate verify failed"):
                    await http.ask("GET", "/a")
            monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
            async with EngineHttpClient(url, api_key="k", idle_s=5.0, held=lambda: False) as http:
                assert [await http.ask("GET", "/a"), await http.ask("GET", "/a")] == [b"hello"] * 2
    assert server.connections == 1  # the refused one never got that far
