"""Publishing is not done when an engine says so, but when it answers with the new weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from afield.engines.torch.engine import TorchEngine
from afield.errors import Unavailable
from afield.gateway.engine_pool import EnginePool
from afield.interfaces.engine import Chunk, GenerateRequest
from afield.interfaces.weight_probe import FILE, read_weight_probe, write_weight_probe
from afield.settings.trainer import LoraOptions
from afield.trainers.model import PolicyModel, compute_weight_probe
from support.gateways import POLICY

pytestmark = pytest.mark.anyio
BOUND_S = 60


@pytest.fixture
def published(tmp_path: Path) -> Callable[[int, float], Path]:
    """Weights with their probe: the policy's, with so much noise."""

    def make(version: int, noise: float) -> Path:
        torch.set_num_threads(1)
        torch.manual_seed(version)
        path = tmp_path / str(version)
        shutil.copytree(POLICY, path)
        tensors = load_file(POLICY / "model.safetensors")
        noisy = {name: t + noise * t.std() * torch.randn(t.shape) for name, t in tensors.items()}
        save_file(noisy, path / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        write_weight_probe(path, compute_weight_probe(model))
        return path

    return make


class Deaf(TorchEngine):
    """Says it has what it was given, and keeps the policy's weights."""

    async def load(self, version: int, path: str) -> None:
        await super().load(version, str(POLICY))


async def test_new_weights_pass_the_check(
    published: Callable[[int, float], Path],
) -> None:
    async with asyncio.timeout(BOUND_S), EnginePool({"a": TorchEngine(POLICY)}) as pool:
        for version, noise in enumerate((0.0, 0.0, 1e-6, 1e-4, 1e-2, 0.5), 1):
            await pool.load(version, str(published(version, noise)))
        assert pool.list()[0].version == 6


@pytest.mark.parametrize("noise", [0.003, 0.05])
async def test_old_weights_fail_the_check(published: Callable[[int, float], Path], noise: float) -> None:
    first, second = published(1, 0.0), published(2, noise)
    async with asyncio.timeout(BOUND_S), EnginePool({"deaf": Deaf(POLICY)}) as pool:
        await pool.load(1, str(first))
        with pytest.raises(
            Unavailable,
            match="deaf: the engine accepted weights version 2 but still answers with the previous weights",
        ):
            await pool.load(2, str(second))
        await asyncio.sleep(0.5)  # it is looked at again, and found the same
        assert pool.list()[0].health == "unhealthy"
    async with asyncio.timeout(BOUND_S), EnginePool({"deaf": Deaf(POLICY), "a": TorchEngine(POLICY)}) as pool:
        await pool.load(1, str(first))
        await pool.load(2, str(second))
        assert [worker.health for worker in pool.list()] == ["unhealthy", "ready"]


class Still(Deaf):
    """One that can be paused; it answers nothing meanwhile."""

    async def pause(self) -> None:
        self.moving = asyncio.Event()

    async def resume(self) -> None:
        self.moving.set()

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        if (moving := getattr(self, "moving", None)) is not None:
            await moving.wait()
        async with aclosing(super().generate(call)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_weights_loaded_while_paused_are_checked_after_resume(
    published: Callable[[int, float], Path],
) -> None:
    first, second = published(1, 0.0), published(2, 0.05)
    async with asyncio.timeout(BOUND_S), EnginePool({"still": Still(POLICY)}) as pool:
        for version, path, standing in ((1, first, "ready"), (2, second, "unhealthy")):
            await pool.pause("keep")
            await pool.load(version, str(path))
            await pool.resume()
            assert pool.list()[0].health == standing
        assert "still answers with the previous weights" in pool.list()[0].reason


async def test_wrong_weights_fail_the_check(
    published: Callable[[int, float], Path],
) -> None:
    async with asyncio.timeout(BOUND_S), EnginePool({"deaf": Deaf(POLICY)}) as pool:
        with pytest.raises(Unavailable, match="does not answer with them"):
            await pool.load(1, str(published(1, 1.0)))


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("rank", [0, 4])
async def test_exported_policy_passes_the_check(
    tmp_path: Path, layout: Literal["tree", "padded"], rank: int
) -> None:
    policy = PolicyModel(POLICY, device=torch.device("cpu"), lora=LoraOptions(rank=rank), layout=layout)
    async with asyncio.timeout(BOUND_S), EnginePool({"a": TorchEngine(POLICY)}) as pool:
        for version in (1, 2, 3):
            torch.manual_seed(version)
            for tensor in policy.trainable:
                tensor.data += 0.05 * torch.randn(tensor.shape)
            path = tmp_path / str(version)
            _ = policy.export_adapter(path) if rank and version > 1 else policy.export(path)
            assert read_weight_probe(path) is not None
            if version == 1 and rank:
                continue  # the adapters are on what the engine has
            await pool.load(version, str(path))
            assert pool.list()[0].health == "ready"


async def test_probe_of_other_weights_is_ignored(published: Callable[[int, float], Path]) -> None:
    path = published(1, 1.0)
    assert read_weight_probe(path) is not None
    shutil.copy(POLICY / "model.safetensors", path / "model.safetensors")
    assert read_weight_probe(path) is None
    (path / FILE).write_text("{")
    assert read_weight_probe(path) is None
