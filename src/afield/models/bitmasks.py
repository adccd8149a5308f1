"""Token bitmasks, 32 tokens per word, applied to logits; needs only torch."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(words: Tensor, vocabulary: int) -> Tensor:
    """Unpack masks `[..., words]` to booleans `[..., vocabulary]`."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> bits) & 1).bool().flatten(-2)[..., :vocabulary]


def restrict(logits: Tensor, words: Tensor) -> Tensor:
    """Set logits `[rows, vocabulary]` to minus infinity where masks `[rows, words]` forbid the token."""
    return logits.masked_fill(~allowed(words, logits.shape[-1]), float("-inf"))
