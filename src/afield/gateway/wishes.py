"""What a client asks of sampling, in any dialect, and what becomes of it.

Sampling belongs to the trainer. A session names the settings its client may choose (`client_sampling`);
whatever else a client asks for is not done, and its turn says so with a tag `overridden:NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from afield.types import Sampling

NAMES = ("temperature", "top_p", "top_k", "seed")
OTHERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias")


class _Nested(Struct, rename="camel"):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Asked(Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: msgspec.Raw = msgspec.Raw(b"null")
    generationConfig: _Nested | None = None  # noqa: N815


_DECODER = msgspec.json.Decoder(_Asked)


def wishes(body: bytes) -> dict[str, float]:
    """The settings a request names. One that has them in a wrong form asks for nothing."""
    try:
        asked = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    found: dict[str, float] = {}
    for place in (asked, asked.generationConfig):
        for name in (*NAMES, *OTHERS) if place else ():
            value = getattr(place, name, None)
            if name == "logit_bias":
                value = 1.0 if value is not None and bytes(value) not in (b"null", b"{}") else None
            if value is not None:
                found[name] = value
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
