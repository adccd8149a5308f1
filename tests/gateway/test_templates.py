"""Any harness on any template: what a client sends is answered, and what a rule changed is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from afield.chat.message_rules import RULES
from afield.conformance.clients import CLIENTS
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import UsageError
from afield.sdk.agent import Context
from support.client_gateway import threaded_gateway
from support.client_requests import replay, requests
from support.gateways import running
from templates.models import ALL, write_model

pytestmark = pytest.mark.anyio
REPLY = ScriptedReply(token_ids=(7, 8, 2))
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
LATER = {"role": "system", "content": "Speak French."}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **rest: Any) -> Any:
    completion = await client.chat.completions.create(model="m", messages=messages, **rest)
    return completion.choices[0].message.model_dump(exclude_none=True)


async def test_turn_is_tagged_with_message_rules(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "moving")
    engine = ScriptedEngine([REPLY] * 3)
    async with running(engine, tmp_path / "store", model) as up:
        client = await up.agent()
        messages = [SYSTEM, USER, LATER]
        messages.append(await ask(client, messages))
        messages += [USER]
        messages.append(await ask(client, messages))
        await ask(client, [*messages, LATER])
        record = await up.client.finalize("r.1")
        tokens = up.gateway.tokenizer
    assert [turn.tags for turn in record.turns] == [("render:fold-system",), (), ("render:fold-system",)]
    # A later system message stands in its place, so one conversation is one row.
    assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
    assert [turn.tier for turn in record.turns] == ["full", "append", "append"]
    assert "<system>\nSpeak French.\n</system>" in tokens.decode(record.turns[2].delta_ids)


async def test_strict_session_gets_400_for_unsupported_messages(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "moving")
    async with running(ScriptedEngine([REPLY]), tmp_path / "store", model) as up:
        client = await up.agent(render="strict")
        with pytest.raises(openai.BadRequestError, match=r"fold-system.*use render = 'fold'"):
            await ask(client, [SYSTEM, USER, LATER])
        await ask(client, [SYSTEM, USER])
        record = await up.client.finalize("r.1")
    assert [turn.tags for turn in record.turns] == [()]


# --- every client on every template --------------------------------------------------------------


def test_there_are_requests_of_every_pinned_client() -> None:
    assert set(requests()) == set(CLIENTS)


@pytest.mark.parametrize("name", ALL)
async def test_every_client_is_answered_on_every_template(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model", name)
    records, unanswered = await replay(model, tmp_path / "store")
    assert unanswered == []
    for client, sent in requests().items():
        turns = records[client].turns
        assert len(turns) == len(sent)
        rules = {tag.removeprefix("render:") for turn in turns for tag in turn.tags if tag[:7] == "render:"}
        assert rules <= set(RULES)


async def test_strict_sessions_of_clients_with_later_system_messages_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "moving")
    _, refused = await replay(model, tmp_path / "store", render="strict")
    assert {"claude-code", "codex", "opencode"} <= {line.split()[0] for line in refused}
    assert all(" 400 " in line for line in refused)


# --- what no rollout could do --------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def with_tools(task: dict[str, Any], rollout: Context) -> float:
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        client.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # pyright: ignore
    return 1.0


def test_run_ends_when_the_model_has_no_tool_format(tmp_path: Path) -> None:
    asked: list[str] = []

    def agent(task: dict[str, Any], rollout: Context) -> float:
        asked.append(rollout.session_id)
        return with_tools(task, rollout)

    with threaded_gateway(tmp_path, write_model(tmp_path / "model", "plain")) as there:
        plan = {"render": "strict", "retries": {"task": 3}, "concurrency": 2}
        with (
            pytest.raises(
                UsageError, match=r"as every other rollout would be: .*no tool calls.*render 'fold'"
            ),
            there.client(agent, **plan) as client,
        ):
            futures = [client.submit({"n": n}) for n in range(64)]
            for future in futures:
                future.result(60)
        assert 1 <= len(asked) <= 4
        with there.client(with_tools, run="again", exp_id="folding") as client:
            assert client.submit({}).result(60).outcome.reward == 1.0
