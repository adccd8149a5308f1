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
from afield.sdk.listen import listen
from afield.settings.environment import Environment
from afield.settings.gateway import LogFormat
from afield.utils.process_secrets import hide_arguments

DESCRIPTION = """\
A server compatible with AWS Bedrock AgentCore Runtime, on this machine. Real boto3 clients of
bedrock-agentcore and bedrock-agentcore-control reach it by endpoint_url. Each session runs an unmodified
program in a sandbox of its own.
"""
NOT_MODELLED = """\
It does not model: IAM roles and policies, JWT authorizers; VPC networking;
containers as such (an image is a program of this machine; no arm64, no microVM); MCP, A2A and
WebSocket; file systems, lifecycle hooks, capacity providers; gateways, memory, identity and the other
services of AgentCore. Runtimes are lost when the server ends.
"""
EXIT_S = 10.0
"""Time to end after standard input has closed, in seconds."""


def add(commands: Any) -> None:
    from afield.agentcore_local.faults import KINDS

    faults = "\n".join(f"  {kind:9} {what}" for kind, what in KINDS.items())
    command = commands.add_parser(
        "agentcore-local",
        help="serve the AgentCore API on this machine",
        description=DESCRIPTION,
        epilog=f"{NOT_MODELLED}\nfaults:\n{faults}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_programs(command)
    _add_limits(command)
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    command.add_argument(
        "--port", type=int, default=8480, help="port to listen on; 0 selects a free port (default: 8480)"
    )
    command.add_argument("--region", default="us-west-2", help="AWS region in ARNs (default: us-west-2)")
    command.add_argument(
        "--account", default="123456789012", help="AWS account in ARNs (default: 123456789012)"
    )
    command.add_argument(
        "--require-signature",
        action="store_true",
        help="refuse requests without a SigV4 header; with --secret-key, also verify the signature",
    )
    command.add_argument(
        "--secret-key",
        metavar="KEY",
        help="secret access key with which clients must sign every request; AFIELD_ACR_SECRET_KEY sets it"
        " without showing it to other users; required unless --host is a loopback address",
    )
    command.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="format of log lines (default: text)",
    )
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="exit when standard input closes")
    command.set_defaults(run=run)


def _add_programs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help="program that a container URI stands for: app.py (serves port 8080 itself), file.py:agent"
        " (served by afield's SDK) or a command; NAME is a URI, repository:tag or repository",
    )
    command.add_argument(
        "--code-root", type=Path, metavar="DIR", help="directory of the entry points of codeConfiguration"
    )
    command.add_argument(
        "--isolation",
        choices=("sandbox", "none"),
        default="sandbox",
        help="isolation of programs; none: processes with access to files and network (default: sandbox)",
    )
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="address that sandboxed programs may connect to; may be repeated (default: none)",
    )
    command.add_argument(
        "--mount", action="append", default=[], metavar="PATH", help="path that sandboxed programs may read"
    )
    command.add_argument(
        "--warm",
        action="append",
        default=[],
        metavar="MODULE",
        help="module to import before sessions are forked, which saves its import in each; may be repeated",
    )
    command.add_argument(
        "--memory-mb", type=int, default=1024, help="memory limit of a session in MiB (default: 1024)"
    )
    command.add_argument(
        "--logs",
        type=Path,
        default=Path("acr-logs"),
        metavar="DIR",
        help="directory of session logs (default: acr-logs)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    def number(name: str, default: float, help: str) -> None:
        command.add_argument(name, type=type(default), default=default, help=f"{help} (default: {default:g})")

    number("--sessions", 1000, "largest number of concurrent sessions; above it, an invocation gets 402")
    number(
        "--starts-per-s",
        25.0,
        "largest number of session starts per second; above it, an invocation gets 429",
    )
    number("--stops-per-s", 25.0, "largest number of session stops per second; above it, a stop gets 429")
    number(
        "--invokes-per-s",
        200.0,
        "largest number of invocations of one agent per second; above it, an invocation gets 429",
    )
    number("--burst-s", 1.0, "seconds of these rates that may arrive in one burst")
    number("--cold-start-s", 0.0, "shortest time of an invocation that starts a session, in seconds")
    number("--init-s", 30.0, "seconds that a program has to serve /ping; after that, its invocation gets 424")
    number("--ready-s", 0.5, "seconds that a runtime is CREATING, UPDATING or DELETING")
    number("--speed", 1.0, "factor by which lifecycle and request timeouts are shortened")
    number("--seed", 0, "seed of fault injection")
    command.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND=RATE[:S]",
        help="fault to inject, see below; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    start_logging(args.log_format)
    hide_arguments([args.secret_key or ""])
    args.secret_key = args.secret_key or Environment.read().agentcore_secret_key
    if not args.secret_key and not is_loopback(args.host):
        raise UsageError(
            f"other machines can reach {args.host} and run programs here: give a --secret-key or set"
            " AFIELD_ACR_SECRET_KEY; clients use it as their aws_secret_access_key"
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
        raise UsageError("no program to run: give --image NAME=app.py or --code-root DIR")
    if args.code_root and not args.code_root.is_dir():
        raise UsageError(f"--code-root {args.code_root} is not a directory")
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
    time.sleep(EXIT_S)
    os._exit(1)


def _raise_open_files() -> None:
    """Raise the limit of open files: every session and every invocation uses several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
