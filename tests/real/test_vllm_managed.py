"""`--engine vllm` with real vLLM on the CPU: started, killed, started again with its weights, ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.real.vllm_server import CACHE
from transformers import AutoModelForCausalLM

from afield.conformance import pins
from afield.factory.engines import engine_pool
from afield.interfaces import Chunk, GenerateRequest
from afield.settings.gateway import ManagedEngineSettings
from afield.types import Sampling
from afield.utils.installations import python_environment
from afield.utils.process_tree import children
from support.gateways import POLICY
from support.processes import alive

pytestmark = [pytest.mark.real, pytest.mark.anyio]
PROMPT = tuple(range(20, 40))


def noisy(into: Path) -> Path:
    """The policy with other weights."""
    shutil.copytree(POLICY, into)
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(into / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def rescored(model: Path, sampled: list[int]) -> list[float]:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    with torch.no_grad():
        logits = policy(torch.tensor([[*PROMPT, *sampled]])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None]).flatten().tolist()


def call(name: str) -> GenerateRequest:
    return GenerateRequest(
        id=name, session_id=name, prompt_ids=PROMPT, sampling=Sampling(), max_tokens=12, stop_ids=()
    )


def everything_below(pid: int) -> list[int]:
    return [below for child in children(pid) for below in (child, *everything_below(child))]


async def test_real_vllm_is_started_restarted_with_its_weights_and_ended(tmp_path: Path) -> None:
    python = python_environment(CACHE, "vllm", pins.VLLM, without=pins.VLLM_WITHOUT)
    newer = noisy(tmp_path / "v3")
    placement = ManagedEngineSettings(
        vllm_python=str(python), vllm_logs=str(tmp_path), vllm_args=("--max-model-len", "1024")
    )
    pool = engine_pool(
        ["vllm"], POLICY, slots=0, seed=0, record=None, start_timeout_s=300, placement=placement
    )
    pool._unavailable_timeout_s = 120.0  # a call waits while the server starts again
    async with pool:
        info = await pool.info()
        assert (info.kind, info.dtype, info.logprobs) == ("vllm", "float32", "processed")
        await pool.load(3, str(newer))
        (worker,) = pool._workers
        processes = everything_below(worker.engine.pid)
        os.kill(processes[0], signal.SIGKILL)
        async with asyncio.timeout(30):
            while any(map(alive, processes)):
                await asyncio.sleep(0.1)
        chunks: list[Chunk] = [chunk async for chunk in pool.generate(call("after"))]
        sampled = [token for chunk in chunks for token in chunk.token_ids]
        assert {(chunk.low, chunk.high) for chunk in chunks} == {(3, 3)}
        logprobs = [p for chunk in chunks for p in chunk.logprobs]
        assert logprobs == pytest.approx(rescored(newer, sampled), abs=1e-4)
        assert logprobs != pytest.approx(rescored(POLICY, sampled), abs=1e-2)
        processes = [worker.engine.pid, *everything_below(worker.engine.pid)]
    assert not any(map(alive, processes))
