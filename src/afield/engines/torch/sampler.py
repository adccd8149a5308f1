"""Token sampling by inverse transform: one uniform number per token.

The distribution is the model's under the constraint mask, then temperature, top-k and top-p, renormalised;
log-probabilities are those of that distribution, in float32. Temperature 0 takes the most likely token and
reports its log-probability without temperature. `draw` supports all of it. `pick` neither masks nor truncates
and never synchronises with the device, so that a CUDA graph can contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from afield.models.bitmasks import restrict

BLOCK = 128
# (logits, temperatures, block size) -> highest score of each block, and its sum of exp(score - highest).
Sums = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class SamplingParams(Protocol):
    """Sampling parameters of one row."""

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""
        ...

    @property
    def top_p(self) -> float:
        """Nucleus sampling threshold; 1 is off."""
        ...

    @property
    def top_k(self) -> int:
        """Number of likeliest tokens to sample from; 0 is off."""
        ...


def distribution(
    logits: Tensor, samplings: Sequence[SamplingParams], masks: Mapping[int, Tensor] | None = None
) -> Tensor:
    """Float32 log-probabilities of the sampled distribution, for `logits` `[rows, vocabulary]`.

    `masks` are constraint bitmasks by row, applied before temperature and truncation.
    """
    scores = logits.float()
    if masks:
        rows = torch.tensor(list(masks), device=scores.device)
        words = torch.stack(list(masks.values())).to(scores.device)
        scores = scores.index_copy(0, rows, restrict(scores[rows], words))
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        temperature = [s.temperature or 1.0 for s in samplings]
        scores = scores / torch.tensor(temperature, device=scores.device)[:, None]
    truncated = [i for i, s in enumerate(samplings) if s.temperature and (s.top_k or s.top_p < 1)]
    if truncated:
        rows = torch.tensor(truncated, device=scores.device)
        scores = scores.index_copy(0, rows, _truncate(scores[rows], [samplings[i] for i in truncated]))
    return torch.log_softmax(scores, dim=-1)


def draw(
    logits: Tensor,
    samplings: Sequence[SamplingParams],
    uniforms: Sequence[float],
    masks: Mapping[int, Tensor] | None = None,
) -> tuple[list[int], list[float]]:
    """Sample a token for each row of `logits` `[rows, vocabulary]`; returns tokens and log-probabilities."""
    logprobs = distribution(logits, samplings, masks)
    tokens = _invert(logprobs, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
    greedy = [not s.temperature for s in samplings]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(dim=-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


Top = tuple[tuple[int, float], ...]


def likeliest(logprobs: Tensor, count: int, token: int, logprob: float) -> Top:
    """The `count` likeliest tokens of one row `[vocabulary]` and their log-probabilities, likeliest first.

    The sampled `token` has its reported `logprob` and wins ties; tokens of probability 0 are left out.
    """
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = [(i, p) for i, p in zip(ids.tolist(), values.tolist(), strict=True) if p > float("-inf")]
    if pairs and token not in dict(pairs) and logprob >= pairs[-1][1]:  # tied with the last pair
        pairs[-1] = (token, logprob)
    pairs = [(i, logprob if i == token else p) for i, p in pairs]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0] != token)))


def plain_sums(logits: Tensor, temperature: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`Sums` in plain torch."""
    scores = logits.float() / temperature[:, None]
    if missing := -scores.shape[1] % block:
        scores = pad(scores, (0, missing), value=float("-inf"))
    scores = scores.view(len(scores), -1, block)
    top = scores.amax(dim=-1)
    # A block of probability 0 would give -inf - -inf = NaN.
    base = top.masked_fill(top == float("-inf"), 0.0)
    return top, (scores - base[:, :, None]).exp_().sum(dim=-1)


def pick(
    logits: Tensor, temperature: Tensor, uniforms: Tensor, sums: Sums = plain_sums
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row; returns tokens and log-probabilities on the device.

    Equivalent to `draw` without masks and truncation. A cumulative sum over blocks of tokens chooses the
    block, a second one the token inside it, so the logits are read once.
    """
    greedy = temperature == 0
    divisor = temperature.masked_fill(greedy, 1.0).float()
    tops, totals = sums(logits, divisor, BLOCK)
    top = tops.amax(dim=-1, keepdim=True)
    weights = totals.double() * (tops - top).double().exp()
    running = weights.cumsum(dim=-1)
    total = running[:, -1:]
    target = uniforms.double()[:, None] * total
    index = torch.searchsorted(running, _below(target, running), right=True).clamp_(max=weights.shape[1] - 1)
    block = torch.where(greedy[:, None], tops.argmax(dim=-1, keepdim=True), index)
    # Sums in different orders differ by rounding: the rest can be slightly below 0 or too high.
    remainder = (target - running.gather(1, block) + weights.gather(1, block)).clamp_(min=0)
    at = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    beyond = at >= logits.shape[1]
    scores = logits.gather(1, at.clamp(max=logits.shape[1] - 1)).float() / divisor[:, None]
    scores = scores.masked_fill_(beyond, float("-inf"))
    inside = (scores - top).double().exp().cumsum(dim=-1)
    index = torch.searchsorted(inside, _below(remainder, inside), right=True).clamp_(max=BLOCK - 1)
    place = torch.where(greedy[:, None], scores.argmax(dim=-1, keepdim=True), index)
    logprobs = (scores.gather(1, place) - top).double() - total.log()
    return (block * BLOCK + place)[:, 0].clamp_(max=logits.shape[1] - 1), logprobs[:, 0].float()


def _truncate(scores: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Set tokens outside top-k and then top-p to minus infinity; the most likely token always stays."""
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    vocabulary = scores.shape[-1]
    top_k = torch.tensor([s.top_k or vocabulary for s in samplings], device=scores.device)
    top_p = torch.tensor([s.top_p for s in samplings], device=scores.device)
    rank = torch.arange(vocabulary, device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], float("-inf"))
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    # The second condition keeps rounding from cutting the tail of a row with top_p 1.
    beyond = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    ordered = ordered.masked_fill(beyond & (rank > 0), float("-inf"))
    return torch.empty_like(scores).scatter_(1, index, ordered)


def _invert(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    running = logprobs.double().exp().cumsum(dim=-1)
    target = _below(uniforms[:, None] * running[:, -1:], running)
    index = torch.searchsorted(running, target, right=True)[:, 0]
    return index.clamp_(max=logprobs.shape[-1] - 1)


def _below(target: Tensor, running: Tensor) -> Tensor:
    """Clamp the target strictly below the total, so that the chosen token has a probability above 0."""
    total = running[:, -1:]
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
