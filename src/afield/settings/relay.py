"""Settings of a relay."""

from __future__ import annotations

from typing import Annotated, ClassVar

from afield.settings.fields import Bound, Count, FilePath, Metavar, Positive, SettingsGroup
from afield.settings.gateway import LogFormat


class RelayServerSettings(SettingsGroup, frozen=True, kw_only=True):
    """Address, TLS and clusters of a relay."""

    title: ClassVar[str] = "Server"

    host: Annotated[str, Metavar("HOST")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Metavar("PORT"), Bound(at_least=0, at_most=65535)] = 8500
    """Port to listen on; 0 takes any free one."""
    cluster: Annotated[tuple[str, ...], Metavar("NAME[=FILE]")] = ()
    """Cluster that may connect, with the file of its secret (mode 0600), or AFIELD_RELAY_SECRET; may be
    repeated."""
    tls_cert: FilePath = ""
    """File with the TLS certificate chain; without it a proxy in front of the relay must terminate TLS."""
    tls_key: FilePath = ""
    """File with the TLS private key."""
    log_format: LogFormat = "text"
    """Format of log lines."""


class RelayLimitSettings(SettingsGroup, frozen=True, kw_only=True):
    """Limits of a relay."""

    title: ClassVar[str] = "Limits"

    max_requests: Count = 8192
    """Requests in flight per connected process."""
    max_body_mb: Count = 64
    """MiB of one request body."""
    max_connections: Count = 32_768
    """Connections of agents."""
    max_connections_per_address: Count = 16_384
    """Connections of one address; raise it if a proxy in front of the relay has all of them."""
    max_held_mb: Count = 768
    """MiB of requests and responses that the relay holds; above it new requests get 503."""
    max_held_mb_per_cluster: Count = 512
    """MiB of requests and responses that the relay holds for one cluster."""
    hold_timeout_s: Positive = 30.0
    """Seconds that a request waits for a gateway that is not connected."""
    resume_timeout_s: Positive = 60.0
    """Seconds that requests survive a lost connection to their gateway."""
    heartbeat_interval_s: Positive = 5.0
    """Seconds between pings; a connection without a reply is closed."""


class RelaySettings(RelayServerSettings, RelayLimitSettings, frozen=True, kw_only=True):
    """Settings of one relay."""
