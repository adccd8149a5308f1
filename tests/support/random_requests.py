"""Requests with random valid parameters, and what has to become of them.

Every parameter of the table has values here. A request is made of a few of them; its answer is either 400
with the name of a parameter that may be refused, or shows, in the engine's call, the turn or the answer, that
each one was honoured, or in a tag that it was overridden.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

from afield.conformance.model import NO_THOUGHT, SWITCHABLE_TEMPLATE
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.parameters import NOTHING, TABLE, RequestParameter
from afield.interfaces import SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.types import Turn
from support.gateways import POLICY, Running, running, vocabulary

SECRET = "zzqx"
SAID = f"<think>\n{SECRET}\n</think>\n\nOne two three four."
STOP = "<|im_end|>"
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
OTHER = {"name": "ask", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]

PATHS = {
    "chat": "v1/chat/completions",
    "completions": "v1/completions",
    "responses": "v1/responses",
    "anthropic": "v1/messages",
    "gemini": "v1beta/models/m:generateContent",
}
BASES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI, "tools": [{"type": "function", "function": f} for f in (FUNCTION, OTHER)]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi", "tools": [{"type": "function", **f} for f in (FUNCTION, OTHER)]},
    "anthropic": {
        "messages": HI,
        "max_tokens": 64,
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in (FUNCTION, OTHER)],
    },
    "gemini": {
        "contents": [{"parts": [{"text": "Hi"}]}],
        "tools": [{"functionDeclarations": [FUNCTION, OTHER]}],
    },
}


class Seen(Struct):
    """One request and what came of it. `call` and `turn` are there if it was answered."""

    dialect: str
    asked: dict[str, Any]
    status: int
    text: str
    call: GenerateRequest | None = None
    turn: Turn | None = None

    @property
    def answer(self) -> Any:
        return json.loads(self.text)

    @property
    def streamed(self) -> bool:
        return self.text.startswith(("data:", "event:", ":"))

    def tagged(self, name: str) -> bool:
        assert self.turn is not None
        return f"overridden:{name}" in self.turn.tags


Check = Callable[[Seen, Any], bool]


def reply(seen: Seen) -> str:
    assert seen.turn is not None
    return seen.turn.messages[-1].content


def capped(seen: Seen, value: int) -> bool:
    assert seen.call is not None and seen.turn is not None
    return seen.call.max_tokens <= value and len(seen.turn.token_ids) <= value


def stopped(seen: Seen, value: str | list[str]) -> bool:
    stops = [value] if isinstance(value, str) else value
    return all(stop not in reply(seen) for stop in stops)


def held(seen: Seen, value: Any) -> bool:
    """The reply is sampled under a constraint."""
    assert seen.call is not None and seen.turn is not None
    return seen.call.constraint is not None and seen.turn.constraint == seen.call.constraint


def switched(off: Callable[[Any], bool]) -> Check:
    def check(seen: Seen, value: Any) -> bool:
        assert seen.call is not None
        prompt = VOCAB.decode(seen.call.prompt_ids)
        return prompt.endswith(NO_THOUGHT) == off(value) or not off(value)

    return check


def tagged_as(name: str) -> Check:
    return lambda seen, _: seen.tagged(name)


def bounded(name: str) -> Check:
    """A budget is part of a constraint, or the turn says that it is not held."""
    return lambda seen, value: held(seen, value) or seen.tagged(name)


def says(*words: str) -> Check:
    return lambda seen, value: not value or all(word in seen.text for word in words)


def fine(seen: Seen, value: Any) -> bool:
    return True


OFF = switched(lambda value: value in (False, "none", "disabled", 0))
V = tuple[list[Any], Check]
TOOL_FORMS = [{"type": "function", "function": {"name": "look"}}]
ALLOWED = {"mode": "auto", "tools": TOOL_FORMS}
STREAM: dict[str, V] = {
    "stream": ([True, False], lambda seen, value: seen.streamed == value),
    "stream_options.include_obfuscation": ([True, False], fine),
}
USAGE: dict[str, V] = {"stream_options.include_usage": ([True], says('"usage":{'))}
IDS: V = ([True, False], says("token_ids"))
KWARGS: dict[str, V] = {
    "chat_template_kwargs.enable_thinking": ([True, False], OFF),
    "chat_template_kwargs.thinking": ([True, False], OFF),
    "chat_template_kwargs.reasoning_effort": (["low", "none"], OFF),
}
GUIDED: dict[str, V] = {
    "guided_json": ([SCHEMA], held),
    "guided_regex": (["[a-z]+"], held),
    "guided_choice": ([["a", "b"]], held),
    "guided_grammar": (['root ::= "a"'], held),
}
STRUCTURED: dict[str, V] = {
    "structured_outputs.json": ([SCHEMA], held),
    "structured_outputs.regex": (["[a-z]+"], held),
    "structured_outputs.choice": ([["a", "b"]], held),
    "structured_outputs.grammar": (['root ::= "a"'], held),
    "structured_outputs.json_object": ([True], held),
}
RESPONSE_FORMAT: V = (
    [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": FORM}],
    lambda seen, value: value["type"] == "text" or held(seen, value),
)
CHOICE: Check = lambda seen, value: value in ("auto", "none") or held(seen, value)  # noqa: E731
PARALLEL: Check = lambda seen, value: value or held(seen, value)  # noqa: E731
EFFORTS = ["none", "low", "high"]

HONOURED: dict[str, dict[str, V]] = {
    "chat": {
        "model": (["m", "other"], says('"model":')),
        "tool_choice": (
            ["auto", "none", "required", TOOL_FORMS[0], {"type": "allowed_tools", "allowed_tools": ALLOWED}],
            CHOICE,
        ),
        "parallel_tool_calls": ([True, False], PARALLEL),
        "max_tokens": ([3, 40], capped),
        "max_completion_tokens": ([3, 40], capped),
        "stop": (["three", ["two", "four"]], stopped),
        "logprobs": ([True, False], says('"logprob"')),
        "top_logprobs": ([2], says("top_logprobs")),
        "prompt_logprobs": ([1], says("prompt_logprobs")),
        "return_tokens_as_token_ids": ([True], fine),
        "response_format": RESPONSE_FORMAT,
        "return_token_ids": IDS,
        "reasoning_effort": (EFFORTS, OFF),
        "reasoning.enabled": ([True, False], OFF),
        "reasoning.effort": (EFFORTS, OFF),
        "reasoning.max_tokens": ([16], bounded("reasoning.max_tokens")),
        "reasoning.exclude": ([True], lambda seen, _: SECRET not in seen.text),
        "thinking.type": (["enabled", "disabled"], OFF),
        "thinking.budget_tokens": ([16], bounded("thinking.budget_tokens")),
        "enable_thinking": ([True, False], OFF),
        "thinking_token_budget": ([16], bounded("thinking_token_budget")),
        "thinking_budget": ([16], bounded("thinking_budget")),
        "include_reasoning": ([True, False], lambda seen, value: value or SECRET not in seen.text),
        **STREAM,
        **USAGE,
        **KWARGS,
        **GUIDED,
        **STRUCTURED,
    },
    "completions": {
        "model": (["m", "other"], says('"model":')),
        "max_tokens": ([3, 40], capped),
        "stop": (["three", ["two", "four"]], stopped),
        "logprobs": ([0, 2], lambda seen, _: "token_logprobs" in seen.text),
        "prompt_logprobs": ([1], says("prompt_logprobs")),
        "return_tokens_as_token_ids": ([True], fine),
        "echo": ([True, False], lambda seen, value: not value or '"text":"Hi' in seen.text),
        "response_format": RESPONSE_FORMAT,
        "return_token_ids": IDS,
        **STREAM,
        **USAGE,
        **GUIDED,
        **STRUCTURED,
    },
    "responses": {
        "instructions": (["Be brief."], lambda seen, _: "Be brief." in VOCAB.decode(_call(seen).prompt_ids)),
        "model": (["m", "other"], says('"model":')),
        "tool_choice": (["auto", "none", "required", {"type": "function", "name": "look"}], CHOICE),
        "parallel_tool_calls": ([True, False], PARALLEL),
        "max_output_tokens": ([16, 40], capped),
        "include": ([["reasoning.encrypted_content"], []], says("encrypted_content")),
        "top_logprobs": ([2], fine),
        "text.format": ([{"type": "text"}, FORM], lambda seen, v: v["type"] == "text" or held(seen, v)),
        "reasoning.effort": (EFFORTS, OFF),
        "reasoning.summary": (["auto"], lambda seen, _: "summary_text" in seen.text or thoughtless(seen)),
        "reasoning.generate_summary": (
            ["auto"],
            lambda seen, _: "summary_text" in seen.text or thoughtless(seen),
        ),
        "include_reasoning": ([True], lambda seen, _: SECRET in seen.text or thoughtless(seen)),
        "store": ([True, False], lambda seen, value: f'"store":{json.dumps(value)}' in seen.text),
        "metadata": ([{"a": "b"}], says('"metadata":{"a":"b"}')),
        "return_token_ids": IDS,
        **STREAM,
        **KWARGS,
        **STRUCTURED,
    },
    "anthropic": {
        "system": (["Be brief."], lambda seen, _: "Be brief." in VOCAB.decode(_call(seen).prompt_ids)),
        "model": (["m", "other"], says('"model":')),
        "tool_choice": (
            [{"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "look"}],
            lambda seen, value: value["type"] in ("auto", "none") or held(seen, value),
        ),
        "max_tokens": ([3, 40], capped),
        "stop_sequences": ([["three"], ["two", "four"]], stopped),
        "stream": STREAM["stream"],
        "output_config.format": ([FORM], held),
        "output_format": ([FORM], held),
        "output_config.effort": (["low", "high"], tagged_as("output_config.effort")),
        "thinking": (
            [
                {"type": "adaptive"},
                {"type": "disabled"},
                {"type": "enabled", "budget_tokens": 16},
                {"type": "adaptive", "display": "omitted"},
            ],
            lambda seen, value: anthropic_thinking(seen, value),
        ),
        "return_token_ids": IDS,
        "logprobs": ([True], says('"logprobs":[')),
        **KWARGS,
    },
    "gemini": {
        "systemInstruction": (
            [{"parts": [{"text": "Be brief."}]}],
            lambda seen, _: "Be brief." in VOCAB.decode(_call(seen).prompt_ids),
        ),
        "toolConfig.functionCallingConfig": (
            [
                {"mode": "AUTO"},
                {"mode": "NONE"},
                {"mode": "ANY"},
                {"mode": "ANY", "allowedFunctionNames": ["look"]},
                {"mode": "VALIDATED"},
            ],
            lambda seen, value: value["mode"] in ("AUTO", "NONE") or held(seen, value),
        ),
        "generationConfig.maxOutputTokens": ([3, 40], capped),
        "generationConfig.stopSequences": ([["three"], ["two", "four"]], stopped),
        "generationConfig.responseMimeType": (
            ["text/plain", "application/json"],
            lambda seen, value: value == "text/plain" or held(seen, value),
        ),
        "generationConfig.responseSchema": ([{"type": "STRING"}], held),
        "generationConfig.responseJsonSchema": ([SCHEMA], held),
        "generationConfig.responseFormat": (
            [[{"text": {"mimeType": "application/json", "schema": SCHEMA}}]],
            held,
        ),
        "generationConfig.responseLogprobs": ([True], says("logprobsResult")),
        "generationConfig.logprobs": ([2], says("topCandidates")),
        "generationConfig.thinkingConfig.includeThoughts": (
            [True, False],
            lambda seen, value: (SECRET in seen.text) == value or thoughtless(seen),
        ),
        "generationConfig.thinkingConfig.thinkingBudget": (
            [0, -1, 64],
            lambda seen, value: (
                OFF(seen, value)
                and (
                    value < 1
                    or held(seen, value)
                    or seen.tagged("generationConfig.thinkingConfig.thinkingBudget")
                )
            ),
        ),
        "generationConfig.thinkingConfig.thinkingLevel": (
            ["LOW", "high"],
            tagged_as("generationConfig.thinkingConfig.thinkingLevel"),
        ),
        "returnTokenIds": IDS,
    },
}
OVERRIDDEN: dict[str, list[Any]] = {
    "temperature": [0.3],
    "top_p": [0.5],
    "top_k": [7],
    "seed": [3],
    "presence_penalty": [0.5],
    "frequency_penalty": [0.5],
    "repetition_penalty": [1.5],
    "min_p": [0.1],
    "logit_bias": [{"5": 1.0}],
}
ACCEPTED: dict[str, list[Any]] = {
    "max_tool_calls": [3],
    "metadata": [{"a": "b"}],
    "prompt_cache_options": [{"mode": "implicit"}],
    "prediction": [{"type": "content", "content": "One"}],
    "safetySettings": [[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]],
    "labels": [{"a": "b"}],
    "store": [True, False],
    "cache_control": [{"type": "ephemeral"}],
    "stream_options.include_obfuscation": [True, False],
}
ANYTHING: list[Any] = ["x", {"a": 1}, [1], 5]
# Parameters whose request may be refused for the sake of others, of the engine or of the template.
CONDITIONAL = (
    "tool_choice", "parallel_tool_calls", "response_format", "guided", "structured_outputs", "text.format",
    "output_config", "output_format", "thinking", "reasoning", "enable_thinking", "chat_template_kwargs",
    "toolConfig", "responseMimeType", "responseSchema", "responseJsonSchema", "responseFormat", "logprobs",
    "stream_options", "echo",
)  # fmt: skip
# Objects that are made of their parts, and what every request has.
MADE = {
    "chat": {"messages", "tools", "stream_options", "structured_outputs", "reasoning", "thinking",
             "chat_template_kwargs"},
    "completions": {"prompt", "stream_options", "structured_outputs"},
    "responses": {"input", "tools", "previous_response_id", "stream_options", "structured_outputs", "text",
                  "reasoning", "chat_template_kwargs"},
    "anthropic": {"messages", "tools", "output_config", "thinking.type", "thinking.display",
                  "thinking.budget_tokens", "tool_choice.type", "tool_choice.name",
                  "tool_choice.disable_parallel_tool_use", "chat_template_kwargs"},
    "gemini": {"contents", "tools", "toolConfig", "generationConfig", "generationConfig.thinkingConfig",
               "toolConfig.functionCallingConfig.mode",
               "toolConfig.functionCallingConfig.allowedFunctionNames"},
}  # fmt: skip
VOCAB = vocabulary(POLICY)


def _call(seen: Seen) -> GenerateRequest:
    assert seen.call is not None
    return seen.call


def thoughtless(seen: Seen) -> bool:
    """Nothing was thought: the reply was cut or constrained before it came to that."""
    assert seen.turn is not None
    return SECRET not in seen.turn.messages[-1].reasoning


def anthropic_thinking(seen: Seen, value: dict[str, Any]) -> bool:
    if value["type"] == "disabled":
        return SECRET not in seen.text and VOCAB.decode(_call(seen).prompt_ids).endswith(NO_THOUGHT)
    if value.get("display") == "omitted":
        return SECRET not in seen.text
    told = "budget_tokens" not in value or held(seen, value) or seen.tagged("thinking.budget_tokens")
    return told and (SECRET in seen.text or thoughtless(seen))


def snake(name: str) -> str:
    last = name.rpartition(".")[2]
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in last)


def values_of(dialect: str, entry: RequestParameter) -> list[Any]:
    if entry.name in HONOURED[dialect]:
        return HONOURED[dialect][entry.name][0]
    if entry.handling == "overridden":
        return ["low", "high"] if entry.unread else OVERRIDDEN[snake(entry.name)]
    if entry.handling == "refused":
        return [*ANYTHING, *entry.off, None]
    assert entry.effect.startswith("accepted; "), f"{dialect}: no values for {entry.name}"
    return ACCEPTED.get(entry.name, ["x"])


def random_request(dialect: str, rng: random.Random) -> dict[str, Any]:
    """Names and values of a few parameters. Most requests have one that is not refused, or none."""
    entries = [entry for entry in TABLE[dialect].values() if entry.name not in MADE[dialect]]
    if dialect == "anthropic":
        entries.append(RequestParameter("thinking", "honoured", ""))
    usable = [entry for entry in entries if entry.handling != "refused"]
    chosen = rng.sample(usable, rng.randint(1, 4))
    if rng.random() < 0.5:
        chosen.append(rng.choice([entry for entry in entries if entry.handling == "refused"]))
    picked = {entry.name: rng.choice(values_of(dialect, entry)) for entry in chosen}
    # An object is sent whole or by its parts.
    return {
        name: value for name, value in picked.items() if not any(name.startswith(f"{o}.") for o in picked)
    }


def body_of(dialect: str, asked: dict[str, Any]) -> dict[str, Any]:
    body = dict(BASES[dialect])
    if any(name.startswith("stream_options.") for name in asked):
        body["stream"] = True
    for name, value in asked.items():
        *path, last = name.split(".")
        inner = body
        for step in path:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                break
        inner[last] = value
    return body


def refusable(dialect: str, asked: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in asked.items()
        if _refused(dialect, name, value) or any(part in name for part in CONDITIONAL)
    ]


def _refused(dialect: str, name: str, value: Any) -> bool:
    entry = TABLE[dialect].get(name)
    if entry is None or entry.handling != "refused":
        return False
    return value not in NOTHING and value not in entry.off


def problems(seen: Seen) -> list[str]:
    """What is wrong with how a request was answered; nothing, if all is well."""
    dialect, asked = seen.dialect, seen.asked
    may = refusable(dialect, asked)
    if seen.status == 400:
        told = json.loads(seen.text)["error"]["message"]
        named = any(name in told or name.split(".")[0] in told for name in may)
        return [] if named else [f"400 that names none of {may}: {told}"]
    if seen.status != 200:
        return [f"status {seen.status}: {seen.text[:200]}"]
    found = []
    for name, value in asked.items():
        entry = TABLE[dialect].get(name)
        if name in HONOURED[dialect]:
            if not HONOURED[dialect][name][1](seen, value):
                found.append(f"{name}={value!r} was not honoured: {seen.text[:300]}")
        elif entry is not None and entry.handling == "overridden":
            if not seen.tagged(name if entry.unread else snake(name)):
                found.append(f"{name} was overridden without a tag")
        elif (
            entry is not None
            and entry.handling == "refused"
            and value not in NOTHING
            and value not in entry.off
        ):
            found.append(f"{name}={value!r} was accepted")
    return found


def write_model(directory: Path) -> Path:
    """The demo policy's tokenizer with a template that has tools and a switch for thinking."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in POLICY.glob("*.json"):
        shutil.copy(path, directory)
    (directory / "chat_template.jinja").write_text(SWITCHABLE_TEMPLATE)
    return directory


async def asked_of(
    up: Running, calls: list[GenerateRequest], dialect: str, asked: dict[str, Any], n: int
) -> Seen:
    session = f"{dialect}.{n}"
    ticket = await up.client.open(SessionSpec(id=session))
    del calls[:]
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {ticket.api_key}"}) as http,
        http.post(f"{up.url}/s/{session}/{PATHS[dialect]}", json=body_of(dialect, asked)) as answer,
    ):
        text, status = await answer.text(), answer.status
    turns = (await up.client.finalize(session)).turns
    seen = Seen(dialect, asked, status, text)
    if calls and turns:
        seen.call, seen.turn = calls[-1], turns[-1]
    return seen


async def run(directory: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """So many requests of each dialect: how many were answered and refused, and what was wrong."""
    calls: list[GenerateRequest] = []
    said = (*VOCAB.encode(SAID), VOCAB.control[STOP])

    def script(call: GenerateRequest) -> ScriptedReply:
        calls.append(call)
        return ScriptedReply(token_ids=said, chunks=(64,))

    told: dict[str, Any] = {"requests": 0, "answered": 0, "refused": 0, "problems": []}
    model = write_model(directory / "model")
    async with running(ScriptedEngine(script), directory / "store", model) as up:
        for dialect in TABLE:
            rng = random.Random(f"{dialect} {seed}")
            for n in range(count):
                seen = await asked_of(up, calls, dialect, random_request(dialect, rng), n)
                told["requests"] += 1
                told["answered" if seen.status == 200 else "refused"] += 1
                told["problems"] += [f"{dialect} {n} {seen.asked}: {text}" for text in problems(seen)]
    return told
