"""Requests with a constraint, of every kind, and rescoring of what was recorded for them."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import torch
from pydantic import BaseModel, Field

from afield import trajectories
from afield.batches.rows import Row
from afield.settings.trainer import LayoutName
from afield.trainers.batch import check_rows
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.model import PolicyModel
from afield.trainers.optimizer import Optimizer
from afield.turn_tree import TurnTree
from afield.types import Trajectory, Turn
from support.gateways import Running

LOOKUP = {
    "type": "object",
    "properties": {
        "key": {"enum": ["seven", "nine"]},
        "many": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["key", "many"],
}
COUNT = {"type": "object", "properties": {"to": {"enum": [1, 2, 3]}}, "required": ["to"]}
SCHEMAS = {"lookup": LOOKUP, "count": COUNT}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
USER: list[Any] = [{"role": "user", "content": "What is the value of key seven?"}]
ROOM = 150
BUDGET = 6


class Answer(BaseModel):
    word: Literal["yes", "no"]
    times: int = Field(ge=0, le=9)
    note: str = Field(max_length=6)


def rescored(model: Path, rows: Sequence[Trajectory], layout: LayoutName = "tree") -> float:
    """How far the trainer is from the engine about any token."""
    torch.set_num_threads(1)
    policy = PolicyModel(model, device=torch.device("cpu"), layout=layout)
    made = [
        Row(rollout_id=f"r{n}", trajectory=row, advantages=(1.0,) * len(row.turns))
        for n, row in enumerate(rows)
    ]
    check_rows(made, vocabulary=policy.vocabulary, context=policy.context)
    audit = BatchDiagnostics()
    Optimizer(policy, lr=0.0).score(made, audit)
    return audit.worst.diff


def trained(turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    return trajectories.linear(TurnTree(turns)).trajectories


async def recorded(up: Running, session_id: str = "r.1") -> tuple[Turn, ...]:
    return (await up.client.finalize(session_id)).turns


def check_call(call: Any) -> None:
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


async def until_it_ends(ask: Callable[..., Awaitable[Any]], **asked: Any) -> Any:
    """The choice of an answer that was not cut off: a model of random weights may write blanks on and on."""
    body = {"thinking_token_budget": BUDGET, **asked.pop("extra_body", {})}
    for _ in range(12):
        try:
            made = await ask(model="m", messages=USER, max_tokens=ROOM, extra_body=body, **asked)
        except openai.LengthFinishReasonError:
            continue
        assert made.usage.completion_tokens_details.reasoning_tokens <= BUDGET + len("</think>")
        if made.choices[0].finish_reason != "length":
            return made.choices[0]
    raise AssertionError("no answer ended")


async def ask_everything(client: openai.AsyncOpenAI) -> None:
    """A request of each kind, with the OpenAI SDK."""
    chat = client.chat.completions
    parsed = await until_it_ends(chat.parse, response_format=Answer)
    assert isinstance(parsed.message.parsed, Answer) and parsed.finish_reason == "stop"
    forms: list[tuple[str, Any, str]] = [
        ("regex", "[a-f]{3}-[0-9]{2}", r"[a-f]{3}-[0-9]{2}"),
        ("grammar", 'root ::= ("un" | "deux") " " [0-9]', "(un|deux) [0-9]"),
        ("choice", ["left", "right"], "left|right"),
    ]
    for kind, form, pattern in forms:
        held = await until_it_ends(chat.create, extra_body={"structured_outputs": {kind: form}})
        assert re.fullmatch(pattern, held.message.content), held
    called = await until_it_ends(chat.create, tools=TOOLS, tool_choice="required")
    assert called.message.tool_calls and not called.message.content and called.finish_reason == "tool_calls"
    for call in called.message.tool_calls:
        check_call(call)
    named = {"type": "function", "function": {"name": "count"}}
    called = await until_it_ends(chat.create, tools=TOOLS, tool_choice=named, parallel_tool_calls=False)
    (call,) = called.message.tool_calls
    assert call.function.name == "count"
    check_call(call)
    single = await chat.create(
        model="m", messages=USER, max_tokens=40, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(single.choices[0].message.tool_calls or []) <= 1
