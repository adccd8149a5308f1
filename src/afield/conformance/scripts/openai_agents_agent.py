"""An OpenAI Agents SDK agent with a sub-agent for a tool, over Responses or Chat Completions.

Run by the suite in the client's own environment:
openai_agents_agent.py BASE_URL KEY MODEL TASK GO_ON (responses | chat)
"""

# pyright: reportMissingImports=false
import asyncio
import sys


async def main(base_url: str, key: str, model_id: str, task: str, go_on: str, api: str) -> None:
    from agents.retry import RetryDecision
    from openai import AsyncOpenAI

    from agents import (
        Agent,
        ModelRetrySettings,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind(model_id, AsyncOpenAI(base_url=base_url, api_key=key))
    # Sampling again costs this application nothing, so it says so.
    again = RetryDecision(retry=True, delay=0.2, approve_unsafe_replay=True)
    settings = ModelSettings(retry=ModelRetrySettings(max_retries=3, policy=lambda context: again))

    @function_tool
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    helper = Agent(
        name="helper", instructions="You help.", tools=[look], model=model, model_settings=settings
    )
    ask = helper.as_tool(tool_name="ask", tool_description="Ask a helper, who works alone.")
    agent = Agent(
        name="walker",
        instructions="You go step by step.",
        tools=[look, ask],
        model=model,
        model_settings=settings,
    )
    if api == "chat":
        streamed = Runner.run_streamed(agent, task, max_turns=30)
        async for _ in streamed.stream_events():
            pass
        history = streamed.to_input_list()
    else:
        history = (await Runner.run(agent, task, max_turns=30)).to_input_list()
    result = await Runner.run(agent, [*history, {"role": "user", "content": go_on}], max_turns=30)
    sys.stdout.write(str(result.final_output))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
