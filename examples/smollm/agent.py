"""A help desk with LangGraph's ready agent and two tools; in training, its model is the rollout's."""

import functools
import ssl
import warnings

import httpx
import tasks
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from tasks import Task

import afield
from afield.sdk.frameworks.langchain import create_openai_compatible_model

# The package langchain has the same function as langchain.agents.create_agent.
warnings.filterwarnings("ignore", message="create_react_agent has been moved")

STEPS = 9  # nodes visited: the model five times, its tools in between


@tool
async def find_orders(customer: str, config: RunnableConfig) -> str:
    """The orders of a customer."""
    return tasks.find_orders(config.get("configurable", {})["task"], customer)


@tool
async def get_order(order_id: str, config: RunnableConfig) -> str:
    """The details of an order."""
    return tasks.get_order(config.get("configurable", {})["task"], order_id)


TOOLS = [find_orders, get_order]


@functools.cache
def http() -> httpx.AsyncClient:
    """Connections that all rollouts of this process share."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(verify=ssl.create_default_context(), limits=limits, timeout=300)


@afield.agent
async def agent(task: Task, rollout: afield.Context) -> float:
    model = create_openai_compatible_model(rollout, http_async_client=http())  # <- the rollout's model
    graph = create_react_agent(model, TOOLS)
    messages = [SystemMessage(tasks.SYSTEM), HumanMessage(task["question"])]
    try:
        state = await graph.ainvoke(
            {"messages": messages}, {"configurable": {"task": task}, "recursion_limit": STEPS}
        )
    except GraphRecursionError:
        return 0.0
    return tasks.grade(task, str(state["messages"][-1].content))
