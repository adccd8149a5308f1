"""Divisions of GPUs between trainer and engines, and forecasts of whole loops."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from afield.errors import UsageError
from afield.planning.architecture import architecture_of
from afield.planning.costs import Constant, engine_times, gateway_times, read_costs
from afield.planning.placement import Workload, parse_gpus
from afield.planning.scaling import LoopPlan, LoopRequest, plan_loop, processes_for, trainer_counts
from afield.planning.simulation import AgentLoad, LoopTimes, Spread, simulate
from bench.plan.gpu_costs import ADDED, CHECK_POINTS, PROMPT, REPLY, THIRD, context_of
from planning.test_placement import SEVEN

LOAD = AgentLoad(
    agents=96,
    tasks_per_step=24,
    rollouts=4,
    turns=Spread(5, 0.4),
    prompt=Spread(1000, 0.4),
    reply=Spread(200, 0.4),
    added=Spread(300, 0.4),
    tool_s=Spread(3.0, 0.8),
)


def request(**values: Any) -> LoopRequest:
    model = architecture_of(SEVEN, "model")
    return LoopRequest(model, read_costs("h200"), LOAD, Workload(context=4096))._replace(**values)


def planned(gpus: str = "8x141", mode: Any = "sync", staleness: int = 0, **values: Any) -> LoopPlan:
    return plan_loop(request(**values), parse_gpus(gpus), mode, staleness)


@pytest.mark.parametrize("point", CHECK_POINTS, ids=lambda point: "stream" if point.stream else "whole")
def test_rates_measured_on_an_h200_are_met_within_15_percent(point: Any) -> None:
    """Of points from which no cost was derived."""
    costs, model = read_costs("h200"), architecture_of(THIRD, "bench/gpu/loop.py")
    load = AgentLoad(
        agents=point.sessions, tasks_per_step=1, rollouts=point.sessions, turns=Spread(point.turns),
        stream=point.stream,
        prompt=Spread(PROMPT), reply=Spread(REPLY), added=Spread(ADDED), tool_s=Spread(0),
    )  # fmt: skip
    engine = engine_times(
        costs, model, "vllm", replicas=1, max_sequences=512, context=context_of(point.turns) / 2
    )
    times = LoopTimes(
        load=load, engine=engine, gateway=gateway_times(costs, 1), train_s=0.0, train_token_s=0.0, steps=1
    )
    assert simulate(times).sampled_per_s == pytest.approx(point.tokens_per_s, rel=0.15)


def test_trainer_counts_are_powers_of_two_and_eighths() -> None:
    assert trainer_counts(1) == [1]
    assert trainer_counts(2) == [1, 2]
    assert trainer_counts(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trainer_counts(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 0), ("async", 2)])
def test_the_division_is_as_good_as_any_other(mode: Any, staleness: int) -> None:
    best = planned(mode=mode, staleness=staleness)
    assert best.cluster.trainer_gpus + (0 if best.cluster.colocated else best.cluster.engine_gpus) <= 8
    for trainers in (2, 4, 6):
        other = planned(mode=mode, staleness=staleness, trainer_gpus=trainers)
        assert not other.cluster.colocated
        assert (other.cluster.trainer_gpus, other.cluster.engine_gpus) == (trainers, 8 - trainers)
        assert best.forecast.sampled_per_s >= 0.95 * other.forecast.sampled_per_s


def test_only_mode_sync_shares_gpus() -> None:
    assert planned(trainer_gpus=8).cluster.colocated
    with pytest.raises(UsageError, match="gpus = 8x141 hold no loop in mode async"):
        planned(trainer_gpus=8, mode="async", staleness=2)


def test_more_gpus_shorten_a_step_of_the_same_work() -> None:
    steps = [planned(f"{count}x141").forecast.step_s for count in (4, 8, 32)]
    assert steps == sorted(steps, reverse=True)


def test_a_shared_gpu_has_less_room_for_its_cache() -> None:
    shared, apart = planned(trainer_gpus=8).cluster, planned(trainer_gpus=4).cluster
    assert 0 < shared.kv_tokens < apart.kv_tokens


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(UsageError, match=r"gpus = 2x24 hold no loop in mode sync: the trainer needs .* GiB"):
        planned("2x24")
    with pytest.raises(UsageError, match="trainer_gpus = 9 is more than the 8 GPUs"):
        planned(trainer_gpus=9)


def test_gateway_processes_grow_with_their_cost_and_hold_the_load() -> None:
    costs = read_costs("h200")
    slow = structs.replace(costs, gateway_call_s=Constant(value=0.2, basis="measured", source="a test"))
    few, many = planned(), planned(costs=slow)
    assert few.gateway_processes == 1 < many.gateway_processes
    assert many.times.gateway.processes == pytest.approx(many.gateway_processes, rel=0.5)
    forecast = many.forecast
    working = sum(seconds for state, seconds in forecast.agents.items() if state != "idle")
    load = forecast.gateway_load * forecast.step_s / working
    assert load / many.gateway_processes <= 0.6
    assert processes_for(forecast) == many.gateway_processes
    assert planned(costs=slow, gateway_processes=1).forecast.bottleneck == "gateway"


def test_the_embedded_engine_has_a_gateway_for_each_replica() -> None:
    plan = planned("8x141", workload=Workload(context=4096, engine="torch"))
    assert plan.gateway_processes == plan.times.gateway.processes == plan.cluster.replicas
    assert plan.times.engine.own_gateway
