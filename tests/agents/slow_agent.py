"""Agent that calls the model, sleeps for `seconds`, and calls it again.

With `until` it also waits for that file, and first leaves one named by its session beside it.

It uses no client library, whose import would take longer than the rollout.
"""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import afield


def chat(rollout: afield.Context, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = json.dumps({"model": rollout.model_id, "messages": messages}).encode()
    headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{rollout.openai_base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    messages = [{"role": "user", "content": task["question"]}]
    reply = chat(rollout, messages)
    time.sleep(task.get("seconds", 0.5))
    if "until" in task:
        until = Path(task["until"])
        until.with_name(rollout.session_id).touch()
        while not until.exists():
            time.sleep(0.05)
    reply = chat(rollout, [*messages, reply, {"role": "user", "content": "Are you sure?"}])
    return float(len(reply["content"] or "") % 2)
