"""OpenAI Completions: a prompt of text or ids, and everything sampled after it as text.

Nothing is parsed: what looks like a tool call or reasoning stays in the text. Several prompts, several
choices and `suffix` are refused. With `echo` the prompt comes first; nobody sampled it, so it has no
log-probabilities. A client that asks for `logprobs` or `return_token_ids` gets exactly what is recorded;
of other candidates nothing is recorded, so `top_logprobs` holds the sampled token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from afield.gateway.dialects import chat
from afield.gateway.dialects.base import EVENTS, Asked, Wish, asks_again, data, read
from afield.gateway.refusal import Refusal, bad_request
from afield.gateway.request import Done, ModelRequest, Piece, Started
from afield.gateway.wishes import wishes
from afield.tokens import ChatTokens, TextDelta

Json = dict[str, Any]


class Body(chat.Structured, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: chat.StreamOptions | None = None
    logprobs: int | bool | None = None
    echo: bool | None = False
    n: int | None = 1
    best_of: int | None = 1
    suffix: str | None = None
    return_token_ids: bool | None = False


DECODER = msgspec.json.Decoder(Body)


def decode(asked: Asked) -> tuple[ModelRequest, Wish]:
    wire = read(DECODER, asked.body, "a completion request")
    _check(wire)
    prompt = _prompt(wire.prompt)
    output, form = chat.asked_output(wire)
    request = ModelRequest(
        dialect="completions",
        model=wire.model,
        prompt=prompt,
        max_tokens=wire.max_tokens,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stream=bool(wire.stream),
        wishes=wishes(wire),
        retry=asks_again(asked),
        output=output,
        names={"output": form} if output else {},
        tags=("unenforced:response_format",) if output else (),
    )
    wish = Wish(
        model=wire.model,
        usage=bool(wire.stream_options and wire.stream_options.include_usage),
        logprobs=wire.logprobs is not None and wire.logprobs is not False,
        token_ids=bool(wire.return_token_ids),
        echo={"prompt": prompt} if wire.echo else {},
    )
    return request, wish


def _check(wire: Body) -> None:
    for name in ("n", "best_of"):
        if (asked := getattr(wire, name) or 1) != 1:
            raise bad_request(
                f"{name}={asked} is not served", "ask once per choice; each call is its own turn"
            )
    if wire.suffix:
        raise bad_request("suffix is not served", "put what follows into the prompt")
    if wire.max_tokens is not None and wire.max_tokens < 1:
        raise bad_request(f"max_tokens={wire.max_tokens} must be at least 1")


def _prompt(given: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    alone = given[0] if isinstance(given, list) and len(given) == 1 else given
    prompt = given if isinstance(alone, int) else alone
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
    name = "completions"

    def __init__(self, tokens: ChatTokens) -> None:
        self._tokens = tokens

    def decode(self, asked: Asked) -> tuple[ModelRequest, Wish]:
        return decode(asked)

    def error(self, refusal: Refusal) -> Json:
        return chat.error(refusal)

    def count(self, tokens: int) -> Json:
        return {"total_tokens": tokens}

    def answer(self, started: Started, done: Done, wish: Wish) -> Json:
        shape = Shape(started, wish, self._tokens)
        before = shape.before()
        given = shape.logprobs(started.prompt_ids, None) if wish.echo else None
        sampled = shape.logprobs(done.turn.token_ids, done.turn.logprobs)
        choice = shape.choice(
            before + done.reply.content, _joined(given, sampled), finish=str(done.turn.finish_reason)
        )
        if wish.token_ids:
            choice |= {"prompt_token_ids": started.prompt_ids, "token_ids": done.turn.token_ids}
        return shape.envelope | {"choices": [choice], "usage": chat.usage(done)}

    def view(self, started: Started, wish: Wish) -> CompletionsView:
        return CompletionsView(started, wish, self._tokens)


class Shape:
    """What one answer is made of; counts the characters its tokens have spelled."""

    def __init__(self, started: Started, wish: Wish, tokens: ChatTokens) -> None:
        self.envelope: Json = {
            "id": f"cmpl-{started.session_id}-{started.turn_id}",
            "object": "text_completion",
            "created": int(started.created),
            "model": wish.model,
        }
        self._wish = wish
        self._tokens = tokens
        self._offset = 0

    def before(self) -> str:
        """The prompt's text, where the client wants it repeated."""
        prompt = self._wish.echo.get("prompt", "")
        return prompt if isinstance(prompt, str) else self._tokens.decode(prompt)

    def choice(self, text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def logprobs(self, ids: Sequence[int], values: Sequence[float] | None) -> Json | None:
        if not self._wish.logprobs:
            return None
        texts = [self._tokens.decode([token]) for token in ids]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        known = list(values) if values is not None else [None] * len(texts)
        return {
            "tokens": texts,
            "token_logprobs": known,
            "top_logprobs": [None if p is None else {text: p} for text, p in zip(texts, known, strict=True)],
            "text_offset": offsets,
        }


def _joined(given: Json | None, sampled: Json | None) -> Json | None:
    if given is None or sampled is None:
        return sampled
    return {name: given[name] + sampled[name] for name in sampled}


class CompletionsView:
    content_type = EVENTS

    def __init__(self, started: Started, wish: Wish, tokens: ChatTokens) -> None:
        self._started = started
        self._wish = wish
        self._shape = Shape(started, wish, tokens)

    def opening(self) -> bytes:
        """The prompt, for a client that wants it repeated as text or as ids."""
        if not (self._wish.echo or self._wish.token_ids):
            return b""
        given = self._shape.logprobs(self._started.prompt_ids, None) if self._wish.echo else None
        choice = self._shape.choice(self._shape.before(), given)
        return self._chunk(
            choice | ({"prompt_token_ids": self._started.prompt_ids} if self._wish.token_ids else {})
        )

    def piece(self, piece: Piece) -> bytes:
        text = "".join(event.text for event in piece.events if isinstance(event, TextDelta))
        asked = self._wish.logprobs or self._wish.token_ids
        if not text and not (asked and piece.token_ids):
            return b""
        choice = self._shape.choice(text, self._shape.logprobs(piece.token_ids, piece.logprobs))
        return self._chunk(choice | ({"token_ids": piece.token_ids} if self._wish.token_ids else {}))

    def closing(self, done: Done) -> bytes:
        out = self._chunk(self._shape.choice("", None, finish=str(done.turn.finish_reason)))
        if self._wish.usage:
            out += data(self._shape.envelope | {"choices": [], "usage": chat.usage(done)})
        return out + b"data: [DONE]\n\n"

    def failing(self, refusal: Refusal) -> bytes:
        return data(chat.error(refusal))

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def _chunk(self, choice: Json) -> bytes:
        return data(self._shape.envelope | {"choices": [choice]})
