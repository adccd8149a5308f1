"""A help desk with LangGraph's ready agent and two tools; in training, its model is the rollout's."""

import functools
import ssl
import warnings
from typing import Any

import httpx
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

import afield

# The package langchain has the same function as langchain.agents.create_agent.
warnings.filterwarnings("ignore", message="create_react_agent has been moved")

SYSTEM = "You work at a help desk. Find the order with the tools, then answer with the value alone."
STEPS = 9  # nodes visited: the model five times, its tools in between


def world(config: RunnableConfig) -> dict[str, Any]:
    return config.get("configurable", {})


def find_orders_of(task: dict[str, Any], customer: str) -> str:
    if customer.strip().lower() != task["customer"].lower():
        return "no such customer"
    return "\n".join(f"order {order['id']}: {order['state']}" for order in task["orders"])


def get_order_of(task: dict[str, Any], order_id: str) -> str:
    order = next((order for order in task["orders"] if order["id"] == order_id.strip()), None)
    if order is None:
        return "no such order"
    return "\n".join(f"{name}: {value}" for name, value in order.items() if name not in ("id", "state"))


@tool
async def find_orders(customer: str, config: RunnableConfig) -> str:
    """The orders of a customer."""
    return find_orders_of(world(config)["task"], customer)


@tool
async def get_order(order_id: str, config: RunnableConfig) -> str:
    """The details of an order."""
    return get_order_of(world(config)["task"], order_id)


TOOLS = [find_orders, get_order]


@functools.cache
def http() -> httpx.AsyncClient:
    """Connections that all rollouts of this process share."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(verify=ssl.create_default_context(), limits=limits, timeout=300)


def grade(task: dict[str, Any], answer: str) -> float:
    return float(answer.strip() == task["answer"])


@afield.agent
async def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    model = ChatOpenAI(
        model=rollout.model_id,
        base_url=rollout.openai_base_url,
        api_key=rollout.api_key,
        http_async_client=http(),
        max_retries=2,
    )
    graph = create_react_agent(model, TOOLS)
    messages = [SystemMessage(SYSTEM), HumanMessage(task["question"])]
    try:
        state = await graph.ainvoke(
            {"messages": messages}, {"configurable": {"task": task}, "recursion_limit": STEPS}
        )
    except GraphRecursionError:
        return 0.0
    return grade(task, str(state["messages"][-1].content))
