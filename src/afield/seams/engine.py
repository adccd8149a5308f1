"""Engine: token ids in; token ids, their log-probabilities and the policy version out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, Self

from msgspec import Struct

from afield.types import FinishReason, Sampling


class EngineInfo(Struct, frozen=True, kw_only=True):
    kind: str
    version: int
    max_context: int
    vocab_size: int


class Call(Struct, frozen=True, kw_only=True):
    """One model call. `max_tokens` is already cut to what context and budget allow."""

    id: str
    session_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    stream: bool = False


class Chunk(Struct, frozen=True, kw_only=True):
    """Freshly sampled tokens. A stop token is sampled and therefore included.

    Log-probabilities are those of the distribution the token was drawn from, temperature and
    truncation applied; for greedy decoding (temperature 0) they are the untempered model's.
    All tokens of a chunk were sampled by versions in [low, high]. The last chunk, and no other, has
    a `finish`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    low: int
    high: int
    finish: FinishReason | None = None


class Engine(Protocol):
    """`async with engine:` starts and stops it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def info(self) -> EngineInfo: ...

    def generate(self, call: Call) -> AsyncGenerator[Chunk]:
        """Chunks until one carries a finish. Closing the generator early abandons the call.

        With `call.stream` unset the engine may answer in one chunk. A prompt the engine cannot take
        raises ValueError before the first chunk; an engine that breaks raises Unavailable.
        """
        ...

    async def load(self, version: int, path: str) -> None:
        """Serve the weights in this directory as `version`. Calls in flight go on, with the new weights.

        Repeating the current version is harmless; a lower one is refused with Conflict.
        """
        ...
