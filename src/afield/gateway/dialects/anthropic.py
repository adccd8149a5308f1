"""Anthropic Messages, the asking half: what a request says, as canonical messages.

One assistant turn becomes one message however many blocks or entries it is sent in; each tool result
becomes one tool message, ahead of what else its user entry says. Cache marks, billing lines and unknown
keys are dropped. Tools marked `defer_loading` are not in the prompt's head: their definition is written
where the conversation loads them, so that loading one keeps the root. Blocks of server-side tools are
dropped with a tag; files, PDFs and block types nobody knows are refused.
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
    RawRequest,
    Reading,
    ResponseOptions,
    as_arguments,
    as_object,
    asks_again,
    encode,
    event,
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
    wishes,
)
from afield.gateway.parameters import check, check_within
from afield.gateway.thinking import AskedReasoning
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


# --- the wire ------------------------------------------------------------------------------------


class Source(Struct):
    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[Block] | None = None


class Block(Struct):
    type: str
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw(b"{}")
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    tool_name: str | None = None
    tool: dict[str, Any] | None = None


class Entry(Struct):
    role: str
    content: str | list[Block] | None = None
    clear_at: str | None = None


class WireTool(Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = False
    strict: bool | None = False


class ToolChoice(Struct):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class Body(RequestedSampling, kw_only=True):
    messages: list[Entry]
    model: str = ""
    system: str | list[Block] | None = None
    tools: list[WireTool] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    logprobs: bool | None = False


BODY = Reading("anthropic", Body, "a Messages request")


# --- the request ---------------------------------------------------------------------------------


def decode(asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, tags = BODY.read(asked)
    for name in ("thinking", "output_config", "chat_template_kwargs", "tool_choice"):
        if held := getattr(wire, name):
            tags += check_within("anthropic", name, held, ignore=asked.ignore)
    if not wire.messages:
        raise bad_request("messages is empty", "send at least one message")
    if wire.max_tokens is not None and wire.max_tokens < 1:
        raise bad_request(f"max_tokens={wire.max_tokens} must be at least 1")
    toolbox = _Toolbox(wire.tools or [])
    if wire.context_management is not None:
        tags += check("anthropic", "context_management", wire.context_management, ignore=asked.ignore)
    given, choice = None, request_options.AUTO
    if wire.tool_choice is not None:
        given = _given_choice(wire)
        choice = checked(_choice(given, toolbox), toolbox.callable, "tool_choice")
    output, form = _output(wire)
    reasoning, names = _reasoning(wire)
    reader = _Reader(toolbox)
    request = ModelRequest(
        dialect="anthropic",
        model=wire.model,
        messages=reader.messages(wire),
        tools=toolbox.offered,
        may_call=choice.may_call,
        must_call=choice.must_call,
        callable_tools=choice.callable_tools,
        parallel_calls=not (given and given.disable_parallel_tool_use),
        output=output,
        reasoning=reasoning,
        names=NAMES if form == "output_config.format" and not names else {**NAMES, "output": form, **names},
        max_tokens=wire.max_tokens,
        stop=tuple(wire.stop_sequences or ()),
        stream=bool(wire.stream),
        wishes=wishes(wire),
        hints=frozenset(reader.hints),
        retry=asks_again(asked),
        thread=asked.headers.get("x-claude-code-agent-id", ""),
        tags=tuple(dict.fromkeys([*_unenforced(wire, toolbox), *reader.tags, *tags])),
        images=reader.gallery.images,
        image_places=reader.gallery.places,
    )
    thinking = wire.thinking or {}
    wish = ResponseOptions(
        model=wire.model,
        logprobs=bool(wire.logprobs),
        token_ids=bool(wire.return_token_ids),
        reasoning=thinking.get("type") in ("enabled", "adaptive"),
        echo=OMITTED if thinking.get("display") == "omitted" else SHOWN,
    )
    return request, wish


def _reasoning(wire: Body) -> tuple[Reasoning, dict[str, str]]:
    effort = (wire.output_config or {}).get("effort")
    if not (wire.thinking or effort or wire.chat_template_kwargs):
        return NO_REASONING, {}
    asked = AskedReasoning()
    thinking = wire.thinking or {}
    asked.kind(thinking.get("type"), "thinking.type")
    asked.budget(thinking.get("budget_tokens"), "thinking.budget_tokens")
    asked.effort(effort, "output_config.effort", turns_on=False)  # how hard to think, not whether
    asked.kwargs(wire.chat_template_kwargs)
    return asked.made()


def _given_choice(wire: Body) -> ToolChoice | None:
    if wire.tool_choice is None:
        return None
    try:
        return msgspec.convert(wire.tool_choice, ToolChoice)
    except msgspec.ValidationError as error:
        raise bad_request(f"tool_choice: {error}") from error


def _choice(given: ToolChoice | None, toolbox: _Toolbox) -> request_options.ToolChoice:
    if given is None:
        return request_options.AUTO
    if given.type == "tool":
        if given.name in toolbox.server_side:
            raise bad_request(
                f"tool_choice: tool {given.name!r} runs on the provider's servers",
                "offer a tool of your own",
            )
        if not given.name:
            raise bad_request("tool_choice names no tool", "send the name of one of the request's tools")
        return request_options.forced(given.name)
    if given.type not in ("auto", "any", "none"):
        raise bad_request(f"tool_choice.type {given.type!r} is not one of auto, any, none, tool")
    return request_options.MODES[given.type]


def _output(wire: Body) -> tuple[OutputFormat | None, str]:
    if wire.output_config is None and wire.output_format is None:
        return None, "output_config.format"
    first = response_format((wire.output_config or {}).get("format"), "output_config.format", flat=True)
    older = response_format(wire.output_format, "output_format", flat=True)
    return one(first, "output_config.format", (older, "output_format") if older else None)


def _unenforced(wire: Body, toolbox: _Toolbox) -> list[str]:
    tags = [f"{TOOLS_TAG}.{name}" for name in toolbox.server_side]
    if any(tool.strict for tool in wire.tools or ()):
        tags.append(STRICT)
    if wire.messages[-1].role == "assistant":
        tags.append("unenforced:prefill")
    return tags


class _Toolbox:
    """The tools of a request: those in the prompt's head, and those that the conversation loads later.

    Where a server-side search would have loaded them, none would ever be; then all are in the head.
    """

    def __init__(self, wires: Sequence[WireTool]) -> None:
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
        """All that the conversation may have loaded."""
        return list(self._known.values())

    def definition(self, name: str) -> str:
        tool = self._known.get(name)
        return encode(tool.raw).decode() if tool else name


def _tool(wire: WireTool) -> Tool:
    """As a Chat client would write it, so that the same tools give the same root in both dialects."""
    parameters = wire.input_schema or {}
    described = {} if wire.description is None else {"description": wire.description}
    function = {"name": wire.name, **described, "parameters": parameters}
    return Tool(wire.name, wire.description or "", parameters, {"type": "function", "function": function})


class _Reader:
    """Reads the entries of one request and keeps what they refer to: images, our marks, tags."""

    def __init__(self, toolbox: _Toolbox) -> None:
        self._toolbox = toolbox
        self.gallery = Gallery()
        self.hints: set[str] = set()
        self.tags: list[str] = []

    def messages(self, wire: Body) -> tuple[Message, ...]:
        said: list[Message] = []
        if system := self._system(wire.system):
            said.append(Message(role="system", content=system))
        turn: list[Block] | None = None
        for index, entry in enumerate(wire.messages):
            where = f"messages[{index}]"
            if entry.role == "assistant":
                turn = [*(turn or ()), *_blocks(entry.content)]
                continue
            if turn is not None:
                said.append(self._assistant(turn, where))
                turn = None
            said += self._entry(entry, where)
        if turn is not None:
            said.append(self._assistant(turn, "the last message"))
        return tuple(said)

    def _system(self, system: str | list[Block] | None) -> str:
        if isinstance(system, str) and system.startswith(BILLING):
            system = system.partition("\n")[2]
        blocks = [block for block in _blocks(system) if not (block.text or "").startswith(BILLING)]
        return self._text(blocks, "system")[0]

    def _entry(self, entry: Entry, where: str) -> list[Message]:
        if entry.role not in ("user", "system"):
            raise bad_request(f"{where}: role {entry.role!r} is not one of assistant, system, user")
        if entry.clear_at == "next_user_message":
            self.tags.append("unenforced:clear_at")
        blocks = _blocks(entry.content)
        results = [block for block in blocks if block.type == "tool_result"]
        said = [self._result(block, where) for block in results]
        if len(results) < len(blocks) or not blocks:
            text, images = self._text([b for b in blocks if b.type != "tool_result"], where)
            role = "system" if entry.role == "system" else "user"
            said.append(Message(role=role, content=text, images=images))
        return said

    def _result(self, block: Block, where: str) -> Message:
        if isinstance(block.content, dict):
            raise bad_request(f"{where}: the content of a tool_result is neither text nor blocks")
        text, images = self._text(_blocks(block.content), where)
        return Message(role="tool", content=text, tool_call_id=block.tool_use_id or "", images=images)

    def _assistant(self, blocks: Sequence[Block], where: str) -> Message:
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        rest: list[Block] = []
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

    def _text(self, blocks: Sequence[Block], where: str) -> tuple[str, tuple[ImageRef, ...]]:
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

    def _image(self, block: Block, at: int, where: str) -> ImageRef:
        source = block.source
        if isinstance(source, Source) and source.type == "base64":
            return self.gallery.from_base64(source.data, source.media_type or "image/png", at, where)
        if isinstance(source, Source) and source.type == "url":
            return self.gallery.from_url(source.url, at, where)
        kind = source.type if isinstance(source, Source) else source
        raise bad_request(f"{where}: an image with a source of type {kind!r}", "send it as base64 or by URL")

    def _other(self, block: Block, where: str) -> str:
        """What a block that is neither text nor image says in words."""
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

    def _document(self, block: Block, where: str) -> str:
        source = block.source
        if block.type == "search_result":
            inner = block.content
            origin = [source] if isinstance(source, str) else []
        elif isinstance(source, Source) and source.type == "text":
            inner, origin = source.data, []
        elif isinstance(source, Source) and source.type == "content":
            inner, origin = source.content, []
        else:
            kind = source.type if isinstance(source, Source) else source
            raise bad_request(f"{where}: a document with a source of type {kind!r}", AS_TEXT)
        text, _ = self._text(_blocks(None if isinstance(inner, dict) else inner), where)
        return "\n".join(part for part in (block.title, *origin, block.context, text) if part) + "\n"

    def _tool_change(self, block: Block) -> str:
        tool: Mapping[str, Any] = block.tool or {}
        if block.type == "tool_removal":
            return f"The tool {tool.get('name', '')} is no longer available.\n"
        given = tool.get("definition")
        if isinstance(given, dict):
            return encode(_tool(_inline(given)).raw).decode() + "\n"
        return self._toolbox.definition(str(tool.get("name", ""))) + "\n"


def _inline(given: dict[str, Any]) -> WireTool:
    try:
        return msgspec.convert(given, WireTool)
    except msgspec.ValidationError as error:
        raise bad_request(f"the definition of a tool_addition is not a tool: {error}") from error


def _blocks(content: str | list[Block] | None) -> list[Block]:
    if isinstance(content, str):
        return [Block("text", text=content)]
    return content or []


def _call(block: Block, where: str) -> ToolCall:
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
    name = "anthropic"

    def decode(self, asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        try:
            return decode(asked)
        except RecursionError as error:
            raise bad_request("the request is nested too deeply to be read") from error

    def error(self, refusal: ApiError) -> dict[str, Any]:
        return error(refusal)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def answer(self, started: CallStarted, done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
        reply = done.reply
        content: list[dict[str, Any]] = []
        if reply.reasoning and wish.reasoning:
            text = "" if wish.echo.get("omitted") else reply.reasoning
            content.append(thinking(text, seal(started.turn_id)))
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call) for call in reply.tool_calls]
        message = envelope(started, wish) | {"content": content, "usage": usage(done)} | stopped(done)
        return message | sampled(done, wish)

    def view(self, started: CallStarted, wish: ResponseOptions) -> AnthropicStream:
        return AnthropicStream(started, wish)


def error(refusal: ApiError) -> dict[str, Any]:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    text = refusal.text
    if refusal.sizes:
        text = f"prompt is too long: {refusal.sizes[0]} tokens > {refusal.sizes[1]} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


def stopped(done: CallFinished) -> dict[str, Any]:
    if done.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop}
    if done.turn.finish_reason is not FinishReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if done.reply.tool_calls else "end_turn", "stop_sequence": None}


def usage(done: CallFinished) -> dict[str, Any]:
    told = _usage(done.prompt_tokens, len(done.turn.token_ids))
    return told | {"output_tokens_details": {"thinking_tokens": done.thought}}


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, **cached, "output_tokens": sampled}


def envelope(started: CallStarted, wish: ResponseOptions) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": item_id("msg", started.turn_id),
        "type": "message",
        "role": "assistant",
        "model": wish.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(len(started.prompt_ids), 0),
    }
    return shown | {"prompt_token_ids": started.prompt_ids} if wish.token_ids else shown


def sampled(done: CallFinished, wish: ResponseOptions) -> dict[str, Any]:
    ids = {"token_ids": done.turn.token_ids} if wish.token_ids else {}
    return ids | ({"logprobs": done.turn.logprobs} if wish.logprobs else {})


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
    """The answer in events: one block is open at a time."""

    content_type = EVENTS

    def __init__(self, started: CallStarted, wish: ResponseOptions) -> None:
        self._started = started
        self._wish = wish
        self._open = ""
        self._index = -1
        self._arguments: list[str] = []

    def opening(self) -> bytes:
        return event(
            "message_start", {"type": "message_start", "message": envelope(self._started, self._wish)}
        )

    def piece(self, piece: CallDelta) -> bytes:
        return b"".join([self._show(event) for event in piece.events])

    def closing(self, done: CallFinished) -> bytes:
        last = {"type": "message_delta", "delta": stopped(done), "usage": usage(done)}
        end = event("message_delta", last | sampled(done, self._wish))
        return self._close() + end + event("message_stop", {"type": "message_stop"})

    def failing(self, refusal: ApiError) -> bytes:
        return event("error", error(refusal))

    def keepalive(self) -> bytes:
        return PING

    def _show(self, shown: Event) -> bytes:
        if isinstance(shown, TextDelta):
            begun = self._begin("text", {"type": "text", "text": ""})
            return begun + self._delta({"type": "text_delta", "text": shown.text})
        if isinstance(shown, ReasoningDelta):
            if not self._wish.reasoning:
                return b""
            begun = self._begin("thinking", thinking("", ""))
            if self._wish.echo.get("omitted"):
                return begun
            return begun + self._delta({"type": "thinking_delta", "thinking": shown.text})
        if isinstance(shown, ToolStart):
            block = {"type": "tool_use", "id": shown.id, "name": shown.name, "input": {}}
            return self._begin(f"tool {shown.index}", block)
        if isinstance(shown, ToolArguments):
            self._arguments.append(shown.text)
            return b""
        assert isinstance(shown, ToolEnd)
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
