"""LangGraph agent of two nodes: streaming, sub-graph, continuation from a summary.

The suite runs it in the client's own environment: langgraph_agent.py BASE_URL KEY MODEL TASK GO_ON
"""

# pyright: reportMissingImports=false
import sys
from typing import Any


def build(model: Any, tools: list[Any]) -> Any:
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
    from langgraph.types import RetryPolicy

    bound = model.bind_tools(tools)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    retry = RetryPolicy(initial_interval=0.2, max_attempts=4, retry_on=Exception)
    graph = StateGraph(MessagesState).add_node("think", think, retry_policy=retry)
    graph.add_node("tools", ToolNode(tools)).add_edge(START, "think")
    return graph.add_conditional_edges("think", tools_condition).add_edge("tools", "think").compile()


def main(base_url: str, key: str, model_id: str, task: str, go_on: str) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=model_id, base_url=base_url, api_key=lambda: key, streaming=True)

    @tool
    def look(thread: str, step: int) -> str:
        """Where the thread is after a step."""
        return f"You are at [at {thread}-{step}]."

    @tool
    def ask(question: str) -> str:
        """Ask a helper, who works on the question alone."""
        helper = build(model, [look])
        state = {"messages": [SystemMessage("You help."), HumanMessage(question)]}
        return helper.invoke(state)["messages"][-1].text

    agent = build(model, [look, ask])
    system = SystemMessage("You go step by step.")
    limit = {"recursion_limit": 60}
    history = agent.invoke({"messages": [system, HumanMessage(task)]}, limit)["messages"]
    summary = model.invoke([*history, HumanMessage("Please summarise this conversation.")])
    start = HumanMessage(f"So far: {summary.text}\n{go_on}")
    sys.stdout.write(agent.invoke({"messages": [system, start]}, limit)["messages"][-1].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
