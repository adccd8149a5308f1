"""Demo agent on LangGraph: a graph of model and tool node."""

from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
NUDGE = "Please look it up with a tool."
STEPS = 7
"""Node visits per rollout: four model calls and three tool calls."""
# One connection pool for all rollouts of this process, instead of one each.
POOLS = {"http_client": openai.DefaultHttpxClient(), "http_async_client": openai.DefaultAsyncHttpxClient()}


@tool
def get_price(item: str, config: RunnableConfig) -> str:
    """The price of an item."""
    return config.get("configurable", {})["shop"].price(item)


@tool
def get_stock(item: str, config: RunnableConfig) -> str:
    """How many of an item are left."""
    return config.get("configurable", {})["shop"].stock(item)


def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    return {"messages": [config.get("configurable", {})["model"].invoke(state["messages"])]}


TOOLS = [get_price, get_stock]
GRAPH = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode(TOOLS))
GRAPH.add_edge(START, "think").add_conditional_edges("think", tools_condition).add_edge("tools", "think")
AGENT = GRAPH.compile()


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    model = ChatOpenAI(
        model=rollout.model_id, base_url=rollout.openai_base_url, api_key=lambda: rollout.api_key, **POOLS
    ).bind_tools(TOOLS)
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(task["question"])]
    with shop.Shop(task) as opened:
        config: RunnableConfig = {"configurable": {"shop": opened, "model": model}, "recursion_limit": STEPS}
        try:
            messages = AGENT.invoke({"messages": messages}, config)["messages"]
            if opened.lookups == 0:
                messages = AGENT.invoke({"messages": [*messages, HumanMessage(NUDGE)]}, config)["messages"]
        except GraphRecursionError:
            return 0.0
        return shop.grade(task, str(messages[-1].content))
