"""Agents that go wrong, each in its own way."""

import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

import afield


def raises(task: dict[str, Any]) -> float:
    raise LookupError("no such shelf")


def not_a_number(task: dict[str, Any]) -> float:
    return float("nan")


def not_even_numeric(task: dict[str, Any]) -> Any:
    return "very good"


def never_returns(task: dict[str, Any]) -> float:
    time.sleep(3600)
    return 1.0


def dies(task: dict[str, Any]) -> float:
    os._exit(7)


def posts_garbage(task: dict[str, Any], rollout: afield.Context) -> float:
    url = f"{rollout.openai_base_url}/chat/completions"
    for key, body in ((rollout.api_key, b"\xff{"), ("wrong", b"{}")):
        request = urllib.request.Request(url, body, {"authorization": f"Bearer {key}"})
        try:
            urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            with error:
                assert error.code in (400, 401)
    asked = {"model": rollout.model_id, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {rollout.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
    return 1.0


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> Any:
    how = globals()[task["how"]]
    return how(task, rollout) if how is posts_garbage else how(task)
