"""Placements that fit, those that do not, and settings that a run accepts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from msgspec import structs

from afield.errors import UsageError
from afield.planning.architecture import architecture_of
from afield.planning.placement import Gpus, MemoryPlan, Workload, make_plan, parse_gpus, toml
from afield.settings.train import train_config

SEVEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
EXPERTS: dict[str, Any] = SEVEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}


def planned(gpus: str, config: dict[str, Any] = SEVEN, **workload: Any) -> MemoryPlan:
    return make_plan(architecture_of(config, "model"), parse_gpus(gpus), Workload(**workload))


PLANS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("8x80", SEVEN, {}),
    ("8x80", SEVEN, {"kl": True}),
    ("2x141", SEVEN, {"rank": 16}),
    ("1x141", SEVEN, {"rank": 16, "concurrency": 64}),
    ("2x80", SEVEN, {"rank": 8, "engine": "torch", "concurrency": 32}),
    ("8x180", EXPERTS, {}),
]


@pytest.mark.parametrize(("gpus", "config", "workload"), PLANS)
def test_settings_of_every_placement_make_a_run(
    gpus: str, config: dict[str, Any], workload: dict[str, Any]
) -> None:
    plan = planned(gpus, config, **workload)
    assert plan.fits
    for placement in plan.fits:
        table = tomllib.loads(toml(placement.settings))["train"]
        assert table == placement.settings
        chosen = train_config(None, {**table, "model": "m", "agent": "a.py:agent"})
        devices = chosen.engine_devices
        assert chosen.learn.devices == placement.trainer_gpus
        assert max(devices) < plan.gpus.count
        assert placement.colocated == (min(devices) < chosen.learn.devices)
        if chosen.engine == "vllm":
            assert len(devices) == chosen.vllm_replicas * chosen.vllm_tensor_parallel


@pytest.mark.parametrize(("gpus", "config", "workload"), PLANS)
def test_trainer_and_engine_stay_below_the_memory_of_a_gpu(
    gpus: str, config: dict[str, Any], workload: dict[str, Any]
) -> None:
    plan = planned(gpus, config, **workload)
    for placement in plan.fits:
        assert placement.free >= 0
        assert placement.trainer.peak <= plan.gpus.usable
        if placement.colocated:
            shared = placement.settings.get("vllm_memory", 0) * plan.gpus.gib * 2**30
            assert placement.trainer.peak + shared <= plan.gpus.usable


def test_what_does_not_fit_is_refused_with_numbers_and_the_nearest_that_does() -> None:
    plan = planned("1x80")
    assert not plan.fits
    assert "the trainer needs 146.9 GiB per GPU" in plan.refused[0].reason
    assert "74.2 GiB are usable" in plan.refused[0].reason
    assert plan.nearest
    more = next(near for near in plan.nearest if near.startswith("more GPUs"))
    assert planned(more.split("--gpus ")[1].split(",")[0]).fits


def test_fewer_rollouts_at_once_are_named_where_the_kv_cache_is_too_small() -> None:
    plan = planned("1x80", rank=8, engine="torch")
    assert not plan.fits
    assert "the engine needs" in plan.refused[0].reason
    calls = next(near for near in plan.nearest if near.startswith("fewer rollouts"))
    assert planned("1x80", rank=8, engine="torch", concurrency=int(calls.split()[-1])).fits


def test_larger_gpus_take_larger_passes() -> None:
    small, large = planned("8x80").fits[0], planned("8x180").fits[0]
    assert large.trainer_gpus < small.trainer_gpus or large.trainer_shape.tokens > small.trainer_shape.tokens


def test_a_pass_is_at_least_as_long_as_a_rollout() -> None:
    for placement in planned("8x141", context=32768).fits:
        assert placement.trainer_shape.tokens >= 32768


@pytest.mark.parametrize("text", ["8", "8x", "x80", "0x80", "8x2", "8x80x2", "2000x80", "eight"])
def test_wrong_gpus_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="gpus = "):
        parse_gpus(text)


def test_gpus_are_read() -> None:
    assert parse_gpus("8X79.5") == Gpus(count=8, gib=79.5)


def test_workloads_that_a_model_cannot_do_are_refused() -> None:
    with pytest.raises(UsageError, match="context = 40000 is longer than the model's 32768"):
        planned("8x80", context=40_000)
    with pytest.raises(UsageError, match="adapters on all linear layers cannot be planned"):
        planned("8x80", EXPERTS, rank=16)


def test_a_model_of_any_size_has_a_plan_or_a_reason() -> None:
    model = architecture_of(SEVEN, "model")
    for layers in (1, 8, 80, 800):
        for gpus in ("1x16", "3x24", "8x80"):
            plan = make_plan(structs.replace(model, layers=layers), parse_gpus(gpus), Workload())
            assert plan.fits or plan.refused
