"""Agent with a fixed number of turns and a fixed time between them; a task without turns ends at once."""

import json
import time
import urllib.request
from typing import Any

import afield


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    messages: list[dict[str, str]] = []
    headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
    for turn in range(task["turns"]):
        if turn:
            time.sleep(task["tool_s"])
        messages.append({"role": "user", "content": task["question"] if not turn else task["result"]})
        body = json.dumps({"model": rollout.model_id, "messages": messages}).encode()
        url = f"{rollout.openai_base_url}/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
            reply = json.load(response)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": reply or ""})
    return float(int(rollout.rollout_id.rpartition("-r")[2]) % 2) if task["turns"] else 1.0
