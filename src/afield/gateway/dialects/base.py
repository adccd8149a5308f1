"""What a dialect is: a way to ask, and a view of what comes.

A dialect decodes a request into a `ModelRequest` and a `ResponseOptions`, and shows the items of the call as
one
answer (`answer`) or as a stream of bytes (`view`). The table in `parameters` says what becomes of each
parameter; of a conversation's parts, those that only a provider understands are left out with a tag
`unenforced:NAME`. It keeps no state: everything a later request may refer to is in the ids and marks
that it hands out (see `marks`).
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
    memo: MessageCache | None = None
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

    def begin(self) -> bytes: ...

    def delta(self, delta: CallDelta) -> bytes: ...

    def end(self, finished: CallFinished) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def keepalive(self) -> bytes:
        """Sent while nothing else is; may come before the opening."""
        ...


class Dialect(Protocol):
    name: str

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]: ...

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]: ...

    def stream(self, started: CallStarted, options: ResponseOptions) -> StreamEncoder: ...

    def encode_error(self, error: ApiError) -> dict[str, Any]: ...

    def count(self, tokens: int) -> dict[str, Any]:
        """The answer to a question how many tokens a request has."""
        ...


def read(decoder: msgspec.json.Decoder[T], body: bytes, description: str) -> T:
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request is not {description}: {json_problem(body, error)}") from error


def data(value: object) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def asks_again(raw: RawRequest) -> bool:
    """Whether the client's library says that it has asked this before."""
    count = raw.headers.get("x-stainless-retry-count", "")
    return count.isdigit() and int(count) > 0


def idempotency_key(raw: RawRequest) -> str:
    """The client's own name for a request, the same in all tries; empty if it gives none."""
    return raw.headers.get("idempotency-key", "")[:MAX_KEY]


B = TypeVar("B", bound=Struct)
VALUE = msgspec.json.Decoder()
NAMES = msgspec.json.Decoder(dict[str, Raw])


class BodyReader(Generic[B]):
    """`under` is the object that this reads, with a dot behind it; `spelled` gives the spelling of names."""

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
        """The request, and the tags of what was ignored."""
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
    """The text of a JSON object that any client can read."""
    text = arguments if arguments.strip() else "{}"
    try:
        OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return encode({UNPARSED: arguments}).decode()
    return text


def as_arguments(arguments: Raw, where: str) -> str:
    """The arguments of a call a client sends back."""
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
