"""Google ADK agent over the Gemini API: streaming, sub-agent, resumed session.

The suite runs it in the client's own environment, whose variables name the API:
google_adk_agent.py MODEL TASK GO_ON
"""

# pyright: reportMissingImports=false
import asyncio
import sys
from typing import Any


async def main(model_id: str, task: str, go_on: str) -> None:
    import httpx
    from google.adk.agents import LlmAgent
    from google.adk.agents.run_config import RunConfig, StreamingMode
    from google.adk.models import Gemini
    from google.adk.runners import InMemoryRunner
    from google.adk.tools.agent_tool import AgentTool
    from google.genai import errors, types

    retry = types.HttpRetryOptions(attempts=4, initial_delay=0.2)
    model = Gemini(model=model_id, retry_options=retry)

    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    helper = LlmAgent(
        name="ask",
        model=model,
        instruction="You help.",
        description="Works on a question alone.",
        tools=[look],
    )
    agent = LlmAgent(
        name="walker", model=model, instruction="You go step by step.", tools=[look, AgentTool(helper)]
    )
    runner = InMemoryRunner(agent=agent, app_name="walk")
    session = await runner.session_service.create_session(app_name="walk", user_id="u")
    config = RunConfig(streaming_mode=StreamingMode.SSE)

    async def say(text: str) -> Any:
        """Send a message; after a connection error, run again on what the session has stored."""
        message: Any = types.Content(role="user", parts=[types.Part(text=text)])
        last = ""
        for _ in range(4):
            try:
                events = runner.run_async(
                    user_id="u", session_id=session.id, new_message=message, run_config=config
                )
                async for event in events:
                    if event.is_final_response() and event.content and event.content.parts:
                        last = event.content.parts[-1].text or ""
                return last
            except (errors.APIError, httpx.HTTPError) as error:
                sys.stderr.write(f"{error!r}\n")
                message = None
        raise SystemExit("the model does not answer")

    await say(task)
    sys.stdout.write(await say(go_on))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
