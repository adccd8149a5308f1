"""OpenAI Agents SDK agent with a sub-agent, over Responses or Chat Completions.

The suite runs it in the client's own environment:
openai_agents_agent.py BASE_URL KEY MODEL TASK GO_ON (responses | chat)
"""

# pyright: reportMissingImports=false
import asyncio
import sys
from typing import Any


async def main(base_url: str, key: str, model_id: str, task: str, go_on: str, api: str) -> None:
    from openai import APIConnectionError, AsyncOpenAI

    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind(model_id, AsyncOpenAI(base_url=base_url, api_key=key))

    @function_tool
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    helper = Agent(name="helper", instructions="You help.", tools=[look], model=model)
    ask = helper.as_tool(tool_name="ask", tool_description="Ask a helper, who works alone.")
    agent = Agent(
        name="walker",
        instructions="You go step by step.",
        tools=[look, ask],
        model=model,
    )

    async def walk(history: Any) -> Any:
        """Run the agent with streaming; the SDK retries only before the first byte, this loop after it."""
        while True:
            streamed = Runner.run_streamed(agent, history, max_turns=30)
            try:
                async for _ in streamed.stream_events():
                    pass
                return streamed
            except APIConnectionError:
                history = streamed.to_input_list()

    history = (await walk(task)).to_input_list()
    result = await walk([*history, {"role": "user", "content": go_on}])
    sys.stdout.write(str(result.final_output))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
