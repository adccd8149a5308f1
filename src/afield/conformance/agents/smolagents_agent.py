"""smolagents tool-calling agent with a managed sub-agent; sends its history as prose.

The suite runs it in the client's own environment: smolagents_agent.py BASE_URL KEY MODEL TASK GO_ON
"""

# pyright: reportMissingImports=false
import sys


def main(base_url: str, key: str, model_id: str, task: str, go_on: str) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id, api_base=base_url, api_key=key)

    @tool
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step.

        Args:
            thread: name of the thread
            step: number of the step
        """
        return f"You are at [at {thread}-{step}]."

    helper = ToolCallingAgent([look], model, name="ask", description="Works on a question alone.")
    agent = ToolCallingAgent([look], model, managed_agents=[helper], max_steps=30)
    agent.run(task)
    sys.stdout.write(str(agent.run(go_on, reset=False)))


if __name__ == "__main__":
    main(*sys.argv[1:])
