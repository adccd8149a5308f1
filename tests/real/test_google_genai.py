"""Both lines of google-genai against a real gateway: tools, settings and model lists arrive."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from afield.conformance.clients.base import from_pypi
from afield.conformance.suites.registry import GENAI
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Unavailable
from afield.interfaces import SessionSpec
from afield.settings.environment import Environment
from support.gateways import POLICY, running, vocabulary

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
CLIENT = Path(__file__).parent / "genai_client.py"
VOCAB = vocabulary()
CALL = '<tool_call>\n{"name": "get_price", "arguments": {"item": "x"}}\n</tool_call>'


def said(text: str) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), VOCAB.id_of("<|im_end|>") or 0))


async def asked(python: Path, folder: Path) -> tuple[dict[str, Any], Any, str]:
    engine = ScriptedEngine([said(CALL), said("It costs 4.")])
    async with running(engine, folder) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        process = await asyncio.create_subprocess_exec(
            str(python), str(CLIENT), ticket.base_url, ticket.api_key, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        record = await up.client.finalize("r.1")
        return json.loads(out), record, up.gateway.tokenizer.decode(engine.recorded[0].prompt_ids)


@pytest.mark.parametrize("version", GENAI)
def test_what_the_client_says_reaches_the_model(version: str, tmp_path: Path) -> None:
    try:
        python = from_pypi(GENAI[version])(Environment.read().envs) / "python"
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    told, record, prompt = asyncio.run(asked(python, tmp_path))
    assert told["version"] == version
    assert told["call"] == ["get_price", {"item": "x"}]
    assert told["answer"] == "It costs 4."
    assert told["models"] == {"v1": [f"models/{POLICY.name}"], "v1beta": [f"models/{POLICY.name}"]}
    assert '"item": {"type": "string"}' in prompt
    assert '"pieces": {' in prompt
    settings = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
    assert {f"overridden:{name}" for name in settings} <= set(record.turns[0].tags)
    assert [turn.parent for turn in record.turns] == [None, "t1"]
    assert record.turns[0].sampling.max_tokens == 64
