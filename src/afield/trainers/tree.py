"""Attention over a forest: every token sees its ancestors and itself, and nothing else.

It is an attention implementation of `transformers`: `watch(model)` puts it in place, and a call that
brings `tree=` runs over that forest; without one, attention is the usual causal one. On CUDA it is one
FlexAttention kernel whose mask costs one integer per token; on a CPU the exact sum, sequence by
sequence. Models whose attention is more than that (windows, soft caps, sinks) are refused.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from afield.trainers.packing import Packed

ATTENTION = "afield_tree"
BLOCK = 128
BEYOND = ("softcap", "s_aux", "position_bias")  # what some attention does besides


class Tree:
    """A forest on a device. Tokens that fill up the last block are trees of their own."""

    def __init__(self, packed: Packed, device: torch.device) -> None:
        count = len(packed.ids)
        filler = -count % BLOCK if device.type == "cuda" else 0
        self.ids = pad(torch.tensor(packed.ids), (0, filler)).to(device)[None]
        self.positions = pad(torch.tensor(packed.depth), (0, filler)).to(device)[None]
        ends = [*packed.end, *range(count + 1, count + filler + 1)]
        self.end = torch.tensor(ends, dtype=torch.int32, device=device)
        self.longest = max(packed.depth, default=0) + 1
        self._segments = packed.segments
        self._device = device

    @cached_property
    def segments(self) -> list[tuple[int, int, Tensor, Tensor]]:
        """For each sequence: the tokens it adds, all it consists of, and which of those each one sees."""
        made: list[tuple[int, int, Tensor, Tensor]] = []
        for start, end, path in self._segments:
            parts = [torch.arange(first, last) for first, last in (*path, (start, end))]
            keys = torch.cat(parts).to(self._device)
            fresh = end - start
            seen = torch.ones(fresh, len(keys), dtype=torch.bool).tril(len(keys) - fresh).to(self._device)
            made.append((start, end, keys, seen))
        return made

    @cached_property
    def blocks(self) -> BlockMask:
        """Which blocks see which, wholly or in part. What a block begins with and ends with says it all."""
        end = self.end
        count = len(end) // BLOCK
        latest, earliest = end.view(count, BLOCK).amax(1), end.view(count, BLOCK).amin(1)
        first = torch.arange(count, device=end.device) * BLOCK
        before = first[None, :] < first[:, None]
        whole = before & (earliest[None, :] >= first[:, None] + BLOCK)
        some = (before & (latest[None, :] > first[:, None]) & ~whole) | (first[None, :] == first[:, None])

        def visible(_b: Tensor, _h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q) & (q < end[kv])

        return BlockMask.from_kv_blocks(
            *_listed(some),
            *_listed(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(len(end), len(end)),
        )

    def hidden(self, model: Any) -> Tensor:
        """The last hidden state of every token, [tokens, size]."""
        output = model.get_decoder()(
            input_ids=self.ids, position_ids=self.positions, tree=self, use_cache=False
        )
        return output.last_hidden_state[0]

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """What a model says after each of `tokens`, [tokens, vocabulary]."""
        output = model(
            input_ids=self.ids,
            position_ids=self.positions,
            tree=self,
            use_cache=False,
            logits_to_keep=tokens,
        )
        return output.logits[0]


def _listed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """How many are set in each row, and which, those first."""
    order = torch.argsort(matrix.to(torch.int8), dim=1, descending=True, stable=True)
    return matrix.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def watch(model: Any) -> None:
    """Put this attention into a model."""
    _register()
    model.set_attn_implementation(ATTENTION)


@cache
def _register() -> None:
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Causal attention needs none, and a forest has its own."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are [batch, heads, tokens, size]; the result is [batch, tokens, heads, size]."""
    if strange := [name for name in BEYOND if more.get(name) is not None]:
        raise NotImplementedError(f"{type(module).__name__} uses {strange[0]}, which is not supported here")
    longest = tree.longest if tree is not None else query.shape[2]
    if dropout or (sliding_window is not None and longest > sliding_window):
        what = f"dropout {dropout}" if dropout else f"a window of {sliding_window} and rows of {longest}"
        raise NotImplementedError(f"{type(module).__name__} has {what}, which cannot be trained here exactly")
    if tree is None:
        grouped = query.shape[1] != key.shape[1]
        causal = attention_mask is None
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    elif query.device.type == "cuda":
        out = _flex()(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=True)
    else:
        out = _by_sequence(query, key, value, tree, scaling)
    return out.transpose(1, 2).contiguous(), None


@cache
def _flex() -> Any:
    return torch.compile(flex_attention)


def _by_sequence(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    parts: list[Tensor] = []
    for start, end, keys, seen in tree.segments:
        part = scaled_dot_product_attention(
            query[:, :, start:end],
            key.index_select(2, keys),
            value.index_select(2, keys),
            seen,
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(part)
    return torch.cat(parts, dim=2)
