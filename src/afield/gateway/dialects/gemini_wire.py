"""Gemini generateContent on the wire: the fields that are read, in camel or snake case."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from afield.gateway.dialects.base import RawRequest, encode, read
from afield.gateway.dialects.request_body import Reading
from afield.gateway.requested_sampling import RequestedSampling


def camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


class Wire(Struct, rename="camel"):
    pass


class FunctionCall(Wire):
    name: str = ""
    args: Raw = Raw(b"{}")
    id: str | None = None


class Blob(Wire):
    data: str = ""
    mime_type: str = ""


class FileData(Wire):
    file_uri: str = ""
    mime_type: str = ""


class FunctionResponse(Wire):
    name: str = ""
    response: Any = None
    id: str | None = None
    parts: list[Part] | None = None


class Part(Wire):
    text: str | None = None
    thought: bool | None = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    executable_code: Any = None
    code_execution_result: Any = None
    tool_call: Any = None
    tool_response: Any = None


class Content(Wire):
    parts: Part | list[Part] | None = None
    role: str | None = None


class CallingConfig(Wire):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ThinkingConfig(Wire):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(RequestedSampling, kw_only=True, rename="camel"):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    response_mime_type: str | None = None
    response_schema: Any = None
    response_json_schema: Any = None
    response_format: Any = None
    thinking_config: dict[str, Any] | None = None
    response_logprobs: bool | None = False
    logprobs: int | None = None
    # Named again, so that they are renamed too.
    top_p: float | None = None
    top_k: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None


class Body(Wire):
    contents: Content | list[Content] | None = None
    system_instruction: Content | str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_config: dict[str, Any] | None = None
    generation_config: Raw = Raw(b"null")
    generate_content_request: Raw = Raw(b"")
    return_token_ids: bool | None = False


class Declaration(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


WHAT = "a generateContent request"
BODY = Reading("gemini", Body, WHAT, spelled=camel_name)
CONFIG = Reading("gemini", GenerationConfig, f"{WHAT}: generationConfig", "generationConfig.", camel_name)
# Names that are looked for in objects that are read as they come.
_READ = ("function_declarations", "function_calling_config")
_STRUCTS = (
    FunctionCall,
    Blob,
    FileData,
    FunctionResponse,
    Part,
    Content,
    CallingConfig,
    ThinkingConfig,
    GenerationConfig,
    Body,
    Declaration,
)
# Every name of a field that has another spelling in snake case: no list to forget one in. What the table
# alone has is respelled when it is looked up.
_SNAKE_NAMES = sorted({n for struct in _STRUCTS for n in struct.__struct_fields__ if "_" in n} | {*_READ})
SNAKE = re.compile(rf'"(?:{"|".join(_SNAKE_NAMES)})"\s*:'.encode())
ANY = msgspec.json.Decoder()
# Below these lies the client's own data, whose keys are not ours to respell.
OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}


def body_of(asked: RawRequest) -> tuple[Body, GenerationConfig, tuple[str, ...]]:
    """A request and its configuration, and the tags of what was ignored. Where it wraps another, as in
    counting tokens, the one inside."""
    given = asked.body
    if SNAKE.search(given):
        given = encode(camel(read(ANY, given, WHAT)))
    wire, tags = BODY.read(asked, given)
    if inner := bytes(wire.generate_content_request):
        wire, tags = BODY.read(asked, inner)
    if (raw := bytes(wire.generation_config)) == b"null":
        return wire, GenerationConfig(), tags
    config, more = CONFIG.read(asked, raw)
    return wire, config, tags + more


def camel(value: Any) -> Any:
    """The same with the names of fields in camel case; both are allowed on the wire."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {camel_name(key): item for key, item in value.items()}
    return {key: item if key in OPAQUE else camel(item) for key, item in named.items()}
