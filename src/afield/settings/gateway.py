"""Gateway settings: one struct for the command line, files and child processes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec

from afield.settings.fields import (
    PATH,
    Bound,
    Count,
    CountOrZero,
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
    """Port to listen on; 0 selects a free port."""
    public_url: Url = ""
    """Address given to agents; by default the address the gateway listens on."""
    admin_key: Annotated[str, Metavar("KEY")] = ""
    """Admin key, with which trainers and collectors authenticate; or set AFIELD_ADMIN_KEY. On loopback one is
    generated and printed."""
    admin_key_file: FilePath = ""
    """File that contains the admin key; its mode must be 0600."""
    secret_file: FilePath = ""
    """File with the secret that signs session keys; by default in ~/.local/state/afield/gateways."""
    store: Annotated[str, Metavar("DIR"), PATH] = "gateway-store"
    """Directory of the session store."""
    store_shared: bool = False
    """Expect the store on a file system that several machines mount: SQLite then uses no shared memory."""
    keep_sessions_h: NotNegative = 72.0
    """Hours after which a completed session leaves the store; 0 keeps all."""
    durable: bool = False
    """Survive power cuts: call fsync after every commit."""
    outcomes: Annotated[str, Metavar("SPEC")] = ""
    """Store to which the gateway forwards outcomes of agents: files:///DIR or s3://BUCKET."""
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
    """Engine: torch (embedded), vllm (starts servers), vllm=URL, sglang=URL, relay=vllm:NAME for a server
    behind a relay, or scripted=FILE for tests; may be repeated."""
    slots: CountOrZero = 0
    """Calls that the embedded engine runs at once; 0 selects 64 on a CPU, and on a GPU as many as fit into
    its free memory."""
    seed: int = 0
    """Sampling seed of the embedded engine."""
    engine_dtype: EngineDtype = "auto"
    """Dtype of the embedded engine; auto is float32 on a CPU and bfloat16 on a GPU."""
    engine_start_timeout_s: NotNegative = 300.0
    """Seconds that an engine has to load its model and answer when the gateway starts."""
    record_engine_calls: FilePath = ""
    """File to which every engine call is written, to compare it with the recorded turns."""


class ManagedEngineSettings(SettingsGroup, frozen=True, kw_only=True):
    """Devices of engines, and vLLM servers that are started with `--engine vllm`."""

    title: ClassVar[str] = "Engine placement and managed vLLM"

    engine_devices: Annotated[tuple[int, ...], Metavar("N,...")] = ()
    """GPUs of the engines. By default all visible ones; in a training run those that the trainer leaves, or
    the trainer's own if it leaves none."""
    vllm_python: FilePath = ""
    """Interpreter of the environment in which vLLM is installed; by default the one that runs afield."""
    vllm_tensor_parallel: Count = 1
    """GPUs over which each vLLM server that afield starts splits the model."""
    vllm_replicas: CountOrZero = 0
    """Number of vLLM servers to start; 0 starts as many as engine_devices has room for, at least one."""
    vllm_memory: Annotated[float | None, Bound(above=0, at_most=1)] = None
    """Share of a GPU's memory that a started vLLM server takes; default: 0.9, or 0.45 on a trainer's GPU."""
    vllm_max_seqs: Count | None = None
    """Calls that a started vLLM server runs at once; default: vLLM's."""
    vllm_adapters: CountOrZero = 0
    """LoRA adapters that a started vLLM server has room for; a training run with LoRA sets it."""
    vllm_adapter_rank: Count = 16
    """Largest LoRA rank that a started vLLM server accepts."""
    vllm_shared_weights: bool = False
    """Have vLLM copy weights from a trainer's GPU memory on this machine. vLLM at a URL has to be started
    with the weight transfer backend `ipc`; afield starts its own servers so. A training run sets it if it
    can."""
    vllm_args: tuple[str, ...] = ()
    """Further command-line arguments of started vLLM servers."""
    vllm_logs: Annotated[str, Metavar("DIR"), PATH] = ""
    """Directory for the logs of started vLLM servers; by default the directory of the session store."""


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
    """Address of a relay to connect to, for a machine that accepts no inbound connections; agents then reach
    this process through the relay."""
    relay_cluster: Annotated[str, Metavar("NAME")] = ""
    """Name of this process's cluster at the relay."""
    relay_name: Annotated[str, Metavar("NAME")] = ""
    """Name of this process in its cluster; by default the host name."""
    relay_secret_file: FilePath = ""
    """File with the cluster's secret, mode 0600; or set AFIELD_RELAY_SECRET."""


class TelemetrySettings(SettingsGroup, frozen=True, kw_only=True):
    """OpenTelemetry traces."""

    title: ClassVar[str] = "Traces"

    otel_endpoint: Url = ""
    """Base address of an OTLP collector, which gets traces over HTTP. OTEL_EXPORTER_OTLP_ENDPOINT turns
    traces on as well; without either there are none."""
    otel_content: bool = False
    """Put prompts and replies into traces."""


class GatewaySettings(
    EngineSettings,
    ManagedEngineSettings,
    ServerSettings,
    LimitSettings,
    RelayLinkSettings,
    TelemetrySettings,
    frozen=True,
    kw_only=True,
):
    """Settings of one gateway; its processes get them as JSON on standard input."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls)
