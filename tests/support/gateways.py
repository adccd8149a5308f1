"""A real gateway on a real port, in front of any engine, inside the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai

from afield.chat.vocabulary import Vocabulary
from afield.gateway.client import HttpGateway
from afield.gateway.engine_pool import EnginePool
from afield.gateway.outcomes import DEFAULT_LIMITS, GatewayLimits
from afield.gateway.server import ConnectionLimits, serve
from afield.gateway.service import LocalGateway
from afield.gateway.session_keys import SecretPlace
from afield.interfaces import Engine, SessionSpec, Transport
from afield.sdk.listen import listen
from support.tokenizers import POLICY, load_tokenizer

ADMIN = "test-admin-key"
SSL = ssl.create_default_context()  # reading the certificates takes 20 ms per client


def openai_client(base_url: str, api_key: str, max_retries: int = 2) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=SSL)
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=max_retries, http_client=http)


class Running:
    def __init__(self, gateway: LocalGateway, client: HttpGateway, url: str) -> None:
        self.gateway = gateway
        self.client = client
        self.url = url
        self.agents: list[openai.AsyncOpenAI] = []

    async def agent(
        self, session_id: str = "r.1", *, max_retries: int = 0, **spec: Any
    ) -> openai.AsyncOpenAI:
        """A session, and the OpenAI client an agent would use in it."""
        ticket = await self.client.open(SessionSpec(id=session_id, **spec))
        client = openai_client(ticket.openai_base_url, ticket.api_key, max_retries)
        self.agents.append(client)
        return client

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str = ADMIN,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else None
        headers = {"authorization": f"Bearer {key}"} if headers is None else headers
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, data=data, headers=headers) as response,
        ):
            return response.status, msgspec.json.decode(await response.read())


@asynccontextmanager
async def running(
    engine: Engine,
    store: Path,
    model: Path = POLICY,
    *,
    tries: int = 1,
    outlet: Transport | None = None,
    listener: socket.socket | None = None,
    limits: GatewayLimits = DEFAULT_LIMITS,
    connections: ConnectionLimits | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Serve a gateway; a call may break `tries` times, and `LocalGateway` gets the `options`."""
    listener = listener or listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    tokens = load_tokenizer(model)
    pool = EnginePool({"engine": engine}, tries=tries)
    gateway = LocalGateway(
        tokenizer=tokens,
        engine=pool,
        store=store,
        admin_key=ADMIN,
        public_url=url,
        secret=SecretPlace(directory=store.with_name(f"{store.name}-secrets")),
        outlet=outlet,
        limits=limits,
        **options,
    )
    async with pool, gateway:
        ready = asyncio.Event()
        server = asyncio.create_task(serve(gateway, listener, ready.set, connections=connections))
        try:
            await asyncio.wait_for(ready.wait(), 60)
            async with HttpGateway(url, ADMIN) as client:
                up = Running(gateway, client, url)
                yield up
                for agent in up.agents:
                    await agent.close()
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


def vocabulary(model: Path = POLICY) -> Vocabulary:
    path = model / "tokenizer.json"
    return Vocabulary(path.read_bytes(), path)


async def chat_session(up: Running, function: dict[str, Any]) -> None:
    """What a Chat client asks of prices; sessions of other dialects are compared with it."""
    client = await up.agent()
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much are x and y?"},
    ]
    tools: list[Any] = [{"type": "function", "function": function}]
    for more in ("4", "Thanks."):
        reply = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0]
        messages.append(reply.message)
        calls = reply.message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": c.id, "content": more} for c in calls] or [
            {"role": "user", "content": more}
        ]
    await client.chat.completions.create(model="m", messages=messages, tools=tools)
