"""What stands in for a GPU, so that stock TRL's asynchronous GRPO runs on a CPU. Test code.

It replaces two things in TRL and nothing else:
- the flash-attention kernel (FlashAttention 3, `flash_attn_varlen_func`) under its tree attention, by
  PyTorch's scaled dot product attention, sequence by sequence: the same numbers, slowly;
- the probe of the accelerator's peak FLOP/s, which knows CUDA devices only.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def install() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_, **__: None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float | None = None,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    **other: Any,
) -> Tensor:
    """Causal attention of sequences laid end to end; the last query of each sees its last key."""
    assert causal and window_size == (-1, -1) and not other, "the stand-in knows plain causal attention only"
    groups = query.shape[1] // key.shape[1]
    parts: list[Tensor] = []
    for (a, b), (c, d) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        visible = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        heads = [
            query[a:b].transpose(0, 1),
            key[c:d].repeat_interleave(groups, 1).transpose(0, 1),
            value[c:d].repeat_interleave(groups, 1).transpose(0, 1),
        ]
        out = scaled_dot_product_attention(*heads, attn_mask=visible, scale=softmax_scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)
