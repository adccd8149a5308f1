"""A math agent in production: Strands on AgentCore. Its model is wherever OPENAI_BASE_URL says."""

from bedrock_agentcore import BedrockAgentCoreApp
from calculator import calculator
from strands import Agent
from strands.models.openai import OpenAIModel

SYSTEM = "Work it out with the calculator, then answer with the number."

app = BedrockAgentCoreApp()


@app.entrypoint
async def invoke(payload: dict) -> dict:
    model = OpenAIModel(model_id="policy")
    agent = Agent(model, tools=[calculator], system_prompt=SYSTEM, callback_handler=None)
    answer = str(await agent.invoke_async(payload["question"], limits={"turns": 6}))
    return {"answer": answer}


if __name__ == "__main__":
    app.run()
