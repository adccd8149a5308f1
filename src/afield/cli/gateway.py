"""`afield gateway`: serve a model to agents, and its turns to trainers."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Any

from afield.config import Environment
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
        "--engine", default="torch", help="torch (embedded, default), or scripted=FILE for tests"
    )
    command.add_argument("--host", default="127.0.0.1")
    command.add_argument("--port", type=int, default=8400, help="0 takes any free port (default: 8400)")
    command.add_argument("--public-url", help="what agents are given; default: the address it listens on")
    command.add_argument(
        "--store", type=Path, default=Path("gateway-store"), metavar="DIR", help="default: gateway-store"
    )
    command.add_argument("--admin-key", help="or AFIELD_ADMIN_KEY; made up and printed on loopback")
    command.add_argument("--slots", type=int, default=64, help="calls the embedded engine runs at once")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--engine-ledger", type=Path, metavar="FILE", help="write every engine call here")
    command.add_argument("--durable", action="store_true", help="survive power cuts too (fsync per commit)")
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield import wiring

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    serve = wiring.load("gateway.server:serve")
    given = args.admin_key or Environment.read().admin_key
    admin_key = given or made_up_key(args.host)
    listener = listen(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = args.public_url or f"http://{host}:{listener.getsockname()[1]}"
    if args.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        tokens = wiring.load("tokens:ChatTokens").load(Path(args.model))
        engine = wiring.engine(
            args.engine, Path(args.model), slots=args.slots, seed=args.seed, ledger=args.engine_ledger
        )
        made = wiring.load("gateway.service:LocalGateway")
        async with engine:
            gateway = made(
                tokens=tokens,
                engine=engine,
                store=args.store,
                admin_key=admin_key,
                public_url=url,
                durable=args.durable,
            )
            async with gateway:
                await serve(gateway, listener, lambda: announce(args, url, admin_key, not given, tokens))

    with listener:
        asyncio.run(main())
    return 0


def announce(args: argparse.Namespace, url: str, admin_key: str, made_up: bool, tokens: Any) -> None:
    if args.json:
        print(json.dumps({"url": url, "admin_key": admin_key, "model": tokens.name}), flush=True)
        return
    print(f"afield gateway serves {tokens.name} at {url}")
    if made_up:
        print(f"admin key: {admin_key}")
    certificate = tokens.certificate
    kept = [name for name, keeps in certificate.appends.items() if keeps]
    print(f"tool format: {certificate.tool_format or 'unknown, tools are refused'}")
    print(f"appends that keep the prefix: {', '.join(kept) or 'none'}", flush=True)


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
