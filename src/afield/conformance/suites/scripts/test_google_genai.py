"""Tests of the installed google-genai SDK: every request type, against the gateway."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

BASE, KEY, MODEL = (os.environ[f"SUITE_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
OPTIONS = types.HttpOptions(base_url=BASE)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg=="
)
THINK = types.ThinkingConfig(include_thoughts=True, thinking_budget=1024)
WEATHER = types.FunctionDeclaration(
    name="get_weather",
    description="The weather at a place.",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"location": types.Schema(type=types.Type.STRING)},
        required=["location"],
    ),
)
JSON_WEATHER = types.FunctionDeclaration(
    name="get_weather",
    parameters_json_schema={
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
)
TIME = types.FunctionDeclaration(
    name="get_time", description="The time.", parameters_json_schema={"type": "object"}
)
OFF = types.AutomaticFunctionCallingConfig(disable=True)


class CookingRecipe(BaseModel):
    title: str
    minutes: int
    steps: list[str]


@pytest.fixture(scope="module")
def client() -> Any:
    with genai.Client(api_key=KEY, http_options=OPTIONS) as genai_client:
        yield genai_client


def ask(client: Any, contents: Any, **config: Any) -> Any:
    return client.models.generate_content(
        model=MODEL, contents=contents, config=types.GenerateContentConfig(**config) if config else None
    )


def test_text(client: Any) -> None:
    answer = ask(client, "Hello")
    assert answer.text.startswith("Hello!")
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP
    assert answer.usage_metadata.prompt_token_count > 0
    assert answer.usage_metadata.candidates_token_count > 0
    assert answer.model_version and answer.response_id


@pytest.mark.parametrize(
    "contents",
    [
        ["My name is Ada. What is my name?"],
        [types.Part.from_text(text="My name is Ada."), "What is my name?"],
        types.Content(role="user", parts=[types.Part(text="My name is Ada. What is my name?")]),
        [
            types.UserContent(parts=["My name is Ada."]),
            types.ModelContent(parts=["Hello Ada."]),
            types.UserContent(parts=["What is my name?"]),
        ],
        [{"role": "user", "parts": [{"text": "My name is Ada. What is my name?"}]}],
    ],
    ids=["list", "parts", "content", "turns", "dictionaries"],
)
def test_spellings_of_contents(client: Any, contents: Any) -> None:
    assert ask(client, contents).text == "Your name is Ada."


@pytest.mark.parametrize(
    "config",
    [
        {"system_instruction": "Be brief.", "max_output_tokens": 500},
        {"systemInstruction": "Be brief.", "maxOutputTokens": 500},
        types.GenerateContentConfig(system_instruction=["Be", "brief."], temperature=0.5, top_p=0.9, top_k=7),
        types.GenerateContentConfig(seed=3, presence_penalty=0.25, frequency_penalty=0.5, candidate_count=1),
        types.GenerateContentConfig(
            safety_settings=[
                types.SafetySetting(category="HARM_CATEGORY_HARASSMENT", threshold="BLOCK_ONLY_HIGH")
            ]
        ),
        types.GenerateContentConfig(response_mime_type="text/plain", labels=None),
    ],
    ids=["snake", "camel", "sampling", "penalties", "safety", "mime"],
)
def test_spellings_of_the_config(client: Any, config: Any) -> None:
    answer = client.models.generate_content(model=MODEL, contents="Hello", config=config)
    assert answer.text.startswith("Hello!")


def test_stream(client: Any) -> None:
    chunks = list(client.models.generate_content_stream(model=MODEL, contents="Count from 1 to 20."))
    assert len(chunks) > 3
    assert "".join(chunk.text or "" for chunk in chunks) == ", ".join(map(str, range(1, 21)))
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert chunks[-1].usage_metadata.candidates_token_count > 10


async def test_async() -> None:
    async with genai.Client(api_key=KEY, http_options=OPTIONS).aio as client:
        answer = await client.models.generate_content(model=MODEL, contents="Hello")
        assert answer.text.startswith("Hello!")
        text = ""
        async for chunk in await client.models.generate_content_stream(
            model=MODEL, contents="Count from 1 to 9."
        ):
            text += chunk.text or ""
        assert text == "1, 2, 3, 4, 5, 6, 7, 8, 9"


@pytest.mark.parametrize("declared", [WEATHER, JSON_WEATHER], ids=["parameters", "parameters_json_schema"])
@pytest.mark.parametrize("thinking", [None, THINK], ids=["plain", "thinking"])
def test_a_function_call_and_its_response(client: Any, declared: Any, thinking: Any) -> None:
    config: dict[str, Any] = {
        "tools": [types.Tool(function_declarations=[declared])],
        "thinking_config": thinking,
    }
    question = types.UserContent(parts=["What is the weather in Paris?"])
    first = ask(client, [question], **config)
    [call] = first.function_calls
    assert (call.name, call.args) == ("get_weather", {"location": "Paris"})
    answer = types.Part.from_function_response(name=call.name, response={"result": "It is sunny."})
    answer.function_response.id = call.id
    second = ask(client, [question, first.candidates[0].content, types.UserContent(parts=[answer])], **config)
    assert "It is sunny." in second.text
    assert not second.function_calls


def test_two_calls_at_once_streamed(client: Any) -> None:
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[WEATHER])], automatic_function_calling=OFF
    )
    chunks = client.models.generate_content_stream(
        model=MODEL, contents="What is the weather in Paris and Rome?", config=config
    )
    calls = [call for chunk in chunks for call in chunk.function_calls or []]
    assert [call.args["location"] for call in calls] == ["Paris", "Rome"]


def test_automatic_function_calling(client: Any) -> None:
    locations = []

    def get_weather(location: str) -> str:
        """The weather at a place."""
        locations.append(location)
        return f"It is sunny in {location}."

    answer = ask(client, "What is the weather in Oslo?", tools=[get_weather])
    assert locations == ["Oslo"]
    assert "sunny in Oslo" in answer.text
    assert len(answer.automatic_function_calling_history) == 3


async def test_automatic_function_calling_async() -> None:
    async def get_weather(location: str) -> str:
        """The weather at a place."""
        return f"It is sunny in {location}."

    async with genai.Client(api_key=KEY, http_options=OPTIONS).aio as client:
        config = types.GenerateContentConfig(tools=[get_weather])
        answer = await client.models.generate_content(
            model=MODEL, contents="What is the weather in Oslo?", config=config
        )
        assert "sunny in Oslo" in answer.text


@pytest.mark.parametrize("mode", ["ANY", "NONE", "AUTO"])
def test_function_calling_modes(client: Any, mode: str) -> None:
    choice = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode=mode))
    answer = ask(client, "Hello", tools=[types.Tool(function_declarations=[WEATHER])], tool_config=choice)
    assert bool(answer.function_calls) == (mode == "ANY")


def test_allowed_function_names(client: Any) -> None:
    choice = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["get_time"])
    answer = ask(
        client,
        "What is the weather in Paris?",
        tools=[types.Tool(function_declarations=[WEATHER, TIME])],
        tool_config=types.ToolConfig(function_calling_config=choice),
    )
    assert [call.name for call in answer.function_calls] == ["get_time"]


@pytest.mark.parametrize("thinking", [None, THINK], ids=["plain", "thinking"])
def test_response_schema(client: Any, thinking: Any) -> None:
    answer = ask(
        client,
        "A recipe for soup in 20 minutes.",
        response_mime_type="application/json",
        response_schema=CookingRecipe,
        thinking_config=thinking,
    )
    assert isinstance(answer.parsed, CookingRecipe)
    assert answer.parsed.minutes == 20


def test_response_schema_of_a_list(client: Any) -> None:
    answer = ask(
        client, "Recipes.", response_mime_type="application/json", response_schema=list[CookingRecipe]
    )
    assert answer.parsed and all(isinstance(recipe, CookingRecipe) for recipe in answer.parsed)


def test_response_json_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = ask(
        client, "I live in Rome.", response_mime_type="application/json", response_json_schema=schema
    )
    assert json.loads(answer.text) == {"city": "Rome"}


def test_enumeration(client: Any) -> None:
    answer = ask(
        client,
        "It is a rainy day.",
        response_mime_type="text/x.enum",
        response_schema={"type": "STRING", "enum": ["sunny", "rainy"]},
    )
    assert answer.text == "rainy"


def test_json_without_a_schema(client: Any) -> None:
    assert isinstance(json.loads(ask(client, "Anything.", response_mime_type="application/json").text), dict)


def test_thoughts_are_shown_when_asked_for(client: Any) -> None:
    answer = ask(client, "What is 3 + 4?", thinking_config=THINK)
    assert answer.text == "3 + 4 = 7"
    assert [part.thought for part in answer.candidates[0].content.parts] == [True, None]
    assert answer.usage_metadata.thoughts_token_count > 0
    streamed = client.models.generate_content_stream(
        model=MODEL, contents="What is 3 + 4?", config=types.GenerateContentConfig(thinking_config=THINK)
    )
    parts = [part for chunk in streamed for part in chunk.candidates[0].content.parts]
    assert any(part.thought for part in parts)
    assert "".join(part.text for part in parts if not part.thought) == "3 + 4 = 7"


def test_thoughts_are_not_shown_otherwise(client: Any) -> None:
    answer = ask(client, "What is 3 + 4?")
    assert [part.thought for part in answer.candidates[0].content.parts] == [None]
    chunks = client.models.generate_content_stream(model=MODEL, contents="What is 3 + 4?")
    assert not any(part.thought for chunk in chunks for part in chunk.candidates[0].content.parts)


def test_no_thoughts(client: Any) -> None:
    answer = ask(client, "What is 3 + 4?", thinking_config=types.ThinkingConfig(thinking_budget=0))
    assert answer.text == "3 + 4 = 7"
    assert not answer.usage_metadata.thoughts_token_count


@pytest.mark.parametrize("level", ["LOW", "HIGH"])
def test_thinking_level(client: Any, level: str) -> None:
    thinking = types.ThinkingConfig(thinking_level=level, include_thoughts=True)
    answer = ask(client, "What is 3 + 4?", thinking_config=thinking)
    assert answer.text == "3 + 4 = 7"


def test_stop_sequences(client: Any) -> None:
    answer = ask(client, "Count from 1 to 20.", stop_sequences=["5"])
    assert answer.text.strip() == "1, 2, 3, 4,"
    assert answer.candidates[0].finish_reason == types.FinishReason.STOP


def test_max_output_tokens(client: Any) -> None:
    off = types.ThinkingConfig(thinking_budget=0)
    answer = ask(client, "Count from 1 to 99.", max_output_tokens=20, thinking_config=off)
    assert answer.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
    assert answer.usage_metadata.candidates_token_count == 20


def test_logprobs(client: Any) -> None:
    answer = ask(client, "Hello", response_logprobs=True, logprobs=2)
    result = answer.candidates[0].logprobs_result
    assert all(chosen.log_probability < 0 for chosen in result.chosen_candidates)
    assert len(result.top_candidates) == len(result.chosen_candidates)
    assert all(len(place.candidates) == 2 for place in result.top_candidates)


def test_an_image(client: Any) -> None:
    picture = types.Part.from_bytes(data=PNG, mime_type="image/png")
    assert ask(client, [picture, "What do you see?"]).text


def test_count_tokens(client: Any) -> None:
    short = client.models.count_tokens(model=MODEL, contents="Hello")
    long = client.models.count_tokens(model=MODEL, contents="Hello there, how are you?")
    assert 0 < short.total_tokens < long.total_tokens


def test_chat(client: Any) -> None:
    chat = client.chats.create(model=MODEL, config=types.GenerateContentConfig(thinking_config=THINK))
    chat.send_message("My name is Ada.")
    text = "".join(chunk.text or "" for chunk in chat.send_message_stream("What is my name?"))
    assert text == "Your name is Ada."
    assert [turn.role for turn in chat.get_history()[:3]] == ["user", "model", "user"]


async def test_chat_async() -> None:
    async with genai.Client(api_key=KEY, http_options=OPTIONS).aio as client:
        chat = client.chats.create(model=MODEL)
        await chat.send_message("My name is Ada.")
        assert (await chat.send_message("What is my name?")).text == "Your name is Ada."


def test_models(client: Any) -> None:
    listed = [model.name for model in client.models.list()]
    assert len(listed) == 1
    assert client.models.get(model=listed[0]).name == listed[0]


def test_a_wrong_key() -> None:
    with (
        genai.Client(api_key="wrong", http_options=OPTIONS) as client,
        pytest.raises(errors.ClientError) as raised,
    ):
        ask(client, "Hello")
    assert raised.value.code == 401
    assert raised.value.status == "UNAUTHENTICATED"


def test_a_prompt_that_is_too_long(client: Any) -> None:
    with pytest.raises(errors.ClientError) as raised:
        ask(client, "word " * 40_000)
    assert raised.value.code == 400
    assert "token" in raised.value.message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"response_modalities": ["AUDIO"]}, "responseModalities"),
        ({"cached_content": "cachedContents/1"}, "cachedContent"),
    ],
    ids=["audio", "cache"],
)
def test_what_is_not_supported_is_refused_by_name(client: Any, config: dict[str, Any], name: str) -> None:
    with pytest.raises(errors.ClientError) as raised:
        ask(client, "Hello", **config)
    assert raised.value.code == 400
    assert name.lower() in raised.value.message.replace("_", "").lower()


def test_embeddings_are_refused(client: Any) -> None:
    with pytest.raises(errors.ClientError) as raised:
        client.models.embed_content(model=MODEL, contents="Hello")
    assert raised.value.code == 404
