"""The one-liners for frameworks, at a real gateway; only what the model says is written beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import strands
import transformers
from langgraph.errors import GraphRecursionError
from strands.types.exceptions import EventLoopException, MaxTokensReachedException

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import PolicyFailure, UsageError, WireError
from afield.interfaces import SessionSpec
from afield.sdk.agent import Context
from afield.sdk.classify import attribute
from afield.sdk.frameworks import langchain
from afield.sdk.frameworks.strands import ConversationHook, create_openai_compatible_model
from afield.types import Reason
from support.gateways import POLICY, running

pytestmark = pytest.mark.anyio

TOKENIZER = transformers.AutoTokenizer.from_pretrained(POLICY)
MAKERS = {"strands": create_openai_compatible_model, "langchain": langchain.create_openai_compatible_model}


def said(text: str) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(TOKENIZER.encode(f"{text}<|im_end|>", add_special_tokens=False)))


def call(tool: str, **arguments: Any) -> ScriptedReply:
    return said(f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>")


ROLLOUT: dict[str, Any] = {
    "exp_id": "exp",
    "input_id": "task",
    "rollout_id": "r",
    "attempt": 1,
    "group_id": "g",
    "session_id": "r.1",
    "base_url": "http://127.0.0.1:1/s/r.1",
    "api_key": "secret-key",
    "model_id": "policy",
    "outcome_url": "http://127.0.0.1:1/s/r.1/outcome",
}
CONTEXT = Context(
    openai_base_url="http://127.0.0.1:1/s/r.1/v1",
    **{name: ROLLOUT[name] for name in ROLLOUT if name != "outcome_url"},
)


@asynccontextmanager
async def rollout(
    store: Path, *script: ScriptedReply
) -> AsyncIterator[tuple[dict[str, Any], ScriptedEngine]]:
    """The payload of a rollout whose session is open, and the engine behind it."""
    engine = ScriptedEngine(list(script))
    async with running(engine, store) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        where = {"base_url": ticket.base_url, "api_key": ticket.api_key}
        yield {"question": "How much?", "_rollout": ROLLOUT | where}, engine


@strands.tool
def look(item: str) -> str:
    """Look at an item."""
    return f"{item}: 12"


@strands.tool
def photograph(item: str) -> dict[str, Any]:
    """A photograph of an item."""
    picture = {"image": {"format": "png", "source": {"bytes": b"\x89PNG...."}}}
    return {"status": "success", "content": [picture]}


# --- the model ------------------------------------------------------------------------------------


async def test_a_strands_agent_runs_at_its_rollouts_gateway_from_any_event_loop(tmp_path: Path) -> None:
    answers = (call("look", item="mug"), said("12"), said("again 12"))
    async with rollout(tmp_path, *answers) as (payload, engine):
        model = create_openai_compatible_model(payload)
        agent = strands.Agent(model, tools=[look], callback_handler=None)
        first = await agent.invoke_async("How much is the mug?")
        # A plain call runs in an event loop of its own.
        second = await anyio.to_thread.run_sync(agent, "Sure?")
    assert (str(first).strip(), str(second).strip()) == ("12", "again 12")
    assert len(engine.recorded) == 3


async def test_a_langchain_model_asks_at_its_rollouts_gateway(tmp_path: Path) -> None:
    async with rollout(tmp_path, said("12"), said("13")) as (payload, engine):
        model = langchain.create_openai_compatible_model(payload)
        assert (await model.ainvoke("How much?")).content == "12"
        assert (await anyio.to_thread.run_sync(model.invoke, "Sure?")).content == "13"
    assert len(engine.recorded) == 2


@pytest.mark.parametrize("where", [CONTEXT, {"_rollout": ROLLOUT}], ids=["context", "payload"])
def test_the_rollouts_address_wins_over_that_of_production(where: Any) -> None:
    production = {"model_id": "big", "base_url": "http://127.0.0.1:9/v1", "api_key": "none"}
    model: Any = create_openai_compatible_model(where, **production, max_tokens=7)
    assert str(model._custom_client.base_url) == "http://127.0.0.1:1/s/r.1/v1/"
    assert model._custom_client.api_key == "secret-key"
    assert model.get_config()["model_id"] == "policy" and model.get_config()["params"] == {"max_tokens": 7}
    chat: Any = langchain.create_openai_compatible_model(where, **production, max_retries=1)
    assert (chat.openai_api_base, chat.model_name) == ("http://127.0.0.1:1/s/r.1/v1", "policy")
    assert chat.openai_api_key.get_secret_value() == "secret-key" and chat.max_retries == 1


@pytest.mark.parametrize("where", [None, {"question": "How much?"}], ids=["nothing", "payload"])
def test_without_a_rollout_the_model_is_productions(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    model: Any = create_openai_compatible_model(where, model_id="big")
    assert str(model._custom_client.base_url) == "http://127.0.0.1:9/v1/"
    assert model._custom_client.api_key == "from-the-environment"
    chat: Any = langchain.create_openai_compatible_model(where, model_id="big")
    assert str(chat.root_client.base_url) == "http://127.0.0.1:9/v1/"
    given: Any = create_openai_compatible_model(where, model_id="big", base_url="http://h/v1", api_key="k")
    assert (str(given._custom_client.base_url), given._custom_client.api_key) == ("http://h/v1/", "k")


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_payload_without_a_rollout_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="needs model_id="):
        make({"question": "How much?"})
    with pytest.raises(UsageError, match="Context or payload, not 'http://gateway'"):
        make("http://gateway")
    # A broken rollout must not quietly become a call to production.
    with pytest.raises(WireError, match="api_key"):
        make({"_rollout": {**ROLLOUT, "api_key": ""}}, model_id="big")


def test_the_helpers_are_light_until_they_are_used() -> None:
    program = (
        "import sys, afield.sdk.frameworks.strands, afield.sdk.frameworks.langchain\n"
        "heavy = {'strands', 'openai', 'httpx', 'langchain_openai'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- the conversation -----------------------------------------------------------------------------


async def test_the_hook_collects_the_messages(tmp_path: Path) -> None:
    hook = ConversationHook()
    async with rollout(tmp_path, call("look", item="mug"), said("It is 12.")) as (payload, _):
        model = create_openai_compatible_model(payload)
        agent = strands.Agent(model, tools=[look], name="clerk", callback_handler=None, hooks=[hook])
        assert hook.conversation == []
        await agent.invoke_async("How much is the mug?")
    asked, used, answered, last = hook.conversation
    assert asked == {"agent": "clerk", "role": "user", "content": [{"text": "How much is the mug?"}]}
    assert used["content"][0]["toolUse"]["input"] == {"item": "mug"}
    assert answered["content"][0]["toolResult"]["content"] == [{"text": "mug: 12"}]
    assert last["content"] == [{"text": "It is 12."}]


async def test_messages_are_kept_as_json_although_the_agent_fails(tmp_path: Path) -> None:
    hook = ConversationHook()
    async with rollout(tmp_path, call("photograph", item="mug")) as (payload, _):
        model = create_openai_compatible_model(payload)
        agent = strands.Agent(model, tools=[photograph], callback_handler=None, hooks=[hook])
        with pytest.raises(EventLoopException, match="takes no images"):
            await agent.invoke_async("Show me the mug.")
    *_, answered = hook.conversation
    (picture,) = answered["content"][0]["toolResult"]["content"]
    assert picture["image"]["source"]["bytes"] == "<8 bytes>"
    assert json.loads(json.dumps(hook.conversation)) == hook.conversation


async def test_agents_may_share_a_hook(tmp_path: Path) -> None:
    hook = ConversationHook()
    async with rollout(tmp_path, said("one"), said("two")) as (payload, _):
        for name in ("first", "second"):
            model = create_openai_compatible_model(payload)
            await strands.Agent(model, name=name, callback_handler=None, hooks=[hook]).invoke_async("Go.")
    assert [(m["agent"], m["role"]) for m in hook.conversation] == [
        *[("first", "user"), ("first", "assistant")],
        *[("second", "user"), ("second", "assistant")],
    ]


# --- being cut off --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [MaxTokensReachedException("cut"), GraphRecursionError("looping")])
def test_a_model_that_is_cut_off_has_failed_itself(error: Exception) -> None:
    failure = attribute(error)
    assert isinstance(failure, PolicyFailure) and failure.reason is Reason.BUDGET
