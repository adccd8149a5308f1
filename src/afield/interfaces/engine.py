"""Engine interface: sampling with token ids, log-probabilities and policy versions.

Optional interfaces: `Pausable` (pause calls during a weight update) and `Queueing` (report queue length).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol, Self, runtime_checkable

from msgspec import Struct

from afield.types import Constraint, FinishReason, Image, Sampling, VersionSpan

LogprobMode = Literal["processed", "tempered", "raw"]
"""Distribution of reported log-probabilities: after temperature and truncation, after temperature, or raw."""
TopLogprobs = tuple[tuple[int, float], ...]
"""Most likely tokens at one position with their log-probabilities, in descending order."""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """Model, limits and features of an engine."""

    kind: str
    """Engine type, such as vllm, sglang or torch."""
    version: int
    """Policy version of the loaded weights."""
    max_context: int
    """Largest number of tokens in prompt and reply together."""
    vocab_size: int
    """Number of token ids."""
    images: bool = False
    """Whether prompts may have images."""
    logprobs: LogprobMode = "processed"
    """Distribution of reported log-probabilities; calls sampled from another one are refused."""
    exact_versions: bool = True
    """Whether the engine reports the exact policy version of each token; else an interval."""
    dtype: str = ""
    """Dtype of the loaded weights: float32, bfloat16 or float16; empty if unknown."""
    notes: tuple[str, ...] = ()
    """Limitations of this engine, shown to the user."""
    constraints: bool = False
    """Whether calls may have a constraint; without support, `generate` raises ValueError for them."""
    max_top_logprobs: int = 0
    """Largest `top_logprobs` of a call; 0 is no support."""
    prompt_logprobs: bool = False
    """Whether calls may ask for log-probabilities of the prompt."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """Model call."""

    id: str
    """Call id, unique in the engine."""
    session_id: str
    """Id of the session, for prefix caching and routing."""
    prompt_ids: tuple[int, ...]
    """Prompt; has one placeholder token per image, which the engine expands."""
    sampling: Sampling
    """Sampling parameters."""
    max_tokens: int
    """Largest number of tokens to sample, already limited by context and budget."""
    stop_ids: tuple[int, ...]
    """Tokens that end the call."""
    stream: bool = False
    """Whether chunks are wanted as they are sampled; else one chunk at the end is enough."""
    base_ids: tuple[int, ...] = ()
    """Earlier prompt of the session that `prompt_ids` begins with, as the same object; may be empty."""
    images: tuple[Image, ...] = ()
    """Images of the prompt, in the order of their placeholders."""
    image_places: tuple[int, ...] = ()
    """Indexes of the image placeholders in `prompt_ids`; placeholders that the model sampled itself are not
    among them. Empty takes all placeholders.
    """
    draw: str = ""
    """Key of the random numbers of a call without a seed: where supported, the same key samples the same
    tokens. Empty uses `id`.
    """
    stop: tuple[str, ...] = ()
    """Stop strings. An engine that detokenizes may end the call at the token that completes one; the caller
    checks for them itself in any case.
    """
    constraint: Constraint | None = None
    """Grammar of the reply; None samples freely."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each sampled position; 0 is none."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report at each prompt position; None reports nothing."""


class Chunk(Struct, frozen=True, kw_only=True):
    """Newly sampled tokens of a call."""

    token_ids: tuple[int, ...]
    """Sampled ids, including the stop token."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id under the distribution it was drawn from, with temperature and
    truncation; for greedy decoding, under the model's distribution at temperature 1.
    """
    low: int
    """Oldest policy version that may have sampled these tokens."""
    high: int
    """Newest policy version that may have sampled these tokens."""
    finish: FinishReason | None = None
    """Why the call ended; set on the last chunk only."""
    prompt_ids: tuple[int, ...] | None = None
    """Prompt with expanded images, on the first chunk; None if the prompt is unchanged."""
    versions: tuple[VersionSpan, ...] | None = None
    """Exact versions of all tokens of the call, on the last chunk, from an engine that learns them late;
    they replace `low` and `high`. None keeps `low` and `high`.
    """
    queued_s: float = 0.0
    """Seconds that the call waited in the engine's queue, on the first chunk; 0 if unknown."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Most likely tokens at the position of each of `token_ids`; empty unless requested."""
    prompt_logprobs: tuple[TopLogprobs, ...] | None = None
    """For each prompt token its own log-probability, then the most likely tokens, on the first chunk; empty
    for the first token. None unless requested.
    """


class Engine(Protocol):
    """Inference engine; `async with engine:` starts and stops it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def info(self) -> EngineInfo: ...

    def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Yield chunks until one has a finish. Closing the generator early cancels the call.

        Without `call.stream` the engine may answer in one chunk. Raises ValueError before the first chunk for
        a call that the engine cannot serve, and Unavailable if the engine fails.
        """
        ...

    async def load(self, version: int, path: str) -> None:
        """Serve the weights in this directory as `version`: a full model or a PEFT adapter.

        Calls in flight continue with the new weights; an engine that serves several adapters at once
        continues them with their own. Repeating the current version is harmless; a lower one raises Conflict.
        """
        ...


@runtime_checkable
class Pausable(Protocol):
    """Engine that can pause calls in flight. Repeating either method is harmless."""

    async def pause(self) -> None:
        """Stop sampling until `resume`. Calls in flight keep their state and neither end nor fail."""
        ...

    async def resume(self) -> None: ...


@runtime_checkable
class Queueing(Protocol):
    """Engine that reports the length of its own queue, including calls of other clients."""

    async def waiting(self) -> int | None:
        """Return the number of queued calls; None if unknown."""
        ...
