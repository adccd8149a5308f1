"""The parameters of requests in the types of the SDKs that are installed, by dialect, as JSON.

Runs in any environment, without afield: `python sdk_parameters.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

Found = dict[str, set[str]]


def main() -> None:
    sys.stdout.write(json.dumps({dialect: sorted(names) for dialect, names in installed().items()}))


def installed() -> Found:
    found: Found = {}
    for package, read in (
        ("openai", openai),
        ("anthropic", anthropic),
        ("google.genai", genai),
        ("vllm", vllm),
    ):
        if _spec(package) is not None:
            for dialect, names in read().items():
                found.setdefault(dialect, set()).update(names)
    return found


def _spec(package: str) -> Any:
    try:
        return importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None


def _fields(*types: Any, under: str = "") -> set[str]:
    """Of TypedDicts, and of unions of them."""
    members = [member for kind in types for member in (get_args(kind) or (kind,))]
    return {f"{under}{name}" for member in members for name in get_type_hints(member)}


def openai() -> Found:
    from openai.types import completion_create_params as completions
    from openai.types.chat import ChatCompletionStreamOptionsParam
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import ResponseTextConfigParam
    from openai.types.responses import response_create_params as responses
    from openai.types.shared_params import Reasoning

    options = _fields(ChatCompletionStreamOptionsParam, under="stream_options.")
    return {
        "chat": _fields(chat.CompletionCreateParamsStreaming) | options,
        "completions": _fields(completions.CompletionCreateParamsStreaming) | options,
        "responses": _fields(responses.ResponseCreateParamsStreaming)
        | _fields(responses.StreamOptions, under="stream_options.")
        | _fields(Reasoning, under="reasoning.")
        | _fields(ResponseTextConfigParam, under="text."),
    }


def anthropic() -> Found:
    from anthropic import types
    from anthropic.types import beta
    from anthropic.types.beta import message_create_params as beta_params

    asked = _fields(
        types.message_create_params.MessageCreateParamsStreaming,
        types.message_count_tokens_params.MessageCountTokensParams,
        beta_params.MessageCreateParamsStreaming,
    )
    asked |= _fields(types.ThinkingConfigParam, under="thinking.")
    asked |= _fields(types.ToolChoiceParam, under="tool_choice.")
    for holder, name in ((types, "OutputConfigParam"), (beta, "BetaOutputConfigParam")):
        if hasattr(holder, name):
            asked |= _fields(getattr(holder, name), under="output_config.")
    return {"anthropic": asked}


# What the client does itself, and does not send.
GENAI_ONLY = {
    "http_options",
    "should_return_http_response",
    "automatic_function_calling",
    "automatic_continuation",
}
GENAI_TOP = {
    "system_instruction",
    "tools",
    "tool_config",
    "safety_settings",
    "cached_content",
    "labels",
    "service_tier",
    "store",
    "model_armor_config",
    "continuation_token",
}


def genai() -> Found:
    from google.genai import types

    config = set(types.GenerateContentConfig.model_fields) - GENAI_ONLY
    inner = (config - GENAI_TOP) | set(types.GenerationConfig.model_fields)
    names = {_camel(name) for name in config & GENAI_TOP} | {"contents", "model"}
    for under, fields in (
        ("generationConfig", inner),
        ("generationConfig.thinkingConfig", types.ThinkingConfig.model_fields),
        ("toolConfig", types.ToolConfig.model_fields),
        ("toolConfig.functionCallingConfig", types.FunctionCallingConfig.model_fields),
    ):
        names |= {f"{under}.{_camel(name)}" for name in fields}
    return {"gemini": names}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


VLLM = {
    "chat": ("openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    "completions": ("openai/completion/protocol.py", "CompletionRequest"),
    "responses": ("openai/responses/protocol.py", "ResponsesRequest"),
    "anthropic": ("anthropic/protocol.py", "AnthropicMessagesRequest"),
}


def vllm() -> Found:
    """Read from its source, which takes no import of torch."""
    spec = _spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    found: Found = {}
    for dialect, (file, name) in VLLM.items():
        found[dialect] = set(_declared(root / "entrypoints" / file, name))
    options = _declared(root / "entrypoints" / "generate" / "base" / "protocol.py", "StreamOptions")
    outputs = _declared(root / "sampling_params.py", "StructuredOutputsParams")
    for dialect in ("chat", "completions"):
        found[dialect] |= {f"stream_options.{option}" for option in options}
        found[dialect] |= {f"structured_outputs.{output}" for output in outputs}
    return found


def _declared(file: Path, name: str) -> list[str]:
    tree = ast.parse(file.read_text())
    (made,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    fields = [node.target.id for node in made.body if isinstance(node, ast.AnnAssign)]
    return [field for field in fields if not field.startswith("_")]


if __name__ == "__main__":
    main()
