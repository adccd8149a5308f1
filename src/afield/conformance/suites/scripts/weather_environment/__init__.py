"""verifiers environment: questions about weather and sums, with a tool-calling agent."""

from __future__ import annotations

import json
from typing import Any

import openai
import verifiers.v1 as vf

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    },
]
PLACES = ("Paris", "Oslo", "Rome", "Lima", "Quito")


def _run_tool(name: str, arguments: dict[str, Any]) -> str:
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    return f"It is sunny in {arguments['location']}."


class WeatherData(vf.TaskData):
    place: str = ""


class WeatherTask(vf.Task[WeatherData]):
    @vf.reward(weight=1.0)
    async def answered(self, trace: vf.Trace) -> float:
        """Reward 1 if the last message contains the results of both tools."""
        text = str(trace.messages[-1].content)
        return float(f"sunny in {self.data.place}" in text and "42" in text)


class WeatherConfig(vf.TasksetConfig):
    pass


class WeatherTaskset(vf.Taskset[WeatherTask, WeatherConfig]):
    def load(self) -> list[WeatherTask]:
        question = "Use add with 17 and 25, then use get_weather in {}."
        return [WeatherTask(WeatherData(prompt=question.format(place), place=place)) for place in PLACES]


class WeatherHarnessConfig(vf.HarnessConfig):
    pass


class WeatherHarness(vf.Harness[WeatherHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(6):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    result = _run_tool(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(0, "", "")


__all__ = ["WeatherHarness", "WeatherTaskset"]
