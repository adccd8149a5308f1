"""Agents of the veRL tests, as a task asks for them: ones that branch, break, or cannot go on."""

from __future__ import annotations

import itertools
from typing import Any

import openai

import afield

CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset", max_retries=0)
COUNTER = itertools.count()


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float | dict[str, Any]:
    """`does`: what becomes of it. `branches`: how many conversations go on from its first answer."""
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)

    def ask(messages: list[Any]) -> list[Any]:
        reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
        return [*messages, {"role": "assistant", "content": reply.choices[0].message.content or ""}]

    does = task.get("does", "")
    broken = {"break": "", "break one": "-0", "break when greedy": "-greedy"}
    if does in broken and rollout.rollout_id.endswith(broken[does]):
        raise RuntimeError("this task cannot be done")
    first = ask([{"role": "user", "content": task["question"]}])
    for k in range(task.get("branches", 1)):
        ask([*first, {"role": "user", "content": f"And {k}?"}])
    if does == "give up":
        raise afield.PolicyFailure("the model does not know")
    if does == "reward turns":
        return {"reward": 9.0, "rewards": {"answer": 1.0, "style": 4.0}, "turn_rewards": [0.25, 0.5]}
    if does == "forget a reward":
        return {"reward": 9.0, "rewards": {"answer": 1.0}}
    return float(len(first[-1]["content"]) % 3) / 2
