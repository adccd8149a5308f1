"""A LangGraph agent with tools, in training: the graph is made once, its model goes in by the config."""

import re
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import afield
from afield.sdk.frameworks.langchain import create_openai_compatible_model

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
STEPS = 7  # nodes visited: the model four times, its tools in between


def settings(config: RunnableConfig) -> dict[str, Any]:
    return config.get("configurable", {})


@tool
def get_price(item: str, config: RunnableConfig) -> str:
    """The price of an item."""
    return str(settings(config)["prices"].get(item, "unknown"))


@tool
def get_stock(item: str, config: RunnableConfig) -> str:
    """How many of an item are left."""
    return str(settings(config)["stock"].get(item, "unknown"))


def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    return {"messages": [settings(config)["model"].invoke(state["messages"])]}


TOOLS = [get_price, get_stock]
GRAPH = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode(TOOLS))
GRAPH.add_edge(START, "think").add_conditional_edges("think", tools_condition).add_edge("tools", "think")
AGENT = GRAPH.compile()


def ask(model: Any, task: dict[str, Any]) -> list[Any]:
    """The conversation about a question; production asks the same way."""
    world = {"model": model.bind_tools(TOOLS), "prices": task["prices"], "stock": task["stock"]}
    state = {"messages": [SystemMessage(SYSTEM), HumanMessage(task["question"])]}
    return AGENT.invoke(state, {"configurable": world, "recursion_limit": STEPS})["messages"]


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    messages = ask(create_openai_compatible_model(rollout), task)  # <- the rollout's model
    numbers = re.findall(r"\d+", str(messages[-1].content))
    return float(len(messages) > 3 and bool(numbers) and int(numbers[-1]) == task["answer"])
