"""Probe agent of `afield doctor`: calls the model once.

It needs the standard library and the SDK only, so that it runs wherever an agent does.
"""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from afield.sdk.agent import Context, agent

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
CALL_TIMEOUT_S = 120.0


@agent
def probe(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    """Call the model, with a tool if the task says so; the reward is 1."""
    body = {
        "model": rollout.model_id,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_tokens": 16,
        **({"tools": [TOOL]} if task.get("tools") else {}),
    }
    headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
    url = f"{rollout.openai_base_url}/chat/completions"
    began = time.time()
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
        json.load(response)
    return {"reward": 1.0, "metrics": {"clock": began, "call_s": time.time() - began}}
