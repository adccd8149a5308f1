"""Anthropic Messages dialect.

Requests: all blocks of an assistant turn become one message. Each tool result becomes a tool
message before the other content of its entry. Cache marks and billing lines are dropped. Tools with
`defer_loading` are rendered where the conversation loads them, which keeps the root. Blocks of
server-side tools are dropped with a tag; files, PDFs and unknown blocks are refused.

Responses: reasoning is a thinking block whose signature names the turn, if the client enables thinking.
Arguments that are not a JSON object are sent as text in one key. Context overflow uses the message that
makes clients compact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from afield.chat import Event, ReasoningDelta, TextDelta, Tool, ToolArguments, ToolEnd, ToolStart
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects import request_options
from afield.gateway.dialects.base import (
    EVENTS,
    STRICT,
    TOOLS_TAG,
    BodyReader,
    RawRequest,
    ResponseOptions,
    as_arguments,
    as_object,
    encode,
    event,
    is_retry,
)
from afield.gateway.dialects.request_options import checked, one, response_format
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
    requested_sampling,
)
from afield.gateway.parameters import check, check_within
from afield.gateway.thinking import ReasoningParameters
from afield.gateway.turn_ids import item_id, seal, unseal
from afield.types import FinishReason, ImageRef, Message, ToolCall

BILLING = "x-anthropic-billing-header:"
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback")
OMITTED: Mapping[str, Any] = {"omitted": True}
SHOWN: Mapping[str, Any] = {}
NAMES = {
    "must_call": "tool_choice",
    "parallel_calls": "tool_choice.disable_parallel_tool_use",
    "output": "output_config.format",
}
AS_TEXT = "send its text as a text block"


# --- wire types ---


class AnthropicSource(Struct):
    """Source of an image or a document."""

    type: str = ""
    """Kind of source: `base64`, `url`, `text` or `content`."""
    media_type: str = ""
    """Media type of the data."""
    data: str = ""
    """Base64 data, or text."""
    url: str = ""
    """URL of the data."""
    content: str | list[AnthropicBlock] | None = None
    """Text or blocks of a document."""


class AnthropicBlock(Struct):
    """Content block of any type; fields of other types are None."""

    type: str
    """Kind of block, such as `text` or `tool_use`."""
    text: str | None = None
    """Text of a text block."""
    source: AnthropicSource | str | None = None
    """Source of an image or document; URL of a search result."""
    title: str | None = None
    """Title of a document or search result."""
    context: str | None = None
    """Context of a document."""
    thinking: str | None = None
    """Text of a thinking block."""
    signature: str | None = None
    """Signature of a thinking block, which names its turn."""
    data: str | None = None
    """Data of a redacted thinking block, which names its turn."""
    id: str | None = None
    """Id of a tool call."""
    name: str | None = None
    """Tool of a tool call."""
    input: Raw = Raw(b"{}")
    """Arguments of a tool call, as JSON."""
    tool_use_id: str | None = None
    """Tool call of a tool result."""
    content: str | list[AnthropicBlock] | dict[str, Any] | None = None
    """Content of a tool result or of another nested block."""
    tool_name: str | None = None
    """Tool of a tool reference."""
    tool: dict[str, Any] | None = None
    """Definition of an added or removed tool."""


class AnthropicMessage(Struct):
    """Message of a request."""

    role: str
    """Role: `user`, `assistant` or `system`."""
    content: str | list[AnthropicBlock] | None = None
    """Text or blocks."""
    clear_at: str | None = None
    """Point at which Anthropic removes the message; not enforced, tagged."""


class AnthropicTool(Struct):
    """Tool of a request."""

    name: str = ""
    """Tool name."""
    type: str | None = None
    """Kind of tool; None or `custom` for tools of the client."""
    description: str | None = None
    """Description for the model."""
    input_schema: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    defer_loading: bool | None = False
    """Whether the conversation loads the tool later."""
    strict: bool | None = False
    """Whether arguments must follow the schema."""


class AnthropicToolChoice(Struct):
    """Tool choice of a request."""

    type: str = "auto"
    """Mode: `auto`, `any`, `tool` or `none`."""
    name: str | None = None
    """Tool to call, with `tool`."""
    disable_parallel_tool_use: bool | None = False
    """Whether the reply may contain only one tool call."""


class AnthropicBody(RequestedSampling, kw_only=True):
    """Body of a Messages request; None if the request does not set a field."""

    messages: list[AnthropicMessage]
    """Conversation."""
    model: str = ""
    """Model name."""
    system: str | list[AnthropicBlock] | None = None
    """System prompt, as text or blocks."""
    tools: list[AnthropicTool] | None = None
    """Tools."""
    tool_choice: dict[str, Any] | None = None
    """Tool choice; see `AnthropicToolChoice`."""
    max_tokens: int | None = None
    """Token limit of the reply."""
    stop_sequences: list[str] | None = None
    """Stop strings."""
    stream: bool | None = False
    """Whether the response is streamed."""
    output_config: dict[str, Any] | None = None
    """Output format and reasoning effort."""
    output_format: dict[str, Any] | None = None
    """Output format (earlier name)."""
    thinking: dict[str, Any] | None = None
    """Reasoning switch and budget."""
    context_management: dict[str, Any] | None = None
    """Anthropic's edits of the context."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template (vLLM)."""
    return_token_ids: bool | None = False
    """Whether to return token ids (vLLM)."""
    logprobs: bool | None = False
    """Whether to return log-probabilities."""


BODY = BodyReader("anthropic", AnthropicBody, "a Messages request")


# --- requests ---


def decode(raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, tags = BODY.read(raw)
    for name in ("thinking", "output_config", "chat_template_kwargs", "tool_choice"):
        if value := getattr(wire, name):
            tags += check_within("anthropic", name, value, ignore=raw.ignore)
    if not wire.messages:
        raise bad_request("messages is empty", "send at least one message")
    if wire.max_tokens is not None and wire.max_tokens < 1:
        raise bad_request(f"max_tokens={wire.max_tokens} must be at least 1")
    toolbox = _Toolbox(wire.tools or [])
    if wire.context_management is not None:
        tags += check("anthropic", "context_management", wire.context_management, ignore=raw.ignore)
    wire_choice, choice = None, request_options.AUTO
    if wire.tool_choice is not None:
        wire_choice = _given_choice(wire)
        choice = checked(_choice(wire_choice, toolbox), toolbox.callable, "tool_choice")
    output, output_name = _output(wire)
    reasoning, names = _reasoning(wire)
    reader = _MessageReader(toolbox)
    request = ModelRequest(
        dialect="anthropic",
        model=wire.model,
        messages=reader.messages(wire),
        tools=toolbox.offered,
        may_call=choice.may_call,
        must_call=choice.must_call,
        callable_tools=choice.callable_tools,
        parallel_calls=not (wire_choice and wire_choice.disable_parallel_tool_use),
        output=output,
        reasoning=reasoning,
        names=NAMES
        if output_name == "output_config.format" and not names
        else {**NAMES, "output": output_name, **names},
        max_tokens=wire.max_tokens,
        stop=tuple(wire.stop_sequences or ()),
        stream=bool(wire.stream),
        requested_sampling=requested_sampling(wire),
        hints=frozenset(reader.hints),
        retry=is_retry(raw),
        thread=raw.headers.get("x-claude-code-agent-id", ""),
        tags=tuple(dict.fromkeys([*_unenforced(wire, toolbox), *reader.tags, *tags])),
        images=reader.gallery.images,
        image_places=reader.gallery.places,
    )
    thinking = wire.thinking or {}
    options = ResponseOptions(
        model=wire.model,
        logprobs=bool(wire.logprobs),
        token_ids=bool(wire.return_token_ids),
        reasoning=thinking.get("type") in ("enabled", "adaptive"),
        echo=OMITTED if thinking.get("display") == "omitted" else SHOWN,
    )
    return request, options


def _reasoning(wire: AnthropicBody) -> tuple[Reasoning, dict[str, str]]:
    effort = (wire.output_config or {}).get("effort")
    if not (wire.thinking or effort or wire.chat_template_kwargs):
        return NO_REASONING, {}
    parameters = ReasoningParameters()
    thinking = wire.thinking or {}
    parameters.kind(thinking.get("type"), "thinking.type")
    parameters.budget(thinking.get("budget_tokens"), "thinking.budget_tokens")
    parameters.effort(effort, "output_config.effort", turns_on=False)  # does not enable thinking
    parameters.kwargs(wire.chat_template_kwargs)
    return parameters.build()


def _given_choice(wire: AnthropicBody) -> AnthropicToolChoice | None:
    if wire.tool_choice is None:
        return None
    try:
        return msgspec.convert(wire.tool_choice, AnthropicToolChoice)
    except msgspec.ValidationError as error:
        raise bad_request(f"tool_choice: {error}") from error


def _choice(wire_choice: AnthropicToolChoice | None, toolbox: _Toolbox) -> request_options.ToolChoice:
    if wire_choice is None:
        return request_options.AUTO
    if wire_choice.type == "tool":
        if wire_choice.name in toolbox.server_side:
            raise bad_request(
                f"tool_choice: {wire_choice.name!r} is a tool that only the provider could run",
                "offer a tool of your own",
            )
        if not wire_choice.name:
            raise bad_request("tool_choice names no tool", "send the name of one of the request's tools")
        return request_options.forced(wire_choice.name)
    if wire_choice.type not in ("auto", "any", "none"):
        raise bad_request(f"tool_choice.type {wire_choice.type!r} is not one of auto, any, none, tool")
    return request_options.MODES[wire_choice.type]


def _output(wire: AnthropicBody) -> tuple[OutputFormat | None, str]:
    if wire.output_config is None and wire.output_format is None:
        return None, "output_config.format"
    first = response_format((wire.output_config or {}).get("format"), "output_config.format", flat=True)
    older = response_format(wire.output_format, "output_format", flat=True)
    return one(first, "output_config.format", (older, "output_format") if older else None)


def _unenforced(wire: AnthropicBody, toolbox: _Toolbox) -> list[str]:
    tags = [f"{TOOLS_TAG}.{name}" for name in toolbox.server_side]
    if any(tool.strict for tool in wire.tools or ()):
        tags.append(STRICT)
    if wire.messages[-1].role == "assistant":
        tags.append("unenforced:prefill")
    return tags


class _Toolbox:
    """Tools of a request: in the system prompt, or loaded later by the conversation.

    With a server-side search tool nothing is loaded later, so all are in the system prompt.
    """

    def __init__(self, wires: Sequence[AnthropicTool]) -> None:
        own = [wire for wire in wires if wire.type in (None, "custom")]
        self.server_side = [
            wire.name or wire.type or "" for wire in wires if wire.type not in (None, "custom")
        ]
        searched = any((wire.type or "").startswith("tool_search_tool") for wire in wires)
        for wire in own:
            if not wire.name:
                raise bad_request("a tool has no name")
        self.offered = tuple(_tool(wire) for wire in own if searched or not wire.defer_loading)
        self._known = {wire.name: _tool(wire) for wire in own}

    @property
    def callable(self) -> list[Tool]:
        """All tools that the conversation may have loaded."""
        return list(self._known.values())

    def definition(self, name: str) -> str:
        tool = self._known.get(name)
        return encode(tool.raw).decode() if tool else name


def _tool(wire: AnthropicTool) -> Tool:
    """Converts a tool to the Chat shape, so that all dialects share roots."""
    parameters = wire.input_schema or {}
    described = {} if wire.description is None else {"description": wire.description}
    function = {"name": wire.name, **described, "parameters": parameters}
    return Tool(wire.name, wire.description or "", parameters, {"type": "function", "function": function})


class _MessageReader:
    """Reads the messages of a request, and collects images, turn hints and tags."""

    def __init__(self, toolbox: _Toolbox) -> None:
        self._toolbox = toolbox
        self.gallery = Gallery()
        self.hints: set[str] = set()
        self.tags: list[str] = []

    def messages(self, wire: AnthropicBody) -> tuple[Message, ...]:
        messages: list[Message] = []
        if system := self._system(wire.system):
            messages.append(Message(role="system", content=system))
        turn: list[AnthropicBlock] | None = None
        for index, entry in enumerate(wire.messages):
            where = f"messages[{index}]"
            if entry.role == "assistant":
                turn = [*(turn or ()), *_blocks(entry.content)]
                continue
            if turn is not None:
                messages.append(self._assistant(turn, where))
                turn = None
            messages += self._entry(entry, where)
        if turn is not None:
            messages.append(self._assistant(turn, "the last message"))
        return tuple(messages)

    def _system(self, system: str | list[AnthropicBlock] | None) -> str:
        if isinstance(system, str) and system.startswith(BILLING):
            system = system.partition("\n")[2]
        blocks = [block for block in _blocks(system) if not (block.text or "").startswith(BILLING)]
        return self._text(blocks, "system")[0]

    def _entry(self, entry: AnthropicMessage, where: str) -> list[Message]:
        if entry.role not in ("user", "system"):
            raise bad_request(f"{where}: role {entry.role!r} is not one of assistant, system, user")
        if entry.clear_at == "next_user_message":
            self.tags.append("unenforced:clear_at")
        blocks = _blocks(entry.content)
        results = [block for block in blocks if block.type == "tool_result"]
        messages = [self._result(block, where) for block in results]
        if len(results) < len(blocks) or not blocks:
            text, images = self._text([b for b in blocks if b.type != "tool_result"], where)
            role = "system" if entry.role == "system" else "user"
            messages.append(Message(role=role, content=text, images=images))
        return messages

    def _result(self, block: AnthropicBlock, where: str) -> Message:
        if isinstance(block.content, dict):
            raise bad_request(f"{where}: the content of a tool_result is neither text nor blocks")
        text, images = self._text(_blocks(block.content), where)
        return Message(role="tool", content=text, tool_call_id=block.tool_use_id or "", images=images)

    def _assistant(self, blocks: Sequence[AnthropicBlock], where: str) -> Message:
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        rest: list[AnthropicBlock] = []
        for block in blocks:
            if block.type in ("thinking", "redacted_thinking"):
                reasoning.append(block.thinking or "")
                self._hint(block.signature or block.data or "")
            elif block.type == "tool_use":
                calls.append(_call(block, where))
            else:
                rest.append(block)
        text, images = self._text(rest, where)
        thought = "".join(reasoning)
        return Message(
            role="assistant", content=text, reasoning=thought, tool_calls=tuple(calls), images=images
        )

    def _hint(self, signature: str) -> None:
        if turn_id := unseal(signature):
            self.hints.add(turn_id)

    def _text(self, blocks: Sequence[AnthropicBlock], where: str) -> tuple[str, tuple[ImageRef, ...]]:
        text = ""
        images: list[ImageRef] = []
        for block in blocks:
            if block.type == "text":
                text += block.text or ""
            elif block.type == "image":
                images.append(self._image(block, len(text), where))
            else:
                text += self._other(block, where)
        return text, tuple(images)

    def _image(self, block: AnthropicBlock, offset: int, where: str) -> ImageRef:
        source = block.source
        if isinstance(source, AnthropicSource) and source.type == "base64":
            return self.gallery.from_base64(source.data, source.media_type or "image/png", offset, where)
        if isinstance(source, AnthropicSource) and source.type == "url":
            return self.gallery.from_url(source.url, offset, where)
        kind = source.type if isinstance(source, AnthropicSource) else source
        raise bad_request(f"{where}: an image with a source of type {kind!r}", "send it as base64 or by URL")

    def _other(self, block: AnthropicBlock, where: str) -> str:
        """Returns the text of a block that is neither text nor image."""
        if block.type in ("document", "search_result"):
            return self._document(block, where)
        if block.type == "tool_reference":
            return self._toolbox.definition(block.tool_name or "")
        if block.type in ("tool_addition", "tool_removal"):
            return self._tool_change(block)
        if block.type == "compaction":
            return block.content if isinstance(block.content, str) else ""
        if block.type in SERVER_BLOCKS or block.type.endswith("_tool_result"):
            self.tags.append(f"unenforced:block:{block.type}")
            return ""
        raise bad_request(f"{where} has a block of type {block.type!r}", AS_TEXT)

    def _document(self, block: AnthropicBlock, where: str) -> str:
        source = block.source
        if block.type == "search_result":
            inner = block.content
            origin = [source] if isinstance(source, str) else []
        elif isinstance(source, AnthropicSource) and source.type == "text":
            inner, origin = source.data, []
        elif isinstance(source, AnthropicSource) and source.type == "content":
            inner, origin = source.content, []
        else:
            kind = source.type if isinstance(source, AnthropicSource) else source
            raise bad_request(f"{where}: a document with a source of type {kind!r}", AS_TEXT)
        text, _ = self._text(_blocks(None if isinstance(inner, dict) else inner), where)
        return "\n".join(part for part in (block.title, *origin, block.context, text) if part) + "\n"

    def _tool_change(self, block: AnthropicBlock) -> str:
        tool: Mapping[str, Any] = block.tool or {}
        if block.type == "tool_removal":
            return f"The tool {tool.get('name', '')} is no longer available.\n"
        definition = tool.get("definition")
        if isinstance(definition, dict):
            return encode(_tool(_inline(definition)).raw).decode() + "\n"
        return self._toolbox.definition(str(tool.get("name", ""))) + "\n"


def _inline(definition: dict[str, Any]) -> AnthropicTool:
    try:
        return msgspec.convert(definition, AnthropicTool)
    except msgspec.ValidationError as error:
        raise bad_request(f"the definition of a tool_addition is not a tool: {error}") from error


def _blocks(content: str | list[AnthropicBlock] | None) -> list[AnthropicBlock]:
    if isinstance(content, str):
        return [AnthropicBlock("text", text=content)]
    return content or []


def _call(block: AnthropicBlock, where: str) -> ToolCall:
    return ToolCall(block.id or "", block.name or "", as_arguments(block.input, where))


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
PING = event("ping", {"type": "ping"})


class Anthropic:
    """Anthropic Messages dialect."""

    name = "anthropic"

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        try:
            return decode(raw)
        except RecursionError as error:
            raise bad_request("the request is nested too deeply to be read") from error

    def encode_error(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]:
        reply = finished.reply
        content: list[dict[str, Any]] = []
        if reply.reasoning and options.reasoning:
            text = "" if options.echo.get("omitted") else reply.reasoning
            content.append(thinking(text, seal(started.turn_id)))
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call) for call in reply.tool_calls]
        message = (
            envelope(started, options) | {"content": content, "usage": usage(finished)} | stopped(finished)
        )
        return message | sampled(finished, options)

    def stream(self, started: CallStarted, options: ResponseOptions) -> AnthropicStream:
        return AnthropicStream(started, options)


def error_body(error: ApiError) -> dict[str, Any]:
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = error.text
    if error.sizes:
        text = f"prompt is too long: {error.sizes[0]} tokens > {error.sizes[1]} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


def stopped(finished: CallFinished) -> dict[str, Any]:
    if finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    if finished.turn.finish_reason is not FinishReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if finished.reply.tool_calls else "end_turn", "stop_sequence": None}


def usage(finished: CallFinished) -> dict[str, Any]:
    counts = _usage(finished.prompt_tokens, len(finished.turn.token_ids))
    return counts | {"output_tokens_details": {"thinking_tokens": finished.reasoning_tokens}}


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": sampled}


def envelope(started: CallStarted, options: ResponseOptions) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": item_id("msg", started.turn_id),
        "type": "message",
        "role": "assistant",
        "model": options.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(len(started.prompt_ids), 0),
    }
    return message | {"prompt_token_ids": started.prompt_ids} if options.token_ids else message


def sampled(finished: CallFinished, options: ResponseOptions) -> dict[str, Any]:
    ids = {"token_ids": finished.turn.token_ids} if options.token_ids else {}
    return ids | ({"logprobs": finished.turn.logprobs} if options.logprobs else {})


def thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": Raw(as_object(call.arguments).encode()),
    }


class AnthropicStream:
    """Encodes events; one content block is open at a time."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, options: ResponseOptions) -> None:
        self._started = started
        self._options = options
        self._open = ""
        self._index = -1
        self._arguments: list[str] = []

    def begin(self) -> bytes:
        return event(
            "message_start", {"type": "message_start", "message": envelope(self._started, self._options)}
        )

    def delta(self, delta: CallDelta) -> bytes:
        return b"".join([self._show(event) for event in delta.events])

    def end(self, finished: CallFinished) -> bytes:
        last = {"type": "message_delta", "delta": stopped(finished), "usage": usage(finished)}
        message_delta = event("message_delta", last | sampled(finished, self._options))
        return self._close() + message_delta + event("message_stop", {"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return event("error", error_body(error))

    def keepalive(self) -> bytes:
        return PING

    def _show(self, delta: Event) -> bytes:
        if isinstance(delta, TextDelta):
            start = self._begin("text", {"type": "text", "text": ""})
            return start + self._delta({"type": "text_delta", "text": delta.text})
        if isinstance(delta, ReasoningDelta):
            if not self._options.reasoning:
                return b""
            start = self._begin("thinking", thinking("", ""))
            if self._options.echo.get("omitted"):
                return start
            return start + self._delta({"type": "thinking_delta", "thinking": delta.text})
        if isinstance(delta, ToolStart):
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._begin(f"tool {delta.index}", block)
        if isinstance(delta, ToolArguments):
            self._arguments.append(delta.text)
            return b""
        assert isinstance(delta, ToolEnd)
        return self._close()

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + event("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event(
            "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}
        )

    def _close(self) -> bytes:
        if not self._open:
            return b""
        last = b""
        if self._open == "thinking":
            last = self._delta({"type": "signature_delta", "signature": seal(self._started.turn_id)})
        elif self._open != "text":
            text = as_object("".join(self._arguments))
            last = self._delta({"type": "input_json_delta", "partial_json": text})
            self._arguments.clear()
        self._open = ""
        return last + event("content_block_stop", {"type": "content_block_stop", "index": self._index})
