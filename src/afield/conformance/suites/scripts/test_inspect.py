"""Tests of Inspect's providers: evaluations with tools, and GenerateConfig options."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelOutput,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

os.environ["INSPECT_DISPLAY"] = "none"
BASE, KEY, NAME = (os.environ[f"SUITE_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
OPENAI = f"{BASE}/v1"
PROVIDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (f"openai/{NAME}", OPENAI, {"responses_api": False}),
    "responses": (f"openai/{NAME}", OPENAI, {"responses_api": True}),
    "compatible": (f"openai-api/gateway/{NAME}", OPENAI, {}),
    "compatible-responses": (f"openai-api/gateway/{NAME}", OPENAI, {"responses_api": True}),
    "anthropic": (f"anthropic/{NAME}", BASE, {}),
    "google": (f"google/{NAME}", BASE, {}),
}
THINKING: dict[str, dict[str, Any]] = {
    "chat": {"reasoning_effort": "medium"},
    "responses": {"reasoning_effort": "medium", "reasoning_summary": "auto"},
    "compatible": {"reasoning_effort": "medium"},
    "compatible-responses": {"reasoning_effort": "medium", "reasoning_summary": "auto"},
    "anthropic": {"reasoning_effort": "medium"},
    "google": {"reasoning_tokens": 1024},
}
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6Q"
    "AAAABJRU5ErkJggg=="
)


def model_of(provider: str, **config: Any) -> Model:
    name, base_url, arguments = PROVIDERS[provider]
    generate_config = GenerateConfig(max_retries=0, **{"max_tokens": 2048, **config})
    return get_model(name, config=generate_config, base_url=base_url, api_key=KEY, memoize=False, **arguments)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@tool
def get_weather() -> Any:
    async def execute(location: str) -> str:
        """The weather at a place.

        Args:
            location: Name of the place.
        """
        return f"It is sunny in {location}."

    return execute


@tool
def add() -> Any:
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        return a + b

    return execute


SAMPLES = [
    Sample(input="What is the weather in Paris?", target="sunny in Paris"),
    Sample(input="Use add with 17 and 25.", target="42"),
    Sample(input="What is the weather in Oslo and Rome?", target="sunny in Rome"),
    Sample(
        input=[ChatMessageUser(content="Use add with 2 and 3, then use get_weather in Lima.")], target="Lima"
    ),
]


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
async def test_an_evaluation_with_tools(provider: str, thinking: bool) -> None:
    task = Task(dataset=SAMPLES, solver=[use_tools(get_weather(), add()), generate()], scorer=includes())
    model = model_of(provider, **(THINKING[provider] if thinking else {}))
    [log] = await eval_async(task, model=model, log_dir="logs", epochs=2)
    assert log.status == "success", log.error
    assert log.results and log.samples
    assert log.results.scores[0].metrics["accuracy"].value == 1.0, [
        (sample.input, sample.output.completion, sample.error) for sample in log.samples
    ]
    assert all(sample.model_usage for sample in log.samples)


@scorer(metrics=[accuracy()])
def graded() -> Any:
    async def score(state: Any, target: Any) -> Score:
        grader = get_model(role="grader")
        answer = await grader.generate(f"Repeat exactly: '{target.text}'")
        return Score(value=answer.completion == target.text and target.text in state.output.completion)

    return score


async def test_roles(provider: str) -> None:
    task = Task(dataset=[Sample(input="What is 3 + 4?", target="7")], solver=generate(), scorer=graded())
    roles = {"grader": model_of(provider)}
    [log] = await eval_async(task, model=model_of(provider), model_roles=roles, log_dir="logs")
    assert log.status == "success", log.error
    assert log.results and log.results.scores[0].metrics["accuracy"].value == 1.0


async def test_a_conversation(provider: str) -> None:
    messages = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content="My name is Ada."),
        ChatMessageAssistant(content="Hello Ada."),
        ChatMessageUser(content=[ContentText(text="What is my name?")]),
    ]
    output = await model_of(provider).generate(messages)
    assert output.completion == "Your name is Ada."
    assert output.stop_reason == "stop"
    assert output.usage and output.usage.input_tokens > 0 and output.usage.output_tokens > 0


async def test_an_image(provider: str) -> None:
    content = [ContentText(text="What do you see?"), ContentImage(image=PNG)]
    assert (await model_of(provider).generate([ChatMessageUser(content=content)])).completion


TOOLS = [
    ToolInfo(
        name=name,
        description="A tool.",
        parameters=ToolParams(properties={"location": json_schema(str)}, required=["location"]),
    )
    for name in ("get_weather", "get_time")
]


@pytest.mark.parametrize("choice", ["any", "none", "get_time"])
async def test_tool_choice(provider: str, choice: str) -> None:
    tool_choice: Any = ToolFunction(name=choice) if choice == "get_time" else choice
    output = await model_of(provider).generate(
        "What is the weather in Paris?", tools=TOOLS, tool_choice=tool_choice
    )
    called = [call.function for call in output.message.tool_calls or []]
    assert called == {"any": ["get_weather"], "none": [], "get_time": ["get_time"]}[choice]


async def test_one_call_at_a_time(provider: str) -> None:
    if provider == "google":
        pytest.skip("Gemini's API has no such setting")
    model = model_of(provider, parallel_tool_calls=False)
    output = await model.generate("What is the weather in Paris and Rome?", tools=TOOLS)
    assert len(output.message.tool_calls or []) == 1


async def test_tool_errors_and_results_come_back(provider: str) -> None:
    question = ChatMessageUser(content="What is the weather in Paris?")
    first = await model_of(provider, **THINKING[provider]).generate([question], tools=TOOLS)
    [call] = first.message.tool_calls or []
    result = ChatMessageTool(content="out of order", tool_call_id=call.id, function=call.function)
    second = await model_of(provider, **THINKING[provider]).generate(
        [question, first.message, result], tools=TOOLS
    )
    assert "out of order" in second.completion


class Recipe(BaseModel):
    title: str
    minutes: int
    steps: list[str]


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
async def test_structured_output(provider: str, thinking: bool) -> None:
    schema = ResponseSchema(name="recipe", json_schema=json_schema(Recipe), strict=None)
    model = model_of(provider, response_schema=schema, **(THINKING[provider] if thinking else {}))
    output = await model.generate("A recipe for soup in 20 minutes.")
    assert Recipe.model_validate(json.loads(output.completion)).minutes == 20


async def test_reasoning(provider: str) -> None:
    output = await model_of(provider, **THINKING[provider]).generate("What is 3 + 4?")
    assert output.completion == "3 + 4 = 7"
    content = output.message.content
    thoughts = (
        [part for part in content if isinstance(part, ContentReasoning)] if isinstance(content, list) else []
    )
    assert any("by the rules" in (part.summary or "") + part.reasoning for part in thoughts)


async def test_no_reasoning_unless_asked_for(provider: str) -> None:
    options = {"reasoning_tokens": 0} if provider == "google" else {}  # otherwise Inspect requests thoughts
    content = (await model_of(provider, **options).generate("What is 3 + 4?")).message.content
    if provider in ("anthropic", "google"):  # OpenAI's models always reason
        assert isinstance(content, str) or not any(isinstance(part, ContentReasoning) for part in content)


async def test_logprobs(provider: str) -> None:
    if provider == "anthropic":
        pytest.skip("Anthropic's API has none")
    output = await model_of(provider, logprobs=True, top_logprobs=2).generate("Hello")
    logprobs = output.choices[0].logprobs
    assert logprobs and len(logprobs.content) > 3
    assert all(one.logprob < 0 and len(one.top_logprobs or []) == 2 for one in logprobs.content)


async def test_stop_strings(provider: str) -> None:
    if provider in ("responses", "compatible-responses"):
        pytest.skip("the Responses API has none")
    output = await model_of(provider, stop_seqs=["5"]).generate("Count from 1 to 20.")
    assert output.completion.strip() == "1, 2, 3, 4,"


async def test_max_tokens(provider: str) -> None:
    output = await model_of(provider, max_tokens=64).generate("Count from 1 to 99.")
    assert output.stop_reason == "max_tokens"
    assert output.usage and output.usage.output_tokens <= 64


FIELDS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {5: -10.0},
    "num_choices": 2,
    "best_of": 2,
    "verbosity": "low",
    "reasoning_effort": "low",
    "reasoning_tokens": 1024,
    "cache_prompt": True,
}
NAMES = {"num_choices": ("n", "candidateCount"), "best_of": ("best_of", "bestOf")}


@pytest.mark.parametrize("field", FIELDS)
async def test_a_setting_is_honoured_or_refused_by_name(provider: str, field: str) -> None:
    try:
        output: ModelOutput = await model_of(provider, **{field: FIELDS[field]}).generate("Hello")
    except PrerequisiteError as error:
        pytest.skip(str(error))  # Inspect does not send it
    except Exception as error:
        text = str(error)
        camel = field.split("_")[0] + "".join(word.title() for word in field.split("_")[1:])
        assert "400" in text, text
        assert any(name in text for name in NAMES.get(field, (field, camel))), text
        return
    if output.error:
        assert field in output.error
        return
    if field == "num_choices" and provider in ("chat", "compatible"):
        assert len(output.choices) == 2
    assert output.completion.startswith("Hello!")


async def test_a_wrong_key(provider: str) -> None:
    name, base_url, arguments = PROVIDERS[provider]
    config = GenerateConfig(max_retries=0)
    stranger = get_model(name, config=config, base_url=base_url, api_key="wrong", memoize=False, **arguments)
    with pytest.raises(Exception, match="401"):
        await stranger.generate("Hello")
