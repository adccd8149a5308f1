"""Strands agent: streaming, sub-agent, summary of its history halfway.

The suite runs it in the client's own environment: strands_agent.py BASE_URL KEY MODEL TASK GO_ON
"""

# pyright: reportMissingImports=false
import sys


def main(base_url: str, key: str, model_id: str, task: str, go_on: str) -> None:
    from strands import Agent, tool
    from strands.agent.conversation_manager import SummarizingConversationManager
    from strands.event_loop._retry import ModelRetryStrategy
    from strands.models.openai import OpenAIModel

    class Persistent(ModelRetryStrategy):
        def is_retryable(self, exception: Exception) -> bool:
            return True

    model = OpenAIModel(client_args={"base_url": base_url, "api_key": key}, model_id=model_id)

    @tool
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    @tool
    def ask(question: str) -> str:
        """Ask a helper, who works on the question alone."""
        helper = Agent(model, tools=[look], system_prompt="You help.", callback_handler=None)
        return str(helper(question))

    manager = SummarizingConversationManager(summary_ratio=0.8, preserve_recent_messages=2)
    agent = Agent(
        model,
        tools=[look, ask],
        system_prompt="You go step by step.",
        conversation_manager=manager,
        retry_strategy=Persistent(max_attempts=4, initial_delay=1),
        callback_handler=None,
    )
    agent(task)
    manager.reduce_context(agent)
    sys.stdout.write(str(agent(go_on)))


if __name__ == "__main__":
    main(*sys.argv[1:])
