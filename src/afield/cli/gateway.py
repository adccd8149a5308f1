"""`afield gateway`: serve a model to agents, and its turns to trainers."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import os
import re
import resource
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from msgspec import structs

from afield.cli.logs import FORMATS, start_logging
from afield.cli.model_checks import check_engine
from afield.errors import UsageError
from afield.private_files import STATE, private_directory, read_private, state_directory
from afield.process_secrets import hide_arguments
from afield.sdk.listen import listen
from afield.settings import ENGINE_START_S, Environment, GatewaySettings, agent_environment

SHARD_COMMAND = "gateway-process"
PROCESS_START_S = 180.0


def add(commands: Any) -> None:
    command = commands.add_parser(
        "gateway",
        help="serve a model to agents, token-exact",
        description="Serve a model to agents, and its turns to trainers.",
    )
    command.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model directory")
    command.add_argument(
        "--engine",
        action="append",
        metavar="KIND[=WHERE]",
        help="torch (embedded, default), vllm=URL, sglang=URL, or scripted=FILE for tests; may be repeated",
    )
    command.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    command.add_argument("--port", type=int, default=8400, help="0 takes any free port (default: 8400)")
    command.add_argument("--public-url", help="what agents are given; default: the address it listens on")
    command.add_argument(
        "--store", type=Path, default=Path("gateway-store"), metavar="DIR", help="default: gateway-store"
    )
    command.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="secret behind session keys; default: a file in ~/.local/state/afield/gateways",
    )
    command.add_argument("--admin-key", help="or AFIELD_ADMIN_KEY; made up and printed on loopback")
    command.add_argument(
        "--admin-key-file", type=Path, metavar="FILE", help="file with the admin key, mode 0600"
    )
    command.add_argument(
        "--processes", type=int, default=1, help="gateway processes on the one port (default: 1)"
    )
    command.add_argument(
        "--outcomes",
        metavar="SPEC",
        help="where outcomes of experiments go on to: files:///DIR, s3://BUCKET, ...",
    )
    command.add_argument("--slots", type=int, default=64, help="calls the embedded engine runs at once")
    command.add_argument(
        "--engine-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the embedded engine (default: auto, float32 on a CPU and bfloat16 on a GPU)",
    )
    command.add_argument("--seed", type=int, default=0, help="of the embedded engine (default: 0)")
    command.add_argument(
        "--record-engine-calls", type=Path, metavar="FILE", help="write every engine call here"
    )
    command.add_argument(
        "--max-submission-mb", type=int, default=16, help="of one outcome or reward (default: 16)"
    )
    command.add_argument("--max-rewards", type=int, default=10_000, help="of one session (default: 10000)")
    command.add_argument(
        "--max-session-mb",
        type=int,
        default=256,
        metavar="MB",
        help="of one session's requests in flight at once, decompressed (default: 256)",
    )
    command.add_argument(
        "--max-connections",
        type=int,
        default=16_384,
        metavar="N",
        help="from one address at once, in each process (default: 16384)",
    )
    command.add_argument(
        "--engine-start-timeout",
        type=float,
        default=ENGINE_START_S,
        metavar="S",
        help="seconds to wait at start for an engine that does not answer yet (default: 300)",
    )
    command.add_argument(
        "--keep-sessions-h",
        type=float,
        default=72.0,
        metavar="H",
        help="hours after which a session that is over leaves the store; 0 keeps all (default: 72)",
    )
    command.add_argument(
        "--path-keys",
        action="store_true",
        help="put the session's key into its base URL, for clients that cannot send one",
    )
    command.add_argument("--durable", action="store_true", help="survive power cuts too (fsync per commit)")
    command.add_argument("--log-format", choices=FORMATS, default="text", help="default: text")
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    command.add_argument("--admin-key-fd", type=int, help=argparse.SUPPRESS)
    command.set_defaults(run=run)
    shard = commands.add_parser(SHARD_COMMAND, description="One of several gateway processes on one port.")
    for name in ("--shard", "--shard-link"):
        shard.add_argument(name, type=int, required=True)
    shard.add_argument("--shard-sockets", type=Path, required=True)
    shard.set_defaults(run=run_shard)


def run(args: argparse.Namespace) -> int:
    start_logging(args.log_format)
    environment = Environment.read()
    chosen_key = given_key(args, environment)
    settings = GatewaySettings(
        model=args.model,
        engine=tuple(args.engine or ["torch"]),
        admin_key=chosen_key or "",
        public_url=args.public_url or "",
        local_url="",
        store=args.store,
        secret_file=args.secret_file,
        processes=args.processes,
        outcomes=args.outcomes or environment.outcomes,
        slots=args.slots,
        seed=args.seed,
        engine_dtype=args.engine_dtype,
        record_engine_calls=args.record_engine_calls,
        engine_start_timeout_s=args.engine_start_timeout,
        max_submission_mb=args.max_submission_mb,
        max_session_mb=args.max_session_mb,
        max_rewards=args.max_rewards,
        max_connections=args.max_connections,
        keep_sessions_h=args.keep_sessions_h,
        path_keys=args.path_keys,
        durable=args.durable,
        log_format=args.log_format,
    )
    check(settings)
    if not chosen_key:
        settings = structs.replace(settings, admin_key=made_up_key(args.host))
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    listener = listen(args.host, args.port)
    settings = _with_addresses(settings, args.host, listener.getsockname()[1])

    def ready(model: str) -> None:
        announce(settings, model, made_up=not chosen_key, as_json=args.json)

    with listener:
        if settings.processes > 1:
            serve_front(settings, listener, ready)
        else:
            on_fast_loop(serve(settings, listener, ready))
    return 0


def given_key(args: argparse.Namespace, environment: Environment) -> str | None:
    if args.admin_key:
        hide_arguments([args.admin_key])  # every user of this machine could read it there
        return args.admin_key
    if args.admin_key_fd is not None:
        with os.fdopen(args.admin_key_fd, "rb") as pipe:
            return pipe.read().decode()
    if args.admin_key_file:
        try:
            return read_private(args.admin_key_file).decode().strip()
        except OSError as error:
            raise UsageError(f"--admin-key-file {args.admin_key_file} cannot be read: {error}") from error
    return environment.admin_key


def run_shard(args: argparse.Namespace) -> int:
    """Its settings are the first line of standard input, whose end is the end of its front."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 65536)):
            return 1
        line += more
    settings = GatewaySettings.from_json(line)
    start_logging(settings.log_format)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    serve_shard(settings, args)
    return 0


def _with_addresses(settings: GatewaySettings, host: str, port: int) -> GatewaySettings:
    host = f"[{host}]" if ":" in host else host
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return structs.replace(
        settings,
        local_url=f"http://{everywhere.get(host, host)}:{port}",
        public_url=with_port(settings.public_url or f"http://{host}:{port}"),
    )


def check(settings: GatewaySettings) -> None:
    url = settings.public_url
    if url and not re.match(r"https?://[^/?#\s]+[^?#\s]*$", url):
        raise UsageError(f"--public-url {url!r} is no address; like https://gateway.example:8400")
    if settings.outcomes == "memory":
        raise UsageError("--outcomes memory ends with the gateway and nobody else reads it; use files:///DIR")
    if settings.processes > 1 and settings.record_engine_calls:
        raise UsageError("--record-engine-calls takes one writer: leave it out, or use --processes 1")
    for engine in settings.engine:
        check_engine(engine, Path(settings.model))
    embedded = [e for e in settings.engine if e.partition("=")[0] in ("torch", "scripted")]
    if settings.processes > 1 and embedded:
        raise UsageError(
            f"--engine {embedded[0]} lives in one process; use --processes 1, or a server: --engine vllm=URL"
        )


async def serve(
    settings: GatewaySettings,
    listener: socket.socket,
    ready: Callable[[str], None],
    *,
    shard: Any = None,
    link: int | None = None,
) -> None:
    from afield import factory

    task = asyncio.current_task()
    assert task is not None
    # A thousand is too few where each agent may hold hundreds of connections.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = Path(settings.model)
    tokens = factory.load("chat:ChatTokenizer").load(model, cache=Environment.read().template_profiles)
    pool = factory.pool(
        settings.engine,
        model,
        slots=settings.slots,
        seed=settings.seed,
        ledger=settings.record_engine_calls,
        start_timeout_s=settings.engine_start_timeout_s,
        dtype=settings.engine_dtype,
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        outlet = None
        if settings.outcomes:
            made = factory.load("transports.spec:from_spec")(settings.outcomes, settings.store / "outcomes")
            outlet = await stack.enter_async_context(made)
        secret = factory.load("gateway.session_keys:SecretPlace")(
            directory=Environment.read().secrets, file=settings.secret_file
        )
        if settings.secret_file is None:
            private_directory(state_directory(), STATE)
        gateway = factory.load("gateway.service:LocalGateway")(
            tokenizer=tokens,
            engine=pool,
            store=settings.store,
            admin_key=settings.admin_key,
            public_url=settings.public_url,
            durable=settings.durable,
            path_keys=settings.path_keys,
            keep_sessions_s=settings.keep_sessions_h * 3600,
            shard=shard,
            outlet=outlet,
            secret=secret,
            limits=factory.load("gateway.outcomes:GatewayLimits")(
                submission_bytes=settings.max_submission_mb * 1024 * 1024,
                session_bytes=settings.max_session_mb * 1024 * 1024,
                rewards=settings.max_rewards,
            ),
        )
        await stack.enter_async_context(gateway)
        spare_the_collector()
        # Not before: what only loads has nothing to keep, and should end at once.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        server = factory.load("gateway.server:serve")
        bounds = factory.load("gateway.server:ConnectionLimits")(
            per_address=min(settings.max_connections, hard * 3 // 4)
        )
        await server(gateway, listener, lambda: ready(tokens.name), link=link, connections=bounds)


def announce(settings: GatewaySettings, model: str, *, made_up: bool, as_json: bool) -> None:
    if as_json:
        told = {
            "url": settings.public_url,
            "local_url": settings.local_url,
            "admin_key": settings.admin_key,
            "model": model,
        }
        print(json.dumps(told), flush=True)
        return
    print(f"afield gateway serves {model} at {settings.public_url}")
    print(f"admin key: {settings.admin_key if made_up else '(the one given)'}", flush=True)
    key = settings.admin_key if made_up else "$AFIELD_ADMIN_KEY"
    opens = f'curl -s -X POST {settings.local_url}/sessions -H "Authorization: Bearer {key}"'
    print("next: open a session for an agent (docs/how-to/clients.md)", file=sys.stderr)
    print(f"  {opens}", file=sys.stderr, flush=True)


# --- several processes ---------------------------------------------------------------------------


def serve_front(settings: GatewaySettings, listener: socket.socket, ready: Callable[[str], None]) -> None:
    from afield import factory

    front = factory.load("gateway.front:Front")
    with tempfile.TemporaryDirectory(prefix="afield-") as sockets:
        command = factory.load("gateway.front:command_of")([SHARD_COMMAND, "--shard-sockets", sockets])

        async def main() -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            made = front(
                command,
                settings.processes,
                agent_environment(),
                settings=settings.to_json(),
                start_timeout_s=PROCESS_START_S + settings.engine_start_timeout_s,
                per_address=settings.max_connections,
            )
            await made.serve(listener, lambda line: ready(json.loads(line)["model"]))

        on_fast_loop(main())


def serve_shard(settings: GatewaySettings, args: argparse.Namespace) -> None:
    from afield import factory

    shard = factory.load("gateway.shards:Shard")(args.shard, settings.processes, args.shard_sockets)
    path = factory.load("gateway.shards:socket_path")(args.shard_sockets, args.shard)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as private:
        private.bind(str(path))
        private.listen(1024)
        private.setblocking(False)

        def ready(model: str) -> None:
            print(json.dumps({"model": model}), flush=True)

        on_fast_loop(serve(settings, private, ready, shard=shard, link=args.shard_link))


def with_port(url: str) -> str:
    """Some clients lose a default port that is not named, so it is named."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"))


def spare_the_collector() -> None:
    """What is loaded by now stays; a gateway's data has no cycles, so they are looked for seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def on_fast_loop(work: Coroutine[Any, Any, None]) -> None:
    """uvloop where there is one: it takes half the processor time."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def on_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def made_up_key(host: str) -> str:
    """Good enough where only this machine can connect; elsewhere somebody has to choose one."""
    if not on_loopback(host):
        raise UsageError(f"{host} can be reached by others: give an --admin-key, or set AFIELD_ADMIN_KEY")
    return f"afa-{secrets.token_urlsafe(24)}"


def _exit_with_parent() -> None:
    while os.read(0, 4096):  # unbuffered: a thread inside a buffered reader would block the exit
        pass
    os._exit(0)
