"""Gemini generateContent, the asking half: what a request says, as canonical messages.

Neighbouring model contents are one turn: clients keep a streamed answer as its chunks. A function
response is one tool message, joined to its call by id or, without one, by name in order. Field names
may be in camel or snake case, schema types in capitals. Tools that Google would run are dropped with a
tag; several candidates, cached contents and media other than text and images are refused.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from afield.chat import Tool
from afield.gateway.api_error import bad_request
from afield.gateway.dialects import tool_choice
from afield.gateway.dialects.base import TOOLS_TAG, RawRequest, ResponseOptions, asks_again, encode
from afield.gateway.dialects.gemini_wire import (
    Blob,
    Body,
    CallingConfig,
    Content,
    Declaration,
    FileData,
    FunctionResponse,
    GenerationConfig,
    Part,
    body_of,
    camel_name,
)
from afield.gateway.dialects.images import Gallery
from afield.gateway.dialects.json_arguments import as_arguments
from afield.gateway.dialects.logprobs import check_count
from afield.gateway.dialects.output_format import JSON_OBJECT, choice, json_schema
from afield.gateway.dialects.thinking import AskedReasoning
from afield.gateway.dialects.tool_choice import ToolChoice, checked
from afield.gateway.model_request import NO_REASONING, ModelRequest, OutputFormat, Reasoning
from afield.gateway.parameters import CALLING, check_within
from afield.gateway.requested_sampling import wishes
from afield.gateway.turn_ids import unseal
from afield.types import ImageRef, Message, ToolCall

# What a function is said to return when it returns one thing.
WRAPPERS = ("result", "output")
TYPES = {name.upper(): name for name in ("string", "number", "integer", "boolean", "array", "object", "null")}
# Google's schema in the spelling of its Python clients; other names are the same in both.
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


def decode(asked: RawRequest) -> tuple[ModelRequest, ResponseOptions]:
    wire, config, ignored = body_of(asked)
    _check(wire, config)
    if wire.tool_config:
        ignored += check_within("gemini", "toolConfig", wire.tool_config, ignore=asked.ignore)
        if isinstance(calls := wire.tool_config.get("functionCallingConfig"), dict):
            ignored += check_within("gemini", CALLING, calls, ignore=asked.ignore)
    reasoning, names, thinking = NO_REASONING, NAMES, config.thinking_config
    if thinking:
        ignored += check_within("gemini", THINKING, thinking, ignore=asked.ignore)
        reasoning, names = _reasoning(thinking)
        names = {**NAMES, **names}
    model = asked.parts.get("model", "")
    tools, tags = _tools(wire.tools or [])
    calling = checked(_choice(wire, tools), tools, CALLING) if wire.tool_config else tool_choice.AUTO
    output, form = _output(config)
    reader = _Reader()
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
        names={**names, "output": form} if output else names,
        top_logprobs=config.logprobs or 0,
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        stream=asked.parts.get("method") == "streamGenerateContent",
        wishes=wishes(config),
        hints=frozenset(reader.hints),
        retry=asks_again(asked),
        tags=tuple(dict.fromkeys([*tags, *reader.tags, *ignored])),
        images=reader.gallery.images,
        image_places=reader.gallery.places,
    )
    echo = {"sse": asked.query.get("alt") == "sse"}
    wish = ResponseOptions(
        model=model,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs or 0,
        token_ids=bool(wire.return_token_ids),
        reasoning=bool(thinking and thinking.get("includeThoughts")),
        echo=echo,
    )
    return request, wish


def _check(wire: Body, config: GenerationConfig) -> None:
    if not wire.contents:
        raise bad_request("contents is empty", "send at least one content")
    if config.max_output_tokens is not None and config.max_output_tokens < 1:
        raise bad_request(f"maxOutputTokens={config.max_output_tokens} must be at least 1")
    if check_count(config.logprobs, LOGPROBS) and not config.response_logprobs:
        raise bad_request(f"{LOGPROBS}={config.logprobs} needs responseLogprobs", "set it to true")


def _reasoning(thinking: Mapping[str, Any]) -> tuple[Reasoning, dict[str, str]]:
    """A budget of 0 is none, one of -1 leaves it to the model."""
    budget, level = thinking.get("thinkingBudget"), thinking.get("thinkingLevel")
    if budget is None and level is None:
        return NO_REASONING, {}
    asked = AskedReasoning()
    if budget == 0:
        asked.switch(False, f"{THINKING}.thinkingBudget")
    elif budget != -1:
        asked.budget(budget, f"{THINKING}.thinkingBudget")
    if level is not None and level != "THINKING_LEVEL_UNSPECIFIED":
        asked.effort(level.lower() if isinstance(level, str) else level, f"{THINKING}.thinkingLevel")
    return asked.made()


def _choice(wire: Body, tools: Sequence[Tool]) -> ToolChoice:
    """VALIDATED leaves the choice to the model, and holds its calls to what is declared."""
    given = (wire.tool_config or {}).get("functionCallingConfig")
    if not given:
        return tool_choice.AUTO
    try:
        config = msgspec.convert(given, CallingConfig)
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
    return tool_choice.NONE if mode == "NONE" else tool_choice.AUTO


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


def _new_format(given: Any) -> tuple[OutputFormat | None, str]:
    name = "generationConfig.responseFormat"
    formats = given if isinstance(given, list) else [given]
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
    """As a Chat client would write it, so that the same tools give the same root in both dialects."""
    parameters = wire.parameters_json_schema
    if parameters is None:
        parameters = _schema(wire.parameters or {})
    described = {} if wire.description is None else {"description": wire.description}
    function = {"name": wire.name, **described, "parameters": parameters}
    return Tool(wire.name, wire.description or "", parameters, {"type": "function", "function": function})


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """Google's schema as JSON schema: types in small letters, and first, where others write them."""
    kind = given.get("type")
    made: dict[str, Any] = (
        {} if kind is None else {"type": TYPES.get(kind, kind) if isinstance(kind, str) else kind}
    )
    for spelled, value in given.items():
        key = SCHEMA_NAMES.get(spelled, spelled)
        if key in ("properties", "$defs") and isinstance(value, dict):
            made[key] = {name: _schema(v) if isinstance(v, dict) else v for name, v in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            made[key] = [_schema(v) if isinstance(v, dict) else v for v in value]
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            made[key] = _schema(value)
        elif key != "type":
            made[key] = value
    return made


class _Reader:
    """Reads the contents of one request and keeps what they refer to: images, our marks, tags."""

    def __init__(self) -> None:
        self.gallery = Gallery()
        self.hints: set[str] = set()
        self.tags: list[str] = []
        self._asked: list[ToolCall] = []

    def messages(self, wire: Body) -> tuple[Message, ...]:
        said: list[Message] = []
        if system := self._system(wire.system_instruction):
            said.append(Message(role="system", content=system))
        turn: list[Part] | None = None
        contents = wire.contents if isinstance(wire.contents, list) else [wire.contents or Content()]
        for index, content in enumerate(contents):
            where = f"contents[{index}]"
            if content.role == "model":
                turn = [*(turn or ()), *_parts(content)]
                continue
            if turn is not None:
                said.append(self._model(turn, f"contents[{index - 1}]"))
                turn = None
            said += self._user(content, where)
        if turn is not None:
            said.append(self._model(turn, f"contents[{len(contents) - 1}]"))
            self.tags.append("unenforced:prefill")
        return tuple(said)

    def _system(self, given: Content | str | None) -> str:
        if isinstance(given, str) or given is None:
            return given or ""
        return self._text(_parts(given), "systemInstruction")[0]

    def _user(self, content: Content, where: str) -> list[Message]:
        if content.role not in (None, "", "user", "function", "tool", "system"):
            raise bad_request(f"{where}: role {content.role!r} is not one of model, user")
        parts = _parts(content)
        answers = [part.function_response for part in parts if part.function_response]
        said = [self._response(answer, where) for answer in answers]
        if len(answers) < len(parts) or not parts:
            text, images = self._text([part for part in parts if not part.function_response], where)
            role = "system" if content.role == "system" else "user"
            said.append(Message(role=role, content=text, images=images))
        return said

    def _response(self, answer: FunctionResponse, where: str) -> Message:
        text, images = _returned(answer.response), ()
        if answer.parts:
            more, placed = self._text(answer.parts, where)
            images = tuple([ImageRef(image.digest, image.at + len(text)) for image in placed])
            text += more
        return Message(role="tool", content=text, tool_call_id=self._call_id(answer), images=images)

    def _call_id(self, answer: FunctionResponse) -> str:
        for call in self._asked:
            if call.id == answer.id if answer.id else call.name == answer.name:
                self._asked.remove(call)
                return call.id
        return answer.id or ""

    def _model(self, parts: Sequence[Part], where: str) -> Message:
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        rest: list[Part] = []
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

    def _text(self, parts: Sequence[Part], where: str) -> tuple[str, tuple[ImageRef, ...]]:
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

    def _image(self, blob: Blob, at: int, where: str) -> ImageRef:
        if not blob.mime_type.startswith("image/"):
            raise bad_request(f"{where}: inlineData of type {blob.mime_type!r}", "send text or images")
        return self.gallery.from_base64(blob.data.translate(URL_SAFE), blob.mime_type, at, where)

    def _file(self, given: FileData, at: int, where: str) -> ImageRef:
        if not given.mime_type.startswith("image/"):
            raise bad_request(f"{where}: fileData of type {given.mime_type!r}", "send text or images")
        return self.gallery.from_url(given.file_uri, at, where)

    def _drop(self, part: Part, where: str) -> None:
        names = ("executable_code", "code_execution_result", "tool_call", "tool_response")
        served = [name for name in names if getattr(part, name) is not None]
        if not served:
            raise bad_request(
                f"{where} has a part with nothing known in it", "send text, images or functions"
            )
        self.tags.append(f"unenforced:part:{camel_name(served[0])}")


def _parts(content: Content) -> list[Part]:
    return [content.parts] if isinstance(content.parts, Part) else content.parts or []


def _plain(blob: Blob, where: str) -> str:
    try:
        return base64.b64decode(blob.data.translate(URL_SAFE), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where}: inlineData is not UTF-8 text in base64: {error}") from error


def _returned(response: Any) -> str:
    """What the function returned, as a Chat client would say it: text as it is, the rest as JSON."""
    if isinstance(response, dict) and len(response) == 1:
        (key,) = response
        response = response[key] if key in WRAPPERS else response
    if response is None:
        return ""
    return response if isinstance(response, str) else encode(response).decode()
