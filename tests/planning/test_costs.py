"""Costs with their sources, and times of a model that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from afield.errors import UsageError
from afield.planning.architecture import architecture_of
from afield.planning.costs import (
    MEASURED,
    LoopCosts,
    engine_costs,
    engine_times,
    forward_flops,
    layer_parameters,
    publish_s,
    read_costs,
    train_flops,
    train_token_s,
    weight_bytes,
)
from bench import ROOT
from bench.plan.gpu_costs import h200
from planning.test_placement import EXPERTS, SEVEN

MODEL, MOE = architecture_of(SEVEN, "model"), architecture_of(EXPERTS, "model")


def test_costs_of_the_h200_are_those_of_the_results() -> None:
    """No number in the file has another origin than bench/plan/gpu_costs.py."""
    assert read_costs("h200") == h200(), "run python -m bench.plan.gpu_costs"


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_every_constant_names_a_source_that_exists(path: Path) -> None:
    costs = read_costs(path.stem)
    for engine in costs.engines:
        for name, constant in costs.constants(engine):
            assert constant.source, name
            if constant.basis == "assumed":
                assert constant.value == 0, f"{name}: only nothing may be assumed"
            for word in constant.source.replace(",", " ").split():
                if word.startswith(("bench/", "orchestrator/")):
                    where = ROOT / word if word.startswith("bench/") else ROOT / "src" / "afield" / word
                    assert where.exists(), f"{name}: {word}"


def test_operations_of_a_dense_model_are_two_per_parameter_and_its_attention() -> None:
    assert layer_parameters(MODEL) == MODEL.decoder
    assert forward_flops(MODEL, 0) == 2 * MODEL.decoder
    assert forward_flops(MODEL, 1000) - forward_flops(MODEL, 0) == 4 * 28 * 3584 * 1000
    assert train_flops(MODEL, 0, 0.5) == 6 * MODEL.decoder + 3 * MODEL.embedding


def test_a_token_computes_with_its_own_experts_but_a_step_reads_all() -> None:
    assert layer_parameters(MOE) < MOE.decoder / 5
    costs = read_costs("h200")
    assert weight_bytes(costs, MOE) == 2 * (MOE.decoder + MOE.embedding)


def test_times_follow_the_models_size_and_the_number_of_gpus() -> None:
    costs = read_costs("h200")
    one = engine_times(costs, MODEL, "vllm", replicas=1, context=1000)
    two = engine_times(costs, MODEL, "vllm", replicas=1, context=1000, tensor_parallel=2)
    fixed = engine_costs(costs, "vllm").step_s.value
    assert two.step_s - fixed == pytest.approx((one.step_s - fixed) / 2)
    assert two.prefill_token_s == pytest.approx(one.prefill_token_s / 2)
    assert two.sequence_s == one.sequence_s
    reading = engine_costs(costs, "vllm").bytes_per_s.value
    assert one.step_s == pytest.approx(fixed + weight_bytes(costs, MODEL) / reading)
    assert one.kv_token_s == pytest.approx(2 * 28 * 4 * 128 * 2 / reading)
    single = train_token_s(costs, MODEL, 1, context=1000, sampled_share=0.5)
    assert train_token_s(costs, MODEL, 8, context=1000, sampled_share=0.5) == pytest.approx(single / 8)
    assert publish_s(costs, MODEL, rank=16) < publish_s(costs, MODEL) / 50


def test_a_missing_file_is_refused_with_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither a file nor one of .*h200.*--measure"):
        read_costs(str(tmp_path / "none.json"))


def changed(tmp_path: Path, **values: Any) -> str:
    document = json.loads((MEASURED / "h200.json").read_text()) | values
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_wrong_files_are_refused_with_the_value(tmp_path: Path) -> None:
    zero = {"value": 0.0, "basis": "measured", "source": "x"}
    with pytest.raises(UsageError, match="train_flops_per_s = 0 must be positive"):
        read_costs(changed(tmp_path, train_flops_per_s=zero))
    with pytest.raises(UsageError, match="train_s = -1 must be 0 or positive"):
        read_costs(changed(tmp_path, train_s=zero | {"value": -1.0}))
    with pytest.raises(UsageError, match=r"cannot be read: .*basis"):
        read_costs(changed(tmp_path, train_s=zero | {"basis": "guessed"}))


def test_an_engine_that_was_not_measured_is_refused() -> None:
    costs = read_costs("h200")
    without = structs.replace(costs, engines={"torch": costs.engines["torch"]})
    with pytest.raises(UsageError, match="was not measured on NVIDIA H200; give --engine torch"):
        engine_costs(without, "vllm")


def test_costs_survive_json() -> None:
    costs = read_costs("h200")
    assert msgspec.json.decode(msgspec.json.encode(costs), type=LoopCosts) == costs
