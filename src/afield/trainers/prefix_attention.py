"""Prefix attention: tree attention by dense kernels over shared prefixes.

1. All tokens after a prefix that a tree's trajectories share attend to the whole prefix: one dense block.
2. The remaining short sequences form batches with causal attention.
3. Both results are merged exactly by their softmax normalisers. The backward pass of each part uses the
   merged normaliser and result, so that gradients are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from afield.trainers.packing import Segment

SIMILAR_LENGTH = 0.95
"""Sequences of at least this share of the longest one's length are batched with it."""
MIN_PREFIX = 256
"""Length from which a shared prefix becomes a block, in tokens."""
ops = torch.ops.aten


class PrefixBlock(NamedTuple):
    """Shared prefix [start, middle), to which all tokens of [middle, end) attend."""

    start: int
    """First token of the prefix."""
    middle: int
    """Index behind the prefix, where its descendants start."""
    end: int
    """Index behind the last descendant."""

    @property
    def pairs(self) -> int:
        return (self.middle - self.start) * (self.end - self.middle)


class SequenceBundle(NamedTuple):
    """Sequences of similar length as one padded batch."""

    rows: int
    """Number of sequences."""
    width: int
    """Length of the longest sequence, in tokens."""
    place: Tensor
    """Token index at each position of the batch."""
    fresh: Tensor
    """Positions that hold a token's own result."""
    tokens: Tensor
    """Token indices of those positions."""
    first: int | None
    """First token if the batch is consecutive tokens; otherwise None."""

    @property
    def pairs(self) -> int:
        return self.rows * self.width * (self.width + 1) // 2

    def lay(self, tensor: Tensor) -> Tensor:
        """Gather [tokens, ...] into [rows, width, ...]."""
        if self.first is not None:
            taken = tensor[self.first : self.first + self.rows * self.width]
        else:
            taken = tensor.index_select(0, self.place)
        return taken.reshape(self.rows, self.width, *tensor.shape[1:])

    def lay_fresh(self, tensor: Tensor) -> Tensor:
        """Gather as `lay`, with 0 at positions that do not hold a token's own result."""
        if self.first is not None:
            return self.lay(tensor)
        laid = tensor.new_zeros(self.rows * self.width, *tensor.shape[1:])
        laid.index_copy_(0, self.fresh, tensor.index_select(0, self.tokens))
        return laid.view(self.rows, self.width, *tensor.shape[1:])

    def put(self, into: Tensor, laid: Tensor) -> None:
        """Write every token's own result."""
        if self.first is not None:
            into[self.first : self.first + self.rows * self.width] = laid.flatten(0, 1)
        else:
            into.index_copy_(0, self.tokens, laid.flatten(0, 1).index_select(0, self.fresh).to(into.dtype))

    def add(self, into: Tensor, laid: Tensor) -> None:
        """Add the values of all positions to their tokens."""
        if self.first is not None:
            into[self.first : self.first + self.rows * self.width] += laid.flatten(0, 1)
        else:
            into.index_add_(0, self.place, laid.flatten(0, 1).to(into.dtype))


class AttentionPlan(NamedTuple):
    """Dense kernel calls that make up the attention over a tree."""

    bundles: list[SequenceBundle]
    """Batches of sequences, with causal attention."""
    blocks: list[PrefixBlock]
    """Shared prefixes, each attended to by all its descendants."""

    @property
    def pairs(self) -> int:
        return sum(part.pairs for part in (*self.bundles, *self.blocks))


def plan_attention(
    segments: Sequence[Segment], device: torch.device, min_prefix: int = MIN_PREFIX
) -> AttentionPlan:
    blocks, unshared = split_prefixes(segments, min_prefix)
    batches: list[list[Segment]] = []
    for segment in sorted(unshared, key=_length, reverse=True):
        if not batches or _length(segment) < SIMILAR_LENGTH * _length(batches[-1][0]):
            batches.append([])
        batches[-1].append(segment)
    return AttentionPlan([_bundle(sorted(part), device) for part in batches], blocks)


def split_prefixes(segments: Sequence[Segment], min_prefix: int) -> tuple[list[PrefixBlock], list[Segment]]:
    """Separate shared prefixes from segments. A tree starts with the segment whose prefix others share."""
    blocks: list[PrefixBlock] = []
    rest: list[Segment] = []
    trunks = [number for number, segment in enumerate(segments) if not segment.path]
    for here, following in zip(trunks, [*trunks[1:], len(segments)], strict=True):
        trunk, *branches = segments[here:following]
        middle = min((branch.path[0][1] for branch in branches), default=trunk.start)
        if middle - trunk.start < min_prefix:
            rest += [trunk, *branches]
            continue
        end = max(segment.end for segment in (trunk, *branches))
        blocks.append(PrefixBlock(trunk.start, middle, end))
        rest.append(Segment(trunk.start, middle, ()))
        rest += [Segment(s.start, s.end, _after(middle, s.path)) for s in branches]
        if trunk.end > middle:
            rest.append(Segment(middle, trunk.end, ()))
    return blocks, rest


def _after(middle: int, path: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    (_, last), *others = path
    return ((middle, last), *others) if last > middle else tuple(others)


def _length(segment: Segment) -> int:
    return segment.end - segment.start + sum(last - first for first, last in segment.path)


def _bundle(segments: Sequence[Segment], device: torch.device) -> SequenceBundle:
    width = max(map(_length, segments))
    place = torch.zeros(len(segments), width, dtype=torch.long)
    fresh: list[Tensor] = []
    tokens: list[Tensor] = []
    for number, segment in enumerate(segments):
        end = _length(segment)
        begin = end - (segment.end - segment.start)
        tokens.append(torch.arange(segment.start, segment.end))
        path = [torch.arange(first, last) for first, last in segment.path]
        place[number, :end] = torch.cat([*path, tokens[-1]])
        fresh.append(torch.arange(number * width + begin, number * width + end))
    first, count = segments[0].start, len(segments) * width
    plain = torch.equal(place.flatten(), torch.arange(first, first + count))
    return SequenceBundle(
        len(segments),
        width,
        place.flatten().to(device),
        torch.cat(fresh).to(device),
        torch.cat(tokens).to(device),
        first if plain and all(not segment.path for segment in segments) else None,
    )


class PrefixAttention(torch.autograd.Function):
    """Queries, keys and values are [1, heads, tokens, size]; the result is [1, tokens, heads, size]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out, normaliser = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for bundle in plan.bundles:
            rows = (bundle.lay(tensor).transpose(1, 2) for tensor in (q, k, v))
            result, norm = kernel(query.device.type).forward(*rows, causal=True, scale=scale)
            bundle.put(out, result.transpose(1, 2))
            bundle.put(normaliser, norm.transpose(1, 2))
        for start, middle, end in plan.blocks:
            result, norm = kernel(query.device.type).forward(
                query[:, :, middle:end],
                key[:, :, start:middle],
                value[:, :, start:middle],
                causal=False,
                scale=scale,
            )
            _compiled_merge(query.device.type)(
                out[middle:end], normaliser[middle:end], result[0].transpose(0, 1), norm[0].transpose(0, 1)
            )
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(query, key, value, out, normaliser)
        return out[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        gradient = gradients[0][0]
        # Parts add up in float32 and are rounded once at the end.
        to_q = torch.empty_like(q, dtype=torch.float32)
        to_k, to_v = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (k, v))
        backward = kernel(query.device.type).backward
        for bundle in ctx.plan.bundles:
            laid = (bundle.lay(tensor).transpose(1, 2) for tensor in (q, k, v, out, normaliser))
            rows = bundle.lay_fresh(gradient).transpose(1, 2)
            of_q, of_k, of_v = backward(rows, *laid, causal=True, scale=ctx.scale)
            bundle.put(to_q, of_q.transpose(1, 2))
            bundle.add(to_k, of_k.transpose(1, 2))
            bundle.add(to_v, of_v.transpose(1, 2))
        for start, middle, end in ctx.plan.blocks:
            rows, *later = (t[None, middle:end].transpose(1, 2) for t in (gradient, q, out, normaliser))
            of_q, of_k, of_v = backward(
                rows,
                later[0],
                key[:, :, start:middle],
                value[:, :, start:middle],
                later[1],
                later[2],
                causal=False,
                scale=ctx.scale,
            )
            to_q[middle:end] += of_q[0].transpose(0, 1)
            to_k[start:middle] += of_k[0].transpose(0, 1)
            to_v[start:middle] += of_v[0].transpose(0, 1)
        return *(t.to(q.dtype).transpose(0, 1)[None] for t in (to_q, to_k, to_v)), None, None


def merge_softmax(out: Tensor, norm: Tensor, other: Tensor, other_norm: Tensor) -> None:
    """Merge two softmax results over different keys, in place."""
    both = torch.logaddexp(norm, other_norm)
    mine, others = torch.exp(norm - both)[..., None], torch.exp(other_norm - both)[..., None]
    out.copy_(out.float() * mine + other.float() * others)
    norm.copy_(both)


@cache
def _compiled_merge(device: str) -> Any:
    return torch.compile(merge_softmax, dynamic=True) if device == "cuda" else merge_softmax


# --- kernels: [rows, heads, tokens, size], normalisers [rows, heads, tokens] -----------------------


class CudnnKernel:
    """cuDNN attention kernel."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        result = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return result[0], result[1].view(q.shape[:3])

    @staticmethod
    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        norm: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.zeros((), dtype=torch.long, device=q.device)  # placeholder for dropout's random state
        return ops._scaled_dot_product_cudnn_attention_backward(
            gradient,
            q,
            k,
            v,
            out,
            norm.contiguous()[..., None],
            none,
            none,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            scale=scale,
        )


class CpuKernel:
    """CPU implementation of the kernel, for tests."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    @staticmethod
    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        norm: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, times = k.shape[1], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        of_q, of_k, of_v = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, norm, 0.0, causal, scale=scale
        )
        of_k, of_v = (t.unflatten(1, (heads, times)).sum(2, dtype=torch.float32) for t in (of_k, of_v))
        return of_q, of_k, of_v


def kernel(device: str) -> type[CudnnKernel] | type[CpuKernel]:
    return CudnnKernel if device == "cuda" else CpuKernel


class Heads(NamedTuple):
    """Shape of attention heads."""

    queries: int
    """Number of query heads."""
    keys: int
    """Number of key and value heads."""
    size: int
    """Size of a head."""


@cache
def kernel_available(device: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    """Whether the cuDNN kernel exists for these heads and is correct; tried once on a small tree."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    # Keeps tensors saved here out of a checkpointed layer's hooks.
    with torch.enable_grad(), torch.autocast("cuda", enabled=False), saved_tensors_hooks(_same, _same):
        return check_kernel(device, dtype, heads)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def check_kernel(device: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    plan = plan_attention([Segment(0, 384, ()), Segment(384, 512, ((0, 256),))], device)
    tensors = [
        torch.randn(
            1, count, 512, heads.size, generator=generator, device=device, dtype=dtype
        ).requires_grad_()
        for count in (heads.queries, heads.keys, heads.keys)
    ]
    token = torch.arange(512, device=device)
    own = (token[:, None] < 384) == (token[None] < 384)
    seen = (token[None] <= token[:, None]) & (own | (token[None] < 256))
    scale = heads.size**-0.5
    expected = torch.nn.functional.scaled_dot_product_attention(
        tensors[0].float(), tensors[1].float(), tensors[2].float(), seen, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    push = torch.randn(expected.shape, generator=generator, device=device)
    truth = torch.autograd.grad(expected, tensors, push)
    try:
        out = PrefixAttention.apply(*tensors, plan, scale)
        gradients = torch.autograd.grad(out, tensors, push.to(dtype))
    except RuntimeError:  # torch raises it for a missing kernel
        return False
    pairs = [(out.detach(), expected.detach()), *zip(gradients, truth, strict=True)]
    return all(float((a.float() - b.float()).norm() / b.float().norm()) < 0.02 for a, b in pairs)
