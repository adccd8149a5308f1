"""The same agent in training: what is different is marked."""

from calculator import calculator, grade
from strands import Agent

from afield.sdk.agentcore import RolloutApp
from afield.sdk.frameworks.strands import ConversationHook, create_openai_compatible_model

SYSTEM = "Work it out with the calculator, then answer with the number."

app = RolloutApp()  # <- changed


@app.rollout_entrypoint  # <- changed
async def invoke(payload: dict) -> dict:
    model = create_openai_compatible_model(payload)  # <- the rollout's model
    hook = ConversationHook()
    agent = Agent(model, tools=[calculator], system_prompt=SYSTEM, callback_handler=None, hooks=[hook])
    answer = str(await agent.invoke_async(payload["question"], limits={"turns": 6}))
    return {"reward": grade(answer, payload["answer"]), "conversation": hook.conversation}  # <- its worth


if __name__ == "__main__":
    app.run()
