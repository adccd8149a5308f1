"""Gateways from settings: clients, servers in this process, and child processes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from afield.errors import root_cause
from afield.factory.engines import engine_pool
from afield.factory.registry import needs
from afield.factory.relay import engine_spec, relay_client, relay_route
from afield.factory.telemetry import span_exporter
from afield.orchestrator.state import RunDirectory, RunInfo, find_run
from afield.sdk.listen import listen
from afield.settings.environment import Environment, agent_environment, relay_environment
from afield.settings.fields import values_of
from afield.settings.gateway import GatewaySettings, ManagedEngineSettings
from afield.utils.gateway_process import GatewayProcess
from afield.utils.private_files import STATE, private_directory, state_directory

LOAD_TIMEOUT_S = 180.0
"""Time to start a gateway process and load its tokenizer, in seconds."""
MIB = 1024 * 1024
COMMAND = [sys.executable, "-m", "afield", "gateway", "--json", "--config", "-"]
"""Command of a gateway process: reads settings from the first line of standard input, exits when it
closes."""
SESSIONS_AT_ONCE = 64
"""Sessions of a store that are copied to a run at once."""
SHARD_COMMAND = [sys.executable, "-m", "afield", "gateway-process"]


class ShardSettings(Struct, frozen=True, kw_only=True):
    """Settings of one of several gateway processes on one port."""

    index: int
    """Number of the process, from 0."""
    link: int
    """File descriptor through which it gets connections."""
    sockets: Path
    """Directory of the processes' own sockets."""
    gateway: GatewaySettings
    """Settings of the gateway."""
    relay_secret: str = ""
    """Secret of the cluster at a relay, if it came from the environment."""


def start_timeout(settings: GatewaySettings) -> float:
    """Time until a gateway process must serve, in seconds, including that of its engines."""
    return LOAD_TIMEOUT_S + settings.engine_start_timeout_s


def gateway_process(
    settings: GatewaySettings, log: Path, listener: socket.socket | None = None
) -> GatewayProcess:
    """A gateway in a child process of this one, which is not started yet."""
    environment = agent_environment() | relay_environment()
    timeout_s = start_timeout(settings)
    return GatewayProcess(COMMAND, environment, log, start_timeout_s=timeout_s, listener=listener)


def gateway_client(url: str, admin_key: str, **options: Any) -> Any:
    """A client of the gateway at an address."""
    with needs("gateway"):
        from afield.gateway.client import HttpGateway

    return HttpGateway(url, admin_key, **options)


def endpoint_gateway(url: str, api_key: str) -> Any:
    """Stands for the gateway where agents call any OpenAI-compatible endpoint, which records nothing."""
    with needs("gateway"):
        from afield.gateway.endpoint import EndpointGateway

    return EndpointGateway(url, api_key)


def open_run(runs: Path, name: str) -> RunDirectory:
    """Find a run by id or path; or a gateway's store, whose closed sessions become rollouts of a run."""
    for path in (Path(name), runs / name):
        run, store = RunDirectory(path), path / "gateway.sqlite"
        if store.exists() and (not run.is_run or run.info.kind == "gateway"):
            _copy_sessions(run, store)
            return run
    return find_run(runs, name)


def _copy_sessions(run: RunDirectory, store: Path) -> None:
    """Add the sessions that closed since the last time."""
    with needs("gateway"):
        from afield.gateway.store_reader import closed_sessions

    with run.locked("create", wait=True), run.index as index:
        run.write_info(RunInfo(kind="gateway"))
        index.refresh()
        recorded = {row["id"] for row in index.query("SELECT id FROM rollouts")}
        results = closed_sessions(store, recorded)
        while batch := list(itertools.islice(results, SESSIONS_AT_ONCE)):
            run.append_rollouts(None, batch)


def remove_ended_sessions(store: Path) -> int:
    """Remove completed sessions from a gateway's store; returns their number."""
    with needs("gateway"):
        from afield.gateway.store import remove_ended

    return remove_ended(store)


def chat_tokenizer(model: Path, *, cache: Path | None = None, rules: bool = True) -> Any:
    """The tokenizer and chat template of a model directory."""
    with needs("gateway"):
        from afield.chat import ChatTokenizer

    return ChatTokenizer.load(model, cache=cache, rules=rules)


async def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    ready: Callable[[str], None],
    *,
    shard: Any = None,
    link: int | None = None,
    relay_secret: str = "",
) -> None:
    """Serve a gateway on a listening socket until cancelled; `ready` gets the model's name."""
    with needs("gateway"):
        from afield.gateway.app import GatewayApp
        from afield.gateway.outcomes import GatewayLimits
        from afield.gateway.server import ConnectionLimits, serve
        from afield.gateway.service import LocalGateway
        from afield.gateway.session_keys import SecretPlace
        from afield.gateway.shards import PASSED
        from afield.transports.spec import from_spec

    task = asyncio.current_task()
    assert task is not None
    # Each agent may hold hundreds of connections; the default limit is about a thousand open files.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model, store = Path(settings.model), Path(settings.store)
    environment = Environment.read()
    route = relay_route(settings, relay_secret or environment.relay_secret, settings.public_url)
    tokenizer = chat_tokenizer(model, cache=environment.template_profiles)
    placement = ManagedEngineSettings(**values_of(settings, ManagedEngineSettings))
    if not placement.vllm_logs:
        placement = structs.replace(placement, vllm_logs=str(store / "logs"))
    pool = engine_pool(
        [engine_spec(spec, route) for spec in settings.engine],
        model,
        slots=settings.slots,
        seed=settings.seed,
        record=Path(settings.record_engine_calls) if settings.record_engine_calls else None,
        start_timeout_s=settings.engine_start_timeout_s,
        dtype=settings.engine_dtype,
        placement=placement,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        outlet = None
        if settings.outcomes:
            outlet = await stack.enter_async_context(from_spec(settings.outcomes, store / "outcomes"))
        secret_file = Path(settings.secret_file) if settings.secret_file else None
        if secret_file is None:
            private_directory(state_directory(), STATE)
        app_type: type[GatewayApp] = GatewayApp
        calls: dict[str, Any] = {}
        if spans := span_exporter(settings, "afield-gateway"):
            from afield.gateway.tracing import TracedCalls, TracedGatewayApp

            stack.push_async_callback(asyncio.to_thread, spans.close)
            app_type, calls = TracedGatewayApp, {"make_calls": partial(TracedCalls, spans)}
        gateway = LocalGateway(
            tokenizer=tokenizer,
            engine=pool,
            store=store,
            **calls,
            admin_key=settings.admin_key,
            public_url=settings.public_url,
            routes=route,
            durable=settings.durable,
            store_shared=settings.store_shared,
            path_keys=settings.path_keys,
            keep_sessions_s=settings.keep_sessions_h * 3600,
            shard=shard,
            outlet=outlet,
            secret=SecretPlace(directory=environment.secrets, file=secret_file),
            limits=GatewayLimits(
                submission_bytes=settings.max_submission_mb * MIB,
                session_bytes=settings.max_session_mb * MIB,
                rewards=settings.max_rewards,
            ),
        )
        await stack.enter_async_context(gateway)
        _relax_garbage_collection()
        # Only now: a gateway that is still loading has nothing to save and exits at once.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        connections = ConnectionLimits(per_address=min(settings.max_connections, hard * 3 // 4))
        app = app_type(gateway)
        if route is not None:
            state = {PASSED: True} if shard else {}
            number = {"process": shard.index, "processes": shard.count} if shard else {}
            client = relay_client(app, route, state=state, **number)
            await stack.enter_async_context(running(client.run()))
        await serve(
            gateway, listener, lambda: ready(tokenizer.name), link=link, connections=connections, app=app
        )


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine beside the body; its failure ends the body."""
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from errors


def _relax_garbage_collection() -> None:
    """Run garbage collection rarely: loaded objects are never freed, and gateway data has no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


# --- several processes on one port ---------------------------------------------------------------------


async def serve_front(
    settings: GatewaySettings, listener: socket.socket, ready: Callable[[str], None]
) -> None:
    """Start the gateway's processes and pass connections to them until cancelled."""
    with needs("gateway"):
        from afield.gateway.front import Front

    task = asyncio.current_task()
    assert task is not None
    with tempfile.TemporaryDirectory(prefix="afield-") as sockets:
        secret = Environment.read().relay_secret

        def shard_settings(index: int, link: int) -> bytes:
            shard = ShardSettings(
                index=index, link=link, sockets=Path(sockets), gateway=settings, relay_secret=secret
            )
            return msgspec.json.encode(shard, enc_hook=str)

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        front = Front(
            SHARD_COMMAND,
            settings.processes,
            agent_environment(),
            settings=shard_settings,
            start_timeout_s=start_timeout(settings),
            per_address=settings.max_connections,
        )
        await front.serve(listener, lambda started: ready(started["model"]))


async def serve_shard(line: bytes, ready: Callable[[str], None]) -> None:
    """Serve one of several gateway processes; `line` is a ShardSettings as JSON."""
    with needs("gateway"):
        from afield.gateway.shards import Shard, socket_path

    settings = read_shard(line)
    path = socket_path(settings.sockets, settings.index)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        listener.setblocking(False)
        shard = Shard(settings.index, settings.gateway.processes, settings.sockets)
        secret = settings.relay_secret
        await serve(settings.gateway, listener, ready, shard=shard, link=settings.link, relay_secret=secret)


def read_shard(line: bytes) -> ShardSettings:
    return msgspec.json.decode(line, type=ShardSettings, dec_hook=lambda kind, value: kind(value))


# --- a gateway for one engine --------------------------------------------------------------------------


@asynccontextmanager
async def gateway_for(
    engine: Any, model: Path, store: Path
) -> AsyncIterator[tuple[Any, tuple[str, int], str]]:
    """A gateway on a free loopback port in front of one engine: its client, address and admin key."""
    with needs("gateway"):
        from afield.gateway.engine_pool import EnginePool
        from afield.gateway.server import serve
        from afield.gateway.service import LocalGateway

    pool = EnginePool({"scripted": engine}, tries=1)
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()[:2]
    url, admin_key = f"http://{host}:{port}", secrets.token_urlsafe(16)
    local = LocalGateway(
        tokenizer=chat_tokenizer(model), engine=pool, store=store, admin_key=admin_key, public_url=url
    )
    ready = asyncio.Event()
    async with pool, local:
        server = asyncio.create_task(serve(local, listener, ready.set))
        try:
            await asyncio.wait_for(ready.wait(), LOAD_TIMEOUT_S)
            async with gateway_client(url, admin_key) as client:
                yield client, (host, port), admin_key
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
