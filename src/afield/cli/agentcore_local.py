"""`afield agentcore-local`: local server with the AgentCore Runtime API."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any, get_args

from afield.cli.log_format import start_logging
from afield.cli.serving import is_loopback, run_loop
from afield.errors import UsageError
from afield.process_secrets import hide_arguments
from afield.sdk.listen import listen
from afield.settings.environment import Environment
from afield.settings.gateway import LogFormat

DESCRIPTION = """\
A server compatible with AWS Bedrock AgentCore Runtime, on this machine. Real boto3 clients of
bedrock-agentcore and bedrock-agentcore-control reach it by endpoint_url. Each session runs an unmodified
program in an isolated place of its own.
"""
NOT_MODELLED = """\
It does not model: IAM roles and policies, JWT authorizers; VPC networking;
containers as such (an image is a program of this machine; no arm64, no microVM); MCP, A2A and
WebSocket; file systems, lifecycle hooks, capacity providers; gateways, memory, identity and the other
services of AgentCore. Runtimes are forgotten when it ends.
"""
LAST_S = 10.0


def add(commands: Any) -> None:
    from afield.agentcore_local.faults import KINDS

    faults = "\n".join(f"  {kind:9} {what}" for kind, what in KINDS.items())
    command = commands.add_parser(
        "agentcore-local",
        help="a local server for AgentCore clients",
        description=DESCRIPTION,
        epilog=f"{NOT_MODELLED}\nfaults:\n{faults}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_programs(command)
    _add_limits(command)
    command.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    command.add_argument("--port", type=int, default=8480, help="0 takes any free port (default: 8480)")
    command.add_argument("--region", default="us-west-2", help="in ARNs (default: us-west-2)")
    command.add_argument("--account", default="123456789012", help="in ARNs (default: 123456789012)")
    command.add_argument(
        "--require-signature",
        action="store_true",
        help="refuse requests without a SigV4 header; --secret-key verifies it, too",
    )
    command.add_argument(
        "--secret-key",
        metavar="KEY",
        help="verify that requests are signed with this secret access key; or AFIELD_ACR_SECRET_KEY,"
        " which other users cannot read; needed on any address but loopback",
    )
    command.add_argument("--log-format", choices=get_args(LogFormat), default="text", help="default: text")
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    command.set_defaults(run=run)


def _add_programs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help="what a container URI stands for: app.py (run as it is, serves port 8080), file.py:agent"
        " (served with afield's SDK) or a command; NAME is a URI, a repository:tag or a repository",
    )
    command.add_argument(
        "--code-root", type=Path, metavar="DIR", help="where entry points of codeConfiguration are"
    )
    command.add_argument(
        "--isolation",
        choices=("sandbox", "none"),
        default="sandbox",
        help="none: plain processes, that share this machine's files and network (default: sandbox)",
    )
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="what sandboxed programs may reach; nothing else is reachable",
    )
    command.add_argument(
        "--mount", action="append", default=[], metavar="PATH", help="what sandboxed programs may read"
    )
    command.add_argument(
        "--warm", action="append", default=[], metavar="MODULE", help="what is imported once for all sessions"
    )
    command.add_argument("--memory-mb", type=int, default=1024, help="of a session (default: 1024)")
    command.add_argument(
        "--logs", type=Path, default=Path("acr-logs"), metavar="DIR", help="a file for each session start"
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    def number(name: str, default: float, help: str) -> None:
        command.add_argument(name, type=type(default), default=default, help=f"{help} (default: {default:g})")

    number("--sessions", 1000, "alive at once, else 402")
    number("--starts-per-s", 25.0, "session starts, else 429")
    number("--stops-per-s", 25.0, "stops, counted apart, else 429")
    number("--invokes-per-s", 200.0, "invokes of one agent, else 429")
    number("--burst-s", 1.0, "how many seconds' worth of these may come at once")
    number("--cold-start-s", 0.0, "the invoke that starts a session takes at least this long")
    number("--init-s", 30.0, "a program serves /ping within this time, else 424")
    number("--ready-s", 0.5, "a runtime is CREATING, UPDATING or DELETING for this long")
    number("--speed", 1.0, "lifecycles and request limits run this many times faster")
    number("--seed", 0, "of the faults")
    command.add_argument(
        "--fault", action="append", default=[], metavar="KIND=RATE[:S]", help="bad luck on purpose, see below"
    )


def run(args: argparse.Namespace) -> int:
    start_logging(args.log_format)
    hide_arguments([args.secret_key or ""])
    args.secret_key = args.secret_key or Environment.read().agentcore_secret_key
    if not args.secret_key and not is_loopback(args.host):
        raise UsageError(
            f"{args.host} can be reached by others, who would run programs here: give a --secret-key,"
            " or set AFIELD_ACR_SECRET_KEY; clients use it as their aws_secret_access_key"
        )
    options = options_of(args)
    _raise_open_files()
    with listen(args.host, args.port) as listener:
        run_loop(serve(args, options, listener))
    return 0


def options_of(args: argparse.Namespace) -> Any:
    from afield.agentcore_local import faults, images
    from afield.agentcore_local.control_plane import Account
    from afield.agentcore_local.quotas import Quotas
    from afield.agentcore_local.server import AgentCoreServerOptions
    from afield.agentcore_local.sessions import Timings
    from afield.settings.runtimes import ResourceLimits

    if not args.image and not args.code_root:
        raise UsageError("there is nothing to run: give --image NAME=app.py, or --code-root DIR")
    if args.code_root and not args.code_root.is_dir():
        raise UsageError(f"--code-root {args.code_root} is no directory")
    if args.isolation == "sandbox" and shutil.which("bwrap") is None:
        raise UsageError(
            "--isolation sandbox needs bubblewrap: install it (apt-get install bubblewrap),"
            " or use --isolation none, which isolates nothing"
        )
    try:
        return AgentCoreServerOptions(
            images=images.parse_all(args.image),
            isolation=args.isolation,
            allow=tuple(address(spec) for spec in args.allow),
            mounts=tuple(args.mount),
            warm=tuple(args.warm),
            limits=ResourceLimits(memory_mb=args.memory_mb),
            quotas=Quotas(
                sessions=args.sessions,
                start_rate=args.starts_per_s,
                stop_rate=args.stops_per_s,
                invoke_rate=args.invokes_per_s,
                burst_s=args.burst_s,
            ),
            pace=Timings(cold_start_s=args.cold_start_s, init_s=args.init_s, speed=args.speed),
            account=Account(
                region=args.region, account=args.account, ready_s=args.ready_s, code_root=args.code_root
            ),
            faults=faults.parse(args.fault),
            seed=args.seed,
            signed=args.require_signature,
            secret_key=args.secret_key or "",
            logs=args.logs,
        )
    except ValueError as error:
        raise UsageError(f"{error}; see afield agentcore-local --help") from error


def address(spec: str) -> tuple[str, int]:
    host, colon, port = spec.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"--allow {spec!r} must be HOST:PORT, like 127.0.0.1:8400")
    return host.strip("[]"), int(port)


async def serve(args: argparse.Namespace, options: Any, listener: socket.socket) -> None:
    from afield.agentcore_local.server import AgentCoreServer

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if args.exit_with_parent:
        end = lambda: loop.call_soon_threadsafe(task.cancel)  # noqa: E731
        threading.Thread(target=_end_with_stdin, args=(end,), daemon=True).start()
    async with AgentCoreServer(options, listener) as server:
        announce(args, server.url)
        await asyncio.Event().wait()


def announce(args: argparse.Namespace, url: str) -> None:
    if args.json:
        print(json.dumps({"url": url, "region": args.region, "logs": str(args.logs)}), flush=True)
        return
    print(f"afield agentcore-local serves AgentCore clients at {url}; logs of sessions are in {args.logs}")
    print(f"boto3.client('bedrock-agentcore', endpoint_url='{url}', region_name='{args.region}')", flush=True)


def _end_with_stdin(end: Any) -> None:
    while os.read(0, 4096):  # unbuffered: a thread inside a buffered reader would block the exit
        pass
    end()
    time.sleep(LAST_S)
    os._exit(1)


def _raise_open_files() -> None:
    """Raise the limit of open files: every session and every invocation uses several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
