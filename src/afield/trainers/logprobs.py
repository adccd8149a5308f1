"""Chunked token log-probabilities from hidden states, with their gradient.

Logits of all tokens would be the largest tensor of a step. They are computed for one chunk of tokens at a
time and reduced in float32; the backward pass recomputes them, unless they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from afield.models.bitmasks import restrict

CHUNK_BYTES = 1 << 30
"""Size of a chunk's float32 logits, in bytes; peak memory is a few times as much."""
KEPT_SHARE = 32
"""Logits that take less than this fraction (1/32) of the memory are kept for the backward pass."""
LINEAR_TOLERANCE = 1e-4
"""Relative difference up to which logits count as the output layer's product, in float32."""


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: Tensor,
        masks: Tensor | None,
    ):
        # Cast here, so that sums over chunks reach weights of higher precision unrounded.
        ctx.kinds = weight.dtype, None if bias is None else bias.dtype
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        normalisers: list[Tensor] = []
        chosen: list[Tensor] = []
        ctx.kept = [] if _few(len(target), weight) else None
        ctx.masks = masks
        for h, t, c, m in _chunks(weight, hidden, target, temperature, masks):
            logits = _logits(h, weight, bias, m)
            normaliser, picked = _reduce(h.device.type)(logits, t, c)
            normalisers.append(normaliser)
            chosen.append(picked)
            if ctx.kept is not None:
                ctx.kept.append(logits)
        normaliser = torch.cat(normalisers)
        ctx.save_for_backward(hidden, weight, bias, target, temperature, normaliser)
        return torch.cat(chosen) - normaliser

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        hidden, weight, bias, target, temperature, normaliser = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden: list[Tensor] = []
        # Chunks add up in float32: bfloat16 sums would lose small terms.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        for number, (h, t, c, m, n, g) in enumerate(
            _chunks(weight, hidden, target, temperature, ctx.masks, normaliser, gradients[0])
        ):
            logits = ctx.kept[number] if ctx.kept is not None else _logits(h, weight, bias, m)
            gradient_of_logits = _gradient(h.device.type)(logits, t, c, n, g)
            if wants_hidden:
                to_hidden.append(gradient_of_logits @ weight)
            if to_weight is not None:
                to_weight += gradient_of_logits.T @ h
            if to_bias is not None:
                to_bias += gradient_of_logits.sum(0, dtype=torch.float32)
        summed = (
            None if t is None else t.to(kind) for t, kind in zip((to_weight, to_bias), ctx.kinds, strict=True)
        )
        return torch.cat(to_hidden) if to_hidden else None, *summed, None, None, None


class _GatherHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.shape = hidden.shape
        return hidden.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        (gradient,), (source,) = gradients, ctx.saved_tensors
        needed, place = torch.unique(source, return_inverse=True)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        summed = gradient.new_zeros(len(needed), gradient.shape[1], dtype=wide)
        summed.index_add_(0, place, gradient.to(wide))
        return gradient.new_zeros(ctx.shape).index_copy_(0, needed, summed.to(gradient.dtype)), None


def gather_hidden(hidden: Tensor, source: Tensor) -> Tensor:
    """Hidden states that predict each sampled token. Several tokens may share one, as after a prompt; their
    gradients are summed in float32."""
    return _GatherHidden.apply(hidden, source)


def _few(tokens: int, weight: Tensor) -> bool:
    whole = torch.cuda.get_device_properties(weight.device).total_memory if weight.is_cuda else 1 << 33
    return tokens * weight.shape[0] * weight.element_size() < whole // KEPT_SHARE


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, masks: Tensor | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits if masks is None else restrict(logits, masks)


def _chunks(weight: Tensor, first: Tensor, *others: Tensor | None) -> Iterator[Any]:
    """The tensors in chunks of tokens; None stays None."""
    size = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    for start in range(0, len(first), size):
        yield tuple(None if t is None else t[start : start + size] for t in (first, *others))


def _reduce_logits(logits: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperature[:, None]
    return torch.logsumexp(scaled, dim=-1), scaled.gather(1, target[:, None]).squeeze(1)


def _logits_gradient(
    logits: Tensor, target: Tensor, temperature: Tensor, normaliser: Tensor, gradient: Tensor
):
    share = gradient / temperature
    probability = torch.exp(logits.float() / temperature[:, None] - normaliser[:, None])
    here = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    return ((here.float() - probability) * share[:, None]).to(logits.dtype)


@cache
def _reduce(device: str) -> Any:
    return torch.compile(_reduce_logits, dynamic=True) if device == "cuda" else _reduce_logits


@cache
def _gradient(device: str) -> Any:
    return torch.compile(_logits_gradient, dynamic=True) if device == "cuda" else _logits_gradient


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """Log-probability of each `target` [n] at `temperature` [n] given `hidden` [n, size], without the tokens
    that `masks` [n, words] forbid."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return _ChunkedLogprobs.apply(hidden, weight, bias, target, temperature.float(), masks)


@torch.no_grad()
def chunked_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: Tensor,
    masks: Tensor | None = None,
) -> Tensor:
    """Entropy of the distributions that `chunked_logprobs` scores, in nats; takes the same arguments."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    entropies: list[Tensor] = []
    for h, c, m in _chunks(weight, hidden, temperature.float(), masks):
        probabilities = torch.softmax(_logits(h, weight, bias, m).float() / c[:, None], dim=-1)
        entropies.append(torch.special.entr(probabilities).sum(-1))
    return torch.cat(entropies)


_linear: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def has_linear_head(model: Any) -> bool:
    """Whether a model's logits are the product of its output layer and hidden states, without scaling or
    caps."""
    if model not in _linear:
        _linear[model] = _is_linear(model)
    return _linear[model]


@torch.no_grad()
def _is_linear(model: Any) -> bool:
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or model.get_decoder() is head:
        return False
    ids = torch.arange(3, device=head.weight.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits
    output = model.get_decoder()(input_ids=ids, use_cache=False)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:  # get_decoder() returned the whole model
        return False
    off = (head(hidden) - logits).abs().max() / logits.abs().max().clamp(min=1e-6)
    return bool(off <= (LINEAR_TOLERANCE if logits.dtype == torch.float32 else 100 * LINEAR_TOLERANCE))
