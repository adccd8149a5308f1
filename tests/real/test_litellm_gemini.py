"""LiteLLM over Gemini's API: a conversation with thinking and tools stays one row."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from afield.conformance.pins import PYTHON
from afield.engines.scripted import ScriptedEngine
from afield.interfaces import SessionSpec
from afield.settings.environment import Environment
from afield.utils.installations import python_environment
from support.dialect_session import calls, said
from support.gateways import running

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(1800)]
AGENT = Path(__file__).with_name("litellm_gemini_agent.py")
NOW = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWERS = (
    "<think>\nI think.\n</think>\n\nLet me look." + calls("a", "b"),
    "<think>\nHm.\n</think>\n\nIt costs 4.",
    "<think>\nWell.\n</think>" + NOW,
    "Plain.",
    "<think>\nOnly calls.\n</think>" + calls("c") + NOW,
    "<think>\nEnd.\n</think>\n\nDone.",
)


@pytest.mark.parametrize("history", ["object", "openai", "reasoning"])
@pytest.mark.parametrize("stream", ["stream", "whole"])
@pytest.mark.parametrize("model", ["m", "gemini-2.5-pro"])
async def test_one_conversation_is_one_row(tmp_path: Path, model: str, stream: str, history: str) -> None:
    cache = Environment.read().envs
    python = await asyncio.to_thread(python_environment, cache, "litellm", PYTHON["litellm"])
    left = iter(ANSWERS)
    engine = ScriptedEngine(lambda _: said(next(left)), max_context=8192)
    async with running(engine, tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        agent = await asyncio.create_subprocess_exec(
            *(str(python), str(AGENT), ticket.base_url, ticket.api_key, model, stream, history),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)},
        )
        printed, _ = await agent.communicate()
        assert agent.returncode == 0, printed.decode()[-2000:]
        record = await up.client.finalize("r.1")
    assert len(record.turns) == 6
    assert len(record.trajectories) == 1
    assert record.excluded == ()
