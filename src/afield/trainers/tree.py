"""Attention over a forest: every token sees its ancestors and itself, and nothing else.

It is an attention implementation of `transformers`: `watch(model)` puts it in place, and a call that
brings `tree=` runs over that forest; without one, attention is the usual causal one. All else is computed
once per token. Attention itself is either one FlexAttention kernel, whose mask costs one integer per token,
or causal attention over whole sequences, of which the new tokens are kept: the fastest kernel there is,
where what it does twice is little. On a CPU it is the exact sum, sequence by sequence. Models whose
attention is more than that (windows, soft caps, sinks) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from afield.trainers.packing import Packed, Segment

ATTENTION = "afield_tree"
BLOCK = 128
BEYOND = ("softcap", "s_aux", "position_bias")  # what some attention does besides
ALIKE = 0.8  # sequences this much shorter than the longest still share a call with it
FLEX_PACE = 0.75  # of what causal attention makes of the same arithmetic


class Bundle(NamedTuple):
    """Sequences of like length side by side: the token at each place, and the places of those they add."""

    rows: int
    width: int
    place: Tensor
    fresh: Tensor
    tokens: Tensor


def bundled(segments: Sequence[Segment], device: torch.device) -> list[Bundle]:
    made: list[list[Segment]] = []
    for segment in sorted(segments, key=_length, reverse=True):
        if not made or _length(segment) < ALIKE * _length(made[-1][0]):
            made.append([])
        made[-1].append(segment)
    return [_bundle(sorted(part), device) for part in made]


def _length(segment: Segment) -> int:
    return segment.end - segment.start + sum(last - first for first, last in segment.path)


def _bundle(segments: Sequence[Segment], device: torch.device) -> Bundle:
    width = max(map(_length, segments))
    index = torch.zeros(len(segments), width, dtype=torch.long)
    fresh: list[Tensor] = []
    tokens: list[Tensor] = []
    for number, segment in enumerate(segments):
        end = _length(segment)
        begin = end - (segment.end - segment.start)
        parts = [torch.arange(first, last) for first, last in segment.path]
        tokens.append(torch.arange(segment.start, segment.end))
        index[number, :end] = torch.cat([*parts, tokens[-1]])
        fresh.append(torch.arange(number * width + begin, number * width + end))
    return Bundle(
        len(segments),
        width,
        index.flatten().to(device),
        torch.cat(fresh).to(device),
        torch.cat(tokens).to(device),
    )


class _Laid(torch.autograd.Function):
    """Tokens where their sequences have them; the gradient is that of the places where they are new."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bundle: Bundle) -> Tensor:
        ctx.bundle, ctx.count = bundle, tensor.shape[0]
        return tensor.index_select(0, bundle.place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        picked = gradients[0].index_select(0, ctx.bundle.fresh)
        return picked.new_zeros(ctx.count, *picked.shape[1:]).index_copy_(0, ctx.bundle.tokens, picked), None


class _Shared(torch.autograd.Function):
    """The same for what every later token of a sequence looks at: gradients add up, in float32."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bundle: Bundle) -> Tensor:
        ctx.bundle, ctx.count = bundle, tensor.shape[0]
        return tensor.index_select(0, bundle.place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        total = gradient.new_zeros(ctx.count, *gradient.shape[1:], dtype=torch.float32)
        return total.index_add_(0, ctx.bundle.place, gradient.float()).to(gradient.dtype), None


class _Taken(torch.autograd.Function):
    """The new tokens of a bundle, out of all its places."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bundle: Bundle) -> Tensor:
        ctx.bundle, ctx.count = bundle, tensor.shape[0]
        return tensor.index_select(0, bundle.fresh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        spread = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return spread.index_copy_(0, ctx.bundle.fresh, gradient), None


class Kept:
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


class Tree:
    """A forest on a device. Tokens that fill up the last block are trees of their own."""

    def __init__(self, packed: Packed, device: torch.device, kernel: str = "") -> None:
        self.kernel = kernel or (chosen(packed) if device.type == "cuda" else "each")
        count = len(packed.ids)
        filler = -count % BLOCK if self.kernel == "flex" else 0
        self.ids = pad(torch.tensor(packed.ids), (0, filler)).to(device)[None]
        self.positions = pad(torch.tensor(packed.depth), (0, filler)).to(device)[None]
        ends = [*packed.end, *range(count + 1, count + filler + 1)]
        self.end = torch.tensor(ends, dtype=torch.int32, device=device)
        self.longest = max(packed.depth, default=0) + 1
        self._segments = packed.segments
        self._device = device

    @cached_property
    def bundles(self) -> list[Bundle]:
        return bundled(self._segments, self._device)

    @cached_property
    def order(self) -> Tensor:
        """Where each token is in all that bundles add."""
        return torch.argsort(torch.cat([bundle.tokens for bundle in self.bundles]))

    def lay_out(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [1, heads, tokens, size] for each bundle [rows, heads, width, size]."""
        laid: list[Tensor] = []
        for bundle in self.bundles:
            for how, tensor in zip((_Laid, _Shared, _Shared), tensors, strict=True):
                rows = how.apply(tensor[0].transpose(0, 1), bundle)
                laid.append(rows.view(bundle.rows, bundle.width, *rows.shape[1:]).transpose(1, 2))
        return tuple(laid)

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
        with walk(self, model) as tree:
            output = model.get_decoder()(
                input_ids=self.ids, position_ids=self.positions, tree=tree, use_cache=False
            )
        return output.last_hidden_state[0]

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        """What a model says after each of `tokens`, [tokens, vocabulary]."""
        with walk(self, model) as tree:
            output = model(
                input_ids=self.ids,
                position_ids=self.positions,
                tree=tree,
                use_cache=False,
                logits_to_keep=tokens,
            )
        return output.logits[0]


class Walk:
    """One forward pass over a tree, and the second one over each layer where layers are computed again."""

    def __init__(self, tree: Tree, kept: Kept) -> None:
        self.tree, self.kept = tree, kept
        self.seen = False


@contextmanager
def walk(tree: Tree, model: Any) -> Iterator[Walk]:
    kept = Kept(model.training and torch.is_grad_enabled() and model.is_gradient_checkpointing)
    made = Walk(tree, kept)
    yield made
    kept.first = False
    if not made.seen:
        raise NotImplementedError(
            f"{type(model).__name__} does not attend over trees; watch(model) makes it, or train padded rows"
        )


def chosen(packed: Packed) -> str:
    """The kernel that takes less: FlexAttention over what is needed, or a faster one over some more."""
    needed = sum(packed.depth) + len(packed.depth)
    whole = sum(b.rows * b.width * b.width / 2 for b in bundled(packed.segments, torch.device("cpu")))
    return "rows" if whole < needed / FLEX_PACE else "flex"


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
    tree: Walk | None = None,
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


def _over(walk: Walk, layer: int, scaling: float | None, *given: Tensor) -> Tensor:
    tree, kept = walk.tree, walk.kept
    walk.seen = True
    if tree.kernel == "rows":
        return kept(layer, tree.lay_out, partial(_by_bundle, tree, scaling), *given)
    if tree.kernel == "flex":
        out = kept(layer, _enough_heads, partial(_by_mask, tree, scaling), *given)
    else:
        out = _by_sequence(tree, scaling, *given)
    return out.transpose(1, 2).contiguous()


def _enough_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """With few heads of keys the kernel's backward pass has too little to do at a time."""
    groups = query.shape[1] // key.shape[1]
    if groups <= 2:
        return query, key, value
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _by_mask(tree: Tree, scaling: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _flex()(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=True)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention)


def _by_bundle(tree: Tree, scaling: float | None, *laid: Tensor) -> Tensor:
    parts: list[Tensor] = []
    for number, bundle in enumerate(tree.bundles):
        query, key, value = laid[3 * number : 3 * number + 3]
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        parts.append(_Taken.apply(out.transpose(1, 2).flatten(0, 1), bundle))
    # One bundle has its tokens in order.
    return (parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, tree.order))[None]


def _by_sequence(tree: Tree, scaling: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
