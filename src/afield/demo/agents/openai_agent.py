"""Demo agent on the OpenAI SDK: a tool-calling loop."""

import json
from typing import Any

import openai

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
NUDGE = "Please look it up with a tool."
MAX_CALLS = 4


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: Any = [tool("get_price", "The price of an item."), tool("get_stock", "How many of an item are left.")]

# One connection pool for all rollouts of this process; `with_options` gives each its own URL and key.
CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
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
                return shop.grade(task, message.content or "")
    return 0.0


def use(opened: shop.Shop, call: Any) -> dict[str, str]:
    tools = {"get_price": opened.price, "get_stock": opened.stock}
    try:
        result = tools[call.function.name](json.loads(call.function.arguments)["item"])
    except (KeyError, TypeError, ValueError) as error:
        result = f"This call does not work: {error!r}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}
