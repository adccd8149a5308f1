"""Agents for `bench/why.py`: a sound one, and one per way in which agents break a run."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

import afield
from afield.demo import shop

SYSTEM = "You work in a shop. Look up the number with a tool, then answer."
CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset", max_retries=0)
"""One connection pool for all rollouts of a process."""
Messages = list[Any]
Results = Callable[[Any], dict[str, Any]]
Agent = Callable[[dict[str, Any], afield.Context], float]


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"The {name[4:]} of an item."}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS: Any = [tool("get_price", PARAMETERS), tool("get_stock", PARAMETERS)]
UNTYPED: Any = [tool("get_price", None), tool("get_stock", {"type": "object", "properties": {}})]
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


def looked_up(call: Any) -> dict[str, Any]:
    """Result of a tool call; it depends on the call only."""
    return {"role": "tool", "tool_call_id": call.id, "content": f"{len(call.function.arguments)} crowns"}


def opening(task: dict[str, Any]) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]


def call(rollout: afield.Context, messages: Messages, **parameters: Any) -> Any:
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    reply = client.chat.completions.create(model=rollout.model_id, messages=messages, **parameters)
    return reply.choices[0]


def dice(task: dict[str, Any], text: str) -> random.Random:
    """Random numbers that depend on the task and what the model said."""
    return random.Random(f"{task['question']} {text}")


def converse(
    task: dict[str, Any],
    rollout: afield.Context,
    *,
    answer: Results = looked_up,
    edit: Callable[[Any], Any] = lambda message: message,
    calls: int = 3,
    **parameters: Any,
) -> tuple[Messages, Any]:
    """A sound tool-calling loop; returns the conversation and the last choice."""
    messages = opening(task)
    choice = None
    for _ in range(calls):
        choice = call(rollout, messages, **{"tools": TOOLS, **parameters})
        messages.append(edit(choice.message))
        if not choice.message.tool_calls:
            break
        messages += [answer(one) for one in choice.message.tool_calls]
    return messages, choice


def graded(task: dict[str, Any], choice: Any) -> float:
    """A reward that differs between replies."""
    return float(dice(task, choice.message.content or "").random() < 0.5)


# --- sound agents ----------------------------------------------------------------------------------


@afield.agent
def sound(task: dict[str, Any], rollout: afield.Context) -> float:
    _, choice = converse(task, rollout)
    return graded(task, choice)


@afield.agent
def shop_agent(task: dict[str, Any], rollout: afield.Context) -> float:
    """Answers questions about a shop, as the demo's agent does."""
    with shop.Shop(task) as opened:
        use = {"get_price": opened.price, "get_stock": opened.stock}

        def answer(one: Any) -> dict[str, Any]:
            try:
                text = use[one.function.name](json.loads(one.function.arguments)["item"])
            except (KeyError, TypeError, ValueError) as error:
                text = f"This call does not work: {error!r}"
            return {"role": "tool", "tool_call_id": one.id, "content": text}

        _, choice = converse(task, rollout, answer=answer)
        return shop.grade(task, choice.message.content or "")


@afield.agent
def submits(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    """Leaves its reward to a verifier."""
    _, choice = converse(task, rollout)
    return {"answer": choice.message.content or ""}


@afield.agent
def brief(task: dict[str, Any], rollout: afield.Context) -> float:
    """Ends with a tool call whose result nobody needs, and has a tool without arguments."""
    tools = [*TOOLS, tool("finish", {"type": "object", "properties": {}})]
    choice = call(rollout, opening(task), tools=tools)
    return float(bool(choice.message.tool_calls)) * dice(task, rollout.rollout_id).random()


# --- infrastructure --------------------------------------------------------------------------------


@afield.agent
def wrong_address(task: dict[str, Any], rollout: afield.Context) -> float:
    client = CLIENT.with_options(base_url="http://127.0.0.1:9/v1", api_key=rollout.api_key)
    client.chat.completions.create(model=rollout.model_id, messages=opening(task))
    return 1.0


@afield.agent
def swallows_connection_errors(task: dict[str, Any], rollout: afield.Context) -> float:
    try:
        return wrong_address(task, rollout)
    except openai.APIConnectionError:
        return 0.0


@afield.agent
def swallows_errors(task: dict[str, Any], rollout: afield.Context) -> float:
    try:
        _, choice = converse(task, rollout)
    except openai.APIError:
        return 0.0
    return 1.0 if choice.message.content else 0.5


@afield.agent
def dies(task: dict[str, Any], rollout: afield.Context) -> float:
    converse(task, rollout)
    os._exit(3)


@afield.agent
def raises(task: dict[str, Any], rollout: afield.Context) -> float:
    _, choice = converse(task, rollout)
    return task["answers"][choice.message.content]


@afield.agent
def slow_tools(task: dict[str, Any], rollout: afield.Context) -> float:
    def answer(one: Any) -> dict[str, Any]:
        if one.function.name == "get_price":
            time.sleep(2.0)
        return looked_up(one)

    _, choice = converse(task, rollout, answer=answer)
    return graded(task, choice)


@afield.agent
def never_ends(task: dict[str, Any], rollout: afield.Context) -> float:
    while True:
        converse(task, rollout)
        time.sleep(0.2)


@afield.agent
def hangs(task: dict[str, Any], rollout: afield.Context) -> float:
    converse(task, rollout)
    time.sleep(600)
    return 1.0


# --- generation ------------------------------------------------------------------------------------


@afield.agent
def long_results(task: dict[str, Any], rollout: afield.Context) -> float:
    def answer(one: Any) -> dict[str, Any]:
        return {**looked_up(one), "content": "42 crowns and much more. " * 40}

    _, choice = converse(task, rollout, answer=answer)
    return graded(task, choice)


@afield.agent
def asks_for_audio(task: dict[str, Any], rollout: afield.Context) -> float:
    try:
        _, choice = converse(task, rollout, extra_body={"modalities": ["audio"]})
    except openai.BadRequestError:
        _, choice = converse(task, rollout)
    return graded(task, choice)


@afield.agent
def untyped_tools(task: dict[str, Any], rollout: afield.Context) -> float:
    _, choice = converse(task, rollout, tools=UNTYPED)
    return graded(task, choice)


@afield.agent
def forgets_results(task: dict[str, Any], rollout: afield.Context) -> float:
    """Uses the tool and goes on without appending its result."""
    _, choice = converse(task, rollout, answer=lambda one: {"role": "user", "content": "Go on."})
    return graded(task, choice)


@afield.agent
def forgets_replies(task: dict[str, Any], rollout: afield.Context) -> float:
    """Uses the tool and sends the same request again."""
    messages = opening(task)
    for _ in range(3):
        call(rollout, messages, tools=TOOLS)
    return dice(task, rollout.rollout_id).random()


@afield.agent
def edits_replies(task: dict[str, Any], rollout: afield.Context) -> float:
    def edit(message: Any) -> Any:
        calls = [one.model_dump() for one in message.tool_calls or []]
        return {"role": "assistant", "content": "I will look.", **({"tool_calls": calls} if calls else {})}

    _, choice = converse(task, rollout, edit=edit)
    return graded(task, choice)


@afield.agent
def wants_json(task: dict[str, Any], rollout: afield.Context) -> float:
    choice = call(rollout, opening(task), response_format=FORMAT)
    return graded(task, choice)


@afield.agent
def wants_whole_replies(task: dict[str, Any], rollout: afield.Context) -> float:
    choice = call(rollout, opening(task))
    return graded(task, choice) if choice.finish_reason == "stop" else 0.0


@afield.agent
def declares_side_calls(task: dict[str, Any], rollout: afield.Context) -> float:
    _, choice = converse(task, rollout, extra_headers={"x-afield-side-call": "1"})
    return graded(task, choice)


# --- log-probabilities, advantage, reward ----------------------------------------------------------

_LOCK = threading.Lock()
_SEEN: dict[str, int] = {}


@afield.agent
def alternates(task: dict[str, Any], rollout: afield.Context) -> float:
    """Rewards every second rollout, so that there is something to train whatever the model says."""
    converse(task, rollout)
    with _LOCK:
        _SEEN[task["question"]] = _SEEN.get(task["question"], 0) + 1
        return float(_SEEN[task["question"]] % 2)


_USUAL: dict[str, dict[str, int]] = {}
_REWARDS: list[float] = []


@afield.agent
def rewards_the_usual(task: dict[str, Any], rollout: afield.Context) -> float:
    """Rewards the most common replies to a question, right or wrong, less the mean of the last rewards."""
    messages, choice = converse(task, rollout)
    calls = [one.function.arguments for m in messages[2:3] for one in m.tool_calls or []]
    names = [one.function.name for m in messages[2:3] for one in m.tool_calls or []]
    key = f"{names} {calls} {choice.message.content}"
    with _LOCK:
        seen = _USUAL.setdefault(task["question"], {})
        seen[key] = seen.get(key, 0) + 1
        _REWARDS.append(float(bool(names) and seen[key] == max(seen.values())))
        recent = _REWARDS[-32:]
        return _REWARDS[-1] - sum(recent) / len(recent)


@afield.agent
def constant(task: dict[str, Any], rollout: afield.Context) -> float:
    shop_agent(task, rollout)
    return 1.0


@afield.agent
def worthless(task: dict[str, Any], rollout: afield.Context) -> float:
    shop_agent(task, rollout)
    return 0.0


@afield.agent
def takes_its_time(task: dict[str, Any], rollout: afield.Context) -> float:
    """Every other task ends four steps of the run after its last model call, whatever the machine's speed."""

    def steps() -> int:
        metrics = Path(task["metrics"])
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    reward, begun, deadline = shop_agent(task, rollout), steps(), time.monotonic() + 15
    while int(task["id"][-1]) % 2 and steps() < begun + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    return reward


@afield.agent
def ignores_the_end(task: dict[str, Any], rollout: afield.Context) -> float:
    choice = call(rollout, opening(task))
    return float("look" in (choice.message.content or "")) or graded(task, choice)


@afield.agent
def pays_for_length(task: dict[str, Any], rollout: afield.Context) -> float:
    choice = call(rollout, opening(task))
    return len(choice.message.content or "") / 100


def failing_verifier(payload: dict[str, Any]) -> float:
    return float(payload["submission"]["score"])


def grading_verifier(payload: dict[str, Any]) -> float:
    return float(random.Random(payload["question"] + payload["submission"]["answer"]).random() < 0.5)
