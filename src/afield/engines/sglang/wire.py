"""SGLang wire format: request bodies and response events of `/generate`.

`output_ids` and `output_token_logprobs` are cumulative, or incremental with `--incremental-streaming-output`;
`completion_tokens` is always cumulative, so the new tokens are the end of both lists either way.
"""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from afield.engines.lora import AdapterLease
from afield.engines.remote import LabelSpan, StreamError
from afield.errors import Unavailable
from afield.interfaces.engine import GenerateRequest, TopLogprobs
from afield.types import FinishReason

GENERATE = "/generate"
DONE = b"[DONE]"
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
OFF = -1  # SGLang's value for no top_k
LOWEST = -1e30  # SGLang writes the lowest float for a probability of 0


class ServerInfo(Struct):
    """Body of `/server_info`."""

    max_req_input_len: int
    """Context length in tokens: prompts must be shorter. The advertised context is a few tokens too long."""
    enable_lora: bool | None = None
    """Whether the server serves adapters."""
    max_loras_per_batch: int = 0
    """Number of adapters that can be in use at once."""
    dtype: str = ""
    """Dtype of the weights, or "auto"."""


class ModelInfo(Struct):
    """Body of `/model_info`."""

    weight_version: str = "default"
    """Label of the served weights."""
    has_image_understanding: bool = False
    """Whether the model accepts images."""


class LoadResult(Struct):
    """Response to loading weights or an adapter."""

    success: bool
    """Whether the load succeeded."""
    message: str = ""
    """Message of a weight load."""
    error_message: str | None = None
    """Error of an adapter load; None without."""
    loaded_adapters: dict[str, Any] | None = None
    """Loaded adapters by name; None for a weight load."""


class Finish(Struct):
    """Finish reason of a call."""

    type: str
    """Finish reason: stop, length or abort."""
    message: str = ""
    """Reason of an abort."""
    status_code: int | None = None
    """HTTP status of a failed call; None for a requested abort."""


class MetaInfo(Struct):
    """Metadata of a response or event. Log-probability entries are (log-probability, token id, text)."""

    completion_tokens: int = 0
    """Tokens sampled so far."""
    finish_reason: Finish | None = None
    """Finish reason; None while the call continues."""
    output_token_logprobs: list[tuple[float, int, Any]] = []
    """Entry per sampled token."""
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    """Likeliest tokens per sampled token; None if not requested."""
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """Entry per prompt token; None if not requested."""
    input_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    """Likeliest tokens per prompt token; None if not requested."""
    weight_version: str = "default"
    """Label of the weights at the time of the event."""
    weight_versions: list[LabelSpan] | None = None
    """Version spans of the sampled tokens; None on servers that do not report them."""


class SglangResponse(Struct):
    """Response without streaming, or one event of a stream."""

    output_ids: list[int] = []
    """Sampled tokens, all or the new ones."""
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    """Metadata."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Prompt with expanded images; None if not requested."""
    error: StreamError | None = None
    """Error of a stream; None without."""


class SglangLoad(Struct):
    """Load of one data-parallel rank."""

    num_waiting_reqs: int = 0
    """Number of queued calls."""


LOADS = msgspec.json.Decoder(list[SglangLoad])
SERVER_INFO = msgspec.json.Decoder(ServerInfo)
MODEL_INFO = msgspec.json.Decoder(ModelInfo)
UPDATED = msgspec.json.Decoder(LoadResult)
REPLY = msgspec.json.Decoder(SglangResponse)


class SglangSample:
    """Tokens, log-probabilities and finish reason that are new in one or more events."""

    def __init__(self, replies: list[SglangResponse], seen: int, where: str, count: int = 0) -> None:
        """Merge the events `replies` after `seen` tokens.

        `where` is the server's URL, `count` the requested top_logprobs.
        """
        self._count = count
        self.tops: list[TopLogprobs] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: FinishReason | None = None
        for reply in replies:
            if reply.error is not None:
                raise reply.error.as_error(where)
            if reply.meta_info.finish_reason is not None:
                # Before `_add`, because a refused call has an id that was not sampled.
                self.finish = _finish(reply.meta_info.finish_reason, where)
            self._add(reply, reply.meta_info.completion_tokens - seen - len(self.token_ids), where)
        last = replies[-1].meta_info
        self.version, self.spans = last.weight_version, last.weight_versions
        self.prompt_ids = replies[0].prompt_token_ids

    def _add(self, reply: SglangResponse, new: int, where: str) -> None:
        logprobs = reply.meta_info.output_token_logprobs
        if self.finish is FinishReason.ABORTED and len(reply.output_ids) < len(logprobs):
            # A stream aborted while it waits has only the last id, but all log-probabilities.
            reply.output_ids = [pair[1] for pair in logprobs]
        if not 0 <= new <= len(reply.output_ids) == len(logprobs):
            raise Unavailable(
                f"{where} gave {len(reply.output_ids)} ids and {len(logprobs)} log-probabilities"
                f" where {new} of each are new"
            )
        if not new:
            return
        ids, pairs = reply.output_ids[-new:], logprobs[-new:]
        if ids != [pair[1] for pair in pairs]:
            raise Unavailable(f"{where} gave log-probabilities of other tokens than it sampled")
        if min(pair[0] for pair in pairs) < LOWEST:
            raise Unavailable(f"{where} has no finite log-probability for a token it sampled")
        self.token_ids += ids
        self.logprobs += [pair[0] for pair in pairs]
        if self._count:
            tops = reply.meta_info.output_top_logprobs or []
            if len(tops) < new:
                raise Unavailable(
                    f"{where} gave {new} ids but top log-probabilities of {len(tops)} positions"
                )
            for top, (logprob, token, _) in zip(tops[-new:], pairs, strict=True):
                self.tops.append(_likeliest(top or [], token, logprob, self._count))


def _likeliest(
    candidates: list[tuple[float, int, Any]], token: int, logprob: float, count: int
) -> TopLogprobs:
    pairs = [
        (candidate, logprob if candidate == token else p) for p, candidate, _ in candidates if p >= LOWEST
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0] != token))[:count])


def prompt_tops(reply: SglangResponse, call: GenerateRequest, where: str) -> tuple[TopLogprobs, ...] | None:
    """Log-probabilities per prompt token: the token itself, then the likeliest; None if not requested."""
    if call.prompt_logprobs is None:
        return None
    own = reply.meta_info.input_token_logprobs or []
    tops = reply.meta_info.input_top_logprobs or [None] * len(own)
    if len(own) < len(call.prompt_ids) or len(own) != len(tops):
        raise Unavailable(
            f"{where} gave log-probabilities of {len(own)} ids for a prompt of {len(call.prompt_ids)}"
        )
    return tuple(
        ()
        if value is None
        else (
            (token, value),
            *(pair for pair in _likeliest(top or [], token, value, call.prompt_logprobs) if pair[0] != token),
        )
        for (value, token, _), top in zip(own, tops, strict=True)
    )


def adapter_name(version: int, path: str) -> str:
    """Adapter name at the server; the same in every process that publishes this version from this path."""
    return f"policy-v{version}-{blake2b(path.encode(), digest_size=4).hexdigest()}"


def _finish(finish: Finish, where: str) -> FinishReason:
    if finish.type == "abort" and finish.status_code is not None:
        if finish.status_code == 400:
            raise ValueError(f"{where} refuses the call: {finish.message}")
        raise Unavailable(f"{where} aborted the call with {finish.status_code}: {finish.message}")
    if finish.type not in FINISH:
        raise Unavailable(f"{where} ended a call with {finish.type!r}")
    return FINISH[finish.type]


def body(
    call: GenerateRequest, limit: int, lease: AdapterLease | None = None, adapter: str = ""
) -> dict[str, Any]:
    """Request body of `/generate`; `limit` is the maximum number of tokens."""
    sampling = call.sampling
    request: dict[str, Any] = {
        "input_ids": call.prompt_ids,
        "sampling_params": {
            "max_new_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or OFF,
            "stop_token_ids": call.stop_ids,
            # ignore_eos also disables stop ids, so the model's end ids stay active with stop ids.
            "ignore_eos": not call.stop_ids,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "stream": call.stream,
    }
    if lease is not None:
        request |= {"lora_path": adapter, "rid": lease.id}
    if count := max(call.top_logprobs, call.prompt_logprobs or 0):
        request["top_logprobs_num"] = count
    if call.prompt_logprobs is not None:
        request["logprob_start_len"] = 0
    if call.stop:
        request["sampling_params"]["stop"] = call.stop
    if call.constraint:
        request["sampling_params"]["structural_tag"] = call.constraint.grammar
    if sampling.seed is not None:
        request["sampling_params"]["sampling_seed"] = sampling.seed
    if call.images:
        request["image_data"] = [
            image.url if image.data is None else base64.b64encode(image.data).decode()
            for image in call.images
        ]
        request["return_prompt_token_ids"] = True
    return request
