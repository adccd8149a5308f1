"""Gateway settings: one struct for the command line, files and child processes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec

from afield.settings.fields import (
    PATH,
    Bound,
    Count,
    FilePath,
    Metavar,
    NotNegative,
    SettingsGroup,
    Url,
)
from afield.settings.trainer import EngineDtype

LogFormat = Literal["text", "json"]


class ServerSettings(SettingsGroup, frozen=True, kw_only=True):
    """Address, admin key and store of a gateway."""

    title: ClassVar[str] = "Server"

    host: Annotated[str, Metavar("HOST")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Metavar("PORT"), Bound(at_least=0, at_most=65535)] = 8400
    """Port to listen on; 0 takes any free one."""
    public_url: Url = ""
    """Address given to agents; by default the one listened on."""
    admin_key: Annotated[str, Metavar("KEY")] = ""
    """Key of trainers and collectors, or AFIELD_ADMIN_KEY; on loopback one is generated and printed."""
    admin_key_file: FilePath = ""
    """File that contains the admin key; its mode must be 0600."""
    secret_file: FilePath = ""
    """File of the secret that signs session keys; by default in ~/.local/state/afield/gateways."""
    store: Annotated[str, Metavar("DIR"), PATH] = "gateway-store"
    """Directory of the session store."""
    keep_sessions_h: NotNegative = 72.0
    """Hours after which a completed session leaves the store; 0 keeps all."""
    durable: bool = False
    """Survive power cuts: fsync every commit."""
    outcomes: Annotated[str, Metavar("SPEC")] = ""
    """Transport to which outcomes are forwarded: files:///DIR or s3://BUCKET."""
    processes: Count = 1
    """Gateway processes that share the port."""
    log_format: LogFormat = "text"
    """Format of log lines."""


class EngineSettings(SettingsGroup, frozen=True, kw_only=True):
    """Model and engines behind a gateway."""

    title: ClassVar[str] = "Engines"

    model: Annotated[str, Metavar("DIR"), PATH]
    """Model directory in Hugging Face format."""
    engine: Annotated[tuple[str, ...], Metavar("KIND[=WHERE]")] = ("torch",)
    """Engine: torch (embedded), vllm=URL, sglang=URL, relay=vllm:NAME if it dials out, or scripted=FILE for
    tests; may be repeated."""
    slots: Count = 64
    """Calls that the embedded engine runs at once."""
    seed: int = 0
    """Sampling seed of the embedded engine."""
    engine_dtype: EngineDtype = "auto"
    """Dtype of the embedded engine; auto is float32 on a CPU and bfloat16 on a GPU."""
    engine_start_timeout_s: NotNegative = 300.0
    """Seconds that an engine has to load its model and answer when the gateway starts."""
    record_engine_calls: FilePath = ""
    """File to which every engine call is written, for checking."""


class LimitSettings(SettingsGroup, frozen=True, kw_only=True):
    """Limits of one session or client."""

    title: ClassVar[str] = "Limits"

    max_submission_mb: Count = 16
    """Largest size of one outcome or reward, in MiB."""
    max_session_mb: Count = 256
    """Largest size of all concurrent requests of one session, in MiB, decompressed."""
    max_rewards: Count = 10_000
    """Largest number of rewards per session."""
    max_connections: Count = 16_384
    """Largest number of concurrent connections from one address, in each process."""
    path_keys: bool = False
    """Put the session key into the base URL, for clients that cannot send a key."""


class RelayLinkSettings(SettingsGroup, frozen=True, kw_only=True):
    """Link of a gateway or engine to a relay."""

    title: ClassVar[str] = "Relay"

    relay: Url = ""
    """Relay to dial out to; agents then reach this process through it."""
    relay_cluster: Annotated[str, Metavar("NAME")] = ""
    """Cluster at the relay."""
    relay_name: Annotated[str, Metavar("NAME")] = ""
    """Name of this process in its cluster; by default the host name."""
    relay_secret_file: FilePath = ""
    """File with the cluster's secret, mode 0600; or AFIELD_RELAY_SECRET."""


class GatewaySettings(
    EngineSettings, ServerSettings, LimitSettings, RelayLinkSettings, frozen=True, kw_only=True
):
    """Settings of one gateway; its processes get them as JSON on standard input."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls)
