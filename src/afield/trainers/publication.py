"""Published weights: float32 masters rounded to the engine's dtype.

1. `as_published` replaces the masters by the rounded values inside a block, so that the block computes with
   and writes the published version. Masters are restored bit for bit. `as_kept` does it again with values
   that were kept.
2. `PublishedUpdate` measures how much of the update survives rounding; the update is the difference to the
   checkpoint that training started from (`Checkpoint`).
3. Shards are rounded where they are, by the index of their elements in the whole tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afield.errors import UsageError
from afield.models.rounding import PublishedUpdate, Rounding, measure_update, rounded, torch_dtype
from afield.trainers import lora as adapters

log = logging.getLogger(__name__)
MIN_UPDATE_KEPT = 0.9
"""Share of an update that must reach the engine; less is logged as a warning."""
FREE_GPU_BYTES = 2 << 30
"""GPU memory that masters leave free while weights are published, in bytes."""
FREE_GPU_SHARE = 0.25
"""Share of a GPU's memory that masters leave free for the activations of a pass."""


class TensorShard(NamedTuple):
    """The part of a tensor that is in this process."""

    tensor: Tensor
    """Elements of the shard."""
    first: int = 0
    """Index of its first element in the whole tensor."""
    counted: bool = True
    """False where another process has the same elements and counts them."""


class KeptTensor(NamedTuple):
    """A master, or its shard, and its published values."""

    master: Tensor
    """Tensor of the model, of which training changes the values."""
    sent: Tensor
    """Rounded values in the engine's dtype."""


def undivided(tensor: Tensor) -> TensorShard:
    return TensorShard(tensor)


class Checkpoint:
    """The tensors that training started from, read from their files one at a time.

    A tensor with another name or shape in the files is held in memory.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self._files: dict[str, Path] = {}
        self._held: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._files |= dict.fromkeys(tensors.keys(), file)
            except (OSError, SafetensorError):
                continue
        for name, tensor in canonical(model).items():
            if not self._has(name, tensor):
                self._files.pop(name, None)
                self._held[name] = tensor.detach().cpu().clone()

    def _has(self, name: str, tensor: Tensor) -> bool:
        if name not in self._files:
            return False
        with safe_open(self._files[name], framework="pt") as tensors:
            return list(tensors.get_slice(name).get_shape()) == list(tensor.shape)

    def flat(self, name: str, first: int, count: int) -> Tensor:
        """`count` elements of a tensor from index `first`."""
        if name in self._held:
            return self._held[name].reshape(-1)[first : first + count]
        with safe_open(self._files[name], framework="pt") as tensors:
            stored = tensors.get_slice(name)
            shape = stored.get_shape()
            row = 1
            for size in shape[1:]:
                row *= size
            if not shape or row == 0:
                return tensors.get_tensor(name).reshape(-1)
            begin, end = first // row, -(-(first + count) // row)
            return stored[begin:end].reshape(-1)[first - begin * row :][:count]


def canonical(model: Any) -> dict[str, Tensor]:
    """Parameters by name; tied ones once, by their first name."""
    return dict(model.named_parameters())


def names_of(model: Any) -> dict[str, str]:
    """The name by which each parameter is rounded: tied ones share it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


@contextmanager
def as_published(
    model: Any,
    rounding: Rounding,
    start: Checkpoint,
    shard: Callable[[Tensor], TensorShard] = undivided,
    *,
    kept: list[KeptTensor] | None = None,
) -> Iterator[PublishedUpdate]:
    """Inside the block, all weights of `model` are rounded. The rounded values are added to `kept`."""
    with _restored(kept) as put, torch.no_grad():
        total = PublishedUpdate()
        for name, parameter in canonical(model).items():
            part = shard(parameter.detach())
            before = start.flat(name, part.first, part.tensor.numel()).view(part.tensor.shape)
            total = total.plus(put(name, part, part.tensor, before, rounding))
        yield total


@contextmanager
def as_merged(
    model: Any,
    rounding: Rounding,
    whole: Callable[[Tensor], Tensor],
    shard: Callable[[Tensor], TensorShard] = undivided,
) -> Iterator[PublishedUpdate]:
    """Inside the block, adapters are merged into their weights and disabled."""
    with _restored() as put, adapters.adapters_disabled(model), torch.no_grad():
        total = PublishedUpdate()
        for weight in adapters.adapted_weights(model):
            part = shard(weight.weight)
            if part.tensor.dtype not in (torch.float32, torch_dtype(rounding.dtype)):
                raise UsageError(
                    f"adapters on {part.tensor.dtype} weights cannot be merged for an engine in"
                    f" {rounding.dtype}; set learn.dtype = 'float32', or learn.lora.publish = 'adapter'"
                )
            before = part.tensor.float()
            added = weight.delta(whole).reshape(-1)[part.first : part.first + part.tensor.numel()]
            master = before + added.view(before.shape)
            total = total.plus(put(weight.name, part, master, before, rounding))
        yield total


@contextmanager
def as_adapters(
    model: Any,
    rounding: Rounding,
    whole: Callable[[Tensor], Tensor],
    shard: Callable[[Tensor], TensorShard] = undivided,
    *,
    kept: list[KeptTensor] | None = None,
) -> Iterator[PublishedUpdate]:
    """Inside the block, the adapters' tensors are rounded; their base weights stay."""
    with _restored(kept) as put, torch.no_grad():
        total = PublishedUpdate()
        masters = [
            (whole(weight.down).float(), whole(weight.up).float(), weight)
            for weight in adapters.adapted_weights(model)
        ]
        masters = [(down.clone(), up.clone(), weight) for down, up, weight in masters]
        for name, tensor in adapters.adapter_state(model).items():
            part = shard(tensor)
            put(name, part, part.tensor, None, rounding)
        for down, up, weight in masters:
            sent_down, sent_up = whole(weight.down).float(), whole(weight.up).float()
            total = total.plus(_product(down, up, sent_down, sent_up, weight.scale))
        yield total


def _product(down: Tensor, up: Tensor, sent_down: Tensor, sent_up: Tensor, scale: float) -> PublishedUpdate:
    """The update of a product of two factors, without forming it."""

    def dot(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> float:
        return float(((b.T.double() @ d.double()) * (a.double() @ c.T.double())).sum()) * scale * scale

    update = dot(down, up, down, up)
    along = dot(sent_down, sent_up, down, up)
    return PublishedUpdate(
        update, along, max(dot(sent_down, sent_up, sent_down, sent_up) - 2 * along + update, 0.0)
    )


Put = Callable[[str, TensorShard, Tensor, Tensor | None, Rounding], PublishedUpdate]


@contextmanager
def as_kept(kept: Sequence[KeptTensor]) -> Iterator[None]:
    """Inside the block, the masters have the values that were kept; gradients are computed as usual."""
    with ExitStack() as undo:
        for master, sent in kept:
            undo.callback(master.copy_, set_aside(master, share=FREE_GPU_SHARE))
            master.copy_(sent)
        yield


@contextmanager
def _restored(kept: list[KeptTensor] | None = None) -> Iterator[Put]:
    """Restore masters at the end, also after an error."""
    with ExitStack() as undo:

        def put(
            name: str, part: TensorShard, master: Tensor, start: Tensor | None, rounding: Rounding
        ) -> PublishedUpdate:
            before = None if start is None else start.to(master.device, torch.float32)
            sent = rounded(master, name, rounding, start=before, first=part.first)
            update = PublishedUpdate()
            if before is not None and part.counted:
                update = measure_update(master, sent, before)
            saved = set_aside(part.tensor)
            undo.callback(part.tensor.copy_, saved)
            part.tensor.copy_(sent)
            if kept is not None:
                kept.append(KeptTensor(part.tensor, sent))
            return update

        yield put


def set_aside(tensor: Tensor, *, share: float = 0.0) -> Tensor:
    """A copy on the device, or in CPU memory if the device would have less free memory than a share of it."""
    if tensor.is_cuda:
        free, total = torch.cuda.mem_get_info(tensor.device)
        if free < tensor.nbytes + max(FREE_GPU_BYTES, share * total):
            return tensor.cpu()
    return tensor.clone()


class Rounder:
    """Rounds tensors that another trainer sends, one at a time, and measures the published update.

    `model` is the directory that it started from. Tensors that arrive in 16 bits stay as they are.
    """

    def __init__(self, model: Path, rounding: Rounding) -> None:
        self.arrived = PublishedUpdate()
        self._rounding = rounding
        self._narrow = ""  # first tensor that arrived in 16 bits
        self._files: dict[str, Path] = {}
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        embeddings = [name for name in self._files if name.endswith("embed_tokens.weight")]
        # Tied embeddings have the same bits under both names.
        self._same = {"lm_head.weight": embeddings[0]} if len(embeddings) == 1 and is_tied(model) else {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if tensor.dtype != torch.float32:
            self._narrow = self._narrow or name
        if not self._rounding.lossy:
            return tensor
        key = self._same.get(name, name)
        start = self._start(key, tensor)
        sent = rounded(tensor, key, self._rounding, start=start)
        if start is not None and key == name:
            self.arrived = self.arrived.plus(measure_update(tensor, sent, start))
        return sent

    def metrics(self) -> dict[str, float]:
        """Metrics of all tensors so far; empty if one arrived in 16 bits."""
        if self._narrow:
            log.warning(
                "version %d: the trainer sends %s in 16 bits, so how much of its update that lost cannot be"
                " seen; let it send float32, which is rounded here",
                self._rounding.version,
                self._narrow,
            )
            return {}
        if not self._rounding.lossy:
            return {"update_kept": 1.0, "rounding_noise_norm": 0.0}
        return self.arrived.metrics()

    def _start(self, name: str, tensor: Tensor) -> Tensor | None:
        if name not in self._files:
            return None
        with safe_open(self._files[name], framework="pt") as tensors:
            stored = tensors.get_tensor(name)
        return stored.to(tensor.device, torch.float32) if stored.shape == tensor.shape else None


def is_tied(model: Path) -> bool:
    """Whether a model ties its input and output embeddings."""
    return json.loads((model / "config.json").read_text()).get("tie_word_embeddings") is True
