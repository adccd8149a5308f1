"""Agent of the pool benchmark: a conversation of several turns through the OpenAI client."""

from typing import Any

import openai

import afield

RETRIES = 6


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    messages: list[Any] = []
    with openai.OpenAI(
        base_url=rollout.openai_base_url, api_key=rollout.api_key, max_retries=RETRIES, timeout=60
    ) as client:
        for turn in range(task["turns"]):
            messages.append({"role": "user", "content": f"Question {turn} of {rollout.session_id}?"})
            answer = client.chat.completions.create(model=rollout.model_id, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return 1.0
