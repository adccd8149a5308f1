"""Tree attention: every token attends to its ancestors and itself.

An attention implementation of `transformers`: `install_tree_attention(model)` selects it, and a call with
`tree=` runs over that tree; without one, attention is causal. Kernels: FlexAttention with a mask of one
integer per token, cuDNN over dense blocks (`prefix_attention`) where that is faster, and on a CPU the exact
sum, sequence by sequence. Models with windows, soft caps or sinks are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from afield.trainers.packing import PackedTokens, Segment
from afield.trainers.prefix_attention import (
    AttentionPlan,
    Heads,
    PrefixAttention,
    kernel_available,
    plan_attention,
)

ATTENTION = "afield_tree"
Kernel = Literal["prefix", "flex", "per_sequence"]
BLOCK = 128
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention variants that are refused."""
FLEX_SPEED = 0.65
"""Speed of FlexAttention relative to dense kernels, for the same arithmetic."""


class CheckpointedAttention:
    """Attention that gradient checkpointing does not compute twice.

    A checkpointed layer's forward pass runs twice. The first pass keeps attention's result, one tensor per
    layer of the size that checkpointing keeps anyway; the second only recomputes its inputs.
    """

    def __init__(self, enabled: bool) -> None:
        self.first = enabled
        self._results: dict[int, Tensor] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}

    def __call__(
        self,
        layer: int,
        lay_out: Callable[..., tuple[Tensor, ...]],
        attend: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        """`attend(*lay_out(*tensors))`; a second pass only lays out."""
        if layer in self._results and not self.first:
            with torch.no_grad():
                self._inputs = {layer: lay_out(*tensors)}
            # It requires a gradient so that later operations save the same tensors as at first.
            return self._results.pop(layer).detach().requires_grad_()
        inputs = lay_out(*tensors)
        if not self.first:
            return attend(*inputs)
        positions = {(tensor.data_ptr(), tensor.shape): number for number, tensor in enumerate(inputs)}

        def pack(tensor: Tensor) -> int | Tensor:
            return positions.get((tensor.data_ptr(), tensor.shape), tensor)

        def unpack(packed: int | Tensor) -> Tensor:
            return self._inputs[layer][packed] if isinstance(packed, int) else packed

        with saved_tensors_hooks(pack, unpack):
            result = attend(*inputs)
        self._results[layer] = result.detach()
        return result


class TokenTree:
    """A packed prefix tree on a device. Padding of the last block is a separate tree."""

    def __init__(self, packed: PackedTokens, device: torch.device, kernel: Kernel | None = None) -> None:
        count = len(packed.ids)
        filler = -count % BLOCK if device.type == "cuda" or kernel == "flex" else 0
        self.ids = pad(torch.tensor(packed.ids), (0, filler)).to(device)[None]
        self.positions = pad(torch.tensor(packed.depth), (0, filler)).to(device)[None]
        ends = [*packed.end, *[count + filler] * filler]
        self.end = torch.tensor(ends, dtype=torch.int32, device=device)
        self.longest = max(packed.depth, default=0) + 1
        self._pairs = sum(packed.depth) + count
        self._segments = [*packed.segments, *([Segment(count, count + filler, ())] if filler else [])]
        self._device = device
        self._kernel: Kernel | None = kernel

    def kernel(self, dtype: torch.dtype, heads: Heads) -> Kernel:
        """The faster kernel: FlexAttention over the needed pairs, or dense kernels over somewhat more."""
        if self._kernel is not None:
            return self._kernel
        if self._device.type != "cuda":
            return "per_sequence"
        cheap = self.plan.pairs < self._pairs / FLEX_SPEED
        return "prefix" if cheap and kernel_available(self._device, dtype, heads) else "flex"

    @cached_property
    def plan(self) -> AttentionPlan:
        return plan_attention(self._segments, self._device)

    @cached_property
    def segments(self) -> list[tuple[int, int, Tensor, Tensor]]:
        """Per sequence: start and end of its tokens, all its token indices, and the mask between them."""
        segments: list[tuple[int, int, Tensor, Tensor]] = []
        for start, end, path in self._segments:
            parts = [torch.arange(first, last) for first, last in (*path, (start, end))]
            keys = torch.cat(parts).to(self._device)
            fresh = end - start
            seen = torch.ones(fresh, len(keys), dtype=torch.bool).tril(len(keys) - fresh).to(self._device)
            segments.append((start, end, keys, seen))
        return segments

    @cached_property
    def blocks(self) -> BlockMask:
        """FlexAttention's block mask, from the first and last end of each block."""
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
        with tree_pass(self, model) as tree:
            output = model.get_decoder()(
                input_ids=self.ids, position_ids=self.positions, tree=tree, use_cache=False
            )
        return output.last_hidden_state[0]

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Logits after each of `tokens`, [tokens, vocabulary]."""
        with tree_pass(self, model) as tree:
            output = model(
                input_ids=self.ids,
                position_ids=self.positions,
                tree=tree,
                use_cache=False,
                logits_to_keep=tokens,
            )
        return output.logits[0]


class TreePass:
    """A forward pass over a tree, with the recomputation of checkpointed layers."""

    def __init__(self, tree: TokenTree, attention: CheckpointedAttention) -> None:
        self.tree, self.attention = tree, attention
        self.used = False


def uses_checkpointing(model: Any) -> bool:
    """Whether layers of a model use gradient checkpointing, which does not need training mode."""
    layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    return any(layer.training and layer.gradient_checkpointing for layer in layers)


@contextmanager
def tree_pass(tree: TokenTree, model: Any) -> Iterator[TreePass]:
    attention = CheckpointedAttention(torch.is_grad_enabled() and uses_checkpointing(model))
    current = TreePass(tree, attention)
    yield current
    attention.first = False
    if not current.used:
        raise NotImplementedError(
            f"{type(model).__name__} has no tree attention; call watch(model) first, or train padded rows"
        )


def _listed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Number of set columns per row, and the columns with the set ones first."""
    order = torch.argsort(matrix.to(torch.int8), dim=1, descending=True, stable=True)
    return matrix.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def install_tree_attention(model: Any) -> None:
    """Select tree attention in a model."""
    _register()
    model.set_attn_implementation(ATTENTION)


@cache
def _register() -> None:
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Causal and tree attention need no mask tensor."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: TreePass | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are [batch, heads, tokens, size]; the result is [batch, tokens, heads, size]."""
    if unsupported := [name for name in UNSUPPORTED if more.get(name) is not None]:
        raise NotImplementedError(
            f"{type(module).__name__} uses {unsupported[0]}, which is not supported here"
        )
    longest = tree.tree.longest if tree is not None else query.shape[2]
    if dropout or (sliding_window is not None and longest > sliding_window):
        feature = f"dropout {dropout}" if dropout else f"a window of {sliding_window} and rows of {longest}"
        raise NotImplementedError(
            f"{type(module).__name__} has {feature}, which cannot be trained here exactly"
        )
    if tree is None:
        grouped = query.shape[1] != key.shape[1]
        causal = attention_mask is None
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    else:
        return _attend(tree, id(module), scaling, query, key, value), None
    return out.transpose(1, 2).contiguous(), None


def _attend(current: TreePass, layer: int, scaling: float | None, *tensors: Tensor) -> Tensor:
    tree, checkpointed = current.tree, current.attention
    current.used = True
    scale = tensors[0].shape[-1] ** -0.5 if scaling is None else scaling
    # Norms and rotations with float32 weights leave queries and keys in float32, but not values.
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[0].dtype
    tensors = tuple(tensor.to(dtype) for tensor in tensors)
    kernel = tree.kernel(dtype, Heads(tensors[0].shape[1], tensors[1].shape[1], tensors[0].shape[3]))
    if kernel == "prefix":
        return checkpointed(
            layer, _identity, lambda *inputs: PrefixAttention.apply(*inputs, tree.plan, scale), *tensors
        )
    if kernel == "flex":
        out = checkpointed(layer, _repeat_heads, partial(_flex_attention, tree, scale), *tensors)
    else:
        out = _per_sequence(tree, scale, *tensors)
    return out.transpose(1, 2).contiguous()


def _identity(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Repeat key heads: with few of them the kernel's backward pass has too little parallelism."""
    groups = query.shape[1] // key.shape[1]
    if groups <= 2:
        return query, key, value
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _flex_attention(tree: TokenTree, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _compiled_flex()(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=True)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def _per_sequence(tree: TokenTree, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    parts: list[Tensor] = []
    # Gradients of shared tokens are summed in float32.
    wide = torch.promote_types(key.dtype, torch.float32)
    keys_of_all, values_of_all = key.to(wide), value.to(wide)
    for start, end, keys, seen in tree.segments:
        part = scaled_dot_product_attention(
            query[:, :, start:end],
            keys_of_all.index_select(2, keys).to(key.dtype),
            values_of_all.index_select(2, keys).to(value.dtype),
            seen,
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(part)
    return torch.cat(parts, dim=2)
