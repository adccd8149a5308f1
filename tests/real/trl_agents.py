"""Agents for the tests with a real TRL."""

from __future__ import annotations

from typing import Any

import openai

import afield

CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def branching(task: dict[str, Any], rollout: afield.Context) -> float:
    """Asks once, and goes on from the answer in two ways; the second half of its tasks has a broken tool."""
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)

    def ask(messages: list[Any]) -> list[Any]:
        reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
        return [*messages, reply.choices[0].message]

    begun = ask([{"role": "user", "content": task["question"]}])
    ends = [ask([*begun, {"role": "user", "content": more}])[-1].content for more in ("How many?", "Why?")]
    if rollout.rollout_id.endswith("-r1"):
        raise afield.InfrastructureFailure("this one never works")
    return sum(len(end or "") for end in ends) / 100


@afield.agent
def broken(task: dict[str, Any], rollout: afield.Context) -> float:
    raise afield.TaskFailure("the shop burnt down")
