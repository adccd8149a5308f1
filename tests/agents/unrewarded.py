"""Agent that gives no reward: it returns its answer."""

from __future__ import annotations

from typing import Any

import openai

import afield


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
    return {"answer": reply.choices[0].message.content}
