"""Relays and links to them, from settings."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from afield.errors import UsageError
from afield.factory.registry import needs
from afield.settings.gateway import GatewaySettings, RelayLinkSettings
from afield.settings.relay import RelaySettings
from afield.settings.train import TrainConfig

MIB = 1024 * 1024


class RelayRoute(Struct, frozen=True, kw_only=True):
    """Checked link settings: where a process dials out to, and the URLs that lead to it."""

    url: str
    """Address of the relay, for this process."""
    public_url: str
    """Address of the relay, for agents."""
    cluster: str
    """Cluster at the relay."""
    name: str
    """Name of the process in its cluster."""
    secret: bytes
    """Secret of the cluster."""

    def url_for(self, scope: str) -> str:
        """URL of this process for one scope (see `relay.auth`)."""
        from afield.relay.auth import route_prefix

        return f"{self.public_url}{route_prefix(self.secret, self.cluster, self.name, scope)}"

    def session_url(self, session_id: str) -> str:
        from afield.relay.auth import session_scope

        return self.url_for(session_scope(session_id))

    def header_key_url(self, key_id: str) -> str:
        from afield.relay.auth import header_key_scope

        return self.url_for(header_key_scope(key_id))


def relay_route(
    settings: RelayLinkSettings | GatewaySettings | TrainConfig, secret: str = "", public_url: str = ""
) -> RelayRoute | None:
    """The link of a process; None without a relay. `secret` is used if there is no file."""
    from afield.relay.auth import check_name, check_secret, read_secret

    if not settings.relay:
        return None
    if not re.match(r"https?://[^/?#\s]+[^?#\s]*$", settings.relay):
        raise UsageError(f"--relay {settings.relay!r} must be an address, such as https://relay.example")
    if not settings.relay_cluster:
        raise UsageError("--relay needs the name of the cluster: --relay-cluster NAME")
    if settings.relay_secret_file:
        key = read_secret(Path(settings.relay_secret_file))
    elif secret:
        key = check_secret("AFIELD_RELAY_SECRET", secret.encode())
    else:
        raise UsageError("--relay needs the cluster's secret: --relay-secret-file, or AFIELD_RELAY_SECRET")
    name = settings.relay_name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
    return RelayRoute(
        url=settings.relay.rstrip("/"),
        public_url=(public_url or settings.relay).rstrip("/"),
        cluster=check_name("--relay-cluster", settings.relay_cluster),
        name=check_name("--relay-name", name),
        secret=key,
    )


def engine_spec(spec: str, route: RelayRoute | None) -> str:
    """Engine specification with an address: `relay=vllm:NAME` becomes `vllm=URL` through the relay."""
    from afield.relay.auth import EVERY_PATH, check_name

    kind, _, argument = spec.partition("=")
    if kind != "relay":
        return spec
    engine, colon, name = argument.partition(":")
    if not colon or not engine:
        raise UsageError(f"--engine {spec}: give the kind and the relay name of the engine: relay=vllm:NAME")
    if route is None:
        raise UsageError(
            f"--engine {spec} needs the address of the relay that the engine is connected to: --relay URL"
        )
    at_relay = structs.replace(route, name=check_name("--engine relay", name), public_url=route.url)
    return f"{engine}={at_relay.url_for(EVERY_PATH)}"


def relay_client(app: Any, route: RelayRoute, **options: Any) -> Any:
    """A client that serves an ASGI application through the relay; run it with `run()`."""
    from afield.relay.client import RelayClient

    return RelayClient(
        app, url=route.url, cluster=route.cluster, gateway=route.name, secret=route.secret, **options
    )


async def serve_relay(
    settings: RelaySettings, clusters: dict[str, bytes], listener: socket.socket, ready: Callable[[], None]
) -> None:
    """Serve a relay on a listening socket until cancelled. `clusters` maps names to secrets."""
    with needs("gateway"):
        from afield.relay.server import Relay, RelayLimits, serve_relay

    limits = RelayLimits(
        streams=settings.max_requests,
        body_bytes=settings.max_body_mb * MIB,
        connections=settings.max_connections,
        per_address=settings.max_connections_per_address,
        held_bytes=settings.max_held_mb * MIB,
        held_bytes_per_cluster=settings.max_held_mb_per_cluster * MIB,
        hold_s=settings.hold_timeout_s,
        resume_s=settings.resume_timeout_s,
        heartbeat_s=settings.heartbeat_interval_s,
    )
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    relay = Relay(clusters, limits)
    async with serve_relay(relay, listener, limits=limits, tls=_tls(settings)):
        ready()
        await asyncio.Event().wait()


def clusters_of(settings: RelaySettings, secret: str = "") -> dict[str, bytes]:
    """Secrets by cluster. `secret` is that of a cluster without a file."""
    from afield.relay.auth import check_name, check_secret, read_secret

    clusters: dict[str, bytes] = {}
    for entry in settings.cluster:
        name, _, file = entry.partition("=")
        if not file and not secret:
            raise UsageError(
                f"--cluster {entry!r}: give the file of its secret, NAME=FILE, or set AFIELD_RELAY_SECRET"
            )
        key = read_secret(Path(file)) if file else check_secret("AFIELD_RELAY_SECRET", secret.encode())
        clusters[check_name("--cluster", name)] = key
    if not clusters:
        raise UsageError("no cluster may connect: give --cluster NAME=FILE at least once")
    return clusters


def _tls(settings: RelaySettings) -> ssl.SSLContext | None:
    if not settings.tls_cert and not settings.tls_key:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-cert {settings.tls_cert!r} cannot be used: {error}") from error
    return context
