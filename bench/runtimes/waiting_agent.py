"""Agent that makes a few model calls and waits, so that all run at once."""

import json
import time
import urllib.request

import afield


@afield.agent
def agent(task: dict, rollout: afield.Context) -> float:
    reply = ""
    for turn in range(task["calls"]):
        time.sleep(task["wait_s"])
        reply = ask(rollout, f"turn {turn} of {task['id']}")
    return float(bool(reply))


def ask(rollout: afield.Context, words: str) -> str:
    body = {"model": rollout.model_id, "messages": [{"role": "user", "content": words}], "max_tokens": 16}
    request = urllib.request.Request(
        f"{rollout.openai_base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]["content"]
