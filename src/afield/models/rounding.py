"""Stochastic rounding of float32 weights to the dtype of an engine.

An update of a few 1e-6 is far below the spacing of bfloat16, so rounding to the nearest value drops it.
Stochastic rounding adds random bits below the kept mantissa and truncates: each weight is rounded up or down
with the probability that preserves its expectation, so the update is preserved in the sum over all weights.

1. The random bits are a function of (run seed, version, tensor name, index of the element): a restart, a
   second engine, a shard and a resumed run get the same bits, on a CPU and on CUDA.
2. Values that the dtype can represent, infinities and NaN do not change. A finite value stays finite.
3. A weight that training did not change is rounded to nearest, as loaders round the checkpoint itself.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from afield.errors import UsageError

FILE = "rounding.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHUNK = 1 << 22  # elements per step; bounds the memory for random bits
DROPPED = {torch.bfloat16: 16, torch.float16: 13}  # dropped bits of float32's 23-bit mantissa
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64
SUBNORMAL = 2.0**-14  # smallest normal float16
SPACING = 2.0**-24  # spacing of subnormal float16

Dtype = Literal["float32", "bfloat16", "float16"]


class Rounding(Struct, frozen=True, kw_only=True):
    """Rounding of a version's weights, written as `rounding.json` next to published adapters."""

    dtype: Dtype = "float32"
    """Dtype of the published weights; float32, the default, rounds nothing."""
    seed: int = 0
    """Seed of the run."""
    version: int = 0
    """Policy version of the published weights."""
    nearest: bool = False
    """Whether to round to nearest, which loses small updates; for comparison."""

    @property
    def lossy(self) -> bool:
        """Whether the dtype has less precision than float32."""
        return self.dtype != "float32"


def torch_dtype(name: str) -> torch.dtype:
    """Torch dtype by name; raises UsageError for an unknown name."""
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; choose one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def make_rounding(dtype: str, seed: int, version: int, *, nearest: bool = False) -> Rounding:
    """Create a `Rounding`; raises UsageError for an unknown dtype."""
    torch_dtype(dtype)
    return msgspec.convert({"dtype": dtype, "seed": seed, "version": version, "nearest": nearest}, Rounding)


def write_rounding(directory: Path, rounding: Rounding) -> None:
    """Write `rounding.json`; nothing for float32."""
    if rounding.lossy:
        (directory / FILE).write_bytes(msgspec.json.encode(rounding))


def read_rounding(directory: Path) -> Rounding | None:
    """Read `rounding.json`; None if the directory has none."""
    try:
        data = (directory / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=Rounding)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{directory / FILE} cannot be read: {error}; publish the weights again") from error


# --- random bits ----------------------------------------------------------------------------------


def stream_key(seed: int, version: int, name: str) -> int:
    """64-bit key of the random stream of one tensor and version."""
    return int.from_bytes(blake2b(f"{seed}/{version}/{name}".encode(), digest_size=8).digest())


def random_bits(key: int, first: int, count: int, bits: int, device: torch.device) -> Tensor:
    """`bits` random bits for each of `count` elements from index `first` on, as int64.

    SplitMix64 of the element's index: integer arithmetic modulo 2**64, the same on every device.
    """
    x = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    x.mul_(_signed(GAMMA)).add_(_signed(key))
    _mix(x, 30).mul_(_signed(FIRST))
    _mix(x, 27).mul_(_signed(SECOND))
    _mix(x, 31)
    return x.bitwise_right_shift_(64 - bits).bitwise_and_((1 << bits) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, with a logical shift, in place."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))


# --- rounding -------------------------------------------------------------------------------------


def rounded(
    tensor: Tensor, name: str, rounding: Rounding, *, start: Tensor | None = None, first: int = 0
) -> Tensor:
    """Round a tensor to the dtype of `rounding`, on its device.

    Args:
        tensor: float32 weights; integer tensors are returned unchanged.
        name: name of the tensor in the checkpoint.
        rounding: dtype, seed and version.
        start: the same elements before training; None rounds every element stochastically.
        first: index of the first element in the whole tensor, for a shard of consecutive elements.
    """
    dtype = torch_dtype(rounding.dtype)
    if not tensor.is_floating_point():
        return tensor
    if not rounding.lossy or rounding.nearest or tensor.dtype == dtype:
        return tensor.to(dtype)
    flat = tensor.detach().reshape(-1)
    begin = None if start is None else start.detach().reshape(-1)
    out = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    key = stream_key(rounding.seed, rounding.version, name)
    for low in range(0, len(flat), CHUNK):
        part = flat[low : low + CHUNK].float()
        drawn = _stochastic(part, key, first + low, dtype)
        if begin is not None:
            same = begin[low : low + CHUNK].to(part.device, torch.float32) == part
            drawn = torch.where(same, part.to(dtype), drawn)
        out[low : low + CHUNK] = drawn
    return out.view(tensor.shape)


def _stochastic(part: Tensor, key: int, first: int, dtype: torch.dtype) -> Tensor:
    dropped = DROPPED[dtype]
    bits = random_bits(key, first, len(part), max(dropped, 24 if dtype == torch.float16 else 0), part.device)
    largest = torch.finfo(dtype).max
    # Adding random bits below the kept ones carries with the right probability, for either sign.
    low = (bits >> (24 - dropped)) if dtype == torch.float16 else bits
    kept = part.view(torch.int32).add(low.to(torch.int32)).bitwise_and_(-(1 << dropped)).view(torch.float32)
    if dtype == torch.float16:
        kept = torch.where(part.abs() < SUBNORMAL, _small(part, bits), kept)
    finite = part.isfinite()
    kept = torch.where(finite, kept.clamp(-largest, largest), part)
    return kept.to(dtype)


def _small(part: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding in the subnormal range of float16, where the spacing is constant."""
    scaled = part.abs() / SPACING
    whole = scaled.floor()
    up = bits.to(torch.float32) < (scaled - whole) * 2.0**24
    return torch.copysign((whole + up) * SPACING, part)


# --- update statistics ----------------------------------------------------------------------------


class PublishedUpdate(NamedTuple):
    """Statistics of a published update u = master - start; additive over tensors and shards."""

    update: float = 0.0
    """Squared norm of u."""
    along: float = 0.0
    """Dot product of published - start with u."""
    noise: float = 0.0
    """Squared norm of published - master."""

    def plus(self, other: PublishedUpdate) -> PublishedUpdate:
        """Sum of both statistics."""
        return PublishedUpdate(self.update + other.update, self.along + other.along, self.noise + other.noise)

    @property
    def kept(self) -> float | None:
        """Share of the update that was published, along its own direction; None without an update."""
        return self.along / self.update if self.update else None

    def metrics(self) -> dict[str, float]:
        """Metrics `update_kept` (omitted without an update), `update_norm` and `rounding_noise_norm`."""
        kept = {} if self.kept is None else {"update_kept": self.kept}
        return {
            **kept,
            "update_norm": math.sqrt(self.update),
            "rounding_noise_norm": math.sqrt(self.noise),
        }


def measure_update(master: Tensor, published: Tensor, start: Tensor) -> PublishedUpdate:
    """Statistics of one tensor or shard: float32 master, published weights, weights before training."""
    total = torch.zeros(3, dtype=torch.float64, device=master.device)
    flat = [tensor.detach().reshape(-1) for tensor in (master, published, start)]
    for low in range(0, len(flat[0]), CHUNK):
        now, sent, before = (t[low : low + CHUNK].to(master.device, torch.float32) for t in flat)
        update, step, noise = now - before, sent - before, sent - now
        parts = (update * update, step * update, noise * noise)
        total += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    return PublishedUpdate(*total.tolist())
