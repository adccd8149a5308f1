"""Settings of one gateway, the same for each of its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from afield.errors import UsageError

ENGINE_START_S = 300.0


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """What `afield gateway` was started with; processes of one port get it as JSON on standard input."""

    model: str
    """Hugging Face model directory."""
    engine: tuple[str, ...]
    """Engines as KIND or KIND=WHERE, one or more."""
    admin_key: str
    """Key of trainers and collectors."""
    public_url: str
    """Address that agents are given."""
    local_url: str
    """Address on this machine."""
    store: Path
    """Directory of the store."""
    secret_file: Path | None = None
    """File of the secret behind session keys; None for the default place."""
    processes: int = 1
    """Gateway processes on the one port (default: 1)."""
    outcomes: str = ""
    """Transport that outcomes of experiments go on to; empty for none."""
    slots: int = 64
    """Calls the embedded engine runs at once (default: 64)."""
    seed: int = 0
    """Seed of the embedded engine (default: 0)."""
    engine_dtype: str = "auto"
    """Dtype of the embedded engine; auto is float32 on a CPU and bfloat16 on a GPU."""
    record_engine_calls: Path | None = None
    """File that every engine call is written to; None for none."""
    engine_start_timeout_s: float = ENGINE_START_S
    """Seconds to wait at start for an engine that does not answer yet (default: 300)."""
    max_submission_mb: int = 16
    """MiB of one outcome or reward (default: 16)."""
    max_session_mb: int = 256
    """MiB of one session's requests in flight at once, decompressed (default: 256)."""
    max_rewards: int = 10_000
    """Rewards of one session (default: 10,000)."""
    max_connections: int = 16_384
    """Connections from one address at once, in each process (default: 16,384)."""
    keep_sessions_h: float = 72.0
    """Hours after which a session that is over leaves the store; 0 keeps all (default: 72)."""
    path_keys: bool = False
    """Whether base URLs carry the session's key, for clients that cannot send one (default: no)."""
    durable: bool = False
    """Whether every commit survives a power cut (fsync per commit)."""
    log_format: str = "text"
    """Format of log lines: text or json."""

    def __post_init__(self) -> None:
        for name in ("processes", "max_submission_mb", "max_session_mb", "max_rewards", "max_connections"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if not self.keep_sessions_h >= 0:
            raise UsageError(f"--keep-sessions-h {self.keep_sessions_h:g} must be 0 or more")
        if not self.engine_start_timeout_s >= 0:
            raise UsageError(f"--engine-start-timeout {self.engine_start_timeout_s:g} must be 0 or more")

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls, dec_hook=_read)


def _read(kind: type[Any], value: Any) -> Any:
    return kind(value)
