"""`afield relay` and `afield dial`: reach gateways and engines without inbound ports."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from afield.cli.flags import add_flags, flag_layer
from afield.cli.log_format import start_logging
from afield.cli.serving import run_loop
from afield.errors import UsageError
from afield.sdk.listen import listen
from afield.settings.environment import Environment, environment_layer
from afield.settings.gateway import RelayLinkSettings
from afield.settings.relay import RelaySettings
from afield.settings.values import SettingsLayers, converted, file_layer


def add(commands: Any) -> None:
    command = commands.add_parser(
        "relay",
        help="public entry for agents to gateways without inbound ports",
        usage="afield relay --cluster NAME[=FILE] [options]",
        description="Forward agents' requests to gateways and engines that dial out.",
    )
    command.add_argument("--config", metavar="FILE", help="TOML file with a [relay] table")
    command.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    add_flags(command, RelaySettings)
    command.set_defaults(run=run)
    dial = commands.add_parser(
        "dial",
        help="make a local HTTP server reachable through a relay",
        usage="afield dial --to URL --relay URL --relay-cluster NAME [options]",
        description="Dial out to a relay and forward its requests to a local server, such as vLLM.",
    )
    dial.add_argument(
        "--to",
        metavar="URL",
        required=True,
        help="address of the local server, such as http://127.0.0.1:8000",
    )
    dial.add_argument("--json", action="store_true", help="print the address as one line of JSON")
    add_flags(dial, RelayLinkSettings)
    dial.set_defaults(run=run_dial)


def run(args: argparse.Namespace) -> int:
    from afield import factory

    file = (file_layer(Path(args.config), RelaySettings, "relay"),) if args.config else ()
    variables = environment_layer("AFIELD_RELAY", RelaySettings)
    layers = SettingsLayers((*file, variables, flag_layer(args, RelaySettings)))
    settings = converted(layers.values, RelaySettings, layers.origin)
    start_logging(settings.log_format)
    clusters = factory.clusters_of(settings, Environment.read().relay_secret)
    with listen(settings.host, settings.port) as listener:
        port = listener.getsockname()[1]
        url = f"{'https' if settings.tls_cert else 'http'}://{settings.host}:{port}"

        def ready() -> None:
            names = ", ".join(clusters)
            line = {"url": url, "clusters": [*clusters]}
            print(json.dumps(line) if args.json else f"afield relay listens at {url} for {names}")
            print(end="", flush=True)

        run_loop(factory.serve_relay(settings, clusters, listener, ready))
    return 0


def run_dial(args: argparse.Namespace) -> int:
    from afield import factory
    from afield.relay.auth import EVERY_PATH

    flags = flag_layer(args, RelayLinkSettings)
    settings = converted(flags.values, RelayLinkSettings, flags.origin)
    start_logging("text")
    if not settings.relay:
        raise UsageError("--relay is missing: the address of the relay to dial out to")
    route = factory.relay_route(settings, Environment.read().relay_secret)
    assert route is not None
    url = route.url_for(EVERY_PATH)
    print(json.dumps({"url": url}) if args.json else f"afield dial serves {args.to} at {url}", flush=True)
    run_loop(_dial(args.to, route))
    return 0


async def _dial(target: str, route: Any) -> None:
    from afield import factory
    from afield.relay.forward import HttpForwarder

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with HttpForwarder(target) as app:
        # A gateway continues an interrupted call with the tokens that it has: another request.
        await factory.relay_client(app, route, claim_s=0.0).run()
