"""What a dialect is: a way to ask, and a view of what comes.

A dialect decodes a request into a `ModelRequest` and a `ResponseOptions`, and shows the items of the call as
one
answer (`answer`) or as a stream of bytes (`view`). The table in `parameters` says what becomes of each
parameter; of a conversation's parts, those that only a provider understands are left out with a tag
`unenforced:NAME`. It keeps no state: everything a later request may refer to is in the ids and marks
that it hands out (see `marks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.message_cache import Memo
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, ModelRequest
from afield.wire import json_problem

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
encode = ENCODER.encode
EVENTS = b"text/event-stream"
PREFILL = "unenforced:prefill"  # tag of a turn whose request ends with the beginning of an answer
TOOLS_TAG = "overridden:tools"  # begins the tags of turns with tools that only a provider could run
STRICT = f"{TOOLS_TAG}.strict"  # tag of a turn whose tools' arguments are not held to their schemas
MAX_KEY = 256  # characters of an idempotency key that are looked at


class RawRequest(Struct, frozen=True):
    """A request as it came. `parts` are the named pieces of its path, header names are in lower case.

    `memo` is what the session's client has sent before, where the dialect cares to use it.
    """

    path: str
    body: bytes
    parts: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    memo: Memo | None = None
    session_id: str = ""
    ignore: bool = False
    """Whether the session goes on without parameters that would be refused."""


class ResponseOptions(Struct, frozen=True, kw_only=True):
    """What the client wants of the answer, besides the answer. `echo` is what its dialect repeats in it."""

    model: str = ""
    usage: bool = False
    logprobs: bool = False
    reasoning: bool = True
    """Whether the reasoning is shown; it is recorded in any case."""
    token_ids: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    tokens_as_ids: bool = False
    """Whether tokens are named by their ids in place of their text (vLLM's `return_tokens_as_token_ids`)."""
    echo: Mapping[str, Any] = {}


class StreamEncoder(Protocol):
    """One answer as a stream: `opening`, any number of `piece`s, then `closing` or `failing`."""

    content_type: bytes

    def opening(self) -> bytes: ...

    def piece(self, piece: CallDelta) -> bytes: ...

    def closing(self, done: CallFinished) -> bytes: ...

    def failing(self, refusal: ApiError) -> bytes: ...

    def keepalive(self) -> bytes:
        """Sent while nothing else is; may come before the opening."""
        ...


class Dialect(Protocol):
    name: str

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]: ...

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]: ...

    def view(self, started: CallStarted, wish: ResponseOptions) -> StreamEncoder: ...

    def error(self, refusal: ApiError) -> dict[str, Any]: ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The answer to a question how many tokens a request has."""
        ...


def read(decoder: msgspec.json.Decoder[T], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request is not {what}: {json_problem(body, error)}") from error


def data(value: object) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def asks_again(asked: RawRequest) -> bool:
    """Whether the client's library says that it has asked this before."""
    count = asked.headers.get("x-stainless-retry-count", "")
    return count.isdigit() and int(count) > 0


def idempotency_key(asked: RawRequest) -> str:
    """The client's own name for a request, the same in all tries; empty if it gives none."""
    return asked.headers.get("idempotency-key", "")[:MAX_KEY]
