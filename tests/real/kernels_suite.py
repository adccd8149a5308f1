"""Run by `test_kernels.py` where Triton is, under its interpreter: each kernel against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afield.engines.torch import decode_kernels, triton_kernels
from afield.engines.torch.sampler import plain_sums

pytestmark = pytest.mark.real
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Lanes, heads of queries, heads of keys, their size, rows of memory, their length.
SHAPES = [(1, 1, 1, 16, 1, 1), (3, 6, 2, 32, 5, 70), (5, 4, 4, 64, 6, 129), (2, 14, 2, 128, 3, 65)]
VOCABULARIES = [1, 127, 128, 4096, 5003]


def noise(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def off(ours: Tensor, theirs: Tensor) -> float:
    """In units of what rounding explains."""
    apart = (ours.float() - theirs.float()).abs() / (1 + theirs.float().abs())
    return float(apart.max()) / decode_kernels.ROUNDING[theirs.dtype]


def lanes_of(lanes: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows in no order, and positions that include the first and the last."""
    generator = torch.Generator().manual_seed(lanes)
    row = torch.randperm(rows, generator=generator)[:lanes].int()
    position = torch.randint(length, (lanes,), generator=generator).int()
    position[0] = length - 1
    if lanes > 1:
        position[1] = 0
    return row, position


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_triton_rotation_and_cache_writes_equal_the_plain_ones(
    shape: tuple[int, ...], dtype: torch.dtype, normed: bool
) -> None:
    lanes, heads, kv_heads, size, rows, length = shape
    q, k, v = (noise(lanes, h, size, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    angle = noise(lanes, size // 2, dtype=torch.float32).repeat(1, 2)
    norms = (1 + 0.1 * noise(size, dtype=dtype), 1 - 0.1 * noise(size, dtype=dtype), 1e-6) if normed else None
    lane = lanes_of(lanes, rows, length)
    memory = noise(2, rows, length, kv_heads, size, dtype=dtype)
    results: list[tuple[Tensor, ...]] = []
    for prepare in (triton_kernels.prepare, decode_kernels.prepare):
        keys, values = memory.clone()
        turned = prepare(q, k, v, norms, angle.cos().to(dtype), angle.sin().to(dtype), keys, values, *lane)
        results.append((turned, keys, values))
    assert max(off(a, b) for a, b in zip(*results, strict=True)) <= 1
    untouched = torch.ones(rows, length, dtype=torch.bool)
    untouched[lane[0].long(), lane[1].long()] = False
    assert torch.equal(results[0][1][untouched], memory[0][untouched])


# Not in bfloat16, whose bit patterns the interpreter multiplies as if they were numbers. On a device the
# engine compares that itself when it starts.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_attention_equals_the_plain_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lanes, heads, kv_heads, size, rows, length = shape
    q = noise(lanes, heads, size, dtype=dtype)
    keys, values = noise(2, rows, length, kv_heads, size, dtype=dtype)
    lane = lanes_of(lanes, rows, length)
    # What a row has not written yet may be anything, and must not be read.
    for row, position in zip(*lane, strict=True):
        keys[row, position + 1 :], values[row, position + 1 :] = float("nan"), float("nan")
    ours = triton_kernels.attend(q, keys, values, *lane, size**-0.5)
    assert off(ours, decode_kernels.attend(q, keys.nan_to_num(), values.nan_to_num(), *lane, size**-0.5)) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 1024), (2, 1025)])
def test_triton_gate_equals_the_plain_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype).flip(0)
    assert off(triton_kernels.gate(gate, up), decode_kernels.gate(gate, up)) <= 1
    wide = noise(shape[0], 2 * shape[1], dtype=dtype)
    assert off(triton_kernels.gate(wide[:, ::2], up), decode_kernels.gate(wide[:, ::2], up)) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_triton_block_sums_equal_the_plain_ones(vocabulary: int, dtype: torch.dtype) -> None:
    logits = 4 * noise(3, vocabulary, dtype=dtype)
    logits[1, : vocabulary // 2] = float("-inf")  # whole blocks without probability
    temperature = torch.tensor([0.5, 1.0, 2.0])
    tops, totals = triton_kernels.sums(logits, temperature, 128)
    wanted_tops, wanted_totals = plain_sums(logits, temperature, 128)
    assert torch.equal(tops, wanted_tops)
    torch.testing.assert_close(totals, wanted_totals, rtol=1e-5, atol=1e-6)
