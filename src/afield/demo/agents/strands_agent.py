"""The shop agent on Strands, which streams its answers and runs its tools itself."""

import ssl
from typing import Any

import openai  # noqa: TID253
import strands  # noqa: TID253
from strands.models.openai import OpenAIModel  # noqa: TID253

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
NUDGE = "Please look it up with a tool."
MAX_CALLS = 4

# Reading the certificate store takes longer than a model call; one context serves every rollout.
SSL_CONTEXT = ssl.create_default_context()


@strands.tool(context=True)
def get_price(item: str, tool_context: strands.ToolContext) -> str:
    """The price of an item."""
    return tool_context.invocation_state["shop"].price(item)


@strands.tool(context=True)
def get_stock(item: str, tool_context: strands.ToolContext) -> str:
    """How many of an item are left."""
    return tool_context.invocation_state["shop"].stock(item)


@afield.agent
async def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    http_client = openai.DefaultAsyncHttpxClient(verify=SSL_CONTEXT)
    async with openai.AsyncOpenAI(
        base_url=rollout.openai_base_url, api_key=rollout.api_key, http_client=http_client
    ) as client:
        model = OpenAIModel(client, model_id=rollout.model_id)
        helper = strands.Agent(
            model, tools=[get_price, get_stock], system_prompt=SYSTEM, callback_handler=None
        )
        with shop.Shop(task) as stock_room:
            answer = await helper.invoke_async(task["question"], invocation_state={"shop": stock_room})
            if stock_room.lookups == 0:
                answer = await helper.invoke_async(NUDGE, invocation_state={"shop": stock_room})
            return shop.grade(task, str(answer))
