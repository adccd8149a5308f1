"""`afield ui`: look at runs in the browser."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from afield.cli.runs import open_run
from afield.cli.serving import is_loopback, run_loop
from afield.errors import UsageError
from afield.sdk.listen import listen
from afield.settings.environment import Environment

PORT = 8700


def add(commands: Any) -> None:
    command = commands.add_parser(
        "ui",
        help="look at runs in the browser",
        description="Serve pages about runs, their rollouts and tokens; read-only. Without RUN, all runs.",
    )
    command.add_argument(
        "runs", nargs="*", metavar="RUN", help="run id, path, or latest (default: all runs of AFIELD_RUNS)"
    )
    command.add_argument(
        "--gateway", metavar="URL", help="also show this running gateway; its admin key is AFIELD_ADMIN_KEY"
    )
    command.add_argument(
        "--export", metavar="FILE.html", help="write the runs into one HTML file, which needs no server"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument(
        "--port", type=int, default=PORT, help=f"port to listen on; 0 selects a free port (default: {PORT})"
    )
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield.ui.app import Runs
    from afield.ui.run_list import RunList

    environment = Environment.read()
    chosen = [open_run(name) for name in args.runs]
    if not chosen and not environment.runs.is_dir():
        raise UsageError(f"there is no run under {environment.runs} yet: start one with `afield demo`")
    runs = RunList(chosen, environment.runs)
    if args.export:
        return export(runs, args)
    key = environment.admin_key
    if args.gateway and not key:
        raise UsageError(f"--gateway {args.gateway} needs its admin key: set AFIELD_ADMIN_KEY")
    if not is_loopback(args.host):
        print(
            f"afield: everyone who has the address below can read these runs on {args.host}", file=sys.stderr
        )
    with listen(args.host, args.port) as listener:
        run_loop(serve(Runs(runs.current), listener, args, key or ""))
    return 0


def export(runs: Any, args: argparse.Namespace) -> int:
    from afield.ui.export import export_html

    report = export_html(runs.current(), Path(args.export))
    if args.json:
        print(json.dumps(report))
        return 0
    print(
        f"{args.export}: {report['bytes'] / 1e6:.1f} MB, {report['runs']} runs, {report['rollouts']} rollouts"
    )
    if report["left_out"]:
        print(
            f"the turns of {report['left_out']} rollouts are left out:"
            " removed, unreadable, or older than those that fit"
        )
    for name, error in report["unreadable"].items():
        print(f"run {name} is left out: {error}")
    return 0


async def serve(runs: Any, listener: Any, args: argparse.Namespace, admin_key: str) -> None:
    from afield.factory import needs
    from afield.ui.app import UiApp
    from afield.utils.asgi_server import AsgiServer, server_config

    port = listener.getsockname()[1]
    name = f"[{args.host}]" if ":" in args.host else args.host
    secret = secrets.token_urlsafe(24)
    url = f"http://{name}:{port}/?key={secret}"

    def ready() -> None:
        print(json.dumps({"url": url, "key": secret}) if args.json else f"afield ui: {url}", flush=True)

    async with AsyncExitStack() as stack:
        gateway = None
        if args.gateway:
            with needs("gateway"):
                import aiohttp  # noqa: F401
            from afield.ui.live_gateway import LiveGateway

            gateway = await stack.enter_async_context(LiveGateway(args.gateway, admin_key))
        app = UiApp(runs, key=secret, cookie=f"afield-ui-{port}", hosts=[args.host], gateway=gateway)
        config = server_config(app, timeout_graceful_shutdown=1, lifespan="off")
        await AsgiServer(config, ready).serve(sockets=[listener])
