"""Constrained turns from a real vLLM on the CPU: enforced there, and rescored here within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real.vllm_server import serving_vllm

from afield.engines.vllm.engine import VllmEngine
from afield.types import Sampling
from support.constrained import ask_everything, recorded, rescored, trained
from support.gateways import running
from support.tiny_model import build_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.anyio]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
async def test_constrained_turns_are_enforced_by_vllm_and_rescored_here(tmp_path: Path, mode: str) -> None:
    model = build_tiny_model(tmp_path / "tiny", hidden=256)  # vLLM on a CPU wants wide heads
    with serving_vllm(model, tmp_path / "vllm.log", "--logprobs-mode", mode) as url:
        engine = VllmEngine(url)
        async with running(engine, tmp_path / "store", model) as up:
            assert (await engine.info()).constraints
            await ask_everything(await up.agent(sampling=Sampling(temperature=1.0)))
            turns = await recorded(up)
    assert len(turns) >= 7 and all(turn.constraint for turn in turns)
    assert rescored(model, trained(turns)) < 1e-4
