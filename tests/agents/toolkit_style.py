"""An agent in the style of the AgentCore toolkit: it reads `_rollout` itself and returns rewards."""

from afield.sdk.agentcore import RolloutApp

app = RolloutApp()


@app.rollout_entrypoint
async def invoke(payload: dict, context) -> dict:
    rollout = payload["_rollout"]
    return {
        "rewards": {"correct": payload["value"]},
        "metrics": {"length": len(rollout["model_id"])},
        "same_session": context.session_id == rollout["session_id"],
    }


if __name__ == "__main__":
    app.run()
