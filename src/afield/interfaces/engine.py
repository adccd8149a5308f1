"""Engine: token ids in; token ids, their log-probabilities and the policy version out.

An engine that can hold its calls still in the middle (their state kept, nothing lost) is `Pausable` too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol, Self, runtime_checkable

from msgspec import Struct

from afield.types import Constraint, FinishReason, Image, Sampling, VersionSpan

LogprobMode = Literal["processed", "tempered", "raw"]
TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens of one place and their log-probabilities, likeliest first."""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What an engine serves and how far its word goes.

    `logprobs` says which log-probabilities are reported: of the distribution drawn from, or (calls for
    which that is another one are then refused) before truncation, or before temperature too. With
    `exact_versions` a token's version is what the engine says sampled it; otherwise an interval. `notes`
    are downgrades to tell people.
    """

    kind: str
    version: int
    max_context: int
    vocab_size: int
    images: bool = False
    logprobs: LogprobMode = "processed"
    exact_versions: bool = True
    dtype: str = ""
    """Dtype in which the engine holds its weights: float32, bfloat16 or float16; empty if it does not say."""
    notes: tuple[str, ...] = ()
    constraints: bool = False
    """Whether calls may have a constraint; one that comes to an engine without is refused with ValueError."""
    max_top_logprobs: int = 0
    """How many of the likeliest tokens a call may ask for at each place."""
    prompt_logprobs: bool = False
    """Whether calls may ask for the log-probabilities of their prompt."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One model call. `max_tokens` is already cut to what context and budget allow.

    `images` stand, in order, where `prompt_ids` has the model's image placeholder, once for each (at
    `image_places`, where given: a placeholder that the model sampled itself stands for nothing); the engine
    expands it and says so in `Chunk.prompt_ids`. `base_ids`, where given, is the very object that
    an earlier call of the session had as its prompt, with which this one's begins. `draw` names the random
    numbers of a call without a seed: an engine that can gives the same for the same name (and a seed of
    its own), else for the same id. An engine that detokenises may end the call (STOP) with the token that
    completes one of the strings in `stop`, anywhere in what it samples; the caller looks for them itself.
    Tokens that cannot lead to a match of `constraint` have no probability. `top_logprobs` and
    `prompt_logprobs` ask for what `Chunk` has under these names, for so many tokens at each place.
    """

    id: str
    session_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    stream: bool = False
    base_ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    image_places: tuple[int, ...] = ()
    draw: str = ""
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


class Chunk(Struct, frozen=True, kw_only=True):
    """Freshly sampled tokens. A stop token is sampled and therefore included.

    Log-probabilities are those of the distribution the token was drawn from, temperature and
    truncation applied; for greedy decoding (temperature 0) they are the untempered model's.
    All tokens of a chunk were sampled by versions in [low, high]. The last chunk, and no other, has
    a `finish`. When the engine made another prompt of the call's (images expanded), the first chunk
    has it in `prompt_ids`. An engine that learns the exact versions only at the end tells them with the
    last chunk: `versions` covers all tokens of the call, from the first, and replaces the intervals.
    `queued_s`, of the first chunk, is how long the engine had no room for the call, where it says so.
    `top_logprobs` has the likeliest tokens at the place of each of `token_ids`, where the call asks for them;
    `prompt_logprobs`, of the first chunk, has each prompt token's own and then the likeliest ones; the first
    token of a prompt has none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    low: int
    high: int
    finish: FinishReason | None = None
    prompt_ids: tuple[int, ...] | None = None
    versions: tuple[VersionSpan, ...] | None = None
    queued_s: float = 0.0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[TopLogprobs, ...] | None = None


class Engine(Protocol):
    """`async with engine:` starts and stops it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def info(self) -> EngineInfo: ...

    def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Chunks until one carries a finish. Closing the generator early abandons the call.

        With `call.stream` unset the engine may answer in one chunk. A prompt the engine cannot take
        raises ValueError before the first chunk; an engine that breaks raises Unavailable.
        """
        ...

    async def load(self, version: int, path: str) -> None:
        """Serve the weights in this directory as `version`: a whole model, or an adapter as peft saves it.

        Calls in flight go on, with the new weights; an engine that serves several adapters at once lets them
        go on with their own. Repeating the current version is harmless; a lower one is refused with Conflict.
        """
        ...


@runtime_checkable
class Pausable(Protocol):
    """An engine that can hold still. Both are harmless when repeated."""

    async def pause(self) -> None:
        """Calls in flight sample nothing more until `resume`; none of them ends or fails for it."""
        ...

    async def resume(self) -> None: ...


@runtime_checkable
class Queueing(Protocol):
    """An engine that says how many calls wait in its own queue, whoever asked them."""

    async def waiting(self) -> int | None:
        """Calls that it has no room for now; None where it does not say."""
        ...
