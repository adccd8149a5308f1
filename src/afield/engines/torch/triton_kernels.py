"""Triton decode kernels: rotary embedding and store, attention, gated MLP, sums.

Each lane adds one id to one row of the KV cache `[rows, length, heads, size]`. The kernels read and write it
in place, reading each key in use once; no shape depends on the number of keys. They round where the model's
own layers round. `decode_kernels` has plain torch versions and compares the kernels with them on the device.
Import only with CUDA; with `TRITON_INTERPRET=1` the kernels run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

REFUSALS: tuple[type[Exception], ...] = (TritonError,)
# Smallest row count of tl.dot.
FEWEST_QUERIES = 16
KEYS_AT_ONCE = 64
ELEMENTS_AT_ONCE = 1024
TOKENS_AT_ONCE = 4096


class Kernel(Protocol):
    """Triton kernel: called from another kernel, or launched over a grid."""

    def __call__(self, *args: Any) -> Any: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...


def jit(body: Callable[..., Any]) -> Kernel:
    """`triton.jit` with a type."""
    return triton.jit(body)


@jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@jit
def _half(source, weight, cos, sin, target, eps, half: tl.constexpr, normed: tl.constexpr):
    """Apply the optional RMS norm and the rotary embedding to one head of one lane."""
    d = tl.arange(0, half)
    a = tl.load(source + d).to(tl.float32)
    b = tl.load(source + half + d).to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * half) + eps)
        a = _rounded(_rounded(a * scale, source) * tl.load(weight + d).to(tl.float32), source)
        b = _rounded(_rounded(b * scale, source) * tl.load(weight + half + d).to(tl.float32), source)
    cos_a, cos_b = tl.load(cos + d).to(tl.float32), tl.load(cos + half + d).to(tl.float32)
    sin_a, sin_b = tl.load(sin + d).to(tl.float32), tl.load(sin + half + d).to(tl.float32)
    turned_a = _rounded(a * cos_a, source) - _rounded(b * sin_a, source)
    turned_b = _rounded(b * cos_b, source) + _rounded(a * sin_b, source)
    tl.store(target + d, turned_a.to(target.dtype.element_ty))
    tl.store(target + half + d, turned_b.to(target.dtype.element_ty))


@jit
def _prepare(
    q, k, v, q_weight, k_weight, cos, sin, q_out, keys, values, rows, positions, eps,
    q_stride, k_stride, v_stride, row_stride, position_stride,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = 2 * half
    cos += lane * size
    sin += lane * size
    if head < q_heads:
        target = q_out + (lane * q_heads + head) * size
        _half(q + lane * q_stride + head * size, q_weight, cos, sin, target, eps, half, normed)
    else:
        head -= q_heads
        row = tl.load(rows + lane).to(tl.int64)
        place = row * row_stride + tl.load(positions + lane) * position_stride + head * size
        _half(k + lane * k_stride + head * size, k_weight, cos, sin, keys + place, eps, half, normed)
        d = tl.arange(0, size)
        tl.store(values + place + d, tl.load(v + lane * v_stride + head * size + d))


def prepare(
    q: Tensor, k: Tensor, v: Tensor,
    norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    lanes, heads, size = q.shape
    kv_heads = k.shape[1]
    q, k, v = (t if t[0].is_contiguous() else t.contiguous() for t in (q, k, v))
    cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight, eps = norms or (q, k, 0.0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _prepare[(lanes, heads + kv_heads)](
        q, k, v, q_weight, k_weight, cos, sin, out, keys, values, rows, positions, eps,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1),
        q_heads=heads, kv_heads=kv_heads, half=size // 2, normed=norms is not None, num_warps=1,
    )  # fmt: skip
    return out


@jit
def _attend(
    q, keys, values, out, rows, positions, scale, row_stride, position_stride,
    groups: tl.constexpr, queries: tl.constexpr, size: tl.constexpr, step: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    head, lane = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    length = (tl.load(positions + lane) + 1).to(tl.int32)
    base = tl.load(rows + lane).to(tl.int64) * row_stride + head * size
    g, d, n = tl.arange(0, queries), tl.arange(0, size), tl.arange(0, step)
    here = ((lane * heads + head) * groups + g[:, None]) * size + d[None, :]
    query = tl.load(q + here, mask=g[:, None] < groups, other=0.0)
    top = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    sums = tl.zeros([queries, size], tl.float32)
    for start in range(0, length, step):
        at = start + n
        there = at < length
        place = base + at * position_stride
        key = tl.load(keys + place[None, :] + d[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(query, key, input_precision=precision) * scale
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        value = tl.load(values + place[:, None] + d[None, :], mask=there[:, None], other=0.0)
        total = total * fade + tl.sum(weight, 1)
        sums = sums * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=precision)
        top = higher
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + here, result, mask=g[:, None] < groups)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    scale: float,
    *,
    step: int = KEYS_AT_ONCE,
    warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """Attention of each lane; `step`, `warps` and `stages` tune speed only."""
    lanes, heads, size = q.shape
    groups = heads // keys.shape[2]
    out = torch.empty_like(q)
    _attend[(keys.shape[2], lanes)](
        q, keys, values, out, rows, positions, scale, keys.stride(0), keys.stride(1),
        groups=groups, queries=max(FEWEST_QUERIES, triton.next_power_of_2(groups)), size=size,
        step=step if size <= 128 else step // 2,
        precision="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@jit
def _gate(gate, up, out, gate_stride, up_stride, count, elements: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * elements + tl.arange(0, elements)
    there = at < count
    x = tl.load(gate + row * gate_stride + at, mask=there, other=0.0).to(tl.float32)
    open_by = _rounded(x / (1 + tl.exp(-x)), gate)
    y = open_by * tl.load(up + row * up_stride + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * count + at, y.to(out.dtype.element_ty), mask=there)


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU gate; see `decode_kernels.gate`."""
    count = gate.shape[-1]
    rows, ups = (t if t.stride(-1) == 1 else t.contiguous() for t in (gate.flatten(0, -2), up.flatten(0, -2)))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _gate[(len(rows), triton.cdiv(count, ELEMENTS_AT_ONCE))](
        rows, ups, out, rows.stride(0), ups.stride(0), count, elements=ELEMENTS_AT_ONCE
    )
    return out


@jit
def _sums(
    logits, temperature, tops, totals, stride, vocabulary, blocks, width: tl.constexpr, tokens: tl.constexpr
):
    chunk, row = tl.program_id(0), tl.program_id(1)
    count: tl.constexpr = tokens // width
    block = chunk * count + tl.arange(0, count)
    at = block[:, None] * width + tl.arange(0, width)[None, :]
    there = at < vocabulary
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=there, other=float("-inf")).to(tl.float32)
    x = x / tl.load(temperature + row)
    top = tl.max(x, 1)
    # A block of probability 0 would give -inf - -inf = NaN.
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None]), 1)
    tl.store(tops + row * blocks + block, top, mask=block < blocks)
    tl.store(totals + row * blocks + block, total, mask=block < blocks)


def sums(logits: Tensor, temperature: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Softmax sums per block of tokens; see `sampler.Sums`."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, block)
    tops, totals = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    _sums[(triton.cdiv(vocabulary, TOKENS_AT_ONCE), rows)](
        logits, temperature, tops, totals, logits.stride(0), vocabulary, blocks,
        width=block, tokens=TOKENS_AT_ONCE,
    )  # fmt: skip
    return tops, totals
