"""The demo's shop agent with a second opinion: after its answer it asks once more from the question alone.

Its session therefore has two branches, of which one has tool calls. The reward is what the first answer is
worth, softened so that a group rarely has only one value.
"""

from __future__ import annotations

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
        second = client.chat.completions.create(model=rollout.model_id, messages=asked, tools=TOOLS)
        said = second.choices[0].message.content or ""
        last = messages[-1]
        answer = "" if isinstance(last, dict) else last.content or ""
        return shop.grade(task, answer) + len(said) % 7 / 100
