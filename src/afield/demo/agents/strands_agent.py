"""Demo agent on Strands, which streams responses and runs tools."""

import ssl
from typing import Any

import openai
import strands
from strands.agent.agent_result import AgentResult
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
NUDGE = "Please look it up with a tool."

# Loading CA certificates takes longer than a model call, so all rollouts share one SSL context.
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
        with shop.Shop(task) as opened:
            try:
                answer = await ask(helper, task["question"], opened)
                if opened.lookups == 0:
                    answer = await ask(helper, NUDGE, opened)
            except MaxTokensReachedException:  # the response reached max_tokens
                return 0.0
            return shop.grade(task, str(answer))


async def ask(helper: strands.Agent, question: str, opened: shop.Shop) -> AgentResult:
    return await helper.invoke_async(question, invocation_state={"shop": opened}, limits={"turns": 4})
