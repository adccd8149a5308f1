"""Gemini generateContent on the wire: the fields that are read, in camel or snake case."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw, Struct

from afield.gateway.dialects.base import encode, read
from afield.gateway.wishes import Wishing


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


class ToolConfig(Wire):
    function_calling_config: CallingConfig | None = None


class GenerationConfig(Wishing, kw_only=True, rename="camel"):
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = 1
    response_mime_type: str | None = None
    response_schema: Any = None
    response_json_schema: Any = None
    response_modalities: list[str] | None = None
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
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: str | None = None
    generate_content_request: Body | None = None
    return_token_ids: bool | None = False


class Declaration(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


DECODER = msgspec.json.Decoder(Body)
_TOOL = ("function_declarations",)  # the one name that is looked for in tools, which are read as they come
_STRUCTS = (
    FunctionCall,
    Blob,
    FileData,
    FunctionResponse,
    Part,
    Content,
    CallingConfig,
    ToolConfig,
    GenerationConfig,
    Body,
    Declaration,
)
# Every name of a field that has another spelling in snake case: no list to forget one in.
_SNAKE_NAMES = sorted({n for struct in _STRUCTS for n in struct.__struct_fields__ if "_" in n} | {*_TOOL})
SNAKE = re.compile(rf'"(?:{"|".join(_SNAKE_NAMES)})"\s*:'.encode())
ANY = msgspec.json.Decoder()
# Below these lies the client's own data, whose keys are not ours to respell.
OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema"}


def body_of(given: bytes) -> Body:
    """A request; where it wraps another, as in counting tokens, the one inside."""
    what = "a generateContent request"
    if SNAKE.search(given):
        given = encode(camel(read(ANY, given, what)))
    wire = read(DECODER, given, what)
    return wire.generate_content_request or wire


def camel(value: Any) -> Any:
    """The same with the names of fields in camel case; both are allowed on the wire."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {camel_name(key): item for key, item in value.items()}
    return {key: item if key in OPAQUE else camel(item) for key, item in named.items()}


def camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
