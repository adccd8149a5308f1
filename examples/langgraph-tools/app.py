"""The same graph in production, on AgentCore. Its model is wherever OPENAI_BASE_URL says."""

from agent import ask
from bedrock_agentcore import BedrockAgentCoreApp

from afield.sdk.frameworks.langchain import create_openai_compatible_model

app = BedrockAgentCoreApp()


@app.entrypoint
def invoke(payload: dict) -> dict:
    model = create_openai_compatible_model(model_id="policy")
    return {"answer": ask(model, payload)[-1].content}


if __name__ == "__main__":
    app.run()
