"""Model requests and call events, independent of the dialect.

Dialects decode requests into `ModelRequest` and encode the events of `calls`: `CallStarted`,
`CallDelta`s, `CallFinished`. Without `CallFinished` no turn is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from afield.chat import Event, Tool
from afield.interfaces import Image
from afield.interfaces.engine import TopLogprobs
from afield.types import Message, Sampling, Turn

NO_SAMPLING: Mapping[str, float] = {}
NO_IMAGES: Mapping[str, Image] = {}
NO_NAMES: Mapping[str, str] = {}
NO_PLACES: Mapping[str, str] = {}


class Scores(Struct, frozen=True, kw_only=True):
    """Log-probabilities that a request asks for, in addition to those of the sampled tokens."""

    count: int = 0
    """Number of requested top log-probabilities per token."""
    top: tuple[TopLogprobs, ...] = ()
    """Top log-probabilities of each sampled token; empty if not requested."""
    prompt_count: int | None = None
    """Number of requested top log-probabilities per prompt token; None for no scores."""
    prompt: tuple[TopLogprobs, ...] | None = None
    """Per prompt token its own and the top log-probabilities; empty for the first token."""
    text_positions: tuple[int, ...] | None = None
    """Positions of the sampled tokens that are reply text, if requested."""

    def answers(self, count: int, prompt_count: int | None, spoken: bool) -> bool:
        """Returns whether these scores cover a request."""
        if prompt_count is not None and (self.prompt_count is None or self.prompt_count < prompt_count):
            return False
        return self.count >= count and (self.text_positions is not None or not spoken)


class OutputFormat(Struct, frozen=True):
    """Required form of the reply."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    """Kind of constraint."""
    text: str = ""
    """JSON schema, regular expression, EBNF grammar, or JSON list of choices; empty for `json_object`."""


class Reasoning(Struct, frozen=True, kw_only=True):
    """Reasoning parameters of a request."""

    enabled: bool | None = None
    """Whether the model reasons; None leaves it to the chat template."""
    budget: int | None = None
    """Maximum of reasoning tokens; None for no limit."""
    effort: str = ""
    """Provider's word for the effort, such as `high`."""


NO_REASONING = Reasoning()


class ModelRequest(Struct, frozen=True, kw_only=True):
    """A request of any dialect."""

    dialect: str
    """Name of the dialect."""
    model: str = ""
    """Model name of the request; the response repeats it."""
    messages: tuple[Message, ...] = ()
    """Conversation; empty for a raw prompt."""
    tools: tuple[Tool, ...] = ()
    """Tools in the prompt, also if the reply may not call them: the root stays the same."""
    may_call: bool = True
    """Whether the reply may contain tool calls."""
    must_call: bool = False
    """Whether the reply must be a tool call."""
    callable_tools: tuple[str, ...] = ()
    """Names of the tools that the reply may call; empty for all."""
    parallel_calls: bool = True
    """Whether the reply may contain several calls."""
    output: OutputFormat | None = None
    """Required form of the reply; None for any."""
    reasoning: Reasoning = NO_REASONING
    """Requested reasoning."""
    names: Mapping[str, str] = NO_NAMES
    """Dialect parameter per field, for error messages."""
    top_logprobs: int = 0
    """Top log-probabilities per sampled token."""
    prompt_logprobs: int | None = None
    """Top log-probabilities per prompt token; None for no scores."""
    by_token: bool = False
    """Whether each delta has one token and its text positions."""
    only_score: bool = False
    """Whether the prompt is scored and nothing sampled."""
    stored_options: bytes = b""
    """Options to encode the response again, stored with the turn."""
    shared_text: tuple[str, bytes] | None = None
    """Digest and text of options that several turns share; None for none."""
    max_tokens: int | None = None
    """Token limit of the reply, which only lowers the session's; None for the session's."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    stream: bool = False
    """Whether the response is streamed."""
    prompt: str | tuple[int, ...] | None = None
    """Raw prompt as text or ids (Completions); None for a conversation."""
    after: str | None = None
    """Turn whose stored conversation precedes the messages (Responses); None for none."""
    hints: frozenset[str] = frozenset()
    """Turns that the client names by echoed ids."""
    retry: bool = False
    """Whether the client marks the request as a retry."""
    idempotency_key: str = ""
    """Client's name of the request; equal in all retries."""
    thread: str = ""
    """Client's name of the conversation thread."""
    tags: tuple[str, ...] = ()
    """Tags of the turn."""
    requested_sampling: Mapping[str, float] = NO_SAMPLING
    """Sampling settings that the client requests; the session decides which apply."""
    images: Mapping[str, Image] = NO_IMAGES
    """Images of the messages by digest."""
    image_places: Mapping[str, str] = NO_PLACES
    """Message name per image digest, for errors."""


class CallStarted(Struct, frozen=True):
    """First event of a call."""

    session_id: str
    """Session of the call."""
    turn_id: str
    """Turn of the call."""
    prompt_ids: tuple[int, ...]
    """Prompt token ids."""
    created: float
    """Start time, seconds since the epoch."""
    must_deliver: bool = True
    """Whether the turn is undelivered if the client disconnects before the end."""
    sampling: Sampling = Sampling()
    """Sampling parameters of the call."""


class CallDelta(Struct, frozen=True):
    """Event with newly sampled tokens."""

    token_ids: tuple[int, ...]
    """Sampled token ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each token."""
    events: list[Event]
    """Parsed text, reasoning and tool-call events."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Top log-probabilities per token, if requested."""
    prompt_logprobs: tuple[TopLogprobs, ...] | None = None
    """Prompt scores, with the first delta."""
    text_positions: tuple[int, ...] = ()
    """Positions in the turn of the tokens whose text is in `events`, with `by_token`."""


class CallFinished(Struct, frozen=True):
    """Last event of a call, after its turn is durable."""

    turn: Turn
    """The committed turn."""
    reply: Message
    """The reply as the client gets it."""
    prompt_tokens: int
    """Prompt length in tokens."""
    stop: str | None = None
    """Stop string that ended the reply; None if none did."""
    reasoning_tokens: int = 0
    """Sampled tokens that are reasoning."""
    scores: Scores | None = None
    """Requested log-probabilities; None if none were requested."""


Item = CallStarted | CallDelta | CallFinished


# --- requested sampling ---

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "seed")
PENALTY_NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")


class RequestedSampling(Struct, kw_only=True):
    """Sampling fields of the request bodies of all dialects; None if the request does not set a field."""

    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Nucleus sampling: probability mass of the tokens to sample from."""
    top_k: float | None = None
    """Number of most likely tokens to sample from; 0 or less for all."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of the sampler."""
    presence_penalty: float | None = None
    """Penalty for tokens that occurred."""
    frequency_penalty: float | None = None
    """Penalty per occurrence of a token."""
    repetition_penalty: float | None = None
    """Factor for tokens that occurred (vLLM)."""
    min_p: float | None = None
    """Least probability relative to the most likely token (vLLM)."""
    logit_bias: dict[str, float] | None = None
    """Bias added to logits, by token id."""


def requested_sampling(body: RequestedSampling) -> dict[str, float]:
    """Returns the sampling settings that a request names."""
    settings = {
        name: value for name in SAMPLING_NAMES + PENALTY_NAMES if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        settings["logit_bias"] = 1.0
    return settings


def apply_sampling(sampling: Sampling, requested: Mapping[str, float], may: tuple[str, ...]) -> Sampling:
    """Applies the settings that the client may choose. Raises ValueError for invalid values."""
    allowed = {name: value for name, value in requested.items() if name in may}
    if "top_k" in allowed:
        allowed["top_k"] = max(0, int(allowed["top_k"]))
    return structs.replace(sampling, **allowed) if allowed else sampling


def override_tags(sampling: Sampling, requested: Mapping[str, float]) -> tuple[str, ...]:
    """Returns an `overridden:NAME` tag for each requested setting that is not applied."""
    return tuple(
        f"overridden:{name}" for name, value in requested.items() if not _given(sampling, name, value)
    )


def _given(sampling: Sampling, name: str, value: float) -> bool:
    if name == "top_k":
        return max(0, int(value)) == sampling.top_k
    if name in SAMPLING_NAMES:
        return value == getattr(sampling, name)
    return value == (1.0 if name == "repetition_penalty" else 0.0)
