"""The demo's shop agent with a second opinion: after its answer it asks once more from the question alone.

Its session therefore has two branches, of which one has tool calls. The reward is what the first answer is
worth and a little noise of the rollout's own, so that no group has only one value and every step a gradient.
"""

from __future__ import annotations

import random
from typing import Any

import openai

import afield
from afield.demo import shop
from afield.demo.agents.openai_agent import MAX_CALLS, NUDGE, SYSTEM, TOOLS, use

CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    asked = list(messages)
    with shop.Shop(task) as opened:
        for _ in range(MAX_CALLS):
            reply = client.chat.completions.create(model=rollout.model_id, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message)
            if message.tool_calls:
                messages += [use(opened, call) for call in message.tool_calls]
            elif opened.lookups == 0:
                messages.append({"role": "user", "content": NUDGE})
            else:
                break
        client.chat.completions.create(model=rollout.model_id, messages=asked, tools=TOOLS)
        last = messages[-1]
        answer = "" if isinstance(last, dict) else last.content or ""
        return shop.grade(task, answer) + random.Random(rollout.seed).random() / 10
