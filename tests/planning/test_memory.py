"""Planned memory against measured peaks and against what torch keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import transformers
from msgspec import structs
from torch.autograd.graph import saved_tensors_hooks

from afield.engines.torch import engine
from afield.planning import memory, placement
from afield.planning.architecture import architecture_of
from afield.planning.memory import (
    EngineShape,
    TrainerShape,
    engine_memory,
    kv_token_bytes,
    layer_bytes,
    trainer_memory,
)
from afield.trainers import logprobs
from bench.plan.compare import TOLERANCE, Point, engine_points, predicted, tree_points
from bench.report import newest

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
SEVEN = architecture_of(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "7b",
)
TOKENS = 128


def stored_points() -> list[Point]:
    result = newest("memory")
    assert result is not None, "bench/results has no memory; run python -m bench.plan.compare --save"
    return msgspec.convert(result["points"], list[Point])


@pytest.mark.parametrize("point", stored_points(), ids=lambda point: f"{point.where}: {point.name}")
def test_stored_peaks_are_planned_within_the_tolerance(point: Point) -> None:
    assert predicted(point) == pytest.approx(point.measured, rel=TOLERANCE)


def test_every_peak_of_a_gpu_in_the_results_is_planned() -> None:
    points = [*tree_points(), *engine_points()]
    assert len(points) == 9
    for point in points:
        assert predicted(point) == pytest.approx(point.measured, rel=TOLERANCE), point.name


def saved_bytes(kind: str, layers: int, mixed: bool) -> int:
    """Bytes that the forward pass keeps, without weights and their copies."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_hidden_layers=layers)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weights = {parameter.numel() for parameter in model.parameters()}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        copy = tensor.dtype == torch.bfloat16 and TOKENS not in tensor.shape and tensor.numel() in weights
        if storage.data_ptr() not in known and not copy:
            kept[storage.data_ptr()] = tensor
        return tensor

    ids = torch.arange(TOKENS)[None]
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, mixed):
        result = model.get_decoder()(input_ids=ids, use_cache=False)
    assert result.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_of_a_layer_are_what_autograd_keeps(kind: str, dtype: Any) -> None:
    mixed = dtype == "bfloat16"
    measured = (saved_bytes(kind, 3, mixed) - saved_bytes(kind, 2, mixed)) / TOKENS
    model = architecture_of({**SIZES, "num_hidden_layers": 2, "architectures": [f"{kind}ForCausalLM"]}, kind)
    shape = TrainerShape(tokens=TOKENS, sampled=1, dtype=dtype)
    assert layer_bytes(model, shape).saved == pytest.approx(measured, rel=0.02)


def test_weights_gradients_and_moments_take_16_bytes_per_parameter() -> None:
    whole = trainer_memory(SEVEN, TrainerShape(tokens=8192, sampled=4096, checkpointing=True))
    assert whole.weights + whole.gradients + whole.optimizer == 16 * SEVEN.parameters
    sharded = trainer_memory(SEVEN, TrainerShape(tokens=8192, sampled=4096, checkpointing=True, devices=8))
    assert sharded.weights == SEVEN.parameters * 4 // 8
    assert sharded.peak < whole.peak / 2
    assert sharded.gathered > 2 * SEVEN.embedding * 4


def test_a_reference_takes_another_copy_and_adapters_none() -> None:
    def planned(**changes: Any) -> int:
        shape = TrainerShape(tokens=8192, sampled=4096, checkpointing=True, **changes)
        return trainer_memory(SEVEN, shape).peak

    assert planned(reference=True) - planned() == 4 * SEVEN.parameters
    assert planned(rank=16, reference=True) == planned(rank=16)
    assert planned(rank=16) < planned() / 4


def test_checkpointing_saves_activations_and_more_tokens_take_more() -> None:
    def planned(**changes: Any) -> int:
        return trainer_memory(SEVEN, TrainerShape(sampled=4096, **changes)).step

    assert planned(tokens=16384, checkpointing=True) < planned(tokens=16384) / 1.5
    assert planned(tokens=8192) < planned(tokens=16384) < planned(tokens=32768)


def test_constants_are_those_of_trainer_and_engine() -> None:
    assert (memory.CHUNK_BYTES, memory.KEPT_SHARE) == (logprobs.CHUNK_BYTES, logprobs.KEPT_SHARE)
    assert engine.PREFILL_TOKENS["cuda"] == memory.PREFILL_TOKENS
    assert (placement.CACHE_SHARE, placement.MOST_SLOTS) == (engine.CACHE_SHARE, engine.MAX_SLOTS)


def test_kv_cache_is_divided_by_tensor_parallelism_down_to_one_head() -> None:
    whole = kv_token_bytes(SEVEN)
    assert whole == 2 * 28 * 4 * 128 * 2
    assert [whole // kv_token_bytes(SEVEN, "bfloat16", n) for n in (1, 2, 4, 8)] == [1, 2, 4, 4]
    served = engine_memory(SEVEN, EngineShape(calls=16, context=1000))
    assert served.cache == 17 * 1024 * whole
    assert served.weights == 2 * SEVEN.parameters


def test_weights_in_memory_take_two_bytes_per_parameter_while_the_trainer_runs() -> None:
    shape = TrainerShape(tokens=8192, sampled=4096, checkpointing=True)
    planned = trainer_memory(SEVEN, shape)
    shared = trainer_memory(SEVEN, structs.replace(shape, shared_weights=True))
    assert shared.shared == shared.step - planned.step == 2 * SEVEN.parameters
    assert shared.phases["publish"] == planned.phases["publish"]  # which makes the copy for the file
