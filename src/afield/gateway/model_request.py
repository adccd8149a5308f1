"""A model call in no dialect: what is asked, and what comes of it, item by item.

Dialects decode into `ModelRequest` and are views of the items; `calls` runs the one and yields the
others. A call gives `CallStarted`, then `CallDelta`s, then `CallFinished`; without `CallFinished` nothing
was committed.
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
    count: int = 0
    """How many of the likeliest tokens were asked for at each place."""
    top: tuple[TopLogprobs, ...] = ()
    """The likeliest tokens at the place of each sampled one; empty if none were asked for."""
    prompt_count: int | None = None
    prompt: tuple[TopLogprobs, ...] | None = None
    """Of each token of the prompt its own and then the likeliest ones; the first has none."""
    text_positions: tuple[int, ...] | None = None
    """Which of the sampled tokens are text of the reply, where that was asked for."""

    def answers(self, count: int, prompt_count: int | None, spoken: bool) -> bool:
        """Whether they are what another request asks for."""
        if prompt_count is not None and (self.prompt_count is None or self.prompt_count < prompt_count):
            return False
        return self.count >= count and (self.text_positions is not None or not spoken)


class OutputFormat(Struct, frozen=True):
    """The form a reply must have. `text` is a JSON schema, a regular expression or a grammar in EBNF; of
    `choice` it is a JSON list of strings, of `json_object` nothing."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    text: str = ""


class Reasoning(Struct, frozen=True, kw_only=True):
    """What a request says about thinking. `enabled` None leaves it to the chat template; `budget` is the most
    tokens to think for; `effort` is the provider's word for how hard."""

    enabled: bool | None = None
    budget: int | None = None
    effort: str = ""


NO_REASONING = Reasoning()


class ModelRequest(Struct, frozen=True, kw_only=True):
    """What it asks of sampling beyond these are `wishes`; the trainer decides about them.

    Tools are rendered even when the reply `may_call` none of them, so that the root stays the same.
    `prompt` stands in place of messages (Completions). `after` names the turn the messages follow when
    the client leaves the history to us. `hints` are turns the client named by echoing our marks.
    `retry` says that the client asks again, `idempotency_key` is its own name for the request in all tries.
    `thread` tells the client's own threads apart. `tags` are what the dialect knows about the call. `images`
    holds those that messages refer to, by digest; `image_places` says in which of the client's messages.

    With `must_call` the reply is a tool call; `callable_tools` are the names it may call (all if empty),
    and without `parallel_calls` it makes one call at most. `names` says by which parameter of the dialect a
    field was asked for, for whoever has to refuse it. `top_logprobs` asks for that many of the likeliest
    tokens at every place of the reply, `prompt_logprobs` for those of the prompt's tokens too. Pieces
    `by_token` have one token each and say which of them are text. With `only_score` nothing is sampled.
    `shown` is what the dialect keeps to show the answer again, `shared` the digest and text of what many
    requests have in common.
    """

    dialect: str
    model: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    may_call: bool = True
    must_call: bool = False
    callable_tools: tuple[str, ...] = ()
    parallel_calls: bool = True
    output: OutputFormat | None = None
    reasoning: Reasoning = NO_REASONING
    names: Mapping[str, str] = NO_NAMES
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    by_token: bool = False
    only_score: bool = False
    stored_options: bytes = b""
    shared_text: tuple[str, bytes] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    prompt: str | tuple[int, ...] | None = None
    after: str | None = None
    hints: frozenset[str] = frozenset()
    retry: bool = False
    idempotency_key: str = ""
    thread: str = ""
    tags: tuple[str, ...] = ()
    requested_sampling: Mapping[str, float] = NO_SAMPLING
    images: Mapping[str, Image] = NO_IMAGES
    image_places: Mapping[str, str] = NO_PLACES


class CallStarted(Struct, frozen=True):
    """`owed`: the turn counts as missed if its client leaves before the end; not so when another has it."""

    session_id: str
    turn_id: str
    prompt_ids: tuple[int, ...]
    created: float
    must_deliver: bool = True
    sampling: Sampling = Sampling()
    """What the call is sampled with."""


class CallDelta(Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    events: list[Event]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[TopLogprobs, ...] | None = None
    text_positions: tuple[int, ...] = ()
    """Places in the turn of the tokens whose text the events tell, where `by_token` asks for it."""


class CallFinished(Struct, frozen=True):
    """`stop` is the client's stop string that ended the reply, if one did; `thought` the sampled tokens of it
    that are reasoning."""

    turn: Turn
    reply: Message
    prompt_tokens: int
    stop: str | None = None
    reasoning_tokens: int = 0
    scores: Scores | None = None


Item = CallStarted | CallDelta | CallFinished


# --- requested sampling ---

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "seed")
PENALTY_NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")


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


def requested_sampling(body: RequestedSampling) -> dict[str, float]:
    """The settings a request names."""
    settings = {
        name: value for name in SAMPLING_NAMES + PENALTY_NAMES if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        settings["logit_bias"] = 1.0
    return settings


def apply_sampling(sampling: Sampling, requested: Mapping[str, float], may: tuple[str, ...]) -> Sampling:
    """The trainer's settings, with what the client may choose as it chose. ValueError for nonsense."""
    allowed = {name: value for name, value in requested.items() if name in may}
    if "top_k" in allowed:
        allowed["top_k"] = max(0, int(allowed["top_k"]))
    return structs.replace(sampling, **allowed) if allowed else sampling


def override_tags(sampling: Sampling, requested: Mapping[str, float]) -> tuple[str, ...]:
    """What the client asked for and does not get."""
    return tuple(
        f"overridden:{name}" for name, value in requested.items() if not _given(sampling, name, value)
    )


def _given(sampling: Sampling, name: str, value: float) -> bool:
    if name == "top_k":
        return max(0, int(value)) == sampling.top_k
    if name in SAMPLING_NAMES:
        return value == getattr(sampling, name)
    return value == (1.0 if name == "repetition_penalty" else 0.0)
