"""vLLM's wire format: what is sent, and what an answer's events mean.

Two endpoints give ids for ids. `/inference/v1/generate` tells exact version spans with the last event;
`/v1/completions` with `return_token_ids` is there on every server and tells none. vLLM writes -9999
where it has no log-probability or a NaN: that is refused here like any other missing number.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import Struct

from afield.engines.spans import Problem, Span
from afield.errors import Unavailable
from afield.seams.engine import Call, Image
from afield.types import FinishReason

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
# What a server makes of the `x-request-id` of a call, to be named by when it is to be aborted.
GENERATE_ID, COMPLETIONS_ID = "generate-tokens-{}", "cmpl-{}-0"
NO_LOGPROB = -9999.0
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
DONE = b"[DONE]"


class Entry(Struct):
    logprob: float


class Logprobs(Struct):
    """`content` from generate, `token_logprobs` from completions."""

    content: list[Entry] | None = None
    token_logprobs: list[float] | None = None


class Choice(Struct):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class Reply(Struct):
    """A whole answer, or one event of a stream."""

    choices: list[Choice] = []
    prompt_token_ids: tuple[int, ...] | None = None
    error: Problem | None = None


REPLY = msgspec.json.Decoder(Reply)
REPLIES = msgspec.json.Decoder(list[Reply])


class Sampled:
    """What a number of events say together."""

    __slots__ = ("finish", "logprobs", "prompt_ids", "spans", "token_ids")

    def __init__(self, replies: list[Reply], where: str) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_ids: tuple[int, ...] | None = None
        self.spans: list[Span] | None = None
        self.finish: FinishReason | None = None
        for reply in replies:
            if reply.error is not None:
                raise reply.error.as_error(where)
            if self.prompt_ids is None:
                self.prompt_ids = reply.prompt_token_ids
            for choice in reply.choices:
                self._add(choice, where)
        if len(self.token_ids) != len(self.logprobs):
            raise Unavailable(
                f"{where} gave {len(self.token_ids)} ids but {len(self.logprobs)} log-probabilities"
            )
        if self.logprobs and not min(self.logprobs) > NO_LOGPROB:
            raise Unavailable(f"{where} has no finite log-probability for a token it sampled")

    def _add(self, choice: Choice, where: str) -> None:
        if choice.token_ids:
            self.token_ids += choice.token_ids
            if (given := choice.logprobs) is not None:
                if given.content is not None:
                    self.logprobs += [entry.logprob for entry in given.content]
                else:
                    self.logprobs += given.token_logprobs or []
        if choice.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = choice.prompt_token_ids
        if choice.finish_reason is not None:
            if choice.finish_reason not in FINISH:
                raise Unavailable(f"{where} ended a call with {choice.finish_reason!r}")
            self.finish = FINISH[choice.finish_reason]
            self.spans = choice.weight_versions


def generate_body(model: str, call: Call, limit: int, ids: msgspec.Raw) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "token_ids": ids,
        "stream": call.stream,
        # Our stop ids are the only ones; whatever the model's own configuration says.
        "sampling_params": {
            **_sampling(call, limit),
            "logprobs": 0,
            "detokenize": bool(call.stop),
        },
    }
    if call.images:
        body["content_parts"] = [_part(image) for image in call.images]
        body["return_token_ids"] = True
    return body


def completions_body(model: str, call: Call, limit: int, ids: msgspec.Raw) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ids,
        "stream": call.stream,
        **_sampling(call, limit),
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def _sampling(call: Call, limit: int) -> dict[str, Any]:
    sampling = call.sampling
    # Text is not what we read; held back for the sake of a stop string, it would hold ids back, too.
    strings = {"stop": call.stop, "include_stop_str_in_output": True} if call.stop else {}
    return {
        **strings,
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
