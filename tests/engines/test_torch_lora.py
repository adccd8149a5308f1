"""Adapters as weights of the embedded engine: merged into the model below them, or refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from afield.engines.torch.engine import TorchEngine
from afield.errors import UsageError
from afield.interfaces.engine import Chunk, GenerateRequest
from afield.types import Sampling
from support.gateways import POLICY

pytestmark = pytest.mark.anyio
TOLERANCE = 1e-4


def make_adapter(path: Path, seed: int, **options: Any) -> Path:
    """An adapter that changes what the policy says, saved by peft."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    )
    wrapped: Any = peft.get_peft_model(model, config)
    for name, tensor in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(tensor, std=0.1)
    wrapped.save_pretrained(path)
    return path


def scores(adapter: Path, ids: list[int]) -> list[float]:
    """What peft itself gives every id but the first."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
    given = torch.tensor([ids])
    with torch.no_grad():
        logits = wrapped(input_ids=given).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, given[0, 1:, None])[:, 0].tolist()


def a_call() -> GenerateRequest:
    return GenerateRequest(
        id="c",
        session_id="s",
        prompt_ids=tuple(4 + (7 * i) % 600 for i in range(20)),
        sampling=Sampling(),
        max_tokens=40,
        stop_ids=(),
    )


async def answer(engine: TorchEngine) -> list[Chunk]:
    async with asyncio.timeout(60):
        return [chunk async for chunk in engine.generate(a_call())]


def off(chunks: list[Chunk], adapter: Path) -> float:
    ids = [token for chunk in chunks for token in chunk.token_ids]
    drawn = [p for chunk in chunks for p in chunk.logprobs]
    again = scores(adapter, [*a_call().prompt_ids, *ids])[19:]
    return max(abs(p - q) for p, q in zip(again, drawn, strict=True))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "alpha_pattern": {"down_proj": 2}}], ids=str)
async def test_an_adapter_is_merged_into_the_weights_the_engine_began_with(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    adapters = [make_adapter(tmp_path / str(n), n, **options) for n in (1, 2)]
    async with TorchEngine(POLICY) as engine:
        for version, adapter in enumerate(adapters, 1):
            await engine.load(version, str(adapter))
            chunks = await answer(engine)
            assert {chunk.low for chunk in chunks} == {version}
            assert off(chunks, adapter) < TOLERANCE
            assert off(chunks, adapters[version % 2]) > 100 * TOLERANCE
        await engine.load(3, str(POLICY))
        assert off(await answer(engine), adapters[0]) > 100 * TOLERANCE


async def test_an_adapter_that_cannot_be_merged_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", 1)
    config = json.loads((good / "adapter_config.json").read_text())
    tensors = load_file(good / "adapter_model.safetensors")
    first = next(iter(tensors))
    other_layers = {name.replace("layers.0", "layers.9"): t for name, t in tensors.items()}
    cases = {
        "has use_dora, which cannot be merged": ({**config, "use_dora": True}, tensors),
        "has bias, which cannot be merged": ({**config, "bias": "all"}, tensors),
        "has peft_type 'IA3'": ({**config, "peft_type": "IA3"}, tensors),
        "there is no such weight; was it made for this model": (config, other_layers),
        "there is only factor B": (config, {k: t for k, t in tensors.items() if k != first}),
        "it was made for another model": (config, {**tensors, first: tensors[first][:, :-1].contiguous()}),
        "which is not a lora_A or lora_B": (config, {**tensors, "strange": torch.zeros(1)}),
    }
    async with TorchEngine(POLICY) as engine:
        await engine.load(1, str(good))
        for number, (told, (changed, given)) in enumerate(cases.items()):
            bad = shutil.copytree(good, tmp_path / f"bad{number}")
            (bad / "adapter_config.json").write_text(json.dumps(changed))
            save_file(given, bad / "adapter_model.safetensors")
            with pytest.raises(UsageError, match=told):
                await engine.load(2, str(bad))
        empty = tmp_path / "empty"
        empty.mkdir()
        (empty / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, match=r"adapter_model.safetensors cannot be read"):
            await engine.load(2, str(empty))
        assert off(await answer(engine), good) < TOLERANCE
