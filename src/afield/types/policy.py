"""The model being trained, how it is sampled, and what a session may spend."""

from __future__ import annotations

import math

from msgspec import Struct


class Policy(Struct, frozen=True):
    """The model being trained: a name, and a version that only grows."""

    name: str
    version: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a policy needs a name")
        if self.version < 0:
            raise ValueError(f"policy version {self.version} is negative")


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How tokens are drawn. The trainer owns these; `top_k` 0 means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or positive")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")

    @property
    def truncated(self) -> bool:
        """Whether some tokens could not be drawn at all; a trainer has to know."""
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one session may spend. None means no bound."""

    calls: int | None = None
    tokens: int | None = None
    context: int | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"budget {name}={value} must be positive")
