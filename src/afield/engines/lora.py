"""LoRA adapters: peft's adapter_config.json, and leases on the versions a server serves.

A directory with adapter_config.json is an adapter; any other is a whole model. A call holds an `AdapterLease`
on the version it began with. When more versions are in use than the server has room for, the leases of the
oldest are revoked, and their calls continue with the newest version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
from msgspec import Struct

from afield.errors import UsageError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """Fields of peft's adapter_config.json that change the merged weights; see `unfit`."""

    peft_type: str = "LORA"
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] = {}
    layer_replication: list[list[int]] | None = None
    alora_invocation_tokens: list[int] | None = None
    target_parameters: list[str] | None = None
    trainable_token_indices: dict[str, list[int]] | list[int] | None = None
    use_qalora: bool = False
    use_bdlora: dict[str, object] | bool | None = None

    @property
    def unfit(self) -> str | None:
        """The first field that keeps the adapter from being merged; None if it can be."""
        if self.peft_type != "LORA":
            return f"peft_type {self.peft_type!r}"
        others: dict[str, object] = {
            "use_dora": self.use_dora,
            "fan_in_fan_out": self.fan_in_fan_out,
            "bias": self.bias != "none",
            "lora_bias": self.lora_bias,
            "modules_to_save": self.modules_to_save,
            "layer_replication": self.layer_replication,
            "alora_invocation_tokens": self.alora_invocation_tokens,
            "target_parameters": self.target_parameters,
            "trainable_token_indices": self.trainable_token_indices,
            "use_qalora": self.use_qalora,
            "use_bdlora": self.use_bdlora,
        }
        return next((name for name, used in others.items() if used), None)


def is_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


def read_config(path: Path) -> AdapterConfig:
    try:
        return msgspec.json.decode((path / CONFIG).read_bytes(), type=AdapterConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(f"adapter {str(path)!r}: {CONFIG} cannot be read: {error}") from error


class AdapterLease:
    """One call's hold on an adapter version; `id` is the request id at the server."""

    __slots__ = ("id", "revoked", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.id = uuid4().hex
        self.revoked = False


class AdapterLeases:
    """Adapter versions in use. `newest` serves new calls; None while no adapter is served."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self._held: dict[int, set[AdapterLease]] = {}

    @contextmanager
    def held(self) -> Iterator[AdapterLease | None]:
        """A lease on the newest version, for the length of the block."""
        if self.newest is None:
            yield None
            return
        lease = AdapterLease(self.newest)
        self._held.setdefault(lease.version, set()).add(lease)
        try:
            yield lease
        finally:
            leases = self._held[lease.version]
            leases.discard(lease)
            if not leases:
                del self._held[lease.version]

    def in_use(self, version: int) -> bool:
        return version == self.newest or version in self._held

    def revoke(self, room: int) -> list[AdapterLease]:
        """Revoke the leases of the oldest versions, until at most `room` versions are in use."""
        kept = sorted({*self._held, *([] if self.newest is None else [self.newest])})[-room:] if room else []
        gone = [lease for version, held in self._held.items() if version not in kept for lease in held]
        for lease in gone:
            lease.revoked = True
        return gone
