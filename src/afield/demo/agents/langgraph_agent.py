"""The shop agent on LangGraph: a graph of two nodes, the model and its tools."""

from typing import Any

import openai  # noqa: TID253
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph  # noqa: TID253
from langgraph.prebuilt import ToolNode, tools_condition  # noqa: TID253

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
NUDGE = "Please look it up with a tool."
STEPS = {"recursion_limit": 8}  # nodes visited: four of the model, four of the tools

# One connection pool for all rollouts of this process.
HTTP_CLIENT = openai.DefaultHttpxClient()
HTTP_ASYNC_CLIENT = openai.DefaultAsyncHttpxClient()


@tool
def get_price(item: str, config: RunnableConfig) -> str:
    """The price of an item."""
    return config.get("configurable", {})["shop"].price(item)


@tool
def get_stock(item: str, config: RunnableConfig) -> str:
    """How many of an item are left."""
    return config.get("configurable", {})["shop"].stock(item)


TOOLS = [get_price, get_stock]
SCHEMAS = [convert_to_openai_tool(each) for each in TOOLS]


def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    model = config.get("configurable", {})["model"]
    return {"messages": [model.invoke(state["messages"])]}


GRAPH = StateGraph(MessagesState)
GRAPH.add_node("think", think)
GRAPH.add_node("tools", ToolNode(TOOLS))
GRAPH.add_edge(START, "think")
GRAPH.add_conditional_edges("think", tools_condition)
GRAPH.add_edge("tools", "think")
AGENT = GRAPH.compile()


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    model = ChatOpenAI(
        model=rollout.model_id,
        base_url=rollout.openai_base_url,
        api_key=lambda: rollout.api_key,
        http_client=HTTP_CLIENT,
        http_async_client=HTTP_ASYNC_CLIENT,
    ).bind_tools(SCHEMAS)
    with shop.Shop(task) as stock_room:
        config: RunnableConfig = {"configurable": {"shop": stock_room, "model": model}, "recursion_limit": 8}
        state = AGENT.invoke({"messages": [SystemMessage(SYSTEM), HumanMessage(task["question"])]}, config)
        if stock_room.lookups == 0:
            state = AGENT.invoke({"messages": [*state["messages"], HumanMessage(NUDGE)]}, config)
        return shop.grade(task, str(state["messages"][-1].content))
