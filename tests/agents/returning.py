"""Agent that returns what its task says, besides a reward."""

from typing import Any

import afield


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    blob = {"blob": "x" * task["blob"]} if "blob" in task else {}
    return {"reward": 1.0, "metrics": {"score": 2.0}, **task.get("returns", {}), **blob}
