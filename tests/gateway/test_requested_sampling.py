"""Sampling belongs to the trainer: what a client asks for is done only where its session allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces.engine import GenerateRequest
from afield.types import Sampling
from support.gateways import running, vocabulary

pytestmark = pytest.mark.anyio
SAID: Any = [{"role": "user", "content": "Hi"}]


def engine() -> tuple[ScriptedEngine, list[Sampling]]:
    asked: list[Sampling] = []

    def script(call: GenerateRequest) -> ScriptedReply:
        asked.append(call.sampling)
        return ScriptedReply(token_ids=tuple(vocabulary().encode("hello<|im_end|>")))

    return ScriptedEngine(script), asked


async def test_requested_sampling_is_overridden_with_tags(tmp_path: Path) -> None:
    scripted, asked = engine()
    async with running(scripted, tmp_path) as up:
        agent = await up.agent(sampling=Sampling(temperature=0.7))
        more: Any = {"top_k": 5}
        await agent.chat.completions.create(
            model="m", messages=SAID, temperature=0.1, top_p=1.0, seed=3, extra_body=more
        )
        _, answer = await up.ask("GET", "/sessions/r.1/turns")
    assert asked == [Sampling(temperature=0.7)]
    assert answer["turns"][0]["tags"] == ["overridden:temperature", "overridden:top_k", "overridden:seed"]


async def test_client_sampling_applies_allowed_settings(tmp_path: Path) -> None:
    scripted, asked = engine()
    async with running(scripted, tmp_path) as up:
        agent = await up.agent(client_sampling=("temperature", "seed"))
        await agent.chat.completions.create(model="m", messages=SAID, temperature=0.1, top_p=0.5, seed=3)
        _, answer = await up.ask("GET", "/sessions/r.1/turns")
    assert asked == [Sampling(temperature=0.1, seed=3)]
    (turn,) = answer["turns"]
    assert turn["tags"] == ["overridden:top_p"]
    assert turn["sampling"]["temperature"] == 0.1


async def test_invalid_allowed_sampling_gets_400(tmp_path: Path) -> None:
    scripted, asked = engine()
    async with running(scripted, tmp_path) as up:
        await up.agent("a.1")
        await up.agent("b.1", client_sampling=("temperature", "top_k", "seed"))
        nonsense = ({"temperature": -1}, {"temperature": 1e-39}, {"top_k": 1e19}, {"seed": 10**30})
        for value in nonsense:
            body = {"messages": SAID, **value}
            assert (await up.ask("POST", "/s/a.1/v1/chat/completions", body))[0] in (200, 400)
            status, answer = await up.ask("POST", "/s/b.1/v1/chat/completions", body)
            assert status == 400 and next(iter(value)) in answer["error"]["message"]
    assert all(sampling == Sampling() for sampling in asked)


async def test_gemini_sampling_is_read_from_generation_config(tmp_path: Path) -> None:
    scripted, asked = engine()
    async with running(scripted, tmp_path) as up:
        await up.agent("r.1", client_sampling=("temperature",))
        contents = [{"role": "user", "parts": [{"text": "Hi"}]}]
        body = {"contents": contents, "generationConfig": {"temperature": 0.25, "topP": 0.5}}
        status, _ = await up.ask("POST", "/s/r.1/v1beta/models/m:generateContent", body)
        assert status == 200
        _, answer = await up.ask("GET", "/sessions/r.1/turns")
    assert asked == [Sampling(temperature=0.25)]
    assert answer["turns"][0]["tags"] == ["overridden:top_p"]
