"""Workload of the engine benchmark: randomly initialised models, prompts and timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HALF_BILLION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
# What a part of this program may die of without taking the others with it.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, KeyError, AssertionError)


class Load(NamedTuple):
    requests: int
    prompt: int
    new: int
    prefill_tokens: int
    batch_new: int  # of generate_batch, which takes longest
    trial: int  # tokens that decide between the caches of generate
    repeats: int


LARGE = Load(256, 128, 256, 16384, 64, 16, 3)
SMALL = Load(8, 16, 24, 64, 8, 4, 2)


def build(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    config = Qwen3Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
    model.set_attn_implementation("sdpa")
    torch.set_default_dtype(before)
    with torch.no_grad():
        # As peaked as a trained model's: a flat distribution would hide a wrong log-probability.
        model.get_input_embeddings().weight.mul_(4)
    return model.eval().requires_grad_(False)


def prompts(load: Load, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (load.requests, load.prompt), generator=generator).tolist()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    wait(device)
    began = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - began, result


def peak_gib(device: torch.device) -> float:
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0
