"""What a client asks of sampling, in any dialect, and what becomes of it.

Sampling belongs to the trainer. A session names the settings its client may choose (`client_sampling`);
whatever else a client asks for is not done, and its turn says so with a tag `overridden:NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, structs

from afield.types import Sampling

NAMES = ("temperature", "top_p", "top_k", "seed")
OTHERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")


class RequestedSampling(Struct, kw_only=True):
    """The fields that requests of every dialect have for it; a dialect's own struct is one of these."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None


def wishes(asked: RequestedSampling) -> dict[str, float]:
    """The settings a request names."""
    found = {name: value for name in NAMES + OTHERS if (value := getattr(asked, name)) is not None}
    if asked.logit_bias:
        found["logit_bias"] = 1.0
    return found


def granted(sampling: Sampling, wished: Mapping[str, float], may: tuple[str, ...]) -> Sampling:
    """The trainer's settings, with what the client may choose as it chose. ValueError for nonsense."""
    allowed = {name: value for name, value in wished.items() if name in may}
    if "top_k" in allowed:
        allowed["top_k"] = max(0, int(allowed["top_k"]))
    return structs.replace(sampling, **allowed) if allowed else sampling


def tags(sampling: Sampling, wished: Mapping[str, float]) -> tuple[str, ...]:
    """What the client asked for and does not get."""
    return tuple(f"overridden:{name}" for name, value in wished.items() if not _given(sampling, name, value))


def _given(sampling: Sampling, name: str, value: float) -> bool:
    if name == "top_k":
        return max(0, int(value)) == sampling.top_k
    if name in NAMES:
        return value == getattr(sampling, name)
    return value == (1.0 if name == "repetition_penalty" else 0.0)
