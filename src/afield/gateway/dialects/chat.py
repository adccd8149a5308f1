"""OpenAI Chat Completions dialect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from afield.chat import ChatTokenizer, Event, ReasoningDelta, TextDelta, Tool, ToolArguments, ToolStart
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects.base import (
    EVENTS,
    STRICT,
    TOOLS_TAG,
    BodyReader,
    RawRequest,
    ResponseOptions,
    data,
    encode,
    is_retry,
    read,
)
from afield.gateway.dialects.logprobs import TokenText, check_count
from afield.gateway.dialects.request_options import (
    AUTO,
    VLLM,
    checked,
    guided,
    one,
    openai_choice,
    response_format,
)
from afield.gateway.images import Gallery
from afield.gateway.model_request import (
    NO_REASONING,
    CallDelta,
    CallFinished,
    CallStarted,
    ModelRequest,
    OutputFormat,
    Reasoning,
    RequestedSampling,
    Scores,
    requested_sampling,
)
from afield.gateway.parameters import check_within, unsupported
from afield.gateway.request_cache import MessageCache
from afield.gateway.thinking import ReasoningParameters
from afield.interfaces.engine import TopLogprobs
from afield.types import FinishReason, ImageRef, Message, Role, ToolCall

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

NAMES = {"must_call": "tool_choice", "parallel_calls": "parallel_tool_calls", "output": "response_format"}
TEXTS = ("text", "refusal", "input_text", "output_text")
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
"""Reasoning parts of other providers, which agent frameworks send back."""


# --- requests ---


class ChatImageUrl(Struct, gc=False):
    """Image of a content part."""

    url: str
    """URL of the image, `data:` or remote."""


class ContentPart(Struct, gc=False):
    """Part of a message's content."""

    type: str = "text"
    """Kind of part, such as `text` or `image_url`."""
    text: str | None = None
    """Text of a text part."""
    refusal: str | None = None
    """Text of a refusal part."""
    image_url: ChatImageUrl | None = None
    """Image of an image part."""


class ChatFunctionCall(Struct, gc=False):
    """Function and arguments of a tool call."""

    name: str
    """Function name."""
    arguments: str | dict[str, Any] | None = None
    """Arguments as JSON text or as an object."""


class WireCall(Struct, gc=False):
    """Tool call of an assistant message."""

    function: ChatFunctionCall
    """Function and arguments."""
    id: str | None = None
    """Tool-call id."""


class WireMessage(Struct, gc=False):
    """Message of a request."""

    role: str
    """Role, such as `user` or `assistant`."""
    content: str | list[ContentPart] | None = None
    """Text or content parts."""
    tool_calls: list[WireCall] | None = None
    """Tool calls of an assistant message."""
    function_call: ChatFunctionCall | None = None
    """Tool call in the deprecated form."""
    tool_call_id: str | None = None
    """Tool call to which a tool message responds."""
    name: str | None = None
    """Name of the author, or of the function."""
    reasoning_content: str | None = None
    """Reasoning of an assistant message (vLLM, DeepSeek)."""
    reasoning: Any = None
    """Reasoning of an assistant message (vLLM, OpenRouter)."""


class WireFunction(Struct):
    """Function of a tool."""

    name: str
    """Function name."""
    description: str | None = None
    """Description for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = False
    """Whether arguments must follow the schema."""


class ChatTool(Struct):
    """Tool of a request."""

    function: WireFunction | None = None
    """Function of the tool; None for other tools."""
    type: str = "function"
    """Kind of tool; the gateway supports `function`."""


class Structured(RequestedSampling, kw_only=True):
    """Output format fields of OpenAI and vLLM; None if the request does not set a field."""

    response_format: dict[str, Any] | None = None
    """OpenAI's output format."""
    guided_json: str | dict[str, Any] | None = None
    """JSON schema (vLLM)."""
    guided_regex: str | None = None
    """Regular expression (vLLM)."""
    guided_choice: list[str] | None = None
    """Allowed replies (vLLM)."""
    guided_grammar: str | None = None
    """EBNF grammar (vLLM)."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's structured output parameters."""


def requested_output(wire: Structured) -> tuple[OutputFormat | None, str]:
    """Returns the requested output format and the parameter that names it."""
    first = response_format(wire.response_format, "response_format")
    if all(guide is None for guide in _output_values(wire)):
        return first, "response_format"
    return one(first, "response_format", guided(dict(zip(VLLM, _output_values(wire), strict=True))))


_output_values = attrgetter(*VLLM)


class ChatBody(Structured, kw_only=True):
    """Body of a Chat Completions request; None if the request does not set a field."""

    messages: msgspec.Raw
    """Conversation, decoded later."""
    model: str | None = ""
    """Model name."""
    tools: msgspec.Raw = msgspec.Raw(b"null")
    """Tools, decoded later."""
    tool_choice: str | dict[str, Any] | None = None
    """Tool choice: a mode or a tool."""
    stream: bool | None = False
    """Whether the response is streamed."""
    stream_options: dict[str, Any] | None = None
    """Options of the stream, such as `include_usage`."""
    max_tokens: int | None = None
    """Token limit of the reply (deprecated name)."""
    max_completion_tokens: int | None = None
    """Token limit of the reply."""
    stop: str | list[str] | None = None
    """Stop string or strings."""
    logprobs: bool | None = False
    """Whether to return log-probabilities."""
    top_logprobs: int | None = None
    """Top log-probabilities per token."""
    prompt_logprobs: int | None = None
    """Top log-probabilities per prompt token (vLLM)."""
    return_tokens_as_token_ids: bool | None = False
    """Whether tokens are written as ids (vLLM)."""
    return_token_ids: bool | None = False
    """Whether to return token ids (vLLM)."""
    parallel_tool_calls: bool | None = None
    """Whether the reply may contain several tool calls."""
    reasoning_effort: str | None = None
    """Reasoning effort, such as `high`."""
    reasoning: dict[str, Any] | None = None
    """Reasoning parameters (OpenRouter)."""
    thinking: dict[str, Any] | None = None
    """Reasoning switch and budget, in Anthropic's form."""
    enable_thinking: bool | None = None
    """Whether the model reasons (Qwen)."""
    thinking_token_budget: int | None = None
    """Maximum of reasoning tokens (vLLM)."""
    thinking_budget: int | None = None
    """Maximum of reasoning tokens (Qwen)."""
    include_reasoning: bool | None = None
    """Whether to return reasoning."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template (vLLM)."""


BODY = BodyReader("chat", ChatBody, "a chat completion request")
MESSAGES = msgspec.json.Decoder(list[WireMessage])
TOOLS = msgspec.json.Decoder(list[ChatTool] | None)


def decode(raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, tags = BODY.read(raw)
    _check(wire)
    if wire.stream_options:
        tags += check_within("chat", "stream_options", wire.stream_options, ignore=raw.ignore)
    gallery = Gallery()
    tools, tool_tags = _tools(bytes(wire.tools), raw.ignore)
    choice, output, reasoning, names = AUTO, None, NO_REASONING, NAMES
    if wire.tool_choice is not None:
        choice = checked(openai_choice(wire.tool_choice, nested=True), tools, "tool_choice")
    if _SPECIAL(wire) != _NOTHING:
        tags += _check_objects(wire, raw.ignore)
        output, output_name = requested_output(wire)
        reasoning, reasoning_names = _reasoning(wire)
        names = {**NAMES, "output": output_name, **reasoning_names}
    request = ModelRequest(
        dialect="chat",
        model=wire.model or "",
        messages=_messages(bytes(wire.messages), gallery, raw.memo),
        tools=tools,
        may_call=choice.may_call,
        must_call=choice.must_call,
        callable_tools=choice.callable_tools,
        parallel_calls=wire.parallel_tool_calls is not False,
        output=output,
        reasoning=reasoning,
        names=names,
        max_tokens=wire.max_completion_tokens or wire.max_tokens,
        stop=(wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ()),
        stream=bool(wire.stream),
        top_logprobs=wire.top_logprobs or 0,
        prompt_logprobs=wire.prompt_logprobs,
        requested_sampling=requested_sampling(wire),
        retry=is_retry(raw),
        tags=(*tool_tags, *tags),
        images=gallery.images,
        image_places=gallery.places,
    )
    options = ResponseOptions(
        model=wire.model or "",
        usage=wants_usage(wire.stream_options),
        logprobs=bool(wire.logprobs),
        top_logprobs=wire.top_logprobs or 0,
        prompt_logprobs=wire.prompt_logprobs is not None,
        tokens_as_ids=bool(wire.return_tokens_as_token_ids),
        reasoning=wire.include_reasoning is not False and not (wire.reasoning or {}).get("exclude"),
        token_ids=bool(wire.return_token_ids),
    )
    return request, options


def wants_usage(options: dict[str, Any] | None) -> bool:
    return bool(options and options.get("include_usage"))


_THINKING = (
    "reasoning_effort",
    "reasoning",
    "thinking",
    "enable_thinking",
    "thinking_token_budget",
    "thinking_budget",
    "chat_template_kwargs",
)
_SPECIAL = attrgetter(*_THINKING, "response_format", *VLLM)
_NOTHING = (None,) * (len(_THINKING) + 1 + len(VLLM))


def _check_objects(wire: ChatBody, ignore: bool) -> tuple[str, ...]:
    tags: tuple[str, ...] = ()
    for name in ("reasoning", "thinking", "chat_template_kwargs", "structured_outputs"):
        if value := getattr(wire, name):
            tags += check_within("chat", name, value, ignore=ignore)
    return tags


def _reasoning(wire: ChatBody) -> tuple[Reasoning, dict[str, str]]:
    if all(getattr(wire, name) is None for name in _THINKING):
        return NO_REASONING, {}
    parameters = ReasoningParameters()
    parameters.kwargs(wire.chat_template_kwargs)
    parameters.switch(wire.enable_thinking, "enable_thinking")
    parameters.effort(wire.reasoning_effort, "reasoning_effort")
    parameters.budget(wire.thinking_token_budget, "thinking_token_budget")
    parameters.budget(wire.thinking_budget, "thinking_budget")
    if wire.reasoning:
        parameters.switch(wire.reasoning.get("enabled"), "reasoning.enabled")
        parameters.effort(wire.reasoning.get("effort"), "reasoning.effort")
        parameters.budget(wire.reasoning.get("max_tokens"), "reasoning.max_tokens")
    if wire.thinking:
        parameters.kind(wire.thinking.get("type"), "thinking.type")
        parameters.budget(wire.thinking.get("budget_tokens"), "thinking.budget_tokens")
    return parameters.build()


def _check(wire: ChatBody) -> None:
    if bytes(wire.messages).strip() in (b"[]", b"null"):
        raise bad_request("messages is empty", "send at least one message")
    check_stream_options(wire)
    if wire.top_logprobs is not None or wire.prompt_logprobs is not None:
        _check_logprobs(wire)
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(wire, name)
        if value is not None and value < 1:
            raise bad_request(f"{name}={value} must be at least 1")


def check_stream_options(wire: Any) -> None:
    if wire.stream_options is not None and not wire.stream:
        raise bad_request("stream_options is only for streams", "leave it out, or set stream to true")


def _check_logprobs(wire: ChatBody) -> None:
    if check_count(wire.top_logprobs, "top_logprobs") and not wire.logprobs:
        raise bad_request(f"top_logprobs={wire.top_logprobs} needs logprobs", "set logprobs to true")
    check_count(wire.prompt_logprobs, "prompt_logprobs")
    if wire.prompt_logprobs is not None and wire.stream:
        raise bad_request("prompt_logprobs is not available in a stream", "send the request without stream")


def _messages(raw: bytes, gallery: Gallery, memo: MessageCache | None) -> tuple[Message, ...]:
    def some(raw: bytes, before: int) -> tuple[Message, ...]:
        wires = read(MESSAGES, raw, f"a chat completion request, in messages from {before} on")
        return tuple([_message(wire, n, gallery) for n, wire in enumerate(wires, before)])

    # Images are not part of their messages, so conversations with images are decoded whole.
    return memo.read(raw, some) if memo and b"image" not in raw else some(raw, 0)


def _message(wire: WireMessage, index: int, gallery: Gallery) -> Message:
    role = ROLES.get(wire.role)
    if role is None:
        roles = ", ".join(sorted(ROLES))
        raise bad_request(f"messages[{index}]: role {wire.role!r} is not one of {roles}")
    content, images = wire.content, ()
    if not isinstance(content, str):
        content, images = _parts(content or (), index, gallery)
    return Message(
        role=role,
        content=content,
        reasoning=wire.reasoning_content or (wire.reasoning if isinstance(wire.reasoning, str) else ""),
        tool_calls=_calls(wire),
        tool_call_id=wire.tool_call_id or "",
        name=wire.name or "",
        images=images,
    )


def _parts(parts: Sequence[ContentPart], index: int, gallery: Gallery) -> tuple[str, tuple[ImageRef, ...]]:
    text = ""
    images: list[ImageRef] = []
    for part in parts:
        if part.type == "image_url" and part.image_url:
            images.append(gallery.from_url(part.image_url.url, len(text), f"messages[{index}]"))
        elif part.type in TEXTS:
            text += part.text or part.refusal or ""
        elif part.type not in THOUGHTS:
            raise bad_request(f"messages[{index}] has a part of type {part.type!r}", "send text or images")
    return text, tuple(images)


def _calls(wire: WireMessage) -> tuple[ToolCall, ...]:
    if wire.tool_calls:
        return tuple([_call(call.id, call.function) for call in wire.tool_calls])
    return (_call(None, wire.function_call),) if wire.function_call else ()


def _call(call_id: str | None, wire: ChatFunctionCall) -> ToolCall:
    arguments = wire.arguments
    text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
    return ToolCall(call_id or "", wire.name, text)


@lru_cache(maxsize=64)
def _tools(raw: bytes, ignore: bool) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Decodes tools, and returns tags for those that only a provider runs.

    The template renders the tool objects as sent. Clients repeat their tools, so they are cached.
    """
    tools: list[Tool] = []
    tags: list[str] = []
    wires = read(TOOLS, raw, "a chat completion request") or []
    for wire, tool_json in zip(wires, msgspec.json.decode(raw) or [], strict=True):
        if wire.type == "custom":
            message = "tools: a custom tool takes free text, which is not served in this dialect"
            tags += unsupported("tools.custom", message, "send a function, or use Responses", ignore=ignore)
        elif wire.type != "function":
            tags.append(f"{TOOLS_TAG}.{wire.type}")
        elif wire.function is None:
            raise bad_request(f"tools[{len(tools) + len(tags)}] has no function")
        else:
            function = wire.function
            if function.strict:
                tags.append(STRICT)
            tools.append(
                Tool(function.name, function.description or "", function.parameters or {}, tool_json)
            )
    return tuple(tools), tuple(dict.fromkeys(tags))


# --- responses ---


def error_body(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": error.text, "type": kind, "param": error.parameter, "code": error.code}
    return {"error": fields}


def finish_reason(finished: CallFinished) -> str:
    if finished.turn.finish_reason is FinishReason.STOP and finished.reply.tool_calls:
        return "tool_calls"
    return str(finished.turn.finish_reason)


def usage(finished: CallFinished) -> dict[str, Any]:
    sampled = len(finished.turn.token_ids)
    total = finished.prompt_tokens + sampled
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }


class Chat:
    """Chat Completions dialect."""

    name = "chat"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        return decode(raw)

    def encode_error(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"total_tokens": tokens}

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]:
        reply = finished.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if reply.reasoning and options.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [_wire_call(call) for call in reply.tool_calls]
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish_reason(finished)}
        scores = finished.scores or Scores()
        sampled = (finished.turn.token_ids, finished.turn.logprobs, scores.top)
        choice["logprobs"] = logprobs(*sampled, self._tokenizer, options) if options.logprobs else None
        answer = envelope("chat.completion", started, options) | {
            "choices": [choice],
            "usage": usage(finished),
        }
        if options.prompt_logprobs and scores.prompt is not None:
            answer["prompt_logprobs"] = TokenText(self._tokenizer, options).prompt(scores.prompt)
        if options.token_ids:
            choice["token_ids"] = finished.turn.token_ids
            answer["prompt_token_ids"] = started.prompt_ids
        return answer

    def stream(self, started: CallStarted, options: ResponseOptions) -> ChatStream:
        return ChatStream(started, options, self._tokenizer)


def _wire_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def envelope(kind: str, started: CallStarted, options: ResponseOptions) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{started.session_id}-{started.turn_id}",
        "object": kind,
        "created": int(started.created),
        "model": options.model,
    }


class ChatStream:
    """Encodes chunks; their common part is encoded once."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, options: ResponseOptions, tokenizer: ChatTokenizer) -> None:
        self._started = started
        self._options = options
        self._tokenizer = tokenizer
        self._head = encode(envelope("chat.completion.chunk", started, options))[:-1]
        self._before = b"data: " + self._head + b',"choices":[{"index":0,"delta":'

    def begin(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        ids = self._started.prompt_ids if self._options.token_ids else None
        return self._chunk(delta, after=b',"prompt_token_ids":' + encode(ids) if ids is not None else b"")

    def delta(self, delta: CallDelta) -> bytes:
        parts = [part for event in delta.events if (part := _delta(event))]
        if not self._options.reasoning:
            parts = [part for part in parts if "reasoning_content" not in part]
        extra = self._extra(delta)
        if not parts:
            return self._chunk(b"{}", extra) if extra else b""
        return b"".join(self._chunk(encode(part), b"" if n else extra) for n, part in enumerate(parts))

    def end(self, finished: CallFinished) -> bytes:
        last = self._chunk(b"{}", finish=encode(finish_reason(finished)))
        if self._options.usage:
            last += b"data: " + self._head + b',"choices":[],"usage":' + encode(usage(finished)) + b"}\n\n"
        return last + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return data(error_body(error))

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def _extra(self, delta: CallDelta) -> bytes:
        extra = b""
        if self._options.logprobs and delta.token_ids:
            sampled = (delta.token_ids, delta.logprobs, delta.top_logprobs)
            extra += b',"logprobs":' + encode(logprobs(*sampled, self._tokenizer, self._options))
        if self._options.token_ids and delta.token_ids:
            extra += b',"token_ids":' + encode(delta.token_ids)
        return extra

    def _chunk(self, delta: bytes, extra: bytes = b"", finish: bytes = b"null", after: bytes = b"") -> bytes:
        return self._before + delta + b',"finish_reason":' + finish + extra + b"}]" + after + b"}\n\n"


def _delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolStart):
        function = {"name": event.name, "arguments": ""}
        return {
            "tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]
        }
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def logprobs(
    ids: Sequence[int],
    values: Sequence[float],
    tops: Sequence[TopLogprobs],
    tokenizer: ChatTokenizer,
    options: ResponseOptions,
) -> dict[str, Any]:
    content = TokenText(tokenizer, options).entries(ids, values, tops, options.top_logprobs)
    return {"content": content, "refusal": None}
