"""Published weights: float32 masters rounded to the engine's dtype, and how much of the update arrived.

1. `as_published` puts the rounded values in the place of the masters for as long as a block lasts; what is
   computed or written there is what the version means. Masters come back bit for bit.
2. The update is what training has added to the checkpoint that it started from (`Checkpoint`).
3. Shards are rounded where they are, by the index that their elements have in the whole tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from afield.errors import UsageError
from afield.rounding import PublishedUpdate, Rounding, measure_update, rounded, torch_dtype
from afield.trainers import lora as adapters

log = logging.getLogger("afield.trainers")
KEPT = 0.9  # share of an update that has to reach the engine, or it is told
ROOM = 2 << 30  # bytes of a GPU that stay free beside what is set aside there


class TensorShard(NamedTuple):
    """The part of a tensor that is in this process, and the index of its first element in the whole.

    `counted` is False where another process has the same elements and counts them.
    """

    tensor: Tensor
    first: int = 0
    counted: bool = True


def undivided(tensor: Tensor) -> TensorShard:
    return TensorShard(tensor)


class Checkpoint:
    """The tensors that training started from: read from their files, one at a time.

    A tensor that the files have under another name, or in another shape, is held in memory instead.
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
        """So many elements of a tensor from this index on."""
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
    """Parameters by name; those that are tied once, by the name that comes first."""
    return dict(model.named_parameters())


def names_of(model: Any) -> dict[str, str]:
    """Of every parameter the name by which it is rounded: tied ones have the same bits."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


@contextmanager
def as_published(
    model: Any,
    rounding: Rounding,
    start: Checkpoint,
    shard: Callable[[Tensor], TensorShard] = undivided,
) -> Iterator[PublishedUpdate]:
    """All weights of `model` are what `rounding` makes of them, until the block ends."""
    with _restored() as put, torch.no_grad():
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
    """Adapters are merged into the weights below them and switched off, until the block ends."""
    with _restored() as put, adapters.adapters_disabled(model), torch.no_grad():
        total = PublishedUpdate()
        for one in adapters.adapted_weights(model):
            part = shard(one.weight)
            if part.tensor.dtype not in (torch.float32, torch_dtype(rounding.dtype)):
                raise UsageError(
                    f"adapters on {part.tensor.dtype} weights cannot be merged for an engine in"
                    f" {rounding.dtype}; set learn.dtype = 'float32', or learn.lora.publish = 'adapter'"
                )
            before = part.tensor.float()
            added = one.delta(whole).reshape(-1)[part.first : part.first + part.tensor.numel()]
            master = before + added.view(before.shape)
            total = total.plus(put(one.name, part, master, before, rounding))
        yield total


@contextmanager
def as_adapters(
    model: Any,
    rounding: Rounding,
    whole: Callable[[Tensor], Tensor],
    shard: Callable[[Tensor], TensorShard] = undivided,
) -> Iterator[PublishedUpdate]:
    """The adapters' own tensors are rounded, until the block ends; the weights below stay as they are."""
    with _restored() as put, torch.no_grad():
        total = PublishedUpdate()
        masters = [
            (whole(one.down).float(), whole(one.up).float(), one) for one in adapters.adapted_weights(model)
        ]
        masters = [(down.clone(), up.clone(), one) for down, up, one in masters]
        for name, tensor in adapters.adapter_state(model).items():
            part = shard(tensor)
            put(name, part, part.tensor, None, rounding)
        for down, up, one in masters:
            sent_down, sent_up = whole(one.down).float(), whole(one.up).float()
            total = total.plus(_product(down, up, sent_down, sent_up, one.scale))
        yield total


def _product(down: Tensor, up: Tensor, sent_down: Tensor, sent_up: Tensor, scale: float) -> PublishedUpdate:
    """Of the products of two factors, without forming them."""

    def dot(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> float:
        return float(((b.T.double() @ d.double()) * (a.double() @ c.T.double())).sum()) * scale * scale

    update = dot(down, up, down, up)
    along = dot(sent_down, sent_up, down, up)
    return PublishedUpdate(
        update, along, max(dot(sent_down, sent_up, sent_down, sent_up) - 2 * along + update, 0.0)
    )


Put = Callable[[str, TensorShard, Tensor, Tensor | None, Rounding], PublishedUpdate]


@contextmanager
def _restored() -> Iterator[Put]:
    """Tensors that were put in place of masters give way to them at the end, also after an error."""
    with ExitStack() as undo:

        def put(
            name: str, part: TensorShard, master: Tensor, start: Tensor | None, rounding: Rounding
        ) -> PublishedUpdate:
            before = None if start is None else start.to(master.device, torch.float32)
            sent = rounded(master, name, rounding, start=before, first=part.first)
            told = PublishedUpdate()
            if before is not None and part.counted:
                told = measure_update(master, sent, before)
            saved = set_aside(part.tensor)
            undo.callback(part.tensor.copy_, saved)
            part.tensor.copy_(sent)
            return told

        yield put


def set_aside(tensor: Tensor) -> Tensor:
    """A copy: on the device where it has room, else in the machine's memory."""
    if tensor.is_cuda and torch.cuda.mem_get_info(tensor.device)[0] < tensor.nbytes + ROOM:
        return tensor.cpu()
    return tensor.clone()


class Rounder:
    """Rounds the tensors that another trainer sends, one at a time, and adds up what arrived.

    `model` is the directory that it started from. Tensors that come in 16 bits already are left alone.
    """

    def __init__(self, model: Path, rounding: Rounding) -> None:
        self.arrived = PublishedUpdate()
        self._rounding = rounding
        self._narrow = ""  # the first tensor that came in 16 bits
        self._files: dict[str, Path] = {}
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)
        embeddings = [name for name in self._files if name.endswith("embed_tokens.weight")]
        # A second name of tied embeddings has the bits of the first.
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
        """Of all tensors so far. Nothing is claimed about weights that came in 16 bits."""
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
            found = tensors.get_tensor(name)
        return found.to(tensor.device, torch.float32) if found.shape == tensor.shape else None


def is_tied(model: Path) -> bool:
    """Whether a model's input and output embeddings are one."""
    return json.loads((model / "config.json").read_text()).get("tie_word_embeddings") is True
