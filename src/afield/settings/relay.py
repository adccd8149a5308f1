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
    """Port to listen on; 0 selects a free port."""
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
    """Largest number of requests in flight for each connected process."""
    max_body_mb: Count = 64
    """Largest size of a request body, in MiB."""
    max_connections: Count = 32_768
    """Largest number of connections from agents."""
    max_connections_per_address: Count = 16_384
    """Largest number of connections from one address; raise it if a proxy in front of the relay opens all
    connections."""
    max_held_mb: Count = 768
    """Largest size of all requests and responses in the relay's memory, in MiB; above it, new requests get
    503."""
    max_held_mb_per_cluster: Count = 512
    """Largest size of the requests and responses of one cluster in the relay's memory, in MiB."""
    hold_timeout_s: Positive = 30.0
    """Seconds that a request waits for a gateway that is not connected."""
    resume_timeout_s: Positive = 60.0
    """Seconds that running requests stay open after the relay loses the connection to their gateway."""
    heartbeat_interval_s: Positive = 5.0
    """Seconds between pings; a connection without a reply is closed."""


class RelaySettings(RelayServerSettings, RelayLimitSettings, frozen=True, kw_only=True):
    """Settings of one relay."""
