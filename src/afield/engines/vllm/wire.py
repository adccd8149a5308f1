"""vLLM wire format: request bodies and response events.

`/inference/v1/generate` reports exact version spans with its last event; `/v1/completions` with
`return_token_ids` exists on every server and reports none. vLLM writes -9999 for a missing or NaN
log-probability, which raises Unavailable here.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from afield.engines.remote import LabelSpan, StreamError
from afield.errors import Unavailable
from afield.interfaces.engine import GenerateRequest, Image, TopLogprobs
from afield.interfaces.shared_weights import SharedWeights
from afield.types import FinishReason

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
INIT_TRANSFER = "/init_weight_transfer_engine"
# Request ids for /abort_requests, which vLLM derives from the `x-request-id` of a call.
GENERATE_ID, COMPLETIONS_ID = "generate-tokens-{}", "cmpl-{}-0"
NO_LOGPROB = -9999.0
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
DONE = b"[DONE]"
TOKEN_ID = "token_id:"


class Candidate(Struct):
    """Likely token at a position, with its log-probability."""

    logprob: float
    """Log-probability."""
    token_id: int | None = None
    """Token id; None from releases before 0.32, which name it."""
    token: str = ""
    """Name `token_id:ID`."""

    @property
    def id(self) -> int:
        """Token id; raises ValueError for a token that is named by its text."""
        return int(self.token.removeprefix(TOKEN_ID)) if self.token_id is None else self.token_id


class TokenLogprob(Struct):
    """Log-probability of one sampled token."""

    logprob: float
    """Log-probability."""


class RankedLogprob(TokenLogprob):
    """Log-probability of one sampled token, with the likeliest tokens at its position."""

    top_logprobs: list[Candidate] = []
    """Likeliest tokens."""


E = TypeVar("E", bound=TokenLogprob)


class Logprobs(Struct, Generic[E]):
    """Log-probabilities of a reply or event."""

    content: list[E] | None = None
    """Entry per sampled token, from generate; None from completions."""
    token_logprobs: list[float] | None = None
    """Log-probability of each sampled token, from completions; None from generate."""
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    """Likeliest tokens by name `token_id:ID`, from completions; decoded only if requested."""


PromptLogprobs = list[dict[int, TokenLogprob] | None]


class VllmChoice(Struct, Generic[E]):
    """Choice of a response; requests ask for one."""

    token_ids: list[int] | None = None
    """Sampled tokens; None for an event without tokens."""
    logprobs: Logprobs[E] | None = None
    """Log-probabilities of the sampled tokens."""
    finish_reason: str | None = None
    """Finish reason; None while the call continues."""
    weight_versions: list[LabelSpan] | None = None
    """Version spans, with the finish reason, from generate; None from completions."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Prompt as the server expanded it; None if not reported here."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt; None if not requested."""


class VllmResponse(Struct, Generic[E]):
    """Response without streaming, or one event of a stream."""

    choices: list[VllmChoice[E]] = []
    """Choices; empty for an event without one."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Prompt as the server expanded it; None if not reported here."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt; None if not requested."""
    error: StreamError | None = None
    """Error of a stream; None without."""


One = msgspec.json.Decoder[VllmResponse[Any]]
Several = msgspec.json.Decoder[list[VllmResponse[Any]]]
REPLY: One = msgspec.json.Decoder(VllmResponse[TokenLogprob])
REPLIES: Several = msgspec.json.Decoder(list[VllmResponse[TokenLogprob]])
FULL_REPLY: One = msgspec.json.Decoder(VllmResponse[RankedLogprob])
FULL_REPLIES: Several = msgspec.json.Decoder(list[VllmResponse[RankedLogprob]])
NAMED = msgspec.json.Decoder(list[dict[str, float] | None] | None)


class VllmSample:
    """Tokens, log-probabilities and finish reason of one or more events."""

    __slots__ = ("_count", "finish", "logprobs", "prompt_ids", "prompt_tops", "spans", "token_ids", "tops")

    def __init__(self, replies: list[VllmResponse[Any]], where: str, count: int = 0) -> None:
        """Merge the events `replies`; `where` is the server's URL, `count` the requested top_logprobs."""
        self._count = count
        self.tops: list[TopLogprobs] = []
        self.prompt_tops: tuple[TopLogprobs, ...] | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_ids: tuple[int, ...] | None = None
        self.spans: list[LabelSpan] | None = None
        self.finish: FinishReason | None = None
        for reply in replies:
            if reply.error is not None:
                raise reply.error.as_error(where)
            if self.prompt_ids is None:
                self.prompt_ids = reply.prompt_token_ids
            if reply.prompt_logprobs is not None:
                self.prompt_tops = _prompt_tops(reply.prompt_logprobs)
            for choice in reply.choices:
                self._add(choice, where)
        if len(self.token_ids) != len(self.logprobs):
            raise Unavailable(
                f"{where} gave {len(self.token_ids)} ids but {len(self.logprobs)} log-probabilities"
            )
        if self.logprobs and not min(self.logprobs) > NO_LOGPROB:
            raise Unavailable(f"{where} has no finite log-probability for a token it sampled")

    def _add(self, choice: VllmChoice[Any], where: str) -> None:
        if choice.token_ids:
            self.token_ids += choice.token_ids
            if (logprobs := choice.logprobs) is not None:
                if logprobs.content is not None:
                    self.logprobs += [entry.logprob for entry in logprobs.content]
                else:
                    self.logprobs += logprobs.token_logprobs or []
                if self._count:
                    self._add_tops(choice.token_ids, logprobs, where)
        if choice.prompt_logprobs is not None:
            self.prompt_tops = _prompt_tops(choice.prompt_logprobs)
        if choice.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = choice.prompt_token_ids
        if choice.finish_reason is not None:
            if choice.finish_reason not in FINISH:
                raise Unavailable(f"{where} ended a call with {choice.finish_reason!r}")
            self.finish = FINISH[choice.finish_reason]
            self.spans = choice.weight_versions

    def _add_tops(self, ids: list[int], logprobs: Logprobs[Any], where: str) -> None:
        if logprobs.content is not None:
            entries = [entry.top_logprobs for entry in logprobs.content]
        else:
            named = [top or {} for top in NAMED.decode(logprobs.top_logprobs) or []]
            entries = [[Candidate(p, token=name) for name, p in top.items()] for top in named]
        try:
            candidates = [[(entry.id, entry.logprob) for entry in top] for top in entries]
        except ValueError as error:
            raise Unavailable(f"{where} names likely tokens by their text instead of their id") from error
        if len(candidates) != len(ids):
            raise Unavailable(
                f"{where} gave {len(ids)} ids but top log-probabilities of {len(candidates)} positions"
            )
        self.tops += [_likeliest(top, token, self._count) for top, token in zip(candidates, ids, strict=True)]


def _likeliest(candidates: list[tuple[int, float]], token: int, count: int) -> TopLogprobs:
    """Sort candidates by log-probability; vLLM lists the sampled token first, whatever its rank."""
    finite = [pair for pair in candidates if pair[1] > NO_LOGPROB]
    return tuple(sorted(finite, key=lambda pair: (-pair[1], pair[0] != token))[:count])


def _prompt_tops(prompt_logprobs: PromptLogprobs) -> tuple[TopLogprobs, ...]:
    """Log-probabilities per prompt token: vLLM lists the token itself first, then the likeliest ones."""
    return tuple(
        tuple((token, entry.logprob) for token, entry in (top or {}).items()) for top in prompt_logprobs
    )


def generate_body(model: str, call: GenerateRequest, limit: int, ids: msgspec.Raw) -> dict[str, Any]:
    """Request body of `/inference/v1/generate`; `limit` is the maximum number of tokens."""
    body: dict[str, Any] = {
        "model": model,
        "token_ids": ids,
        "stream": call.stream,
        # Only the call's stop ids end it, not those of the model's configuration.
        "sampling_params": {
            **_sampling(call, limit),
            "detokenize": bool(call.stop),
        },
    }
    if call.images:
        body["content_parts"] = [_part(image) for image in call.images]
        body["return_token_ids"] = True
    return body


def completions_body(model: str, call: GenerateRequest, limit: int, ids: msgspec.Raw) -> dict[str, Any]:
    """Request body of `/v1/completions`; `limit` is the maximum number of tokens."""
    return {
        "model": model,
        "prompt": ids,
        "stream": call.stream,
        **_sampling(call, limit),
        "return_token_ids": True,
        "return_tokens_as_token_ids": call.top_logprobs > 0,
        "add_special_tokens": False,
    }


def _sampling(call: GenerateRequest, limit: int) -> dict[str, Any]:
    sampling = call.sampling
    # With the stop string included in the output, the server need not hold tokens back to trim it.
    strings = {"stop": call.stop, "include_stop_str_in_output": True} if call.stop else {}
    scores = {} if call.prompt_logprobs is None else {"prompt_logprobs": call.prompt_logprobs}
    # With vLLM's default backend, xgrammar, a structural tag gives the same masks as `afield.models.masks`.
    held = {"structured_outputs": {"structural_tag": call.constraint.grammar}} if call.constraint else {}
    return {
        **strings,
        **scores,
        **held,
        "logprobs": call.top_logprobs,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": call.stop_ids,
        "ignore_eos": True,
    }


def _part(image: Image) -> dict[str, Any]:
    url = image.url
    if image.data is not None:
        url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    return {"type": "image_url", "url": url, "uuid": image.digest}


# --- prompt encoding ------------------------------------------------------------------------------


def transfer(shared: SharedWeights) -> list[tuple[str, Any]]:
    """Requests, as path and body, that have a server copy weights from a trainer's GPU memory."""
    update = {
        "names": [tensor.name for tensor in shared.tensors],
        "dtype_names": [tensor.dtype for tensor in shared.tensors],
        "shapes": [tensor.shape for tensor in shared.tensors],
        "ipc_handles_pickled": shared.vllm_handles,
    }
    return [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": update}),
        ("/finish_weight_update", {"weight_version": str(shared.version)}),
    ]


ROOM = 64 * 1024 * 1024  # cache size in bytes
SHORT = 1024  # prompts with fewer ids are faster to encode than to cache
_encode = msgspec.json.Encoder().encode


class PromptEncoder:
    """Encodes prompts as JSON, reusing the text of the session's last prompt.

    If `GenerateRequest.base_ids` is that prompt (the same object), only the ids after it are encoded. The
    least recently used texts are dropped when the cache exceeds `ROOM` bytes.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[tuple[int, ...], bytes]] = OrderedDict()
        self._held = 0

    def ids(self, call: GenerateRequest) -> msgspec.Raw:
        """JSON array of the call's prompt ids."""
        if len(call.prompt_ids) < SHORT:
            return msgspec.Raw(_encode(call.prompt_ids))
        ids, text = self._known.pop(call.session_id, ((), b""))
        self._held -= len(text)
        if ids and ids is call.base_ids:
            text = text[:-1] + b"," + _encode(call.prompt_ids[len(ids) :])[1:]
        else:
            text = _encode(call.prompt_ids)
        self._known[call.session_id] = (call.prompt_ids, text)
        self._held += len(text)
        while self._held > ROOM:
            _, (_, gone) = self._known.popitem(last=False)
            self._held -= len(gone)
        return msgspec.Raw(text)
