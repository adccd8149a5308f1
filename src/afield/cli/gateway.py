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

from afield.cli.early import check_engine
from afield.cli.logs import FORMATS, start_logging
from afield.config import Environment, agent_environment
from afield.errors import UsageError
from afield.sdk.listen import listen


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
        "--processes", type=int, default=1, help="gateway processes on the one port (default: 1)"
    )
    command.add_argument(
        "--outcomes",
        metavar="SPEC",
        help="where outcomes of experiments go on to: files:///DIR, s3://BUCKET, ...",
    )
    command.add_argument("--slots", type=int, default=64, help="calls the embedded engine runs at once")
    command.add_argument("--seed", type=int, default=0, help="of the embedded engine (default: 0)")
    command.add_argument("--engine-ledger", type=Path, metavar="FILE", help="write every engine call here")
    command.add_argument(
        "--max-submission-mb", type=int, default=16, help="of one outcome or reward (default: 16)"
    )
    command.add_argument("--max-rewards", type=int, default=10_000, help="of one session (default: 10000)")
    command.add_argument("--durable", action="store_true", help="survive power cuts too (fsync per commit)")
    command.add_argument("--log-format", choices=FORMATS, default="text", help="default: text")
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    for hidden in ("--shard", "--shard-link"):
        command.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    command.add_argument("--shard-sockets", type=Path, help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    start_logging(args.log_format)
    args.engine = args.engine or ["torch"]
    environment = Environment.read()
    args.outcomes = args.outcomes or environment.outcomes
    args.local_url = args.public_url
    check(args)
    given = args.admin_key or environment.admin_key
    args.admin_key = given or made_up_key(args.host)
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    if args.shard is not None:
        serve_shard(args)
        return 0
    listener = listen(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    port = listener.getsockname()[1]
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    args.local_url = f"http://{everywhere.get(host, host)}:{port}"
    args.public_url = with_port(args.public_url or f"http://{host}:{port}")
    with listener:
        if args.processes > 1:
            serve_front(args, listener, not given)
        else:
            on_fast_loop(serve(args, listener, lambda model: announce(args, model, not given)))
    return 0


def check(args: argparse.Namespace) -> None:
    if args.processes < 1:
        raise UsageError(f"--processes {args.processes} must be at least 1")
    for name in ("max_submission_mb", "max_rewards"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.public_url and not re.match(r"https?://[^/?#\s]+[^?#\s]*$", args.public_url):
        raise UsageError(f"--public-url {args.public_url!r} is no address; like https://gateway.example:8400")
    if args.outcomes == "memory":
        raise UsageError("--outcomes memory ends with the gateway and nobody else reads it; use files:///DIR")
    if args.processes > 1 and args.engine_ledger:
        raise UsageError("--engine-ledger takes one writer: leave it out, or use --processes 1")
    for engine in args.engine:
        check_engine(engine, Path(args.model))
    embedded = [e for e in args.engine if e.partition("=")[0] in ("torch", "scripted")]
    if args.processes > 1 and embedded:
        raise UsageError(
            f"--engine {embedded[0]} lives in one process; use --processes 1, or a server: --engine vllm=URL"
        )


async def serve(
    args: argparse.Namespace,
    listener: socket.socket,
    ready: Callable[[str], None],
    shard: Any = None,
) -> None:
    from afield import wiring

    task = asyncio.current_task()
    assert task is not None
    # A thousand is too few where each agent may hold hundreds of connections.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = Path(args.model)
    tokens = wiring.load("tokens:ChatTokens").load(model, cache=Environment.read().certificates)
    pool = wiring.pool(args.engine, model, slots=args.slots, seed=args.seed, ledger=args.engine_ledger)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool)
        outlet = None
        if args.outcomes:
            made = wiring.load("transports.parse:from_spec")(args.outcomes, args.store / "outcomes")
            outlet = await stack.enter_async_context(made)
        gateway = wiring.load("gateway.service:LocalGateway")(
            tokens=tokens,
            engine=pool,
            store=args.store,
            admin_key=args.admin_key,
            public_url=args.public_url,
            durable=args.durable,
            shard=shard,
            outlet=outlet,
            secret=wiring.load("gateway.signing_secret:SecretPlace")(
                directory=Environment.read().secrets, file=args.secret_file
            ),
            limits=wiring.load("gateway.outcomes:Limits")(
                submission_bytes=args.max_submission_mb * 1024 * 1024, rewards=args.max_rewards
            ),
        )
        await stack.enter_async_context(gateway)
        spare_the_collector()
        # Not before: what only loads has nothing to keep, and should end at once.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        server = wiring.load("gateway.server:serve")
        await server(gateway, listener, lambda: ready(tokens.name), link=args.shard_link)


def announce(args: argparse.Namespace, model: str, made_up: bool) -> None:
    if args.json:
        told = {
            "url": args.public_url,
            "local_url": args.local_url,
            "admin_key": args.admin_key,
            "model": model,
        }
        print(json.dumps(told), flush=True)
        return
    print(f"afield gateway serves {model} at {args.public_url}")
    print(f"admin key: {args.admin_key if made_up else '(the one given)'}", flush=True)
    key = args.admin_key if made_up else "$AFIELD_ADMIN_KEY"
    opens = f'curl -s -X POST {args.local_url}/sessions -H "Authorization: Bearer {key}"'
    print("next, a session: its base_url and api_key are an agent's (docs/clients.md)", file=sys.stderr)
    print(f"  {opens}", file=sys.stderr, flush=True)


# --- several processes ---------------------------------------------------------------------------


def serve_front(args: argparse.Namespace, listener: socket.socket, made_up: bool) -> None:
    from afield import wiring

    front = wiring.load("gateway.front:Front")
    with tempfile.TemporaryDirectory(prefix="afield-") as sockets:
        command = wiring.load("gateway.front:command_of")(shard_arguments(args, sockets))

        async def main() -> None:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            environment = agent_environment() | {"AFIELD_ADMIN_KEY": args.admin_key}
            made = front(command, args.processes, environment)
            await made.serve(listener, lambda line: announce(args, json.loads(line)["model"], made_up))

        on_fast_loop(main())


def shard_arguments(args: argparse.Namespace, sockets: str) -> list[str]:
    """The key travels in the environment, where other users cannot read it."""
    words = ["gateway", "--model", args.model, "--store", str(args.store), "--public-url", args.public_url]
    words += [word for engine in args.engine for word in ("--engine", engine)]
    words += ["--processes", str(args.processes), "--shard-sockets", sockets]
    words += ["--max-submission-mb", str(args.max_submission_mb), "--max-rewards", str(args.max_rewards)]
    words += ["--log-format", args.log_format, "--json", "--exit-with-parent"]
    told = args.outcomes != Environment.read().outcomes  # what the environment says, shards find there
    words += ["--outcomes", args.outcomes] if args.outcomes and told else []
    words += ["--secret-file", str(args.secret_file)] if args.secret_file else []
    return words + (["--durable"] if args.durable else [])


def serve_shard(args: argparse.Namespace) -> None:
    from afield import wiring

    shard = wiring.load("gateway.shards:Shard")(args.shard, args.processes, args.shard_sockets)
    path = wiring.load("gateway.shards:socket_path")(args.shard_sockets, args.shard)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as private:
        private.bind(str(path))
        private.listen(1024)
        private.setblocking(False)
        on_fast_loop(serve(args, private, lambda model: announce(args, model, False), shard))


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


def made_up_key(host: str) -> str:
    """Good enough where only this machine can connect; elsewhere somebody has to choose one."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(f"{host} can be reached by others: give an --admin-key, or set AFIELD_ADMIN_KEY")
    return f"afa-{secrets.token_urlsafe(24)}"


def _exit_with_parent() -> None:
    while os.read(0, 4096):  # unbuffered: a thread inside a buffered reader would block the exit
        pass
    os._exit(0)
