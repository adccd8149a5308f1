"""Agent that asks the model once and succeeds with the probability `skill` of its task.

With `fails` = `infrastructure` it fails, in the attempts that `fails_at` names or in all, until the file
`until` exists. It writes its sessions to the file `marks`.
"""

import json
import random
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import afield
from afield.errors import InfrastructureFailure


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> Any:
    number = int(rollout.rollout_id.rpartition("-r")[2])
    if "marks" in task:
        with Path(task["marks"]).open("a") as marks:
            marks.write(rollout.session_id + "\n")
    repaired = "until" in task and Path(task["until"]).exists()
    if not repaired and task.get("fails") == "infrastructure" and number in task.get("fails_at", [number]):
        raise InfrastructureFailure("the tool's server is gone")
    body = {"model": rollout.model_id, "messages": [{"role": "user", "content": task["question"]}]}
    headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(
        f"{rollout.openai_base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            reply = json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            return {"reward": 0.0, "status": float(error.code)}
    if task.get("by_reply"):
        return float(len(reply) % 2)
    return float(random.Random(rollout.seed).random() < task["skill"])
