"""LoRA adapters on a vLLM server, one per weight version.

1. Each version has its own adapter name, such as `policy-v7`.
2. The server needs `--enable-lora`, `--max-loras` of at least 2 (the newest version and calls in flight) and
   VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
3. With more adapters than `--max-loras`, vLLM evicts one in use and reads it from its directory again, or
   crashes if the directory is gone. So calls of the oldest versions are aborted first and continue with a
   newer version.
4. Loading a version unloads the versions that no call uses.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from afield.engines.http import EngineHttpClient
from afield.engines.lora import AdapterLeases
from afield.engines.remote import MODELS
from afield.errors import Unavailable, UsageError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
REMEDY = (
    "start it with --enable-lora --max-loras 2 (or more) --max-lora-rank (that of the adapter),"
    " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and VLLM_SERVER_DEV_MODE=1; or publish whole weights, with"
    " learn.lora.publish = 'merged'"
)
LEAST = 2
MAX_LORA = re.compile(rb'^vllm:lora_requests_info\{[^}\n]*max_lora="(\d+)"', re.MULTILINE)


class _LoraConfig(Struct):
    max_loras: int


class _DeviceConfig(Struct):
    device: str = ""


class _ModelDtype(Struct):
    dtype: object = ""


class _VllmConfig(Struct):
    served: _ModelDtype = msgspec.field(default_factory=_ModelDtype, name="model_config")
    lora_config: _LoraConfig | None = None
    device_config: _DeviceConfig = msgspec.field(default_factory=_DeviceConfig)


class _ServerInfo(Struct):
    vllm_config: _VllmConfig


class _ErrorBody(Struct):
    message: str = ""


class _LoadError(Struct):
    error: _ErrorBody = msgspec.field(default_factory=_ErrorBody)
    detail: object = None


SERVER_INFO = msgspec.json.Decoder(_ServerInfo)
REFUSAL = msgspec.json.Decoder(_LoadError)


class _ModelConfig(Struct):
    tie_word_embeddings: bool = False


def is_tied(path: str) -> bool:
    """Whether the model directory ties its embeddings; False if config.json cannot be read here."""
    try:
        return msgspec.json.decode(
            (Path(path) / "config.json").read_bytes(), type=_ModelConfig
        ).tie_word_embeddings
    except (OSError, msgspec.MsgspecError):
        return False


def adapter_name(base: str, version: int) -> str:
    """Adapter name of a version, such as `policy-v7`."""
    return f"{base}-v{version}"


class VllmAdapters:
    """Loads and unloads LoRA adapters on a vLLM server."""

    def __init__(self, http: EngineHttpClient, leases: AdapterLeases) -> None:
        self._http, self._leases = http, leases
        self._known: _VllmConfig | None = None
        self._named: dict[int, str] = {}  # adapter names by version, as the server lists them
        self._silent = ""  # reason why the server's configuration is unknown

    async def look(self, base: str) -> int | None:
        """Newest version among the adapters of `base` that the server lists; None without adapters."""
        served = self._http.decode(await self._http.ask("GET", "/v1/models"), MODELS).data
        ours = re.compile(re.escape(base) + r"-v(\d+)")
        matches = {m.id: ours.fullmatch(m.id) for m in served if m.parent is not None}
        self._named = {int(match[1]): name for name, match in matches.items() if match}
        return max(self._named, default=None)

    async def load(self, base: str, version: int, path: str, ends: str) -> None:
        """Serve the adapter to new calls; raises UsageError, with nothing changed, if the server refuses it.

        `ends` is the format of the server's request ids, see `end_calls`.
        """
        room = await self._ask_room()
        await self.end_calls(room - 1, ends)
        name = adapter_name(base, version)
        status, data = await self._http.status("POST", LOAD, {"lora_name": name, "lora_path": path})
        if status != 200:
            error = self._http.decode(data, REFUSAL)
            why = error.error.message or f"it answers {status}"
            raise UsageError(f"{self._http.url} did not take the adapter {path!r}: {why}; {REMEDY}")
        self._named[version] = name
        self._leases.newest = version
        await self._tidy()

    async def make_room(self, ends: str) -> None:
        """Abort the calls of the oldest versions so that the server's adapter limit is kept."""
        await self.end_calls(await self._ask_room(), ends)

    async def end_calls(self, room: int, ends: str) -> None:
        """Abort the calls of the oldest versions so that at most `room` versions are in use.

        The aborted calls continue with a newer version. `ends` is the format of the server's request ids,
        `GENERATE_ID` or `COMPLETIONS_ID`.
        """
        if gone := self._leases.revoke(room):
            ids = [ends.format(lease.id) for lease in gone]
            await self._http.ask("POST", "/abort_requests", {"request_ids": ids})

    async def _tidy(self) -> None:
        # Keeps the previous version too: another process may not know the newest one yet.
        old = sorted(self._named)[:-2]
        idle = [version for version in old if not self._leases.in_use(version)]
        for version in idle:
            status, data = await self._http.status("POST", UNLOAD, {"lora_name": self._named[version]})
            if status not in {200, 404}:
                raise Unavailable(f"{self._http.url} keeps the adapter of version {version}: {data[:200]!r}")
            del self._named[version]

    async def device(self) -> str:
        """Device type of the server; empty if it does not report it."""
        config = await self._config()
        return config.device_config.device if config else ""

    async def dtype(self) -> str:
        """Dtype of the served weights; empty if the server does not report it."""
        config = await self._config()
        name = str(config.served.dtype).removeprefix("torch.") if config else ""
        return name if name in ("float32", "bfloat16", "float16") else ""

    async def mixes(self) -> bool:
        """Whether an adapter may affect calls on the base weights in the same batch.

        vLLM on a CPU does that (seen with 0.32); True also for a server that does not report its device.
        """
        config = await self._config()
        return config is None or config.device_config.device == "cpu"

    async def _ask_room(self) -> int:
        config = await self._config()
        if config is not None:
            room = config.lora_config.max_loras if config.lora_config else 0
        elif (room := await self._room_by_metrics()) is None:
            raise UsageError(
                f"{self._http.url} does not report how many adapters it can hold ({self._silent};"
                f" /metrics has no max_lora); {REMEDY}"
            )
        if room < LEAST:
            has = "no adapters" if not room else f"{room} adapter at a time"
            raise UsageError(f"{self._http.url} serves {has}; {REMEDY}")
        return room

    async def _room_by_metrics(self) -> int | None:
        """Adapter limit from /metrics, for servers whose /server_info fails (it needs pip)."""
        status, data = await self._http.status("GET", "/metrics")
        match = MAX_LORA.search(data) if status == 200 else None
        return int(match[1]) if match else None

    async def _config(self) -> _VllmConfig | None:
        """Server configuration, requested once on first use: the first response takes seconds."""
        if self._known is None:
            status, data = await self._http.status("GET", "/server_info?config_format=json")
            if status == 200:
                self._known = self._http.decode(data, SERVER_INFO).vllm_config
            else:
                self._silent = f"it answers {status} to /server_info ({data[:200].decode(errors='replace')})"
        return self._known
