"""Token bitmasks, 32 tokens per word, applied to logits. Needs torch only."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(words: Tensor, vocabulary: int) -> Tensor:
    """Masks of words [..., words] as one boolean for each token [..., vocabulary]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> bits) & 1).bool().flatten(-2)[..., :vocabulary]


def restrict(logits: Tensor, words: Tensor) -> Tensor:
    """Logits [rows, vocabulary] with minus infinity for what masks [rows, words] do not allow."""
    return logits.masked_fill(~allowed(words, logits.shape[-1]), float("-inf"))
