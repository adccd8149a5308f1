"""The demo's agents against a real gateway; only what the model says is written beforehand."""

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import transformers

from afield.demo import shop
from afield.demo.agents import langgraph_agent, openai_agent, strands_agent
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionSpec
from afield.sdk.agent import Context
from support.gateways import POLICY, running
from support.paths import ROOT

pytestmark = pytest.mark.anyio

AGENTS = {"openai": openai_agent, "strands": strands_agent, "langgraph": langgraph_agent}
TASK = next(row for row in shop.tasks(0, 16) if row["question"] == "How much is the red mug?")
TOKENIZER = transformers.AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(params=AGENTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def said(text: str) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(TOKENIZER.encode(f"{text}<|im_end|>", add_special_tokens=False)))


def call(tool: str = "get_price", **arguments: str) -> ScriptedReply:
    return said(f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>")


async def play(
    name: str, store: Path, *script: ScriptedReply, max_tokens: int | None = None
) -> tuple[float, Any]:
    """The agent's reward, and the calls the engine served."""
    engine = ScriptedEngine(list(script))
    async with running(engine, store) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        context = Context(
            base_url=ticket.base_url,
            openai_base_url=ticket.openai_base_url,
            api_key=ticket.api_key,
            model_id="policy",
            session_id="r.1",
            rollout_id="r",
            attempt=1,
            group_id="g",
            input_id=TASK["id"],
            exp_id="exp",
        )
        agent: Any = AGENTS[name].agent
        with anyio.fail_after(60):
            if inspect.iscoroutinefunction(agent):
                return await agent(TASK, context), engine.recorded
            return await anyio.to_thread.run_sync(agent, TASK, context), engine.recorded


async def test_a_look_up_and_the_number_it_gives_earn_the_reward(name, tmp_path):
    reward, calls = await play(name, tmp_path, call(item="red mug"), said(f"It costs ${TASK['answer']}."))
    assert (reward, len(calls)) == (1.0, 2)
    assert f"<tool_response>\n{TASK['answer']}\n</tool_response>" in TOKENIZER.decode(calls[1].prompt_ids)


async def test_another_number_earns_nothing(name, tmp_path):
    reward, calls = await play(name, tmp_path, call("get_stock", item="red mug"), said("It costs about $10."))
    assert (reward, len(calls)) == (0.0, 2)


async def test_an_answer_without_a_look_up_is_sent_back_once(name, tmp_path):
    answer = said(f"It costs ${TASK['answer']}.")
    reward, calls = await play(name, tmp_path, answer, call(item="red mug"), answer)
    assert (reward, len(calls)) == (1.0, 3)


async def test_a_call_that_does_not_work_is_answered_and_the_agent_continues(name, tmp_path):
    right = [call(item="red mug"), said(f"It costs ${TASK['answer']}.")]
    for wrong in (call("get_colour", item="red mug"), call(thing="red mug"), call(item="pink piano")):
        reward, calls = await play(name, tmp_path / str(id(wrong)), wrong, *right)
        assert (reward, len(calls)) == (1.0, 3)


async def test_a_model_that_only_calls_tools_is_stopped(name, tmp_path):
    reward, calls = await play(name, tmp_path, *[call(item="red mug")] * 20)
    assert reward == 0.0
    assert len(calls) == 4


async def test_the_policy_was_warmed_up_on_what_the_agents_really_send(name, tmp_path):
    _, calls = await play(name, tmp_path, call(item="red mug"), said("It costs $11."))
    builder = demo_policy_builder()
    harness = builder.harnesses()[list(AGENTS).index(name)]
    messages = [{"role": "system", "content": harness.system}, {"role": "user", "content": TASK["question"]}]
    prompt = TOKENIZER.apply_chat_template(
        messages, tools=harness.tools, add_generation_prompt=True, return_dict=False
    )
    assert list(calls[0].prompt_ids) == list(prompt)


def demo_policy_builder() -> Any:
    path = ROOT / "scripts" / "build_demo_policy.py"
    spec = importlib.util.spec_from_file_location("build_demo_policy", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
