"""Simulation of the training loop: closed forms, a stepping oracle, the real group scheduler, accounts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from afield.planning.simulation import (
    AgentLoad,
    EngineTimes,
    GatewayTimes,
    LoopForecast,
    LoopSimulation,
    LoopTimes,
    SimulatedRollout,
    Spread,
    lasting_rate,
    simulate,
)
from bench.collect.simulation.agent_schedule import Habits
from bench.collect.simulation.run import Setting
from bench.collect.simulation.run import simulate as run_real

ENGINE = EngineTimes(
    replicas=2,
    step_s=0.01,
    sequence_s=1e-4,
    kv_token_s=1e-8,
    prefill_s=0.005,
    prefill_token_s=1e-5,
    kv_tokens=200_000,
)
LOAD = AgentLoad(
    agents=32,
    tasks_per_step=8,
    rollouts=4,
    turns=Spread(6, 0.4),
    prompt=Spread(500, 0.4),
    reply=Spread(60, 0.6),
    added=Spread(100, 0.6),
    tool_s=Spread(1.0, 1.0),
)
TIMES = LoopTimes(
    load=LOAD,
    engine=ENGINE,
    gateway=GatewayTimes(processes=2, call_s=0.002, token_s=5e-5, history_s=1e-8, delay_s=0.001),
    train_s=1.0,
    train_token_s=1e-4,
    publish_s=0.5,
)
ASYNC: dict[str, Any] = {"mode": "async", "staleness": 2, "warmup": 3, "steps": 4}
MODES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "one-step-off", "staleness": 1, "warmup": 2},
    ASYNC,
]


def with_load(times: LoopTimes, **values: Any) -> LoopTimes:
    return structs.replace(times, load=structs.replace(times.load, **values))


def with_engine(times: LoopTimes, **values: Any) -> LoopTimes:
    return structs.replace(times, engine=structs.replace(times.engine, **values))


def with_gateway(times: LoopTimes, **values: Any) -> LoopTimes:
    return structs.replace(times, gateway=structs.replace(times.gateway, **values))


# --- closed forms -------------------------------------------------------------------------------------


def test_one_agent_without_queues_takes_the_sum_of_its_parts() -> None:
    turns, prompt, reply, added, tool = 3, 1000, 50, 200, 2.0
    times = LoopTimes(
        load=AgentLoad(
            agents=1, tasks_per_step=1, rollouts=1, turns=Spread(turns), prompt=Spread(prompt),
            reply=Spread(reply), added=Spread(added), tool_s=Spread(tool), launch_s=Spread(0.7),
            finish_s=Spread(0.3), launch_work_s=0.1,
        ),
        engine=EngineTimes(
            replicas=1, step_s=0.02, sequence_s=0.001, prefill_s=0.03, prefill_token_s=1e-4
        ),
        gateway=GatewayTimes(call_s=0.004, token_s=1e-4, history_s=1e-6, delay_s=0.01),
        train_s=5.0, train_token_s=1e-3, publish_s=1.5, poll_s=0.25, steps=3,
    )  # fmt: skip
    contexts = [prompt + n * (reply + added) for n in range(turns)]
    prefilled = prompt + (turns - 1) * added  # the rest is in the KV cache
    collect = 0.1 + 0.7 + 0.3 + (turns - 1) * tool
    collect += turns * (0.004 + 0.01 + reply * 1e-4) + sum(contexts) * 1e-6
    collect += turns * (0.03 + (reply - 1) * 0.021) + prefilled * 1e-4
    tokens = prompt + turns * reply + (turns - 1) * added
    # The groups of the first measured step begin at once, later ones after a poll.
    wall = 3 * (collect + 5.0 + tokens * 1e-3 + 1.5) + (3 + 2) * 0.25
    forecast = simulate(times)
    assert forecast.step_s * 3 == pytest.approx(wall, rel=1e-9)
    assert forecast.trainer["training"] == pytest.approx(5.0 + tokens * 1e-3)
    assert forecast.sampled_per_s == pytest.approx(3 * turns * reply / wall)
    assert forecast.agents["tools"] == pytest.approx((turns - 1) * tool)
    assert forecast.reused == pytest.approx(1 - prefilled / sum(contexts))


@pytest.mark.parametrize("limit", ["max_sequences", "kv_tokens"])
def test_a_saturated_engine_samples_at_its_capacity(limit: str) -> None:
    prompt, reply, at_once = 100, 100, 8
    limits = {"max_sequences": at_once, "kv_tokens": at_once * (prompt + reply) + 1}
    engine = structs.replace(EngineTimes(replicas=2, step_s=0.01), **{limit: limits[limit]})
    load = AgentLoad(
        agents=128,
        tasks_per_step=8,
        rollouts=16,
        turns=Spread(1),
        prompt=Spread(prompt),
        reply=Spread(reply),
        tool_s=Spread(0),
    )
    forecast = simulate(LoopTimes(load=load, engine=engine, train_s=0.0, train_token_s=0.0))
    assert forecast.sampled_per_s == pytest.approx(2 * at_once / 0.01, rel=0.01)
    assert forecast.batch == pytest.approx(at_once, rel=0.01)
    assert forecast.bottleneck == "engines"


def test_the_gateways_queue_waits_as_m_d_1() -> None:
    work = 0.004
    load = AgentLoad(
        agents=1500,
        tasks_per_step=150,
        rollouts=10,
        turns=Spread(12),
        prompt=Spread(10),
        reply=Spread(1),
        added=Spread(0),
        tool_s=Spread(8.0, 0.8),
    )
    times = LoopTimes(
        load=load,
        engine=EngineTimes(replicas=1, step_s=1e-7, max_sequences=5000),
        gateway=GatewayTimes(processes=1, call_s=work, delay_s=0.4),
        train_s=0.0,
        train_token_s=0.0,
        **ASYNC,
    )
    forecast = simulate(times)
    rho, visit = forecast.gateway_load, work / 2
    assert 0.5 < rho < 0.85
    per_call = forecast.agents["gateway"] * load.agents * times.steps / forecast.calls
    waited = (per_call - work - 0.4) / 2
    assert waited == pytest.approx(rho * visit / (2 * (1 - rho)), rel=0.25)


def stepped(times: EngineTimes, calls: list[tuple[int, int]]) -> float:
    """End of the last call, step by step: a pass of all admitted calls, then single decode steps."""
    waiting, running, now = list(calls), list[list[int]](), 0.0
    while waiting or running:
        joining = [waiting.pop(0) for _ in range(min(len(waiting), times.max_sequences - len(running)))]
        while joining:
            part = [joining.pop(0)]
            while joining and sum(p for p, _ in part) + joining[0][0] <= times.prefill_tokens:
                part.append(joining.pop(0))
            now += times.prefill_s + sum(p for p, _ in part) * times.prefill_token_s
            if running:
                now += times.step(len(running), sum(context for context, _ in running))
            running = [[context + 1, left - 1] for context, left in running]
            running += [[context + 1, reply - 1] for context, reply in part]
        if running:
            now += times.step(len(running), sum(context for context, _ in running))
            running = [[context + 1, left - 1] for context, left in running]
        running = [call for call in running if call[1] > 0]
    return now


@pytest.mark.parametrize("seed", range(4))
def test_fluid_decoding_is_that_of_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    engine = EngineTimes(
        replicas=1, step_s=0.01, sequence_s=1e-3, kv_token_s=1e-5, prefill_s=0.02, prefill_token_s=1e-4,
        prefill_tokens=1500, max_sequences=rng.randint(2, 6),
    )  # fmt: skip
    load = AgentLoad(
        agents=24,
        tasks_per_step=6,
        rollouts=4,
        turns=Spread(1),
        prompt=Spread(400, 0.7),
        reply=Spread(80, 0.7),
    )
    times = LoopTimes(load=load, engine=engine, train_s=0, train_token_s=0, steps=1, seed=seed)
    calls = [
        (rollout.added[0], rollout.replies[0])
        for group in range(6)
        for rollout in (SimulatedRollout(load, group, number, seed) for number in range(4))
    ]
    assert simulate(times).step_s == pytest.approx(stepped(engine, calls), rel=0.03)


# --- the real group scheduler -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "staleness"), [("sync", 0), ("one-step-off", 1), ("async", 2)])
@pytest.mark.parametrize("saturated", [False, True])
def test_steps_take_as_long_as_with_the_real_scheduler(mode: Any, staleness: int, saturated: bool) -> None:
    """Real group scheduler and training loop on a simulated clock, with the same agents and engine."""
    total, each = (400.0, 1e9) if saturated else (1e9, 50.0)
    setting = Setting(
        mode=mode, staleness=staleness, groups=96, rollouts=4, batch=8, step_s=12.0, total=total, each=each,
        concurrency=32, straggler_s=None, straggler_after=3,
        habits=Habits(turns=(5, 5), tokens=(100, 100), tool_median_s=2.0, tool_sigma=0.6, failing=0.0),
    )  # fmt: skip
    ends = [step.at for step in run_real(setting).steps]
    measured = (ends[9] - ends[3]) / 6
    mean_tool_s = 2.0 * 2.718281828 ** (0.6**2 / 2)
    forecast = simulate(
        LoopTimes(
            load=AgentLoad(
                agents=32, tasks_per_step=8, rollouts=4, turns=Spread(5), prompt=Spread(32),
                reply=Spread(100), added=Spread(16), tool_s=Spread(mean_tool_s, 0.6),
            ),
            engine=EngineTimes(
                replicas=1,
                step_s=0.0 if saturated else 1 / each,
                sequence_s=1 / total if saturated else 0.0,
            ),
            train_s=12.0, train_token_s=0.0, poll_s=0.125, mode=mode, staleness=staleness,
            warmup=3, steps=6,
        )
    )  # fmt: skip
    assert forecast.step_s == pytest.approx(measured, rel=0.15)


# --- conservation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
def test_each_account_adds_up_to_the_wall_time(mode: dict[str, Any]) -> None:
    forecast = simulate(structs.replace(TIMES, **mode))
    for account in (forecast.trainer, forecast.agents, forecast.engines):
        assert sum(account.values()) == pytest.approx(forecast.step_s, rel=1e-9)
        assert min(account.values()) > -1e-6
    assert sum(forecast.shares.values()) == pytest.approx(1.0)


def test_sampled_tokens_are_those_of_the_rollouts() -> None:
    simulation = LoopSimulation(structs.replace(TIMES, steps=3))
    forecast = simulation.run()
    rollouts = [
        SimulatedRollout(LOAD, group, number, 0)
        for group in range(3 * LOAD.tasks_per_step)
        for number in range(LOAD.rollouts)
    ]
    assert simulation.sampled == sum(sum(rollout.replies) for rollout in rollouts)
    assert simulation.trained_sampled == simulation.sampled
    assert simulation.trained == sum(rollout.tokens for rollout in rollouts)
    assert simulation.calls == forecast.calls == sum(len(rollout.replies) for rollout in rollouts)
    assert forecast.sampled_per_s * forecast.step_s * 3 == pytest.approx(simulation.sampled)
    for replica in simulation.replicas:
        assert (replica.running, replica.kv_reserved, replica.sampling) == (0, 0, [])


def test_calls_that_new_weights_interrupt_sample_all_their_tokens() -> None:
    simulation = LoopSimulation(structs.replace(TIMES, **ASYNC))
    simulation.run()
    steps = ASYNC["warmup"] + ASYNC["steps"]
    groups = range((steps + ASYNC["staleness"] + 1) * LOAD.tasks_per_step)
    possible = sum(
        sum(SimulatedRollout(LOAD, group, number, 0).replies)
        for group in groups
        for number in range(LOAD.rollouts)
    )
    assert simulation.finished >= steps * LOAD.tasks_per_step * LOAD.rollouts
    assert simulation.trained_sampled <= simulation.sampled <= possible
    for replica in simulation.replicas:
        assert replica.kv_reserved == sum(
            call.context + call.replies[call.turn]
            for call in (
                *replica.joining, *replica.pass_calls, *(call for _, _, call in replica.sampling)
            )
        )  # fmt: skip
        assert replica.kv >= -1e-6


def test_new_weights_void_the_cache() -> None:
    never, often = simulate(TIMES), simulate(structs.replace(TIMES, **ASYNC))
    contexts = [
        (rollout, turn)
        for group in range(TIMES.steps * LOAD.tasks_per_step)
        for rollout in (SimulatedRollout(LOAD, group, number, 0) for number in range(LOAD.rollouts))
        for turn in range(len(rollout.replies))
    ]
    prompts = sum(sum(r.added[: turn + 1]) + sum(r.replies[:turn]) for r, turn in contexts)
    assert never.reused == pytest.approx(1 - sum(r.added[turn] for r, turn in contexts) / prompts)
    assert often.reused < never.reused - 0.01


def test_groups_are_never_staler_than_allowed() -> None:
    for staleness in (1, 3):
        simulation = LoopSimulation(structs.replace(TIMES, **(ASYNC | {"staleness": staleness})))
        forecast = simulation.run()
        assert forecast.stalest <= staleness
        assert 0 < forecast.staleness <= forecast.stalest
    assert simulate(TIMES).stalest == 0


# --- comparisons --------------------------------------------------------------------------------------

FASTER: dict[str, Callable[[LoopTimes], LoopTimes]] = {
    "decode": lambda times: with_engine(times, step_s=0.005, sequence_s=5e-5),
    "prefill": lambda times: with_engine(times, prefill_s=0.0, prefill_token_s=5e-6),
    "replicas": lambda times: with_engine(times, replicas=8),
    "trainer": lambda times: structs.replace(times, train_s=0.5, train_token_s=5e-5),
    "weights": lambda times: structs.replace(times, publish_s=0.1),
    "tools": lambda times: with_load(times, tool_s=Spread(0.3, 1.0)),
    "gateway": lambda times: with_gateway(times, call_s=0.0, token_s=0.0, delay_s=0.0),
}


@pytest.mark.parametrize("part", FASTER)
@pytest.mark.parametrize("mode", [MODES[0], ASYNC], ids=lambda mode: mode["mode"])
def test_a_faster_part_shortens_a_step(part: str, mode: dict[str, Any]) -> None:
    times = structs.replace(TIMES, **mode)
    assert simulate(FASTER[part](times)).step_s < simulate(times).step_s * (1 if mode is MODES[0] else 1.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("train_token_s", [1e-5, 1e-4, 1e-3])
def test_asynchrony_is_never_slower_in_a_steady_state(train_token_s: float, seed: int) -> None:
    times = structs.replace(TIMES, train_token_s=train_token_s, seed=seed, steps=4)
    sync, later = simulate(times), simulate(structs.replace(times, **ASYNC))
    assert later.sampled_per_s >= sync.sampled_per_s * 0.98


def test_asynchrony_hides_the_shorter_of_training_and_collecting() -> None:
    sync = simulate(structs.replace(TIMES, train_s=20.0, steps=4))
    later = simulate(structs.replace(TIMES, train_s=20.0, **ASYNC))
    assert later.step_s < sync.step_s * 0.75
    assert later.trainer["idle"] < 0.05 * later.step_s


BOTTLENECKS: dict[str, Callable[[LoopTimes], LoopTimes]] = {
    "trainer": lambda times: structs.replace(times, train_s=1000.0),
    "weights": lambda times: structs.replace(times, publish_s=1000.0),
    "gateway": lambda times: with_gateway(times, processes=1, call_s=0.5),
    "tools": lambda times: times,
    "engines": lambda times: with_engine(times, step_s=0.5),
    "launch": lambda times: with_load(times, launch_work_s=10.0),
}


@pytest.mark.parametrize("part", BOTTLENECKS)
def test_the_slow_part_is_the_bottleneck(part: str) -> None:
    assert simulate(BOTTLENECKS[part](TIMES)).bottleneck == part


def test_more_gateway_processes_relieve_a_full_gateway() -> None:
    full = with_gateway(TIMES, processes=1, call_s=0.2)
    one, four = simulate(full), simulate(with_gateway(full, processes=4))
    assert four.step_s < 0.6 * one.step_s
    assert one.gateway_load <= 1.0001


def test_a_replicas_own_gateway_serves_its_sessions_alone() -> None:
    slow = with_load(with_gateway(with_engine(TIMES, own_gateway=True), call_s=0.05), agents=2)
    simulation = LoopSimulation(with_load(slow, tasks_per_step=1, rollouts=2, tool_s=Spread(0.0)))
    assert simulation.run().gateway_load <= 2
    alone = simulate(with_load(slow, tasks_per_step=1, rollouts=2, tool_s=Spread(0.0)))
    shared = with_gateway(with_engine(slow, own_gateway=False), processes=1)
    crowded = simulate(with_load(shared, tasks_per_step=1, rollouts=2, tool_s=Spread(0.0)))
    assert alone.agents["gateway"] < crowded.agents["gateway"]


def test_a_pile_of_groups_is_no_lasting_rate() -> None:
    """A fast trainer takes the groups that began together faster than the engines can sample others."""
    slow = with_engine(with_load(TIMES, tool_s=Spread(0.1), agents=96), replicas=1, step_s=0.1)
    short = simulate(structs.replace(slow, **(ASYNC | {"steps": 2, "warmup": 1})))
    long = simulate(structs.replace(slow, **(ASYNC | {"steps": 40})))
    assert long.produced_per_s == pytest.approx(long.sampled_per_s, rel=0.1)
    assert lasting_rate(short) <= 1.2 * long.sampled_per_s
    assert lasting_rate(long) == min(long.produced_per_s, long.sampled_per_s)


# --- seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["mode"])
def test_equal_seeds_give_equal_forecasts(mode: dict[str, Any]) -> None:
    times = structs.replace(TIMES, **mode)
    first, again = simulate(times), simulate(times)
    assert first == again
    assert simulate(structs.replace(times, seed=1)).step_s != first.step_s


def test_spreads_keep_their_mean() -> None:
    rng = random.Random(0)
    spread = Spread(200.0, 0.8)
    assert sum(spread.draw(rng) for _ in range(20_000)) / 20_000 == pytest.approx(200.0, rel=0.03)
    assert sum(Spread(3.4, 0.3).count(rng) for _ in range(20_000)) / 20_000 == pytest.approx(3.4, rel=0.03)
    assert Spread(0.0, 1.0).draw(rng) == 0.0
    with pytest.raises(ValueError, match="mean = -1"):
        Spread(-1.0)


def test_ten_thousand_agents_need_few_events() -> None:
    """Events grow with calls, not with tokens."""

    def events(reply: float) -> LoopForecast:
        return simulate(with_load(TIMES, reply=Spread(reply)))

    short, long = events(20), events(2000)
    assert long.events < 1.5 * short.events
    assert short.events < 12 * short.calls
