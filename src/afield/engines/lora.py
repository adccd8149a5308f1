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
    """Adapter type; only LORA can be merged."""
    r: int
    """Rank."""
    lora_alpha: float
    """Alpha; the scale is alpha divided by the rank."""
    use_rslora: bool = False
    """Whether the scale is alpha divided by the root of the rank (rsLoRA)."""
    use_dora: bool = False
    """Weight-decomposed LoRA (DoRA); not supported."""
    fan_in_fan_out: bool = False
    """Transposed weights; not supported."""
    bias: str = "none"
    """Trained biases; only "none" is supported."""
    lora_bias: bool = False
    """Bias of factor B; not supported."""
    modules_to_save: list[str] | None = None
    """Fully trained modules; not supported."""
    alpha_pattern: dict[str, float] = {}
    """Alpha by layer name pattern, instead of `lora_alpha`."""
    layer_replication: list[list[int]] | None = None
    """Replicated layers; not supported."""
    alora_invocation_tokens: list[int] | None = None
    """Activated LoRA (aLoRA); not supported."""
    target_parameters: list[str] | None = None
    """Adapted parameters instead of modules; not supported."""
    trainable_token_indices: dict[str, list[int]] | list[int] | None = None
    """Trained token embeddings; not supported."""
    use_qalora: bool = False
    """Quantisation-aware LoRA; not supported."""
    use_bdlora: dict[str, object] | bool | None = None
    """Block-diagonal LoRA; not supported."""

    @property
    def unfit(self) -> str | None:
        """First field that prevents merging the adapter; None if it can be merged."""
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
    """Whether the directory has an adapter_config.json."""
    return (Path(path) / CONFIG).is_file()


def read_config(path: Path) -> AdapterConfig:
    """Read adapter_config.json; raises UsageError if it is invalid."""
    try:
        return msgspec.json.decode((path / CONFIG).read_bytes(), type=AdapterConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(f"adapter {str(path)!r}: {CONFIG} cannot be read: {error}") from error


class AdapterLease:
    """Use of an adapter version by one call; `id` is the request id at the server."""

    __slots__ = ("id", "revoked", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.id = uuid4().hex
        self.revoked = False


class AdapterLeases:
    """Adapter versions in use. New calls get `newest`; None while no adapter is served."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self._held: dict[int, set[AdapterLease]] = {}

    @contextmanager
    def held(self) -> Iterator[AdapterLease | None]:
        """Hold a lease on the newest version for the length of the block; None without an adapter."""
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
        """Whether the version is the newest or a call holds it."""
        return version == self.newest or version in self._held

    def revoke(self, room: int) -> list[AdapterLease]:
        """Revoke leases of the oldest versions until at most `room` versions are in use; returns them."""
        kept = sorted({*self._held, *([] if self.newest is None else [self.newest])})[-room:] if room else []
        gone = [lease for version, held in self._held.items() if version not in kept for lease in held]
        for lease in gone:
            lease.revoked = True
        return gone
