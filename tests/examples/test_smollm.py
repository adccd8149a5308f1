"""The help desk of examples/smollm: tasks, chat template, agent and warm start, without the real model."""

from __future__ import annotations

import importlib
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from afield.chat import ChatTokenizer
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionSpec
from afield.sdk.agent import Context
from support.gateways import POLICY, running
from support.paths import ROOT

FOLDER = ROOT / "examples" / "smollm"
PLAIN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The model's own chat template."""
HELLO = {"role": "user", "content": "hi"}
CONVERSATIONS = ([HELLO], [{"role": "system", "content": "be brief"}, HELLO, {**HELLO, "role": "assistant"}])


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports modules of the example, whose names other examples have, too."""
    monkeypatch.syspath_prepend(str(FOLDER))
    own = ("tasks", "agent", "warm_start")
    kept = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield importlib.import_module
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model directory with the example's chat template."""
    path = tmp_path / "model"
    shutil.copytree(POLICY, path)
    shutil.copy(FOLDER / "chat_template.jinja", path)
    return path


# --- tasks ----------------------------------------------------------------------------------------


def test_tasks_come_from_the_seed_and_held_out_customers_are_never_trained(desk: Any) -> None:
    tasks = desk("tasks")
    train, held_out = tasks.make_tasks(3, 400, 100)
    assert (train, held_out) == tasks.make_tasks(3, 400, 100)
    assert train != tasks.make_tasks(4, 400, 100)[0]
    assert (len(train), len(held_out)) == (400, 100)
    assert not {task["customer"] for task in train} & {task["customer"] for task in held_out}
    assert len({task["id"] for task in train + held_out}) == 500


def test_only_the_right_order_has_the_answer(desk: Any) -> None:
    tasks = desk("tasks")
    for task in tasks.make_tasks(0, 200, 0, orders=3)[0]:
        wanted = next(order for order in task["orders"] if order["id"] == task["order"])
        assert task["customer"] in task["question"] and wanted["state"] in task["question"]
        listed = tasks.find_orders(task, f" {task['customer'].lower()}")
        assert listed.count("\n") == 2 and f"order {task['order']}: {wanted['state']}" in listed
        lines = {order["id"]: tasks.get_order(task, order["id"]).splitlines() for order in task["orders"]}
        found = [order_id for order_id, fields in lines.items() if task["answer"] in fields]
        assert found == [task["order"]]
        assert (
            tasks.grade(task, f"{task['answer']}\n") == 1
            and tasks.grade(task, f"It is {task['answer']}") == 0
        )
    task = tasks.make_tasks(0, 1, 0)[0][0]
    assert tasks.find_orders(task, "Nobody") == "no such customer"
    assert tasks.get_order(task, "x") == "no such order"


# --- chat template --------------------------------------------------------------------------------


def test_the_template_has_a_known_tool_format_and_only_appends(model: Path) -> None:
    profile = ChatTokenizer.load(model).profile
    assert (profile.tool_format, profile.parallel_calls, profile.end_of_turn) == (
        "hermes",
        True,
        "<|im_end|>",
    )
    assert set(profile.appends.values()) == {"append"} and profile.truncated and not profile.strips


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system"])
@pytest.mark.parametrize("generation", [True, False])
def test_without_tools_the_template_renders_as_the_models_own(
    model: Path, messages: list[dict[str, str]], generation: bool
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": generation}
    rendered = tokenizer.apply_chat_template(messages, **options)
    assert rendered == tokenizer.apply_chat_template(messages, chat_template=PLAIN, **options)


# --- agent and warm start -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_agent_gets_what_the_warm_start_shows_token_by_token(
    desk: Any, model: Path, tmp_path: Path
) -> None:
    """A script plays a demonstration through LangGraph and the gateway, which gives its training row."""
    tasks, warm_start, agent = desk("tasks"), desk("warm_start"), desk("agent")
    task = tasks.make_tasks(0, 1, 0)[0][0]
    messages = warm_start.demonstration(task, random.Random(0), right=1.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    row = warm_start.to_row(tokenizer, messages, "shown")
    ids = row.trajectory.token_ids
    replies = [ScriptedReply(token_ids=ids[turn.start : turn.end]) for turn in row.trajectory.turns]
    async with running(ScriptedEngine(replies), tmp_path / "store", model) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        rollout = Context(
            exp_id="e",
            input_id=task["id"],
            rollout_id="r",
            attempt=1,
            group_id="g",
            session_id="r.1",
            base_url=ticket.base_url,
            api_key=ticket.api_key,
            model_id="policy",
            openai_base_url=ticket.openai_base_url,
        )
        reward = await agent.agent(task, rollout)
        record = await up.client.finalize("r.1")
        await agent.http().aclose()
    assert reward == 1.0 and len(record.turns) == 3
    (trajectory,) = record.trajectories
    assert (trajectory.token_ids, trajectory.loss_mask) == (ids, row.trajectory.loss_mask)


def test_demonstrations_are_right_as_often_as_asked(desk: Any) -> None:
    tasks, warm_start = desk("tasks"), desk("warm_start")
    rng, shown = random.Random(0), tasks.make_tasks(0, 300, 0)[0]
    right = [
        warm_start.demonstration(task, rng, right=0.6)[-1]["content"] == task["answer"] for task in shown
    ]
    assert 0.28 < sum(right) / len(right) < 0.44  # two decisions
    assert all(warm_start.demonstration(t, rng, right=1.0)[-1]["content"] == t["answer"] for t in shown)
