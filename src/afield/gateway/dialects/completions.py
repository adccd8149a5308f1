"""OpenAI Completions dialect: a raw prompt, and the sampled text.

Nothing is parsed: tool calls and reasoning stay text. With `echo` the prompt precedes the text, and with
`logprobs` it is scored without temperature; `max_tokens` 0 samples nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from afield.chat import ChatTokenizer, TextDelta
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects import chat
from afield.gateway.dialects.base import EVENTS, BodyReader, RawRequest, ResponseOptions, data, is_retry
from afield.gateway.dialects.logprobs import TokenText, check_count
from afield.gateway.model_request import (
    CallDelta,
    CallFinished,
    CallStarted,
    ModelRequest,
    Scores,
    requested_sampling,
)
from afield.gateway.parameters import check_within
from afield.interfaces.engine import TopLogprobs

Json = dict[str, Any]
NAMES = {"top_logprobs": "logprobs", "prompt_logprobs": "echo with logprobs"}
REPLACEMENT = "\ufffd"


class CompletionsBody(chat.Structured, kw_only=True):
    """Body of a Completions request; None if the request does not set a field."""

    prompt: str | list[str | int | list[int]]
    """Prompt as text or token ids, or a list with one prompt."""
    model: str | None = ""
    """Model name."""
    max_tokens: int | None = None
    """Token limit of the reply."""
    stop: str | list[str] | None = None
    """Stop string or strings."""
    stream: bool | None = False
    """Whether the response is streamed."""
    stream_options: Json | None = None
    """Options of the stream, such as `include_usage`."""
    logprobs: int | bool | None = None
    """Top log-probabilities per token; True for 1."""
    prompt_logprobs: int | None = None
    """Top log-probabilities per prompt token (vLLM)."""
    return_tokens_as_token_ids: bool | None = False
    """Whether tokens are written as ids (vLLM)."""
    echo: bool | None = False
    """Whether the prompt precedes the reply."""
    return_token_ids: bool | None = False
    """Whether to return token ids (vLLM)."""


BODY = BodyReader("completions", CompletionsBody, "a completion request")


def decode(raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, tags = BODY.read(raw)
    _check(wire)
    for name in ("stream_options", "structured_outputs"):
        if value := getattr(wire, name):
            tags += check_within("completions", name, value, ignore=raw.ignore)
    prompt = _prompt(wire.prompt)
    output, output_name = chat.requested_output(wire)
    request = ModelRequest(
        dialect="completions",
        model=wire.model or "",
        prompt=prompt,
        max_tokens=wire.max_tokens or None,
        only_score=wire.max_tokens == 0,
        top_logprobs=int(wire.logprobs or 0),
        prompt_logprobs=_scores_prompt(wire),
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stream=bool(wire.stream),
        requested_sampling=requested_sampling(wire),
        retry=is_retry(raw),
        output=output,
        names=NAMES | {"output": output_name} if output else NAMES,
        tags=tags,
    )
    options = ResponseOptions(
        model=wire.model or "",
        usage=chat.wants_usage(wire.stream_options),
        logprobs=wire.logprobs is not None and wire.logprobs is not False,
        token_ids=bool(wire.return_token_ids),
        top_logprobs=int(wire.logprobs or 0),
        prompt_logprobs=wire.prompt_logprobs is not None,
        tokens_as_ids=bool(wire.return_tokens_as_token_ids),
        echo={"prompt": prompt} if wire.echo else {},
    )
    return request, options


def _check(wire: CompletionsBody) -> None:
    chat.check_stream_options(wire)
    if wire.max_tokens is not None and wire.max_tokens < (0 if wire.echo else 1):
        raise bad_request(f"max_tokens={wire.max_tokens} must be at least 1", "or 0 with echo")
    check_count(int(wire.logprobs or 0), "logprobs")
    check_count(wire.prompt_logprobs, "prompt_logprobs")
    if wire.prompt_logprobs is not None and wire.stream:
        raise bad_request(
            "prompt_logprobs is not available in a stream", "send the request without stream, or with echo"
        )


def _scores_prompt(wire: CompletionsBody) -> int | None:
    """Returns the number of top log-probabilities per prompt token; None for none."""
    repeated = int(wire.logprobs) if wire.echo and wire.logprobs not in (None, False) else None
    if wire.prompt_logprobs is None or repeated is None:
        return wire.prompt_logprobs if repeated is None else repeated
    return max(wire.prompt_logprobs, repeated)


def _prompt(prompt_in: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    alone = prompt_in[0] if isinstance(prompt_in, list) and len(prompt_in) == 1 else prompt_in
    prompt = prompt_in if isinstance(alone, int) else alone
    if not prompt:
        raise bad_request("prompt is empty", "send text or token ids")
    if isinstance(prompt, str):
        return prompt
    ids = tuple(part for part in prompt if isinstance(part, int))
    if len(ids) != len(prompt):
        raise bad_request(f"{len(prompt)} prompts are not served", "ask once per prompt")
    if min(ids) < 0:
        raise bad_request(f"prompt has the token id {min(ids)}, which is negative")
    return ids


class Completions:
    """Completions dialect."""

    name = "completions"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        return decode(raw)

    def encode_error(self, error: ApiError) -> Json:
        return chat.error_body(error)

    def count(self, tokens: int) -> Json:
        return {"total_tokens": tokens}

    def response(self, started: CallStarted, finished: CallFinished, options: ResponseOptions) -> Json:
        builder = CompletionBuilder(started, options, self._tokenizer)
        scores = finished.scores or Scores()
        prompt_logprobs = builder.prompt_logprobs(scores.prompt) if options.echo else None
        sampled = builder.logprobs(finished.turn.token_ids, finished.turn.logprobs, scores.top)
        text, finish = builder.before() + finished.reply.content, str(finished.turn.finish_reason)
        choice = builder.choice(text, _joined(prompt_logprobs, sampled), finish=finish)
        if options.prompt_logprobs and scores.prompt is not None:
            choice["prompt_logprobs"] = builder.texts.prompt(scores.prompt)
        if options.token_ids:
            choice |= {"prompt_token_ids": started.prompt_ids, "token_ids": finished.turn.token_ids}
        return builder.envelope | {"choices": [choice], "usage": chat.usage(finished)}

    def stream(self, started: CallStarted, options: ResponseOptions) -> CompletionsStream:
        return CompletionsStream(started, options, self._tokenizer)


class CompletionBuilder:
    """Builds the choices of one response, and counts text offsets."""

    def __init__(self, started: CallStarted, options: ResponseOptions, tokenizer: ChatTokenizer) -> None:
        self.envelope: Json = {
            "id": f"cmpl-{started.session_id}-{started.turn_id}",
            "object": "text_completion",
            "created": int(started.created),
            "model": options.model,
        }
        self.texts = TokenText(tokenizer, options)
        self._started = started
        self._options = options
        self._tokenizer = tokenizer
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def before(self) -> str:
        """Returns the prompt's text for `echo`."""
        prompt = self._options.echo.get("prompt", "")
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def choice(self, text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def prompt_logprobs(self, scored: Sequence[TopLogprobs] | None) -> Json | None:
        """Returns the log-probabilities of an echoed prompt; the first token has none."""
        if not self._options.logprobs:
            return None
        prompt_ids = self._started.prompt_ids
        tops = scored if scored is not None else [()] * len(prompt_ids)
        ids = [top[0][0] if top else prompt_ids[n] for n, top in enumerate(tops)]
        own = [top[0][1] if top else None for top in tops]
        return self._listed(ids, own, [top[1:] for top in tops], self._tokenizer.piece)

    def logprobs(
        self, ids: Sequence[int], values: Sequence[float], tops: Sequence[TopLogprobs]
    ) -> Json | None:
        if not self._options.logprobs:
            return None
        return self._listed(ids, values, tops or [()] * len(ids), self._tokenizer.reply_bytes)

    def _listed(
        self,
        ids: Sequence[int],
        values: Sequence[float | None],
        tops: Sequence[TopLogprobs],
        spelled: Callable[[int], bytes],
    ) -> Json:
        offsets: list[int] = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(spelled(token)))
        places = zip(ids, values, tops, strict=True)
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": list(values),
            "top_logprobs": [None if p is None else self._top(token, p, top) for token, p, top in places],
            "text_offset": offsets,
        }

    def _top(self, token: int, logprob: float, top: TopLogprobs) -> dict[str, float]:
        """Returns the token and the requested number of top tokens."""
        logprobs = {self._name(token): logprob}
        for other, p in top[: self._options.top_logprobs]:
            logprobs.setdefault(self._name(other), p)
        return logprobs

    def _name(self, token: int) -> str:
        """Returns the token's text, or its bytes if it is part of a character."""
        text = self.texts.text(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.piece(token))


def _joined(prompt: Json | None, sampled: Json | None) -> Json | None:
    if prompt is None or sampled is None:
        return sampled
    return {name: prompt[name] + sampled[name] for name in sampled}


class CompletionsStream:
    """Encodes a response as chunks."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, options: ResponseOptions, tokenizer: ChatTokenizer) -> None:
        self._started = started
        self._options = options
        self._builder = CompletionBuilder(started, options, tokenizer)
        self._repeated = not options.echo

    def begin(self) -> bytes:
        """Encodes the prompt for `echo` or `return_token_ids`; a scored one comes with the first delta."""
        if self._options.echo and not self._options.logprobs:
            return self._repeat(None)
        if not self._options.token_ids or self._options.echo:
            return b""
        return self._chunk(self._builder.choice("", None) | {"prompt_token_ids": self._started.prompt_ids})

    def delta(self, delta: CallDelta) -> bytes:
        echoed = b"" if self._repeated else self._repeat(delta.prompt_logprobs)
        text = "".join(event.text for event in delta.events if isinstance(event, TextDelta))
        raw = self._options.logprobs or self._options.token_ids
        if not text and not (raw and delta.token_ids):
            return echoed
        logprobs = self._builder.logprobs(delta.token_ids, delta.logprobs, delta.top_logprobs)
        choice = self._builder.choice(text, logprobs)
        return echoed + self._chunk(
            choice | ({"token_ids": delta.token_ids} if self._options.token_ids else {})
        )

    def _repeat(self, scores: Sequence[TopLogprobs] | None) -> bytes:
        """Encodes the echoed prompt."""
        self._repeated = True
        scored = self._builder.prompt_logprobs(scores)
        ids = {"prompt_token_ids": self._started.prompt_ids} if self._options.token_ids else {}
        return self._chunk(self._builder.choice(self._builder.before(), scored) | ids)

    def end(self, finished: CallFinished) -> bytes:
        out = self._chunk(self._builder.choice("", None, finish=str(finished.turn.finish_reason)))
        if self._options.usage:
            out += data(self._builder.envelope | {"choices": [], "usage": chat.usage(finished)})
        return out + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return data(chat.error_body(error))

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def _chunk(self, choice: Json) -> bytes:
        return data(self._builder.envelope | {"choices": [choice]})
