"""Asks the model, takes its time, and asks again."""

import time
from typing import Any

import openai

import afield

CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
    time.sleep(task.get("seconds", 0.5))
    messages += [reply.choices[0].message, {"role": "user", "content": "Are you sure?"}]
    reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
    return float(len(reply.choices[0].message.content or "") % 2)
