"""A relay, processes that dial out to it through a cuttable proxy, and agents."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from afield.relay.auth import route_prefix, session_scope
from afield.relay.client import RelayClient
from afield.relay.server import Relay, RelayLimits, serve_relay
from afield.sdk.listen import listen
from support.ports import free_ports
from support.tcp_proxy import TcpProxy

SECRET = b"0123456789abcdef0123456789abcdef"
LIMITS = RelayLimits(hold_s=5.0, resume_s=5.0, heartbeat_s=0.5)


class App:
    """ASGI application that counts requests, echoes bodies and streams numbered lines."""

    def __init__(self, name: str = "app") -> None:
        self.name = name
        self.requests: list[str] = []
        self.disconnects = 0
        self.go_on = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests.append(scope["path"])
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"content-type", b"text/plain"), (b"x-app", self.name.encode())]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        if scope["path"].endswith("/echo"):
            await send({"type": "http.response.body", "body": body})
        elif scope["path"].endswith("/flood"):
            for _ in range(int(scope["query_string"])):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.sent += 65536
            await send({"type": "http.response.body", "body": b""})
        else:
            gone = asyncio.create_task(self._gone(receive))
            for n in range(40):
                await send({"type": "http.response.body", "body": b"line %d\n" % n, "more_body": True})
                if n == 20:
                    waiting = asyncio.create_task(self.go_on.wait())
                    await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    if gone.done():
                        self.disconnects += 1
                        return
            gone.cancel()
            await send({"type": "http.response.body", "body": b"end\n"})

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


LINES = b"".join(b"line %d\n" % n for n in range(40)) + b"end\n"


class Setup:
    """A relay, a process that dials out through a cuttable proxy, and an agent."""

    def __init__(self, app: App, limits: RelayLimits = LIMITS, port: int = 0) -> None:
        self.app = app
        self.limits = limits
        self.listener = None if port else listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1] if self.listener else port
        self.proxy = TcpProxy(self.port)

        self._clusters = {"lab": SECRET}
        self._serving = AsyncExitStack()

    @asynccontextmanager
    async def relay(self, *, clusters: dict[str, bytes] | None = None) -> AsyncIterator[Relay]:
        self._clusters = clusters or self._clusters
        try:
            yield await self.start()
        finally:
            await self.stop()

    async def start(self) -> Relay:
        relay = Relay(self._clusters, self.limits)
        listener, self.listener = self.listener or listen("127.0.0.1", self.port), None
        await self._serving.enter_async_context(serve_relay(relay, listener, limits=self.limits))
        return relay

    async def stop(self) -> None:
        """Stop the relay: agents lose their connections, and the next relay knows nothing."""
        await self._serving.aclose()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def other(self) -> Setup:
        """Another process and agent at the same relay."""
        return Setup(App(), self.limits, self.port)

    @asynccontextmanager
    async def client(self, app: Any = None, **options: Any) -> AsyncIterator[RelayClient]:
        settings = {
            "cluster": "lab",
            "gateway": "g1",
            "secret": SECRET,
            "claim_s": 5.0,
            "heartbeat_s": 0.5,
            **options,
        }
        async with self.proxy:
            client = RelayClient(app or self.app, url=f"http://127.0.0.1:{self.proxy.port}", **settings)
            running = asyncio.create_task(client.run())
            try:
                waiting = asyncio.create_task(client.connected.wait())
                await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED, timeout=10)
                if running.done():
                    await running
                yield client
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def url(self, path: str, session: str = "s1", gateway: str = "g1", cluster: str = "lab") -> str:
        prefix = route_prefix(SECRET, cluster, gateway, session_scope(session))
        return f"http://127.0.0.1:{self.port}{prefix}/s/{session}/{path}"


async def post(url: str, data: bytes = b"", **options: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.post(url, data=data, **options) as response:
        return response.status, await response.read()


@asynccontextmanager
async def stream(setup: Setup) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession() as http, http.post(setup.url("stream")) as response:
        yield response


class RelayProcess:
    """`afield relay` as a process that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._secret = folder / "secret"
        self._secret.write_bytes(SECRET)
        self._secret.chmod(0o600)
        self.port = free_ports(1)[0]

    async def start(self) -> None:
        command = [sys.executable, "-m", "afield", "relay", "--json", "--port", str(self.port)]
        command += ["--cluster", f"lab={self._secret}", "--heartbeat-interval", "0.5"]
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*command, stdout=pipe)
        assert self.process.stdout is not None
        assert json.loads(await self.process.stdout.readline())["clusters"] == ["lab"]

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()
