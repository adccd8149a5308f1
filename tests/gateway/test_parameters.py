"""Parameters of requests: every one honoured, overridden with a tag, or refused by name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from afield.gateway.api_error import ApiError
from afield.gateway.dialects import RawRequest, responses_request
from afield.gateway.dialects import anthropic as anthropic_dialect
from afield.gateway.dialects import chat as chat_dialect
from afield.gateway.dialects import completions as completions_dialect
from afield.gateway.dialects import gemini as gemini_dialect
from afield.gateway.dialects.anthropic import Anthropic
from afield.gateway.dialects.chat import decode as chat
from afield.gateway.dialects.completions import decode as completions
from afield.gateway.dialects.gemini import decode as gemini
from afield.gateway.dialects.responses_request import decode as responses
from afield.gateway.model_request import ModelRequest, OutputFormat
from afield.gateway.parameters import TABLE, check
from support import random_requests, sdk_parameters
from support.paths import ROOT

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
JSON = OutputFormat("json_schema", TEXT)
FUNCTIONS = [{"name": name, "parameters": {}} for name in ("look", "ask")]
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER, "tools": [{"type": "function", "function": f} for f in FUNCTIONS]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi", "tools": [{"type": "function", **f} for f in FUNCTIONS]},
    "anthropic": {
        "messages": USER,
        "max_tokens": 9,
        "tools": [{"name": f["name"], "input_schema": {}} for f in FUNCTIONS],
    },
    "gemini": {"contents": [{"parts": [{"text": "Hi"}]}], "tools": [{"functionDeclarations": FUNCTIONS}]},
}
DECODERS = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "anthropic": Anthropic().decode,
    "gemini": gemini,
}


BODY_TYPES = {
    "chat": chat_dialect.ChatBody,
    "completions": completions_dialect.CompletionsBody,
    "responses": responses_request.ResponsesBody,
    "anthropic": anthropic_dialect.AnthropicBody,
    "gemini": gemini_dialect.GeminiBody,
}


def decoded(dialect: str, **body: Any) -> ModelRequest:
    raw_request = RawRequest("", msgspec.json.encode({**BODIES[dialect], **body}), {"model": "m"}, {}, {})
    return DECODERS[dialect](raw_request)[0]


def calling(**config: Any) -> dict[str, Any]:
    return {"toolConfig": {"functionCallingConfig": config}}


LOOK = {"type": "function", "function": {"name": "look"}}
FLAT = {"type": "function", "name": "look"}


@pytest.mark.parametrize(
    ("dialect", "body", "may", "must", "names"),
    [
        ("chat", {"tool_choice": "auto"}, True, False, ()),
        ("chat", {"tool_choice": "none"}, False, False, ()),
        ("chat", {"tool_choice": "required"}, True, True, ()),
        ("chat", {"tool_choice": LOOK}, True, True, ("look",)),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}}},
            True,
            False,
            ("look",),
        ),
        ("responses", {"tool_choice": "required"}, True, True, ()),
        ("responses", {"tool_choice": FLAT}, True, True, ("look",)),
        (
            "responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FLAT]}},
            True,
            True,
            ("look",),
        ),
        ("anthropic", {"tool_choice": {"type": "any"}}, True, True, ()),
        ("anthropic", {"tool_choice": {"type": "none"}}, False, False, ()),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "ask"}}, True, True, ("ask",)),
        ("gemini", calling(mode="ANY"), True, True, ()),
        ("gemini", calling(mode="ANY", allowedFunctionNames=["ask"]), True, True, ("ask",)),
        ("gemini", calling(mode="VALIDATED"), True, False, ("look", "ask")),
        ("gemini", calling(mode="NONE"), False, False, ()),
    ],
)
def test_tool_choice_is_decoded(
    dialect: str, body: dict[str, Any], may: bool, must: bool, names: tuple[str, ...]
) -> None:
    request = decoded(dialect, **body)
    assert (request.may_call, request.must_call, request.callable_tools) == (may, must, names)


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
    [
        ("chat", {"tool_choice": "required", "tools": []}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'"),
        ("chat", {"tool_choice": "whatever"}, "'whatever'"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "'web_search'"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "fly"}}, "'fly'"),
        ("gemini", calling(mode="ANY", allowedFunctionNames=["fly"]), "'fly'"),
        ("gemini", calling(mode="AUTO", allowedFunctionNames=["look"]), "allowedFunctionNames"),
    ],
)
def test_invalid_tool_choice_gets_400(dialect: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        decoded(dialect, **body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("anthropic", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_parallel_calls_can_be_disabled(dialect: str, body: dict[str, Any]) -> None:
    assert decoded(dialect).parallel_calls
    assert not decoded(dialect, **body).parallel_calls


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


GOOGLE = {"type": "OBJECT", "properties": {"b": {"type": "INTEGER"}, "a": {"type": "STRING"}}}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("dialect", "body", "output", "name"),
    [
        ("chat", {"response_format": {"type": "json_schema", "json_schema": FORM}}, JSON, "response_format"),
        (
            "chat",
            {"response_format": {"type": "json_object"}},
            OutputFormat("json_object"),
            "response_format",
        ),
        ("chat", {"response_format": {"type": "text"}}, None, ""),
        ("chat", {"response_format": {}, "structured_outputs": {"json_object": False}}, None, ""),
        ("chat", {"guided_json": SCHEMA}, JSON, "guided_json"),
        ("chat", {"guided_regex": "a+"}, OutputFormat("regex", "a+"), "guided_regex"),
        ("chat", {"guided_choice": ["a", "b"]}, OutputFormat("choice", '["a","b"]'), "guided_choice"),
        (
            "completions",
            {"guided_grammar": "root ::= x"},
            OutputFormat("grammar", "root ::= x"),
            "guided_grammar",
        ),
        (
            "completions",
            {"structured_outputs": {"json": SCHEMA}},
            JSON,
            "structured_outputs.json",
        ),
        ("responses", {"text": {"format": FORM}}, JSON, "text.format"),
        ("anthropic", {"output_config": {"format": FORM}}, JSON, "output_config.format"),
        ("anthropic", {"output_format": FORM}, JSON, "output_format"),
        (
            "gemini",
            config(responseMimeType="application/json"),
            OutputFormat("json_object"),
            "generationConfig.responseMimeType",
        ),
        (
            "gemini",
            config(responseMimeType="application/json", responseSchema=GOOGLE),
            JSON,
            "generationConfig.responseSchema",
        ),
        ("gemini", config(responseJsonSchema=SCHEMA), JSON, "generationConfig.responseJsonSchema"),
        (
            "gemini",
            config(responseMimeType="text/x.enum", responseSchema={"type": "STRING", "enum": ["a", "b"]}),
            OutputFormat("choice", '["a","b"]'),
            "generationConfig.responseSchema",
        ),
    ],
)
def test_output_format_is_decoded_in_every_dialect(
    dialect: str, body: dict[str, Any], output: OutputFormat | None, name: str
) -> None:
    request = decoded(dialect, **body)
    assert request.output == output
    assert output is None or request.names["output"] == name


@pytest.mark.parametrize(
    ("dialect", "body", "says"),
    [
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ("completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ("anthropic", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("gemini", config(responseMimeType="image/png"), "responseMimeType"),
        ("chat", {"response_format": {"json_schema": FORM}}, "response_format has no type"),
        ("chat", {"structured_outputs": {"json_object": 0}}, "structured_outputs.json_object"),
        ("completions", {"structured_outputs": {"json_object": "x"}}, "structured_outputs.json_object"),
        ("responses", {"text": {"format": "json_object"}}, "text.format is not an object"),
        ("responses", {"text": {"format": {"schema": SCHEMA}}}, "text.format has no type"),
        ("anthropic", {"output_config": {"format": "json"}}, "output_config.format is not an object"),
        ("anthropic", {"output_config": {"format": []}}, "output_config.format is not an object"),
        ("anthropic", {"output_format": {"schema": SCHEMA}}, "output_format has no type"),
    ],
)
def test_invalid_output_format_gets_400(dialect: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        decoded(dialect, **body)


# --- the table -----------------------------------------------------------------------------------


def test_every_parameter_of_the_installed_SDKs_is_in_the_table() -> None:
    found = sdk_parameters.installed()
    assert set(found) == set(TABLE)
    missing = {dialect: sorted(names - set(TABLE[dialect])) for dialect, names in found.items()}
    assert not any(missing.values()), missing


def test_honoured_parameters_are_decoded_or_without_effect() -> None:
    structs = {
        "": {name: body.__struct_encode_fields__ for name, body in BODY_TYPES.items()},
        "generationConfig.": {"gemini": gemini_dialect.GenerationConfig.__struct_encode_fields__},
    }
    for dialect, table in TABLE.items():
        for entry in table.values():
            under, _, name = entry.name.rpartition(".")
            fields = structs.get(f"{under}." if under else "", {}).get(dialect)
            if fields is None or entry.handling == "refused" or name in fields:
                continue
            if entry.unread:
                assert check(dialect, entry.name, "x", ignore=False) == (f"overridden:{entry.name}",)
                continue
            assert entry.effect.startswith("accepted; "), f"{dialect}: {entry.name} is silently ignored"


def test_refused_parameter_accepts_values_without_effect() -> None:
    for dialect, table in TABLE.items():
        for entry in table.values():
            if entry.handling == "refused":
                for value in (None, *entry.off):
                    assert check(dialect, entry.name, value, ignore=False) == ()
                with pytest.raises(ApiError) as refused:
                    check(dialect, entry.name, ["something"], ignore=False)
                assert entry.name in refused.value.message and entry.effect in refused.value.hint
                assert refused.value.parameter == entry.name
                assert check(dialect, entry.name, ["x"], ignore=True) == (f"ignored:{entry.name}",)


@pytest.mark.parametrize(
    ("dialect", "body", "name"),
    [
        ("chat", {"frobnicate": 1}, "frobnicate"),
        ("chat", {"stream": True, "stream_options": {"frobnicate": 1}}, "stream_options.frobnicate"),
        ("chat", {"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs.tone"),
        ("chat", {"stop_token_ids": [3]}, "stop_token_ids"),
        ("chat", {"web_search_options": {}}, "web_search_options"),
        ("completions", {"suffix": "x", "n": 1}, "suffix"),
        ("responses", {"background": True}, "background"),
        ("responses", {"reasoning": {"frobnicate": 1}}, "reasoning.frobnicate"),
        ("anthropic", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ("anthropic", {"thinking": {"type": "adaptive", "frobnicate": 1}}, "thinking.frobnicate"),
        ("anthropic", {"tool_choice": {"type": "auto", "frobnicate": 1}}, "tool_choice.frobnicate"),
        ("gemini", {"cached_content": "c/1"}, "cachedContent"),
        ("gemini", config(candidate_count=2), "generationConfig.candidateCount"),
        ("gemini", config(thinkingConfig={"frobnicate": 1}), "generationConfig.thinkingConfig.frobnicate"),
        ("gemini", {"toolConfig": {"retrievalConfig": {"languageCode": "de"}}}, "toolConfig.retrievalConfig"),
    ],
)
def test_unsupported_parameter_gets_400_or_is_ignored(dialect: str, body: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError, match=re.escape(name)) as refused:
        decoded(dialect, **body)
    assert (refused.value.status, refused.value.parameter) == (400, name)
    raw_request = RawRequest(
        "", msgspec.json.encode({**BODIES[dialect], **body}), {"model": "m"}, {}, {}, ignore=True
    )
    assert f"ignored:{name}" in DECODERS[dialect](raw_request)[0].tags


def test_parameters_page_matches_the_table() -> None:
    root = ROOT
    script = runpy.run_path(str(root / "scripts" / "parameters_page.py"))
    made = (root / "docs" / "reference" / "parameters.md").read_text()
    assert made == script["page"](), "run .venv/bin/python scripts/parameters_page.py"


def test_undocumented_codex_parameters_are_accepted() -> None:
    assert decoded("responses", client_metadata={"x-codex-installation-id": "1"}).tags == ()


@pytest.mark.anyio
async def test_random_requests_follow_the_parameter_table(tmp_path: Path) -> None:
    told = await random_requests.run(tmp_path, 12, seed=1)
    assert not told["problems"], "\n".join(told["problems"])
    assert told["answered"] > 12 and told["refused"] > 12
