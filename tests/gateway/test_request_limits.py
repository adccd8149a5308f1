"""Bodies that unpack to more than they seem, and connections that never say what they want."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.outcomes import GatewayLimits
from afield.gateway.server import ConnectionLimits
from afield.interfaces import SessionSpec
from afield.interfaces.engine import GenerateRequest
from support.gateways import Running, running, vocabulary

pytestmark = pytest.mark.anyio
MB = 1024 * 1024


def hello(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(vocabulary().encode("hello<|im_end|>")))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bomb(size: int) -> bytes:
    """Zeros that gzip makes a thousand times smaller."""
    packing = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    piece = bytes(MB)
    return b"".join(packing.compress(piece) for _ in range(size // MB)) + packing.flush()


class Attack:
    """Statuses of requests that run while health is asked, and what was seen meanwhile."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.healthy = 0
        self.most_resident = 0

    async def run(self, up: Running, key: str, body: bytes, count: int) -> None:
        headers = {"authorization": f"Bearer {key}", "content-encoding": "gzip"}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def send() -> None:
                url = f"{up.url}/v1/chat/completions"
                async with http.post(url, data=body, headers=headers) as answer:
                    self.statuses.append(answer.status)
                    await answer.read()

            attack = asyncio.gather(*(send() for _ in range(count)))
            while not attack.done():
                async with http.get(f"{up.url}/health") as answer:
                    assert answer.status == 200
                self.healthy += 1
                self.most_resident = max(self.most_resident, resident_bytes())
            await attack


async def test_gzip_bombs_get_413_while_others_are_served(tmp_path: Path) -> None:
    body = bomb(256 * MB)
    before = resident_bytes()
    async with running(ScriptedEngine(hello), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        attack = Attack()
        await attack.run(up, ticket.api_key, body, 10)
        assert len(attack.statuses) == 10
        assert set(attack.statuses) <= {413, 429}
        assert 413 in attack.statuses
        # In the event loop, one health request would be served for all bodies that are unpacked in a row.
        assert attack.healthy > 3 * len(attack.statuses)
        assert attack.most_resident - before < 600 * MB
        assert up.gateway.sessions.get("r.1").body_bytes == 0
        agent = await up.agent("r.2")
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])


async def test_request_bytes_in_flight_are_limited_per_session(tmp_path: Path) -> None:
    limits = GatewayLimits(request_bytes=MB, session_bytes=2 * MB)
    text = "x" * 900_000
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    async with running(ScriptedEngine(hello), tmp_path, limits=limits) as up:
        first = await up.client.open(SessionSpec(id="r.1"))
        other = await up.client.open(SessionSpec(id="r.2"))
        headers = {"authorization": f"Bearer {first.api_key}", "content-length": str(len(body))}
        # Two requests of one session of which the last byte has not come.
        waiting = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*address(up))
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(head.encode() + b"\r\n" + body[:-1])
            await writer.drain()
            waiting.append((reader, writer))
        session = up.gateway.sessions.get("r.1")
        async with asyncio.timeout(60):
            while session.body_bytes < 2 * (len(body) - 1):
                await asyncio.sleep(0.01)
        status, answer = await up.ask("POST", "/v1/chat/completions", body, first.api_key)
        assert status == 429 and answer["error"]["code"] == "too_many_bytes_in_flight"
        status, _ = await up.ask("POST", "/v1/chat/completions", body, other.api_key)
        assert status == 400  # taken, and too long for this model
        for _, writer in waiting:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        async with asyncio.timeout(60):
            while session.body_bytes:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (lambda whole: whole, "hello"),
        (lambda whole: whole[:-5], "ends too early"),
        (lambda whole: whole + b"more", "bytes follow the end"),
        (lambda whole: b"no gzip" + whole, "the body is not gzip"),
    ],
)
async def test_compressed_body_is_read_whole_or_refused(spoil, wanted: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": os.urandom(200_000).hex()}, {"role": "user", "content": "Hi"}]
    short = [{"role": "user", "content": "Hi " * 30}]
    async with running(ScriptedEngine(hello), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        headers = {"authorization": f"Bearer {ticket.api_key}", "content-encoding": "gzip"}
        for messages in (short, said):
            body = spoil(gzip.compress(json.dumps({"model": "m", "messages": messages}).encode()))
            _, answer = await up.ask("POST", "/v1/chat/completions", body, headers=headers)
            assert wanted in str(answer) or ("context length" in str(answer) and wanted == "hello")


# --- connections ---------------------------------------------------------------------------------

QUICK = ConnectionLimits(per_address=8, head_s=0.4, body_s=0.4, body_rate=100_000, poll_interval_s=0.1)


def address(up: Running) -> tuple[str, int]:
    host, _, port = up.url.removeprefix("http://").partition(":")
    return host, int(port)


@asynccontextmanager
async def connected(up: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address(up))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def drip(writer: asyncio.StreamWriter, text: bytes) -> None:
    """A byte now and then, so that the connection is never silent for long."""
    with suppress(OSError):
        while True:
            for byte in text:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("begin", "then", "answer"),
    [
        (b"", b"", b""),
        (b"", b"\r\n", b""),
        (b"GET /health HTTP/1.1\r\n", b"x: y\r\n", b"the head of the request did not come"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 100000\r\nx-api-key: KEY\r\n\r\n",
            b"x",
            b"the body of the request did not come",
        ),
        (b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n", b"\r\n", b'"status":"ok"'),
    ],
    ids=["silent", "empty lines", "slow head", "slow body", "empty lines after an answer"],
)
async def test_incomplete_request_times_out(begin: bytes, then: bytes, answer: bytes, tmp_path: Path) -> None:
    async with running(ScriptedEngine(hello), tmp_path, connections=QUICK) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        async with connected(up) as (reader, writer):
            writer.write(begin.replace(b"KEY", ticket.api_key.encode()))
            dripping = asyncio.create_task(drip(writer, then)) if then else None
            heard = await asyncio.wait_for(_all_of(reader), 60)
            assert answer in heard
            if dripping:
                dripping.cancel()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    heard = b""
    with suppress(ConnectionError):
        while more := await reader.read(65536):
            heard += more
    return heard


async def test_large_body_above_the_minimum_rate_is_accepted(tmp_path: Path) -> None:
    """Longer in all than the time for a body, at more than the least rate."""
    async with running(ScriptedEngine(hello), tmp_path, connections=QUICK) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        async with connected(up) as (reader, writer):
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 400000\r\nx-api-key: {ticket.api_key}"
            )
            writer.write(head.encode() + b"\r\n\r\n")
            for _ in range(20):
                writer.write(b"x" * 20_000)
                await writer.drain()
                await asyncio.sleep(0.06)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert answer.startswith(b"HTTP/1.1 400")  # it is no JSON


async def test_running_call_does_not_time_out_its_client(tmp_path: Path) -> None:
    requested, go_on = asyncio.Event(), asyncio.Event()

    class Waiting(ScriptedEngine):
        async def generate(self, call: GenerateRequest):
            requested.set()
            await go_on.wait()
            async for chunk in super().generate(call):
                yield chunk

    async with running(Waiting(hello), tmp_path, connections=QUICK) as up:
        agent = await up.agent()
        call = asyncio.create_task(
            agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        )
        await requested.wait()
        async with connected(up) as (reader, _):  # one that is cut off meanwhile
            await asyncio.wait_for(_all_of(reader), 60)
        go_on.set()
        assert (await call).choices[0].message.content == "hello"


async def test_connections_per_address_are_limited(tmp_path: Path) -> None:
    limits = ConnectionLimits(per_address=8)
    async with running(ScriptedEngine(hello), tmp_path, connections=limits) as up:
        held = [await asyncio.open_connection(*address(up)) for _ in range(40)]
        answers = await asyncio.gather(*(_refused(reader) for reader, _ in held))
        assert sum(answers) >= 32
        for _, writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in held), return_exceptions=True)
        for _ in range(200):
            with suppress(aiohttp.ClientError):
                status, _ = await up.ask("GET", "/health")
                if status == 200:
                    break
            await asyncio.sleep(0.05)
        assert (await up.ask("GET", "/health"))[0] == 200


async def _refused(reader: asyncio.StreamReader) -> bool:
    try:
        return b"too_many_connections" in await asyncio.wait_for(_all_of(reader), 5)
    except TimeoutError:
        return False


async def test_body_with_half_of_a_surrogate_pair_gets_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine(hello), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d\\ude00 \\ud800"}]}'
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/s/r.1/outcome"):
            status, answer = await up.ask("POST", path, body, ticket.api_key)
            assert status == 400
            assert r"\ud800, half of a surrogate pair" in str(answer).replace("\\\\", "\\")
