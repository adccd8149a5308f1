"""Dialect interface: decodes requests, encodes responses and streams.

A dialect decodes a request into `ModelRequest` and `ResponseOptions`, and encodes the call's events as
one response or a stream. `parameters` lists the handling of each parameter; content that only a provider
understands is dropped with a tag `unenforced:NAME`. Dialects are stateless: later requests refer to turns
by ids (see `turn_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from afield.gateway import parameters
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.model_request import CallDelta, CallFinished, CallStarted, ModelRequest
from afield.gateway.request_cache import MessageCache
from afield.wire import json_problem

T = TypeVar("T")
ENCODER = msgspec.json.Encoder()
encode = ENCODER.encode
EVENTS = b"text/event-stream"
PREFILL = "unenforced:prefill"
"""Tag of a request that ends with an assistant message."""
TOOLS_TAG = "overridden:tools"
"""Prefix of the tag for tools that only a provider runs."""
STRICT = f"{TOOLS_TAG}.strict"
"""Tag of tools whose strict schemas are not enforced."""
MAX_KEY = 256
"""Maximum length of an idempotency key, in characters."""


class RawRequest(Struct, frozen=True):
    """An HTTP request of a dialect."""

    path: str
    """Path without the session prefix."""
    body: bytes
    """Decompressed body."""
    parts: Mapping[str, str]
    """Named parts of the path."""
    query: Mapping[str, str]
    """Query parameters."""
    headers: Mapping[str, str]
    """Headers with lower-case names."""
    memo: MessageCache | None = None
    """Cache of the session's decoded messages; None in a thread."""
    session_id: str = ""
    """Session of the request."""
    ignore: bool = False
    """Whether the session ignores unsupported parameters."""


class ResponseOptions(Struct, frozen=True, kw_only=True):
    """Options for the encoding of a response."""

    model: str = ""
    """Model name in the response."""
    usage: bool = False
    """Whether a stream ends with the usage."""
    logprobs: bool = False
    """Whether log-probabilities are included."""
    reasoning: bool = True
    """Whether reasoning is included; it is recorded in any case."""
    token_ids: bool = False
    """Whether token ids are included."""
    top_logprobs: int = 0
    """Top log-probabilities per token."""
    prompt_logprobs: bool = False
    """Whether prompt log-probabilities are included."""
    tokens_as_ids: bool = False
    """Whether tokens are written as ids (vLLM's `return_tokens_as_token_ids`)."""
    echo: Mapping[str, Any] = {}
    """Dialect's own fields that the response repeats."""


class StreamEncoder(Protocol):
    """Encodes one response as a stream: `begin`, `delta`s, then `end` or `error`."""

    content_type: bytes
    """Content type of the stream."""

    def begin(self) -> bytes: ...

    def delta(self, delta: CallDelta) -> bytes: ...

    def end(self, finished: CallFinished) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def keepalive(self) -> bytes:
        """Bytes to send while nothing is sampled; may precede `begin`."""
        ...


class Dialect(Protocol):
    """Request and response format of one model API."""

    name: str
    """Name of the dialect."""

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]: ...

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]: ...

    def stream(self, started: CallStarted, options: ResponseOptions) -> StreamEncoder: ...

    def encode_error(self, error: ApiError) -> dict[str, Any]: ...

    def count(self, tokens: int) -> dict[str, Any]:
        """Encodes the response to a token count request."""
        ...


def read(decoder: msgspec.json.Decoder[T], body: bytes, description: str) -> T:
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request is not {description}: {json_problem(body, error)}") from error


def data(value: object) -> bytes:
    """Encodes a server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def is_retry(raw: RawRequest) -> bool:
    """Returns whether the client marks the request as a retry."""
    count = raw.headers.get("x-stainless-retry-count", "")
    return count.isdigit() and int(count) > 0


def idempotency_key(raw: RawRequest) -> str:
    """Returns the idempotency key of a request; empty if there is none."""
    return raw.headers.get("idempotency-key", "")[:MAX_KEY]


B = TypeVar("B", bound=Struct)
VALUE = msgspec.json.Decoder()
NAMES = msgspec.json.Decoder(dict[str, Raw])


class BodyReader(Generic[B]):
    """Decodes a request body, and checks parameters that the dialect does not read.

    Known parameters are decoded in one pass. An unknown name makes that pass fail; then each name is
    looked up in `parameters`. `under` is the path of a nested object, `spelled` normalises names.
    """

    def __init__(
        self,
        dialect: str,
        body: type[B],
        description: str,
        under: str = "",
        spelled: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._dialect, self._what, self._under, self._spelled = dialect, description, under, spelled
        self._known = frozenset(body.__struct_encode_fields__)
        entries = [entry for name, entry in parameters.TABLE[dialect].items() if name.startswith(under)]
        names = [
            entry.name.removeprefix(under)
            for entry in entries
            if entry.handling != "refused" and not entry.unread
        ]
        unread = {
            f"unread_{n}": name for n, name in enumerate(names) if "." not in name and name not in self._known
        }
        fields: list[Any] = [(field, Raw, Raw(b"")) for field in unread]
        renamed = dict(zip(body.__struct_fields__, body.__struct_encode_fields__, strict=True))
        strict = msgspec.defstruct(
            f"Strict{body.__name__}",
            fields,
            bases=(body,),
            kw_only=True,
            forbid_unknown_fields=True,
            rename=renamed | unread,
            module=__name__,
        )
        self._strict = msgspec.json.Decoder(cast("type[B]", strict))
        self._lenient = msgspec.json.Decoder(body)

    def read(self, raw: RawRequest, body: bytes | None = None) -> tuple[B, tuple[str, ...]]:
        """Returns the decoded body and the tags of ignored parameters."""
        text = raw.body if body is None else body
        try:
            return self._strict.decode(text or b"{}"), ()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return read(self._lenient, text, self._what), self._looked_up(text, raw.ignore)

    def _looked_up(self, text: bytes, ignore: bool) -> tuple[str, ...]:
        tags: list[str] = []
        for name, raw in read(NAMES, text, self._what).items():
            if name not in self._known:
                value, full = read(VALUE, bytes(raw), self._what), self._under + self._spelled(name)
                tags += parameters.check(self._dialect, full, value, ignore=ignore)
        return tuple(tags)


UNPARSED = "__unparsedToolInput"
OBJECT = msgspec.json.Decoder(dict[str, Raw])


def as_object(arguments: str) -> str:
    """Returns arguments as the text of a JSON object; other text is wrapped in one key."""
    text = arguments if arguments.strip() else "{}"
    try:
        OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return encode({UNPARSED: arguments}).decode()
    return text


def as_arguments(arguments: Raw, where: str) -> str:
    """Returns the arguments of an echoed call; unwraps those of `as_object`."""
    try:
        text = bytes(arguments).decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"{where}: the arguments of a call are not UTF-8: {error}") from error
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise bad_request(f"{where}: the arguments of a call are {text[:40]}, not an object")
    return _as_sampled(text) if UNPARSED in text else text


def _as_sampled(text: str) -> str:
    fields = OBJECT.decode(text)
    inner = fields.get(UNPARSED)
    if len(fields) != 1 or inner is None or not bytes(inner).startswith(b'"'):
        return text
    return msgspec.json.decode(inner)
