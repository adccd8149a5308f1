"""Attention over a forest: every token sees its ancestors and itself, and nothing else.

It is an attention implementation of `transformers`: `watch(model)` puts it in place, and a call that
brings `tree=` runs over that forest; without one, attention is the usual causal one. All else is computed
once per token. Attention itself is one FlexAttention kernel, whose mask costs one integer per token, or
several for plain rectangles (`peeled`) where those take less. On a CPU it is the exact sum, sequence by
sequence. Models whose attention is more than that (windows, soft caps, sinks) are refused.
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
BEYOND = ("softcap", "s_aux", "position_bias")  # what some attention does besides
FLEX_PACE = 0.65  # of what kernels for rectangles make of the same arithmetic


class CheckpointedAttention:
    """What attention gave, while the layers around it are computed again for their gradients.

    With gradient checkpointing a layer's forward pass runs twice. The first time, what attention's gradient
    needs of its results stays; its inputs come from the second, in which it is not computed again. That
    takes one tensor per layer of the size that checkpointing keeps anyway.
    """

    def __init__(self, wanted: bool) -> None:
        self.first = wanted
        self._results: dict[int, Tensor] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}

    def __call__(
        self,
        layer: int,
        lay_out: Callable[..., tuple[Tensor, ...]],
        attend: Callable[..., Tensor],
        *given: Tensor,
    ) -> Tensor:
        """`attend(*lay_out(*given))`, of which a second pass only lays out."""
        if layer in self._results and not self.first:
            with torch.no_grad():
                self._inputs = {layer: lay_out(*given)}
            # Only with a gradient of its own do the operations behind it save what they saved at first.
            return self._results.pop(layer).detach().requires_grad_()
        inputs = lay_out(*given)
        if not self.first:
            return attend(*inputs)
        known = {(tensor.data_ptr(), tensor.shape): number for number, tensor in enumerate(inputs)}

        def pack(tensor: Tensor) -> int | Tensor:
            return known.get((tensor.data_ptr(), tensor.shape), tensor)

        def unpack(packed: int | Tensor) -> Tensor:
            return self._inputs[layer][packed] if isinstance(packed, int) else packed

        with saved_tensors_hooks(pack, unpack):
            result = attend(*inputs)
        self._results[layer] = result.detach()
        return result


class TokenTree:
    """A forest on a device. Tokens that fill up the last block are trees of their own."""

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
        """The one that takes less: a single one over what is needed, or faster ones over somewhat more."""
        if self._kernel is not None:
            return self._kernel
        if self._device.type != "cuda":
            return "per_sequence"
        cheap = self.plan.pairs < self._pairs / FLEX_PACE
        return "prefix" if cheap and kernel_available(self._device, dtype, heads) else "flex"

    @cached_property
    def plan(self) -> AttentionPlan:
        return plan_attention(self._segments, self._device)

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
        with tree_pass(self, model) as tree:
            output = model.get_decoder()(
                input_ids=self.ids, position_ids=self.positions, tree=tree, use_cache=False
            )
        return output.last_hidden_state[0]

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """What a model says after each of `tokens`, [tokens, vocabulary]."""
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
    """One forward pass over a tree, and the second one over each layer where layers are computed again."""

    def __init__(self, tree: TokenTree, kept: CheckpointedAttention) -> None:
        self.tree, self.kept = tree, kept
        self.seen = False


def computed_again(model: Any) -> bool:
    """Whether its layers are, for their gradients. The model around them need not be training for that."""
    layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    return any(layer.training and layer.gradient_checkpointing for layer in layers)


@contextmanager
def tree_pass(tree: TokenTree, model: Any) -> Iterator[TreePass]:
    kept = CheckpointedAttention(torch.is_grad_enabled() and computed_again(model))
    made = TreePass(tree, kept)
    yield made
    kept.first = False
    if not made.seen:
        raise NotImplementedError(
            f"{type(model).__name__} does not attend over trees; watch(model) makes it, or train padded rows"
        )


def _listed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """How many are set in each row, and which, those first."""
    order = torch.argsort(matrix.to(torch.int8), dim=1, descending=True, stable=True)
    return matrix.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def install_tree_attention(model: Any) -> None:
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
    tree: TreePass | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Query, key and value are [batch, heads, tokens, size]; the result is [batch, tokens, heads, size]."""
    if strange := [name for name in BEYOND if more.get(name) is not None]:
        raise NotImplementedError(f"{type(module).__name__} uses {strange[0]}, which is not supported here")
    longest = tree.tree.longest if tree is not None else query.shape[2]
    if dropout or (sliding_window is not None and longest > sliding_window):
        what = f"dropout {dropout}" if dropout else f"a window of {sliding_window} and rows of {longest}"
        raise NotImplementedError(f"{type(module).__name__} has {what}, which cannot be trained here exactly")
    if tree is None:
        grouped = query.shape[1] != key.shape[1]
        causal = attention_mask is None
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    else:
        return _over(tree, id(module), scaling, query, key, value), None
    return out.transpose(1, 2).contiguous(), None


def _over(walk: TreePass, layer: int, scaling: float | None, *given: Tensor) -> Tensor:
    tree, kept = walk.tree, walk.kept
    walk.seen = True
    scale = given[0].shape[-1] ** -0.5 if scaling is None else scaling
    # Norms and rotations of weights in float32 leave queries and keys in it, values not.
    device = given[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else given[0].dtype
    given = tuple(tensor.to(dtype) for tensor in given)
    kernel = tree.kernel(dtype, Heads(given[0].shape[1], given[1].shape[1], given[0].shape[3]))
    if kernel == "prefix":
        return kept(
            layer, _as_they_are, lambda *inputs: PrefixAttention.apply(*inputs, tree.plan, scale), *given
        )
    if kernel == "flex":
        out = kept(layer, _enough_heads, partial(_by_mask, tree, scale), *given)
    else:
        out = _by_sequence(tree, scale, *given)
    return out.transpose(1, 2).contiguous()


def _as_they_are(*given: Tensor) -> tuple[Tensor, ...]:
    return given


def _enough_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """With few heads of keys the kernel's backward pass has too little to do at a time."""
    groups = query.shape[1] // key.shape[1]
    if groups <= 2:
        return query, key, value
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _by_mask(tree: TokenTree, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _flex()(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=True)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention)


def _by_sequence(tree: TokenTree, scaling: float, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    parts: list[Tensor] = []
    # What sequences add to the gradient of tokens they share is summed in float32.
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
