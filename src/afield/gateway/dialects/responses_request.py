"""OpenAI Responses requests: items, tools, previous responses, summaries.

Items of one turn (reasoning, message, calls) become one message: by the turn in their ids, else by
position. `previous_response_id` and `item_reference` name a stored turn. Every tool that the client runs
becomes a function; a `custom` tool has one string parameter `input`. Files and a provider's own
compaction are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from afield.chat import Tool
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects.base import (
    STRICT,
    TOOLS_TAG,
    BodyReader,
    RawRequest,
    ResponseOptions,
    encode,
    is_retry,
    read,
)
from afield.gateway.dialects.chat import ROLES
from afield.gateway.dialects.logprobs import check_count
from afield.gateway.dialects.request_options import AUTO, checked, guided, one, openai_choice, response_format
from afield.gateway.images import Gallery
from afield.gateway.model_request import (
    NO_REASONING,
    ModelRequest,
    OutputFormat,
    Reasoning,
    RequestedSampling,
    requested_sampling,
)
from afield.gateway.parameters import check_within
from afield.gateway.thinking import ReasoningParameters
from afield.gateway.turn_ids import turn_of_id, turn_of_response, unseal, unseal_summary
from afield.types import ImageRef, Message, ToolCall

COMPACTION = "compaction"
"""Tag of a turn that samples a summary."""
ASK = (
    "The conversation gets too long and is about to be replaced by a summary of it. Write that summary now,"
    " for whoever goes on with the work and sees nothing else of what happened but the messages of the user:"
    " what was asked for, what was done and found out (names, paths, values and results as they are), what"
    " was decided, and what is left to do. Write the summary only."
)
HEAD = "Summary of the conversation so far, which it replaces:\n\n"


def summary_message(text: str) -> Message:
    return Message(role="user", content=HEAD + text)


def summary_of(message: Message) -> str | None:
    """Returns the summary in a message, if it is one."""
    is_summary = message.role == "user" and message.content.startswith(HEAD)
    return message.content[len(HEAD) :] if is_summary else None


class ResponsesTool(Struct):
    """Tool of a request."""

    type: str = "function"
    """Kind of tool: `function`, `custom`, `namespace`, or a tool that only OpenAI runs."""
    name: str = ""
    """Tool name."""
    description: str | None = None
    """Description for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Whether arguments must follow the schema; None is False."""
    format: dict[str, Any] | None = None
    """Input format of a custom tool."""
    tools: list[ResponsesTool] | None = None
    """Tools of a namespace."""


class ClientTool(Struct, frozen=True):
    """Tool as the client names it."""

    name: str
    """Name of the tool in requests and responses."""
    namespace: str | None = None
    """Namespace of the tool; None for none."""
    custom: bool = False
    """Whether it is a custom tool, with free-text input."""


class Toolbox(Struct, frozen=True):
    """Tools as the model sees them, and the client's names."""

    tools: tuple[Tool, ...] = ()
    """Tools as functions."""
    named: Mapping[str, ClientTool] = {}
    """Client's tool by the model's name of it."""
    tags: tuple[str, ...] = ()
    """Tags of tools and tool options that are not enforced."""
    listed: Raw = Raw(b"[]")
    """Tools as responses list them, with all function fields."""

    def to_client(self, name: str) -> ClientTool:
        return self.named.get(name) or ClientTool(name)

    def to_model(self, name: str, namespace: str | None) -> str:
        """Returns the model's name of a tool; tools that are no longer listed keep theirs."""
        for model_name, client_tool in self.named.items():
            if (client_tool.name, client_tool.namespace) == (name, namespace):
                return model_name
        return name


class _Input(Struct, forbid_unknown_fields=True):
    """Arguments of a custom tool."""

    input: str
    """Free-text input."""


TOOLS = msgspec.json.Decoder(list[ResponsesTool] | None)
INPUT = msgspec.json.Decoder(_Input)


def read_tools(raw: Raw) -> Toolbox:
    """Decodes tools. Clients repeat them, so they are cached."""
    return _read_tools(bytes(raw))


@lru_cache(maxsize=64)
def _read_tools(raw: bytes) -> Toolbox:
    wire = read(TOOLS, raw, "a Responses request: tools") or []
    tools: list[Tool] = []
    client_tools: dict[str, ClientTool] = {}
    tags: list[str] = []
    for tool, namespace in _flat(wire, None):
        if tool.type not in ("function", "custom"):
            tags.append(f"{TOOLS_TAG}.{tool.type}")
            continue
        if not tool.name:
            raise bad_request(f"a tool of type {tool.type!r} has no name")
        name = tool.name if tool.name not in client_tools else f"{namespace or tool.type}__{tool.name}"
        client_tools[name] = ClientTool(tool.name, namespace, tool.type == "custom")
        tools.append(_tool(name, tool))
        if tool.type == "custom" and (tool.format or {}).get("type") == "grammar":
            tags.append(f"{TOOLS_TAG}.{tool.name}.format")
        if tool.strict:
            tags.append(STRICT)
    echoed = [_complete_tool(tool) for tool in msgspec.json.decode(raw) or []]
    echo = Raw(msgspec.json.encode(echoed))
    return Toolbox(tuple(tools), client_tools, tuple(dict.fromkeys(tags)), echo)


def _complete_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "namespace":
        return tool | {"tools": [_complete_tool(inner) for inner in tool.get("tools") or []]}
    if tool.get("type", "function") != "function":
        return tool
    # Schemas without `strict` are not enforced.
    defaults = {"type": "function", "description": None, "parameters": None}
    return {**defaults, **tool, "strict": bool(tool.get("strict"))}


def _flat(tools: list[ResponsesTool], namespace: str | None) -> Iterator[tuple[ResponsesTool, str | None]]:
    for tool in tools:
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or [], tool.name)
        else:
            yield tool, namespace


def _tool(name: str, tool: ResponsesTool) -> Tool:
    parameters = tool.parameters if tool.type == "function" else _free_text(tool.format or {})
    function: dict[str, Any] = {"name": name}
    if tool.description is not None:
        function["description"] = tool.description
    if parameters is not None:
        function["parameters"] = parameters
    if tool.strict:
        function["strict"] = True
    raw = {"type": "function", "function": function}
    return Tool(name, tool.description or "", parameters or {}, raw)


def _free_text(format: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string"}
    if format.get("type") == "grammar":
        text["description"] = f"Follows this {format.get('syntax')} grammar:\n{format.get('definition')}"
    return {"type": "object", "properties": {"input": text}, "required": ["input"]}


# --- calls of custom tools ---


def free_text(arguments: str) -> str | None:
    """Returns the input of a custom call; None if the arguments have another form."""
    try:
        return INPUT.decode(arguments).input
    except msgspec.MsgspecError:
        return None


def as_arguments(text: str) -> str:
    return msgspec.json.encode(_Input(text)).decode()


TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
NAMES = {"must_call": "tool_choice", "parallel_calls": "parallel_tool_calls", "output": "text.format"}
LOGPROBS = "message.output_text.logprobs"
RAW_INPUT = "ctr_"
"""Prefix of ids of custom calls with raw arguments."""
PROVIDERS = ("compaction", "compaction_trigger", "context_compaction", "compaction_summary")


class InputImageUrl(Struct):
    """Image of an input part, in the form of Chat Completions."""

    url: str
    """URL of the image, `data:` or remote."""


class InputPart(Struct):
    """Part of an item's content."""

    type: str = "input_text"
    """Kind of part, such as `input_text` or `input_image`."""
    text: str | None = None
    """Text of a text part."""
    refusal: str | None = None
    """Text of a refusal part."""
    image_url: str | InputImageUrl | None = None
    """URL of an image part."""


class InputItem(Struct):
    """Input item of any type; fields of other types are None."""

    type: str | None = None
    """Kind of item; None for a message."""
    id: str | None = None
    """Item id, which may name a turn."""
    role: str | None = None
    """Role of a message."""
    content: str | list[InputPart] | None = None
    """Content of a message or of reasoning."""
    summary: list[InputPart] | None = None
    """Summary of reasoning."""
    encrypted_content: str | None = None
    """Encrypted content of reasoning or compaction, which names its turn."""
    call_id: str | None = None
    """Tool-call id of a call or its output."""
    name: str | None = None
    """Tool of a call."""
    namespace: str | None = None
    """Namespace of a call's tool."""
    arguments: str | dict[str, Any] | None = None
    """Arguments of a function call, as JSON text or an object."""
    input: str | dict[str, Any] | None = None
    """Input of a custom tool call."""
    output: str | list[InputPart] | dict[str, Any] | None = None
    """Output of a tool call."""


class ResponsesBody(RequestedSampling, kw_only=True):
    """Body of a Responses request; None if the request does not set a field."""

    input: str | list[InputItem] | None = None
    """Text of a user message, or items."""
    model: str | None = ""
    """Model name."""
    instructions: str | None = None
    """System prompt."""
    previous_response_id: str | None = None
    """Response whose conversation the input continues."""
    tools: Raw = Raw(b"null")
    """Tools, decoded later."""
    tool_choice: str | dict[str, Any] | None = None
    """Tool choice: a mode or a tool."""
    parallel_tool_calls: bool | None = None
    """Whether the reply may contain several tool calls."""
    max_output_tokens: int | None = None
    """Token limit of the reply."""
    stream: bool | None = False
    """Whether the response is streamed."""
    store: bool | None = None
    """Whether the response can be fetched later."""
    include: list[str] | None = None
    """Additional fields of the response."""
    top_logprobs: int | None = None
    """Top log-probabilities per token."""
    max_tool_calls: int | None = None
    """Maximum of calls of built-in tools; the response repeats it."""
    safety_identifier: str | None = None
    """User id for OpenAI; the response repeats it."""
    prompt_cache_key: str | None = None
    """Cache key for OpenAI; the response repeats it."""
    prompt_cache_retention: str | None = None
    """Cache policy for OpenAI; the response repeats it."""
    user: str | None = None
    """User id (earlier name); the response repeats it."""
    reasoning: dict[str, Any] | None = None
    """Reasoning effort and summary."""
    include_reasoning: bool | None = None
    """Whether to return reasoning (vLLM)."""
    stream_options: dict[str, Any] | None = None
    """Options of the stream."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template (vLLM)."""
    text: dict[str, Any] | None = None
    """Output format and verbosity."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's structured output parameters."""
    metadata: dict[str, Any] | None = None
    """Metadata of the client; the response repeats it."""
    return_token_ids: bool | None = False
    """Whether to return token ids (vLLM)."""


class EchoedOptions(Struct, frozen=True):
    """Options that the response repeats."""

    toolbox: Toolbox
    """Tools of the request."""
    fields: dict[str, Any]
    """Request fields that the response repeats."""
    sealed: bool
    """Whether reasoning items have encrypted content."""
    summary: bool
    """Whether reasoning items have a summary."""
    content: bool = False
    """Whether reasoning items have their text as content."""


SHARED = ("instructions", "text", "tools")
"""Fields that the requests of a session share."""


class StoredOptions(Struct, frozen=True):
    """Options stored with a turn, to encode its response again."""

    model: str
    """Model name in the response."""
    fields: dict[str, Any]
    """Request fields that the response repeats, without shared ones."""
    sealed: bool
    """As in `EchoedOptions`."""
    summary: bool
    """As in `EchoedOptions`."""
    content: bool
    """As in `EchoedOptions`."""
    shared: str
    """Digest of the shared fields."""


STORED_OPTIONS = msgspec.json.Decoder(StoredOptions)
SHARED_TEXT = msgspec.json.Decoder(dict[str, Raw])


def store_options(model: str, options: EchoedOptions) -> tuple[bytes, tuple[str, bytes]]:
    """Returns the stored options, and digest and text of their shared part."""
    common = encode({name: options.fields[name] for name in SHARED})
    digest = blake2b(common, digest_size=12).hexdigest()
    own = {name: value for name, value in options.fields.items() if name not in SHARED}
    stored = StoredOptions(model, own, options.sealed, options.summary, options.content, digest)
    return encode(stored), (digest, common)


def restore_options(stored: StoredOptions, common: bytes) -> EchoedOptions:
    texts = SHARED_TEXT.decode(common)
    toolbox = read_tools(texts["tools"])
    values = {name: msgspec.json.decode(texts[name]) for name in ("instructions", "text")}
    fields = stored.fields | values | {"tools": toolbox.listed}
    return EchoedOptions(toolbox, fields, stored.sealed, stored.summary, stored.content)


BODY = BodyReader("responses", ResponsesBody, "a Responses request")
NESTED = ("reasoning", "text", "stream_options", "chat_template_kwargs", "structured_outputs")


def decode(raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, tags = BODY.read(raw)
    for name in NESTED:
        if value := getattr(wire, name):
            tags += check_within("responses", name, value, ignore=raw.ignore)
    if wire.max_output_tokens is not None and wire.max_output_tokens < 1:
        raise bad_request(f"max_output_tokens={wire.max_output_tokens} must be at least 1")
    check_count(wire.top_logprobs, "top_logprobs")
    reasoning, names = _reasoning(wire)
    toolbox = read_tools(wire.tools)
    scored = LOGPROBS in (wire.include or ())
    choice = AUTO
    if wire.tool_choice is not None:
        choice = openai_choice(wire.tool_choice, nested=False, to_model=toolbox.to_model)
        choice = checked(choice, toolbox.tools, "tool_choice")
    output, output_name = _output(wire)
    after, items = _history(wire, raw.session_id)
    reader = ItemReader(toolbox)
    if wire.instructions:
        reader.messages.append(Message(role="system", content=wire.instructions))
    for index, item in items:
        reader.add(item, f"input[{index}]")
    reader.close()
    if not items and after is None:
        raise bad_request("input is empty", "send a text or at least one item")
    echoed = _echoed_options(wire, toolbox)
    stored, shared = store_options(wire.model or "", echoed) if wire.store is not False else (b"", None)
    request = ModelRequest(
        dialect="responses",
        model=wire.model or "",
        messages=tuple(reader.messages),
        tools=toolbox.tools,
        may_call=choice.may_call,
        must_call=choice.must_call,
        callable_tools=choice.callable_tools,
        parallel_calls=wire.parallel_tool_calls is not False,
        output=output,
        reasoning=reasoning,
        names=NAMES
        if output_name == "text.format" and not names
        else {**NAMES, "output": output_name, **names},
        max_tokens=wire.max_output_tokens,
        top_logprobs=(wire.top_logprobs or 0) if scored else 0,
        by_token=scored,
        stored_options=stored,
        shared_text=shared,
        stream=bool(wire.stream),
        requested_sampling=requested_sampling(wire),
        after=after,
        hints=frozenset(reader.hints),
        retry=is_retry(raw),
        thread=_thread(raw),
        tags=tuple(dict.fromkeys([*toolbox.tags, *reader.tags, *tags])),
        images=reader.gallery.images,
        image_places=reader.gallery.places,
    )
    options = ResponseOptions(
        model=wire.model or "",
        logprobs=scored,
        top_logprobs=wire.top_logprobs or 0,
        token_ids=bool(wire.return_token_ids),
        echo={"echoed": echoed},
    )
    return request, options


def _thread(raw: RawRequest) -> str:
    """Returns Codex's thread of a sub-agent; empty for the main thread."""
    spawned = "x-codex-parent-thread-id" in raw.headers or "x-openai-subagent" in raw.headers
    return raw.headers.get("thread-id", "") if spawned else ""


def _reasoning(wire: ResponsesBody) -> tuple[Reasoning, dict[str, str]]:
    if not wire.reasoning and not wire.chat_template_kwargs:
        return NO_REASONING, {}
    parameters = ReasoningParameters()
    parameters.effort((wire.reasoning or {}).get("effort"), "reasoning.effort")
    parameters.kwargs(wire.chat_template_kwargs)
    return parameters.build()


def _output(wire: ResponsesBody) -> tuple[OutputFormat | None, str]:
    if wire.text is None and wire.structured_outputs is None:
        return None, "text.format"
    first = response_format((wire.text or {}).get("format"), "text.format", flat=True)
    return one(first, "text.format", guided({"structured_outputs": wire.structured_outputs}))


def _history(wire: ResponsesBody, session_id: str) -> tuple[str | None, list[tuple[int, InputItem]]]:
    """Returns the turn of the stored history, and the items after it."""
    input_items = (
        [InputItem(role="user", content=wire.input)] if isinstance(wire.input, str) else wire.input or []
    )
    items = list(enumerate(input_items))
    after = None
    if wire.previous_response_id is not None:
        after = turn_of_response(wire.previous_response_id, session_id)
        if after is None:
            missing = (
                f"previous_response_id {wire.previous_response_id[:80]!r} is not a response of this session"
            )
            raise ApiError(400, "previous_response_not_found", missing, "send the whole history as input")
    references = [n for n, item in items if item.type == "item_reference"]
    if not references:
        return after, items
    last = references[-1]
    after = turn_of_id(input_items[last].id or "")
    if after is None:
        raise bad_request(
            f"input[{last}] refers to {input_items[last].id!r}, which is not an item of this session",
            "send the item itself",
        )
    # The turn's own items are stored. Items after its first one, or after the last
    # reference without an id, are new; outputs always are.
    first = next((n for n, item in items if _of_turn(item, after)), last)
    return after, [(n, item) for n, item in items[first:] if not _of_turn(item, after)]


def _of_turn(item: InputItem, turn: str) -> bool:
    """Returns whether an item belongs to a turn's reply."""
    return not is_output(item.type) and mark(item) == turn


def is_output(kind: str | None) -> bool:
    """Returns whether an item type is the result of a call."""
    return kind is not None and kind.endswith("_call_output")


def mark(item: InputItem) -> str | None:
    """Returns the turn that an item's ids name."""
    for handed_out in (item.id, item.call_id):
        if handed_out and (turn := turn_of_id(handed_out)):
            return turn
    return unseal(item.encrypted_content) if item.encrypted_content else None


def _echoed_options(wire: ResponsesBody, toolbox: Toolbox) -> EchoedOptions:
    reasoning = wire.reasoning or {}
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    fields = {
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "prompt_cache_retention": wire.prompt_cache_retention,
        "reasoning": {"effort": reasoning.get("effort"), "summary": summary},
        "safety_identifier": wire.safety_identifier,
        "store": wire.store is not False,
        "text": {"format": {"type": "text"}} | (wire.text or {}),
        "tool_choice": wire.tool_choice or "auto",
        "tools": toolbox.listed,
        "top_logprobs": wire.top_logprobs or 0,
        "user": wire.user,
    }
    sealed = wire.store is False or "reasoning.encrypted_content" in (wire.include or ())
    return EchoedOptions(toolbox, fields, sealed, summary not in (None, "none"), bool(wire.include_reasoning))


# --- items to messages ---

Kind = Literal["reasoning", "text", "call"]


class ItemReader:
    """Converts items to messages, joining the items of a turn."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.messages: list[Message] = []
        self.hints: set[str] = set()
        self.tags: list[str] = []
        self.gallery = Gallery()
        self._toolbox = toolbox
        self._turn: str | None = None
        self._last: Kind | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, item: InputItem, where: str) -> None:
        kind = item.type or "message"
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._join(item, "reasoning")
            self._reasoning.append(_thought(item))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where)
        elif is_output(kind):
            self.close()
            text, images = self._content(item.output, where)
            result = Message(role="tool", content=text, tool_call_id=item.call_id or "", images=images)
            self.messages.append(result)
        elif kind in PROVIDERS:
            self.close()
            self.messages.append(_summary(item, where))
        else:
            self.tags.append(f"unenforced:item:{kind}")

    def close(self) -> None:
        """Ends the open assistant turn."""
        if self._last is not None:
            self.messages.append(
                Message(
                    role="assistant",
                    content="".join(self._text),
                    reasoning="".join(self._reasoning),
                    tool_calls=tuple(self._calls),
                )
            )
        self._turn, self._last = None, None
        self._text, self._reasoning, self._calls = [], [], []

    def _join(self, item: InputItem, kind: Kind) -> None:
        """Ends the open turn unless the item belongs to it."""
        turn = mark(item)
        if turn:
            self.hints.add(turn)
        if turn and self._turn:
            same = turn == self._turn
        else:
            # A turn begins with its reasoning; two texts in a row are different turns.
            same = not (kind == "reasoning" or kind == self._last == "text")
        if not same:
            self.close()
        self._turn, self._last = turn or self._turn, kind

    def _message(self, item: InputItem, where: str) -> None:
        role = ROLES.get(item.role or "")
        if role is None:
            raise bad_request(f"{where}: role {item.role!r} is not one of {', '.join(sorted(ROLES))}")
        if role == "assistant":
            self._join(item, "text")
            self._text.append(self._content(item.content, where)[0])
            return
        self.close()
        text, images = self._content(item.content, where)
        self.messages.append(Message(role=role, content=text, name=item.name or "", images=images))

    def _call(self, item: InputItem, where: str) -> None:
        if not item.name:
            raise bad_request(f"{where}: a {item.type} needs a name")
        arguments = item.arguments if item.type == "function_call" else item.input
        text = arguments if isinstance(arguments, str) else encode(arguments or {}).decode()
        if item.type == "custom_tool_call" and not (item.id or "").startswith(RAW_INPUT):
            text = as_arguments(text)
        self._join(item, "call")
        name = self._toolbox.to_model(item.name, item.namespace)
        self._calls.append(ToolCall(item.call_id or "", name, text))

    def _content(
        self, content: str | Sequence[InputPart] | dict[str, Any] | None, where: str
    ) -> tuple[str, tuple[ImageRef, ...]]:
        if isinstance(content, str):
            return content, ()
        if isinstance(content, dict):
            return encode(content).decode(), ()
        text = ""
        images: list[ImageRef] = []
        for part in content or ():
            if part.type == "input_image" and part.image_url is not None:
                url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
                images.append(self.gallery.from_url(url, len(text), where))
            elif (
                part.type in TEXTS
                and (part_text := part.text if part.refusal is None else part.refusal) is not None
            ):
                text += part_text
            else:
                raise bad_request(f"{where} has a part of type {part.type!r}", "send text, or images by URL")
        return text, tuple(images)


def _summary(item: InputItem, where: str) -> Message:
    summary = unseal_summary(item.encrypted_content) if item.encrypted_content else None
    if summary is None:
        raise bad_request(
            f"{where}: the {item.type} item was not made by this gateway, so its summary cannot be read",
            "compact with POST responses/compact of this gateway, or let the client compact its own history",
        )
    return summary_message(summary[1])


def _thought(item: InputItem) -> str:
    if isinstance(item.content, str):
        return item.content
    parts = item.content or item.summary or []
    return "\n\n".join(part.text for part in parts if part.text)
