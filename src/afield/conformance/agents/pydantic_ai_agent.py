"""Pydantic AI agent: no streaming, sub-agent, continuation with its history.

The suite runs it in the client's own environment: pydantic_ai_agent.py BASE_URL KEY MODEL TASK GO_ON
"""

# pyright: reportMissingImports=false
import sys


def main(base_url: str, key: str, model_id: str, task: str, go_on: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(model_id, provider=OpenAIProvider(base_url=base_url, api_key=key))
    helper = Agent(model, instructions="You help.")
    agent = Agent(model, instructions="You go step by step.")

    @helper.tool_plain(name="look")
    @agent.tool_plain(name="look")
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    @agent.tool_plain
    async def ask(question: str) -> str:
        """Ask a helper, who works on the question alone."""
        return (await helper.run(question)).output

    half = agent.run_sync(task)
    sys.stdout.write(agent.run_sync(go_on, message_history=half.all_messages()).output)


if __name__ == "__main__":
    main(*sys.argv[1:])
