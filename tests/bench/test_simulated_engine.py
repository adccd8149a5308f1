"""Simulated engine of the throughput benchmark against a time-stepping model."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.collect.simulation.engine import Engine
from support.virtual_time import run

Arrival = tuple[float, int]


def stepped(arrivals: list[Arrival], total: float, each: float, dt: float) -> list[float]:
    """When each call ends, by tiny steps of time."""
    left = {k: float(tokens) for k, (_, tokens) in enumerate(arrivals)}
    ends: dict[int, float] = {}
    now = 0.0
    while left:
        here = [k for k in left if arrivals[k][0] <= now]
        rate = min(each, total / max(len(here), 1))
        now += dt
        for k in here:
            left[k] -= rate * dt
            if left[k] <= 0:
                ends[k] = now
                del left[k]
    return [ends[k] for k in range(len(arrivals))]


async def served(arrivals: list[Arrival], total: float, each: float) -> tuple[list[float], Engine]:
    engine = Engine(total, each)
    loop = asyncio.get_running_loop()

    async def call(at: float, tokens: int) -> float:
        await asyncio.sleep(at)
        spans = await engine.sample(tokens)
        assert (spans[0].start, spans[-1].end) == (0, tokens)
        return loop.time()

    return await asyncio.gather(*(call(*arrival) for arrival in arrivals)), engine


@pytest.mark.parametrize("seed", range(8))
def test_calls_end_at_the_simulated_time(seed: int) -> None:
    chance = random.Random(seed)
    arrivals = [(chance.uniform(0, 5), chance.randint(20, 200)) for _ in range(chance.randint(2, 40))]
    total, each = chance.choice([(1000.0, 200.0), (400.0, 200.0), (20_000.0, 150.0)])
    ends, engine = run(served(arrivals, total, each))
    assert ends == pytest.approx(stepped(arrivals, total, each, 0.0005), abs=0.03)
    tokens = sum(tokens for _, tokens in arrivals)
    assert engine.sampled == tokens
    assert sum(engine.served) == pytest.approx(tokens)


def test_a_call_alone_gets_its_own_bound_and_many_share_the_whole() -> None:
    assert run(served([(0, 100)], 20_000, 200))[0] == [pytest.approx(0.5)]
    ends, engine = run(served([(0, 100)] * 400, 20_000, 200))
    assert ends == [pytest.approx(2.0)] * 400
    assert engine.busy == pytest.approx(1.0)


def test_new_weights_in_the_middle_of_a_call_give_it_two_spans() -> None:
    async def main() -> list[list[int]]:
        engine = Engine(20_000, 200)
        call = asyncio.create_task(engine.sample(100))
        await asyncio.sleep(0.2)
        engine.publish(3)
        return [[span.start, span.end, span.low] for span in await call]

    assert run(main()) == [[0, 40, 0], [40, 100, 3]]


def test_an_abandoned_call_leaves_its_share_to_the_others() -> None:
    async def main() -> tuple[float, int]:
        engine = Engine(200, 200)
        gone, stays = (asyncio.create_task(engine.sample(100)) for _ in range(2))
        await asyncio.sleep(0.5)
        gone.cancel()
        await stays
        return asyncio.get_running_loop().time(), engine.sampled

    assert run(main()) == (pytest.approx(0.75), 150)
