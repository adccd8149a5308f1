"""The simulated clock: time passes only where nothing else can happen, and the same way each time."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from support.virtual_time import Stuck, VirtualLoop, run


async def clock() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleeping_takes_no_time() -> None:
    async def main() -> float:
        for _ in range(24):
            await asyncio.sleep(3600)
        return await clock()

    assert run(main()) == 24 * 3600  # in real time this test would be ended long before


def test_timers_fire_in_their_order_and_at_their_time() -> None:
    async def main() -> list[tuple[float, int]]:
        fired: list[tuple[float, int]] = []

        async def sleeper(n: int) -> None:
            await asyncio.sleep(n / 7)
            fired.append((await clock(), n))

        async with asyncio.TaskGroup() as tasks:
            for n in random.Random(1).sample(range(50), 50):
                tasks.create_task(sleeper(n))
        return fired

    assert run(main()) == [(pytest.approx(n / 7), n) for n in range(50)]


def test_timeouts_are_of_simulated_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await asyncio.Event().wait()
        return await clock()

    assert run(main()) == pytest.approx(600)


def test_the_clock_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[str, float, int]:
        ticks = 0

        async def ticking() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(ticking())
        said = await asyncio.to_thread(lambda: time.sleep(0.05) or "done")
        ticker.cancel()
        return said, await clock(), ticks

    assert run(main()) == ("done", 0, 0)


def test_a_thread_that_asks_the_loop_gets_its_answer_after_simulated_time() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()

        async def answer() -> float:
            await asyncio.sleep(5)
            return loop.time()

        def work() -> float:
            return asyncio.run_coroutine_threadsafe(answer(), loop).result(10)

        return await asyncio.to_thread(work), loop.time()

    assert run(main()) == (5, 5)


def test_work_in_a_thread_can_take_simulated_time() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[float] = []

        async def ticking() -> None:
            while True:
                await asyncio.sleep(4)
                seen.append(loop.time())

        def work() -> None:
            loop.spend(10)
            time.sleep(0.02)
            seen.append(loop.time())

        ticker = asyncio.create_task(ticking())
        await asyncio.to_thread(work)
        await asyncio.sleep(3)
        ticker.cancel()
        return seen

    assert run(main()) == [4, 8, 10, 12]


def test_exception_of_a_thread_is_raised_where_it_is_awaited() -> None:
    def work() -> None:
        raise ValueError("not today")

    async def main() -> None:
        await asyncio.to_thread(work)

    with pytest.raises(ValueError, match="not today"):
        run(main())


def test_work_that_was_cancelled_before_it_began_never_runs() -> None:
    ran: list[int] = []

    async def main() -> None:
        work = asyncio.ensure_future(asyncio.to_thread(ran.append, 1))
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(1)

    run(main())
    assert ran == []


def test_a_wait_that_would_never_end_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="the forgotten")

    with pytest.raises(Stuck, match=r"at 0 s.*the forgotten"):
        run(main())


def test_the_same_program_gives_the_same_run_threads_and_all() -> None:
    async def main(seed: int) -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def worker(n: int) -> None:
            chance = random.Random(f"{seed}/{n}")
            for _ in range(5):
                await asyncio.sleep(chance.choice((0, 0, 1, 2)))
                await asyncio.to_thread(time.sleep, random.random() / 2000)
                seen.append((await clock(), n))

        async with asyncio.TaskGroup() as tasks:
            for n in range(10):
                tasks.create_task(worker(n))
        return seen

    assert run(main(1)) == run(main(1)) != run(main(2))


def test_it_serves_as_the_loop_of_other_runners() -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start=100)) as runner:
        runner.run(asyncio.sleep(3))
        assert runner.get_loop().time() == 103
