"""`afield gateway`: serve a model to agents and record their turns."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from msgspec import structs

from afield.cli.flags import add_flags, flag_layer
from afield.cli.log_format import start_logging
from afield.cli.serving import exit_with_parent, is_loopback, run_loop
from afield.errors import UsageError
from afield.sdk.listen import listen
from afield.settings.environment import Environment, environment_layer
from afield.settings.gateway import GatewaySettings
from afield.settings.values import SettingsLayer, SettingsLayers, converted, file_layer
from afield.utils.private_files import read_private
from afield.utils.process_secrets import hide_arguments

SHARD_COMMAND = "gateway-process"


def add(commands: Any) -> None:
    command = commands.add_parser(
        "gateway",
        help="serve a model to agents and record token ids",
        usage="afield gateway --model DIR [options]",
        description="Serve a model to agents, and the recorded turns to trainers.",
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with a [gateway] table; - reads one line of JSON from standard input",
    )
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    command.add_argument("--exit-with-parent", action="store_true", help="exit when standard input closes")
    command.add_argument(
        "--fd",
        type=int,
        metavar="N",
        help="file descriptor of an inherited listening socket, instead of --host and --port",
    )
    add_flags(command, GatewaySettings)
    command.set_defaults(run=run)
    shard = commands.add_parser(SHARD_COMMAND, description="One of several gateway processes on one port.")
    shard.set_defaults(run=run_shard)


def run(args: argparse.Namespace) -> int:
    from afield import factory

    environment = Environment.read()
    settings = read_settings(args, environment)
    start_logging(settings.log_format)
    check(settings)
    generated = not settings.admin_key
    if generated:
        settings = structs.replace(settings, admin_key=generated_key(settings.host))
    if args.exit_with_parent or args.config == "-":
        threading.Thread(target=exit_with_parent, daemon=True).start()
    with inherited(args.fd) if args.fd is not None else listen(settings.host, settings.port) as listener:
        settings = with_public_url(settings, listener)

        def ready(model: str) -> None:
            announce(settings, model, listener, generated=generated, as_json=args.json)

        serve = factory.serve_front if settings.processes > 1 else factory.serve
        run_loop(serve(settings, listener, ready))
    return 0


def inherited(descriptor: int) -> socket.socket:
    """The listening socket of a file descriptor that the parent process passed on."""
    try:
        listener = socket.socket(fileno=descriptor)
    except OSError as error:
        raise UsageError(f"--fd {descriptor} is not a listening socket: {error}") from error
    listener.setblocking(False)
    return listener


def read_settings(args: argparse.Namespace, environment: Environment) -> GatewaySettings:
    """Settings from flags, then the environment, then --config, then defaults."""
    if args.admin_key:
        hide_arguments([args.admin_key])  # every user of this machine can read a command line
    if args.config == "-":
        settings = GatewaySettings.from_json(first_line())
    else:
        file = (file_layer(Path(args.config), GatewaySettings, "gateway"),) if args.config else ()
        variables = environment_layer("AFIELD_GATEWAY", GatewaySettings)
        flags = flag_layer(args, GatewaySettings)
        layers = SettingsLayers((*file, variables, _secrets(environment, flags), flags))
        if not layers.values.get("model"):
            raise UsageError(
                "model is missing: give --model DIR, or model in the [gateway] table of --config"
            )
        settings = converted(layers.values, GatewaySettings, layers.origin)
    return structs.replace(
        settings,
        admin_key=settings.admin_key or key_from_file(settings.admin_key_file) or environment.admin_key or "",
        outcomes=settings.outcomes or environment.outcomes,
    )


def _secrets(environment: Environment, flags: SettingsLayer) -> SettingsLayer:
    """Settings whose variables have names of their own, unless flags give them."""
    values = {"outcomes": environment.outcomes}
    if "admin_key_file" not in flags.values:
        values["admin_key"] = environment.admin_key or ""
    names = {"outcomes": "AFIELD_OUTCOMES", "admin_key": "AFIELD_ADMIN_KEY"}
    return SettingsLayer({key: value for key, value in values.items() if value}, names.__getitem__)


def key_from_file(file: str) -> str:
    try:
        return read_private(Path(file)).decode().strip() if file else ""
    except OSError as error:
        raise UsageError(f"--admin-key-file {file} cannot be read: {error}") from error


def first_line() -> bytes:
    """The first line of standard input, unbuffered: its end is watched later."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 65536)):
            raise UsageError("standard input closed before a line of settings")
        line += more
    return line


def run_shard(args: argparse.Namespace) -> int:
    """Serve one of several gateway processes, started by the front."""
    from afield import factory

    line = first_line()
    start_logging(factory.read_shard(line).gateway.log_format)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    run_loop(factory.serve_shard(line, lambda model: print_ready({"model": model})))
    return 0


def with_public_url(settings: GatewaySettings, listener: socket.socket) -> GatewaySettings:
    """Set the public URL, unless it is configured: the relay's, or the listening address."""
    listening = f"http://{bracketed(settings.host)}:{listener.getsockname()[1]}"
    url = settings.public_url or settings.relay or listening
    return structs.replace(settings, public_url=with_port(url))


def local_url(settings: GatewaySettings, listener: socket.socket) -> str:
    """URL for clients on this machine; a wildcard host becomes loopback."""
    host = bracketed(settings.host)
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"http://{loopback}:{listener.getsockname()[1]}"


def bracketed(host: str) -> str:
    """Host for a URL; IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def with_port(url: str) -> str:
    """URL with an explicit port: some clients drop a default port."""
    parts = urlsplit(url)
    if parts.port is not None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"))


def check(settings: GatewaySettings) -> None:
    """Refuse settings that cannot work before anything is loaded."""
    from afield import factory

    url = settings.public_url
    if url and not re.match(r"https?://[^/?#\s]+[^?#\s]*$", url):
        raise UsageError(f"--public-url {url!r} must be an address, such as https://gateway.example:8400")
    if settings.outcomes == "memory":
        raise UsageError("--outcomes memory is not readable by other processes; use --outcomes files:///DIR")
    if settings.processes > 1 and settings.store_shared:
        raise UsageError("--store-shared needs a single process: leave it out, or use --processes 1")
    if settings.processes > 1 and settings.record_engine_calls:
        raise UsageError("--record-engine-calls needs a single process: leave it out, or use --processes 1")
    for engine in settings.engine:
        factory.check_engine_model(engine, Path(settings.model))
    embedded = [e for e in settings.engine if e.partition("=")[0] in ("torch", "scripted") or e == "vllm"]
    if settings.processes > 1 and embedded:
        raise UsageError(
            f"--engine {embedded[0]} runs in one process; use --processes 1, or an inference server,"
            " such as --engine vllm=URL"
        )


def generated_key(host: str) -> str:
    """An admin key for a gateway that only this machine can reach."""
    if not is_loopback(host):
        raise UsageError(f"other machines can reach {host}: give an --admin-key or set AFIELD_ADMIN_KEY")
    return f"afa-{secrets.token_urlsafe(24)}"


def print_ready(line: dict[str, str]) -> None:
    """Print the one line of JSON that the parent process reads; later output goes to standard error.

    A parent that stops reading would otherwise block a process that writes more than its pipe holds.
    """
    print(json.dumps(line), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def announce(
    settings: GatewaySettings, model: str, listener: socket.socket, *, generated: bool, as_json: bool
) -> None:
    local = local_url(settings, listener)
    if as_json:
        line = {
            "url": settings.public_url,
            "local_url": local,
            "admin_key": settings.admin_key,
            "model": model,
        }
        print_ready(line)
        return
    print(f"afield gateway serves {model} at {settings.public_url}")
    print(f"admin key: {settings.admin_key if generated else '(as configured)'}", flush=True)
    key = settings.admin_key if generated else "$AFIELD_ADMIN_KEY"
    command = f'curl -s -X POST {local}/sessions -H "Authorization: Bearer {key}"'
    print("next: open a session for an agent (docs/how-to/clients.md)", file=sys.stderr)
    print(f"  {command}", file=sys.stderr, flush=True)
