"""The server as a whole: its parts put together, and served until it is told to stop.

async with AcrServer(AcrOptions(images={"math": Image(script="app.py")})) as server:
    boto3.client("bedrock-agentcore", endpoint_url=server.url, ...)
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self

import uvicorn
from msgspec import Struct, field

from afield.agentcore_local.app import LocalAgentCoreApp
from afield.agentcore_local.control_plane import Account, Control
from afield.agentcore_local.data_plane import Data
from afield.agentcore_local.faults import Fault, Luck
from afield.agentcore_local.hosts import Places, PlainPlaces
from afield.agentcore_local.images import Image
from afield.agentcore_local.quotas import Counts, Quotas
from afield.agentcore_local.sessions import Pace, Sessions
from afield.options import Limits
from afield.sdk.listen import listen


class AgentCoreServerOptions(Struct, frozen=True, kw_only=True):
    """`allow` are the HOST:PORT that sandboxed programs reach; plain processes reach everything."""

    images: Mapping[str, Image] = field(default_factory=dict)
    isolation: Literal["sandbox", "none"] = "sandbox"
    allow: tuple[tuple[str, int], ...] = ()
    mounts: tuple[str, ...] = ()
    warm: tuple[str, ...] = ()
    limits: Limits = Limits()
    quotas: Quotas = Quotas()
    pace: Pace = Pace()
    account: Account = Account()
    faults: Mapping[str, Fault] = field(default_factory=dict)
    seed: int = 0
    signed: bool = False
    secret_key: str = ""
    """Secret access key that all requests must be signed with; empty: signatures are not verified."""
    logs: Path | None = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are for whoever runs the event loop."""
        yield


class AgentCoreServer:
    def __init__(
        self,
        options: AgentCoreServerOptions,
        listener: socket.socket | None = None,
        *,
        http: Literal["auto", "h11", "httptools"] = "auto",
    ) -> None:
        """`http` is the parser: httptools where it is installed, else h11."""
        self._http: Literal["auto", "h11", "httptools"] = http
        self._options = options
        self._listener = listener
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def _open(self, stack: AsyncExitStack) -> None:
        options = self._options
        logs = options.logs
        if logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="afield-acr-")))
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        luck, counts = Luck(dict(options.faults), options.seed), Counts(time.monotonic)
        places = await stack.enter_async_context(self._places(logs))
        sessions = Sessions(places, options.quotas, options.pace, luck, counts)
        await stack.enter_async_context(sessions)
        control = Control(options.account, options.images, places, sessions, luck)
        stack.push_async_callback(control.close)
        data = Data(control, sessions, options.quotas, options.pace, luck)
        app = LocalAgentCoreApp(
            control,
            data,
            sessions,
            counts,
            luck,
            signed=options.signed,
            secret_key=options.secret_key,
            folder=logs,
        )
        await self._serve(stack, app)

    def _places(self, logs: Path) -> Places:
        if self._options.isolation == "none":
            return PlainPlaces(logs)
        from afield.agentcore_local.sandbox_hosts import CellPlaces

        options = self._options
        return CellPlaces(
            logs,
            options.limits,
            allow=options.allow,
            mounts=options.mounts,
            warm=options.warm,
            init_s=options.pace.init_s,
        )

    async def _serve(self, stack: AsyncExitStack, app: LocalAgentCoreApp) -> None:
        listener = self._listener or listen("127.0.0.1", 0)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            app,
            http=self._http,
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            backlog=2048,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=60,
        )
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))

        async def end() -> None:
            server.should_exit = True
            await running
            listener.close()

        stack.push_async_callback(end)
        while not server.started and not running.done():
            await asyncio.sleep(0.01)

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
