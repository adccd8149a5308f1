"""The napping agent on the AgentCore app."""

from acting import nap

from afield.sdk.agentcore import RolloutApp

app = RolloutApp()


@app.rollout_entrypoint
async def invoke(payload: dict) -> dict:
    return {"rewards": await nap(payload)}
