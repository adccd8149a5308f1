"""Gemini dialect: generateContent, streamGenerateContent, countTokens.

Requests: field names may be in camel or snake case. Adjacent model contents are one turn. A function
response is matched to its call by id, or by name in order. Tools that Google runs are dropped with a tag;
several candidates, cached contents and media other than text and images are refused.

Responses: reasoning is a thought part, if requested; its signature and those of calls name the turn.
Streams are server-sent events with `alt=sse`, else one JSON array.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from afield.chat import (
    ChatTokenizer,
    Event,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolArguments,
    ToolEnd,
    ToolStart,
)
from afield.gateway.api_error import ApiError, bad_request
from afield.gateway.dialects import request_options
from afield.gateway.dialects.base import (
    EVENTS,
    TOOLS_TAG,
    BodyReader,
    RawRequest,
    ResponseOptions,
    as_arguments,
    as_object,
    data,
    encode,
    is_retry,
    read,
)
from afield.gateway.dialects.logprobs import check_count, recorded
from afield.gateway.dialects.request_options import JSON_OBJECT, ToolChoice, checked, choice, json_schema
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
from afield.gateway.parameters import CALLING, check_within
from afield.gateway.thinking import ReasoningParameters
from afield.gateway.turn_ids import item_id, seal, unseal
from afield.types import FinishReason, ImageRef, Message, ToolCall


def camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class Wire(Struct, rename="camel"):
    """Base of wire types, with field names in camel case."""


class GeminiFunctionCall(Wire):
    """Function call of a model turn."""

    name: str = ""
    """Function name."""
    args: Raw = Raw(b"{}")
    """Arguments, as JSON."""
    id: str | None = None
    """Call id; None for calls without one."""


class Blob(Wire):
    """Inline media data."""

    data: str = ""
    """Base64 data."""
    mime_type: str = ""
    """Media type."""


class FileData(Wire):
    """Media data by URL."""

    file_uri: str = ""
    """URL of the file."""
    mime_type: str = ""
    """Media type."""


class FunctionResponse(Wire):
    """Result of a function call."""

    name: str = ""
    """Function name."""
    response: Any = None
    """Return value."""
    id: str | None = None
    """Id of the call; None matches by name."""
    parts: list[GeminiPart] | None = None
    """Media parts of the result."""


class GeminiPart(Wire):
    """Part of a content; unset fields are None."""

    text: str | None = None
    """Text."""
    thought: bool | None = False
    """Whether the text is reasoning."""
    thought_signature: str | None = None
    """Signature that names the turn."""
    function_call: GeminiFunctionCall | None = None
    """Function call."""
    function_response: FunctionResponse | None = None
    """Result of a function call."""
    inline_data: Blob | None = None
    """Inline media."""
    file_data: FileData | None = None
    """Media by URL."""
    executable_code: Any = None
    """Code of Google's code execution."""
    code_execution_result: Any = None
    """Result of Google's code execution."""
    tool_call: Any = None
    """Call of a tool that Google runs."""
    tool_response: Any = None
    """Result of a tool that Google runs."""


class Content(Wire):
    """Message of a request."""

    parts: GeminiPart | list[GeminiPart] | None = None
    """Part or parts of the message."""
    role: str | None = None
    """Role: `model`, `user`, `function`, `tool` or `system`; None is `user`."""


class CallingConfig(Wire):
    """Function calling mode."""

    mode: str | None = None
    """Mode: `AUTO`, `ANY`, `NONE` or `VALIDATED`."""
    allowed_function_names: list[str] | None = None
    """Functions that the reply may call; None for all."""


class ThinkingConfig(Wire):
    """Reasoning parameters."""

    include_thoughts: bool | None = None
    """Whether to return reasoning."""
    thinking_budget: int | None = None
    """Maximum of reasoning tokens; 0 disables reasoning, -1 leaves it to the model."""
    thinking_level: str | None = None
    """Reasoning effort, such as `high`."""


class GenerationConfig(RequestedSampling, kw_only=True, rename="camel"):
    """Generation parameters; None if the request does not set a field."""

    max_output_tokens: int | None = None
    """Token limit of the reply."""
    stop_sequences: list[str] | None = None
    """Stop strings."""
    response_mime_type: str | None = None
    """Media type of the reply, such as `application/json`."""
    response_schema: Any = None
    """Schema of the reply, in Google's form."""
    response_json_schema: Any = None
    """JSON schema of the reply."""
    response_format: Any = None
    """Output format, in the form of newer clients."""
    thinking_config: dict[str, Any] | None = None
    """Reasoning parameters; see `ThinkingConfig`."""
    response_logprobs: bool | None = False
    """Whether to return log-probabilities."""
    logprobs: int | None = None
    """Top log-probabilities per token."""
    # Repeated here so that `rename` applies.
    top_p: float | None = None
    """See `RequestedSampling`."""
    top_k: float | None = None
    """See `RequestedSampling`."""
    presence_penalty: float | None = None
    """See `RequestedSampling`."""
    frequency_penalty: float | None = None
    """See `RequestedSampling`."""
    repetition_penalty: float | None = None
    """See `RequestedSampling`."""
    min_p: float | None = None
    """See `RequestedSampling`."""
    logit_bias: dict[str, float] | None = None
    """See `RequestedSampling`."""


class GeminiBody(Wire):
    """Body of a generateContent or countTokens request."""

    contents: Content | list[Content] | None = None
    """Conversation."""
    system_instruction: Content | str | None = None
    """System prompt."""
    tools: list[dict[str, Any]] | None = None
    """Tools."""
    tool_config: dict[str, Any] | None = None
    """Tool configuration, with a `CallingConfig`."""
    generation_config: Raw = Raw(b"null")
    """Generation parameters, decoded later."""
    generate_content_request: Raw = Raw(b"")
    """Whole request inside a countTokens request."""
    return_token_ids: bool | None = False
    """Whether to return token ids."""


class Declaration(Wire):
    """Function declaration of a tool."""

    name: str
    """Function name."""
    description: str | None = None
    """Description for the model."""
    parameters: dict[str, Any] | None = None
    """Schema of the arguments, in Google's form."""
    parameters_json_schema: dict[str, Any] | None = None
    """JSON schema of the arguments."""


WHAT = "a generateContent request"
BODY = BodyReader("gemini", GeminiBody, WHAT, spelled=camel_name)
CONFIG = BodyReader("gemini", GenerationConfig, f"{WHAT}: generationConfig", "generationConfig.", camel_name)
# Names in objects that are decoded as plain dicts.
_READ = ("function_declarations", "function_calling_config")
_STRUCTS = (
    GeminiFunctionCall,
    Blob,
    FileData,
    FunctionResponse,
    GeminiPart,
    Content,
    CallingConfig,
    ThinkingConfig,
    GenerationConfig,
    GeminiBody,
    Declaration,
)
# All field names with a snake-case spelling, derived from the structs. Other
# names are normalised when they are looked up.
_SNAKE_NAMES = sorted({n for struct in _STRUCTS for n in struct.__struct_fields__ if "_" in n} | {*_READ})
SNAKE = re.compile(rf'"(?:{"|".join(_SNAKE_NAMES)})"\s*:'.encode())
ANY = msgspec.json.Decoder()
# Client data, whose keys are kept.
OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}


def read_body_and_config(raw: RawRequest) -> tuple[GeminiBody, GenerationConfig, tuple[str, ...]]:
    """Decodes body and generationConfig, and returns the tags of ignored parameters. A countTokens request
    contains the body.
    """
    body = raw.body
    if SNAKE.search(body):
        body = encode(camel(read(ANY, body, WHAT)))
    wire, tags = BODY.read(raw, body)
    if inner := bytes(wire.generate_content_request):
        wire, tags = BODY.read(raw, inner)
    if (config_json := bytes(wire.generation_config)) == b"null":
        return wire, GenerationConfig(), tags
    config, more = CONFIG.read(raw, config_json)
    return wire, config, tags + more


def camel(value: Any) -> Any:
    """Converts field names to camel case."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    camel_case = {camel_name(key): item for key, item in value.items()}
    return {key: item if key in OPAQUE else camel(item) for key, item in camel_case.items()}


# Keys of a function result with a single value.
WRAPPERS = ("result", "output")
TYPES = {name.upper(): name for name in ("string", "number", "integer", "boolean", "array", "object", "null")}
# Snake-case names of Google's Python clients; all others are equal.
SCHEMA_NAMES = {
    **{
        name: camel_name(name)
        for name in (
            "additional_properties",
            "any_of",
            "max_items",
            "max_length",
            "max_properties",
            "min_items",
            "min_length",
            "min_properties",
            "property_ordering",
        )
    },
    "defs": "$defs",
    "ref": "$ref",
}
LOGPROBS = "generationConfig.logprobs"
NAMES = {"must_call": CALLING, "top_logprobs": LOGPROBS}
THINKING = "generationConfig.thinkingConfig"
URL_SAFE = str.maketrans("-_", "+/")


def decode(raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, config, ignored = read_body_and_config(raw)
    _check(wire, config)
    if wire.tool_config:
        ignored += check_within("gemini", "toolConfig", wire.tool_config, ignore=raw.ignore)
        if isinstance(calls := wire.tool_config.get("functionCallingConfig"), dict):
            ignored += check_within("gemini", CALLING, calls, ignore=raw.ignore)
    reasoning, names, thinking = NO_REASONING, NAMES, config.thinking_config
    if thinking:
        ignored += check_within("gemini", THINKING, thinking, ignore=raw.ignore)
        reasoning, names = _reasoning(thinking)
        names = {**NAMES, **names}
    model = raw.parts.get("model", "")
    tools, tags = _tools(wire.tools or [])
    calling = checked(_choice(wire, tools), tools, CALLING) if wire.tool_config else request_options.AUTO
    output, output_name = _output(config)
    reader = _ContentReader()
    messages = reader.messages(wire)
    request = ModelRequest(
        dialect="gemini",
        model=model,
        messages=messages,
        tools=tools,
        may_call=calling.may_call,
        must_call=calling.must_call,
        callable_tools=calling.callable_tools,
        output=output,
        reasoning=reasoning,
        names={**names, "output": output_name} if output else names,
        top_logprobs=config.logprobs or 0,
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        stream=raw.parts.get("method") == "streamGenerateContent",
        requested_sampling=requested_sampling(config),
        hints=frozenset(reader.hints),
        retry=is_retry(raw),
        tags=tuple(dict.fromkeys([*tags, *reader.tags, *ignored])),
        images=reader.gallery.images,
        image_places=reader.gallery.places,
    )
    echo = {"sse": raw.query.get("alt") == "sse"}
    options = ResponseOptions(
        model=model,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs or 0,
        token_ids=bool(wire.return_token_ids),
        reasoning=bool(thinking and thinking.get("includeThoughts")),
        echo=echo,
    )
    return request, options


def _check(wire: GeminiBody, config: GenerationConfig) -> None:
    if not wire.contents:
        raise bad_request("contents is empty", "send at least one content")
    if config.max_output_tokens is not None and config.max_output_tokens < 1:
        raise bad_request(f"maxOutputTokens={config.max_output_tokens} must be at least 1")
    if check_count(config.logprobs, LOGPROBS) and not config.response_logprobs:
        raise bad_request(f"{LOGPROBS}={config.logprobs} needs responseLogprobs", "set it to true")


def _reasoning(thinking: Mapping[str, Any]) -> tuple[Reasoning, dict[str, str]]:
    """Budget 0 disables thinking; -1 leaves it to the model."""
    budget, level = thinking.get("thinkingBudget"), thinking.get("thinkingLevel")
    if budget is None and level is None:
        return NO_REASONING, {}
    parameters = ReasoningParameters()
    if budget == 0:
        parameters.switch(False, f"{THINKING}.thinkingBudget")
    elif budget != -1:
        parameters.budget(budget, f"{THINKING}.thinkingBudget")
    if level is not None and level != "THINKING_LEVEL_UNSPECIFIED":
        parameters.effort(level.lower() if isinstance(level, str) else level, f"{THINKING}.thinkingLevel")
    return parameters.build()


def _choice(wire: GeminiBody, tools: Sequence[Tool]) -> ToolChoice:
    """VALIDATED leaves the choice to the model, and constrains its calls to the declarations."""
    calling = (wire.tool_config or {}).get("functionCallingConfig")
    if not calling:
        return request_options.AUTO
    try:
        config = msgspec.convert(calling, CallingConfig)
    except msgspec.ValidationError as error:
        raise bad_request(f"{CALLING}: {error}") from error
    mode, names = (config.mode or "AUTO").upper(), tuple(config.allowed_function_names or ())
    if names and mode not in ("ANY", "VALIDATED"):
        raise bad_request(f"{CALLING}.allowedFunctionNames is for the modes ANY and VALIDATED, not {mode}")
    if mode == "ANY":
        return ToolChoice(must_call=True, callable_tools=names)
    if mode == "VALIDATED":
        return ToolChoice(callable_tools=names or tuple(tool.name for tool in tools))
    if mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
        raise bad_request(f"{CALLING}.mode {mode!r} is not one of AUTO, ANY, NONE, VALIDATED")
    return request_options.NONE if mode == "NONE" else request_options.AUTO


def _output(config: GenerationConfig) -> tuple[OutputFormat | None, str]:
    if config.response_format is not None:
        return _new_format(config.response_format)
    where, mime = "generationConfig", (config.response_mime_type or "text/plain").lower()
    if mime not in ("text/plain", "application/json", "text/x.enum"):
        raise bad_request(
            f"{where}.responseMimeType {mime!r} is not served", "ask for text/plain or application/json"
        )
    if config.response_json_schema is not None:
        if config.response_schema is not None:
            raise bad_request(
                f"{where}.responseSchema and responseJsonSchema are both there", "send one of them"
            )
        return json_schema(
            config.response_json_schema, f"{where}.responseJsonSchema"
        ), f"{where}.responseJsonSchema"
    name = f"{where}.responseSchema"
    if config.response_schema is None:
        if mime == "text/x.enum":
            raise bad_request(f"{where}.responseMimeType text/x.enum needs a responseSchema with an enum")
        return (JSON_OBJECT, f"{where}.responseMimeType") if mime == "application/json" else (None, "")
    if not isinstance(config.response_schema, dict):
        raise bad_request(f"{name} is not an object", "send the schema as an object")
    schema = _schema(config.response_schema)
    return (
        choice(schema.get("enum"), f"{name}.enum") if mime == "text/x.enum" else json_schema(schema, name)
    ), name


def _new_format(value: Any) -> tuple[OutputFormat | None, str]:
    name = "generationConfig.responseFormat"
    formats = value if isinstance(value, list) else [value]
    texts = [form.get("text") for form in formats if isinstance(form, dict) and set(form) == {"text"}]
    if len(texts) != len(formats) or len(texts) > 1 or not all(isinstance(text, dict) for text in texts):
        raise bad_request(f"{name} is not one text format", "ask for one format of text")
    text: dict[str, Any] = (texts[0] if texts else None) or {}
    mime = str(text.get("mimeType") or "text/plain").lower().replace("_", "/")
    if mime == "text/plain":
        return None, name
    if mime != "application/json":
        raise bad_request(f"{name}: type {mime!r} is not served", "ask for text/plain or application/json")
    schema = text.get("schema")
    return (JSON_OBJECT if schema is None else json_schema(schema, f"{name}.schema")), name


def _tools(wires: Sequence[Mapping[str, Any]]) -> tuple[tuple[Tool, ...], list[str]]:
    tools: list[Tool] = []
    tags: list[str] = []
    for n, wire in enumerate(wires):
        try:
            declared = msgspec.convert(wire.get("functionDeclarations") or [], list[Declaration])
        except msgspec.ValidationError as error:
            raise bad_request(f"tools[{n}].functionDeclarations: {error}") from error
        tools += [_tool(declaration) for declaration in declared]
        tags += [f"{TOOLS_TAG}.{kind}" for kind in wire if kind != "functionDeclarations"]
    return tuple(tools), tags


def _tool(wire: Declaration) -> Tool:
    """Converts a declaration to the Chat shape, so that all dialects share roots."""
    parameters = wire.parameters_json_schema
    if parameters is None:
        parameters = _schema(wire.parameters or {})
    described = {} if wire.description is None else {"description": wire.description}
    function = {"name": wire.name, **described, "parameters": parameters}
    return Tool(wire.name, wire.description or "", parameters, {"type": "function", "function": function})


def _schema(google_schema: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a Google schema to JSON schema, with lower-case types in first place."""
    kind = google_schema.get("type")
    schema: dict[str, Any] = (
        {} if kind is None else {"type": TYPES.get(kind, kind) if isinstance(kind, str) else kind}
    )
    for spelled, value in google_schema.items():
        key = SCHEMA_NAMES.get(spelled, spelled)
        if key in ("properties", "$defs") and isinstance(value, dict):
            schema[key] = {name: _schema(v) if isinstance(v, dict) else v for name, v in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            schema[key] = [_schema(v) if isinstance(v, dict) else v for v in value]
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            schema[key] = _schema(value)
        elif key != "type":
            schema[key] = value
    return schema


class _ContentReader:
    """Reads the contents of a request, and collects images, turn hints and tags."""

    def __init__(self) -> None:
        self.gallery = Gallery()
        self.hints: set[str] = set()
        self.tags: list[str] = []
        self._asked: list[ToolCall] = []

    def messages(self, wire: GeminiBody) -> tuple[Message, ...]:
        messages: list[Message] = []
        if system := self._system(wire.system_instruction):
            messages.append(Message(role="system", content=system))
        turn: list[GeminiPart] | None = None
        contents = wire.contents if isinstance(wire.contents, list) else [wire.contents or Content()]
        for index, content in enumerate(contents):
            where = f"contents[{index}]"
            if content.role == "model":
                turn = [*(turn or ()), *_parts(content)]
                continue
            if turn is not None:
                messages.append(self._model(turn, f"contents[{index - 1}]"))
                turn = None
            messages += self._user(content, where)
        if turn is not None:
            messages.append(self._model(turn, f"contents[{len(contents) - 1}]"))
            self.tags.append("unenforced:prefill")
        return tuple(messages)

    def _system(self, instruction: Content | str | None) -> str:
        if isinstance(instruction, str) or instruction is None:
            return instruction or ""
        return self._text(_parts(instruction), "systemInstruction")[0]

    def _user(self, content: Content, where: str) -> list[Message]:
        if content.role not in (None, "", "user", "function", "tool", "system"):
            raise bad_request(f"{where}: role {content.role!r} is not one of model, user")
        parts = _parts(content)
        answers = [part.function_response for part in parts if part.function_response]
        messages = [self._response(answer, where) for answer in answers]
        if len(answers) < len(parts) or not parts:
            text, images = self._text([part for part in parts if not part.function_response], where)
            role = "system" if content.role == "system" else "user"
            messages.append(Message(role=role, content=text, images=images))
        return messages

    def _response(self, answer: FunctionResponse, where: str) -> Message:
        text, images = _returned(answer.response), ()
        if answer.parts:
            more, placed = self._text(answer.parts, where)
            images = tuple([ImageRef(image.digest, image.offset + len(text)) for image in placed])
            text += more
        return Message(role="tool", content=text, tool_call_id=self._call_id(answer), images=images)

    def _call_id(self, answer: FunctionResponse) -> str:
        for call in self._asked:
            if call.id == answer.id if answer.id else call.name == answer.name:
                self._asked.remove(call)
                return call.id
        return answer.id or ""

    def _model(self, parts: Sequence[GeminiPart], where: str) -> Message:
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        rest: list[GeminiPart] = []
        for part in parts:
            if turn_id := unseal((part.thought_signature or "").translate(URL_SAFE)):
                self.hints.add(turn_id)
            if part.function_call:
                call = part.function_call
                calls.append(ToolCall(call.id or "", call.name, as_arguments(call.args, where)))
            elif part.thought:
                reasoning.append(part.text or "")
            elif part.text is not None or not part.thought_signature:
                rest.append(part)
        text, images = self._text(rest, where)
        self._asked = list(calls)
        thought = "".join(reasoning)
        return Message(
            role="assistant", content=text, reasoning=thought, tool_calls=tuple(calls), images=images
        )

    def _text(self, parts: Sequence[GeminiPart], where: str) -> tuple[str, tuple[ImageRef, ...]]:
        text = ""
        images: list[ImageRef] = []
        for part in parts:
            if part.text is not None:
                text += part.text
            elif blob := part.inline_data:
                if blob.mime_type.startswith("text/"):
                    text += _plain(blob, where)
                else:
                    images.append(self._image(blob, len(text), where))
            elif part.file_data:
                images.append(self._file(part.file_data, len(text), where))
            else:
                self._drop(part, where)
        return text, tuple(images)

    def _image(self, blob: Blob, offset: int, where: str) -> ImageRef:
        if not blob.mime_type.startswith("image/"):
            raise bad_request(f"{where}: inlineData of type {blob.mime_type!r}", "send text or images")
        return self.gallery.from_base64(blob.data.translate(URL_SAFE), blob.mime_type, offset, where)

    def _file(self, file: FileData, offset: int, where: str) -> ImageRef:
        if not file.mime_type.startswith("image/"):
            raise bad_request(f"{where}: fileData of type {file.mime_type!r}", "send text or images")
        return self.gallery.from_url(file.file_uri, offset, where)

    def _drop(self, part: GeminiPart, where: str) -> None:
        names = ("executable_code", "code_execution_result", "tool_call", "tool_response")
        served = [name for name in names if getattr(part, name) is not None]
        if not served:
            raise bad_request(
                f"{where} has a part with nothing known in it", "send text, images or functions"
            )
        self.tags.append(f"unenforced:part:{camel_name(served[0])}")


def _parts(content: Content) -> list[GeminiPart]:
    return [content.parts] if isinstance(content.parts, GeminiPart) else content.parts or []


def _plain(blob: Blob, where: str) -> str:
    try:
        return base64.b64decode(blob.data.translate(URL_SAFE), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where}: inlineData is not UTF-8 text in base64: {error}") from error


def _returned(response: Any) -> str:
    """Returns a function result as Chat clients send it: text, or JSON."""
    if isinstance(response, dict) and len(response) == 1:
        (key,) = response
        response = response[key] if key in WRAPPERS else response
    if response is None:
        return ""
    return response if isinstance(response, str) else encode(response).decode()


STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Gemini:
    """Gemini dialect."""

    name = "gemini"

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, raw: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
        try:
            return decode(raw)
        except RecursionError as error:
            raise bad_request("the request is nested too deeply to be read") from error

    def encode_error(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def response(
        self, started: CallStarted, finished: CallFinished, options: ResponseOptions
    ) -> dict[str, Any]:
        reply = finished.reply
        signature = seal(started.turn_id)
        parts = [thought(reply.reasoning, signature)] if reply.reasoning and options.reasoning else []
        if reply.content or not reply.tool_calls:
            parts.append({"text": reply.content})
        parts += [function_call(call.id, call.name, call.arguments, signature) for call in reply.tool_calls]
        return chunk(parts, started, options, ending(finished, options, self._tokenizer), finished)

    def stream(self, started: CallStarted, options: ResponseOptions) -> GeminiStream:
        return GeminiStream(started, options, self._tokenizer)


def error_body(error: ApiError) -> dict[str, Any]:
    text = error.text
    if error.sizes:
        prompt, limit = error.sizes
        text = f"The input token count ({prompt}) exceeds the maximum number of tokens allowed ({limit})."
    return {"error": {"code": error.status, "message": text, "status": STATUS.get(error.status, "INTERNAL")}}


def thought(text: str, signature: str) -> dict[str, Any]:
    return {"text": text, "thought": True, "thoughtSignature": signature}


def function_call(id: str, name: str, arguments: str, signature: str) -> dict[str, Any]:
    call = {"id": id, "name": name, "args": Raw(as_object(arguments).encode())}
    return {"functionCall": call, "thoughtSignature": signature}


def chunk(
    parts: Sequence[dict[str, Any]],
    started: CallStarted,
    options: ResponseOptions,
    candidate: dict[str, Any] | None = None,
    finished: CallFinished | None = None,
) -> dict[str, Any]:
    content = {"role": "model", "parts": parts}
    response: dict[str, Any] = {
        "candidates": [{"content": content, "index": 0, **(candidate or {})}],
        "modelVersion": options.model,
        "responseId": item_id("resp", started.turn_id),
        "usageMetadata": _usage(
            finished.prompt_tokens, len(finished.turn.token_ids), finished.reasoning_tokens
        )
        if finished
        else _usage(len(started.prompt_ids), 0, 0),
    }
    if finished and options.token_ids:
        response |= {"prompt_token_ids": started.prompt_ids, "token_ids": finished.turn.token_ids}
    return response


def _usage(prompt: int, sampled: int, thought: int) -> dict[str, int]:
    """Reasoning tokens are not part of the candidates' tokens."""
    counts = {"candidatesTokenCount": sampled - thought} if sampled else {}
    counts |= {"thoughtsTokenCount": thought} if thought else {}
    return {"promptTokenCount": prompt, **counts, "totalTokenCount": prompt + sampled}


def ending(finished: CallFinished, options: ResponseOptions, tokenizer: ChatTokenizer) -> dict[str, Any]:
    stopped = finished.turn.finish_reason is FinishReason.STOP or finished.stop is not None
    fields: dict[str, Any] = {"finishReason": "STOP" if stopped else "MAX_TOKENS"}
    if options.logprobs:
        sampled = zip(finished.turn.token_ids, finished.turn.logprobs, strict=True)
        total = sum(finished.turn.logprobs)
        result: dict[str, Any] = {"logProbabilitySum": total}
        result["chosenCandidates"] = [_candidate(*pair, tokenizer) for pair in sampled]
        if options.top_logprobs and finished.scores:
            places = zip(finished.turn.token_ids, finished.turn.logprobs, finished.scores.top, strict=True)
            tops = [recorded(top[: options.top_logprobs], token, p) for token, p, top in places]
            result["topCandidates"] = [
                {"candidates": [_candidate(*pair, tokenizer) for pair in top]} for top in tops
            ]
        fields["avgLogprobs"] = total / max(1, len(finished.turn.logprobs))
        fields["logprobsResult"] = result
    return fields


def _candidate(token: int, logprob: float, tokenizer: ChatTokenizer) -> dict[str, Any]:
    text = tokenizer.piece(token).decode(errors="replace")
    return {"token": text, "tokenId": token, "logProbability": logprob}


class GeminiStream:
    """Encodes a response as chunks: server-sent events or one JSON array."""

    def __init__(self, started: CallStarted, options: ResponseOptions, tokenizer: ChatTokenizer) -> None:
        self._started = started
        self._options = options
        self._tokenizer = tokenizer
        self._sse = bool(options.echo.get("sse"))
        self.content_type = EVENTS if self._sse else b"application/json"
        self._signature = seal(started.turn_id)
        self._call = ToolStart(0, "")
        self._arguments: list[str] = []
        self._begun = False

    def begin(self) -> bytes:
        return b"" if self._sse else b"["

    def delta(self, delta: CallDelta) -> bytes:
        parts = [part for event in delta.events if (part := self._part(event))]
        return self._write(chunk(parts, self._started, self._options)) if parts else b""

    def end(self, finished: CallFinished) -> bytes:
        # Clients treat a chunk without parts as an error.
        fields = ending(finished, self._options, self._tokenizer)
        last = self._write(chunk([{"text": ""}], self._started, self._options, fields, finished))
        return last if self._sse else last + b"]\n"

    def error(self, error: ApiError) -> bytes:
        return self._write(error_body(error)) if self._sse else self._write(error_body(error)) + b"]\n"

    def keepalive(self) -> bytes:
        """A blank line: Google's client parses comments as data."""
        return b"\n"

    def _write(self, value: object) -> bytes:
        if self._sse:
            return data(value)
        between = b",\n" if self._begun else b""
        self._begun = True
        return between + encode(value)

    def _part(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, TextDelta):
            return {"text": event.text}
        if isinstance(event, ReasoningDelta):
            return thought(event.text, self._signature) if self._options.reasoning else None
        if isinstance(event, ToolStart):
            self._call, self._arguments = event, []
        elif isinstance(event, ToolArguments):
            self._arguments.append(event.text)
        elif isinstance(event, ToolEnd):
            return function_call(self._call.id, self._call.name, "".join(self._arguments), self._signature)
        return None
