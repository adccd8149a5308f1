"""What a limiter promises: the rate, the places, fairness, and what a refusal does, on a simulated clock."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.errors import UsageError
from afield.ratelimit import Limiter, LocalLimiter, RateLimits, SharedLimiter, Unlimited
from afield.ratelimit.controller import BURST_S, RateController
from support.paths import TESTS
from support.virtual_time import run

LEASE_S = 2.0  # of the launch slots of several processes
SHARING = TESTS / "support" / "shared_limiter_process.py"


def now() -> float:
    return asyncio.get_running_loop().time()


def burst(rate: float) -> float:
    return max(1.0, rate * BURST_S)


def assert_within(times: list[float], rate: float, slack_s: float = 1e-4) -> None:
    """No window has more calls than the rate and a burst."""
    first: list[tuple[float, int]] = []
    for i, at in enumerate(sorted(times)):
        # The window from call j to call i is worst where j - rate * t_j is least.
        score = (i - rate * at, i)
        first.append(min(score, first[-1]) if first else score)
        calls = i - rate * at - first[i][0] + 1
        assert calls <= burst(rate) + rate * slack_s, (calls, burst(rate), i, first[i][1])


@contextmanager
def limiter_of(kind: str, pace: RateLimits, path: Path) -> Iterator[Limiter]:
    if kind == "local":
        yield LocalLimiter(pace)
        return
    with closing(SharedLimiter(pace, path, clock=now)) as shared:
        yield shared


@pytest.fixture(params=["local", "shared"])
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[RateLimits], Limiter]:
    count = itertools.count()
    return lambda pace: _opened(request, request.param, pace, tmp_path / f"limiter-{next(count)}")


def _opened(request: pytest.FixtureRequest, kind: str, pace: RateLimits, path: Path) -> Limiter:
    opened = limiter_of(kind, pace, path)
    request.addfinalizer(lambda: opened.__exit__(None, None, None))
    return opened.__enter__()


# --- rate and places -----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(0.5, 200),
    starting=st.one_of(st.none(), st.integers(1, 20)),
    arrivals=st.lists(
        st.tuples(st.floats(0, 3), st.floats(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=80
    ),
)
def test_no_window_has_more_calls_than_the_rate_and_a_burst_nor_more_launches_than_places(
    rate: float, starting: int | None, arrivals: list[tuple[float, float, bool, bool]]
) -> None:
    made: list[float] = []
    most = 0

    async def main() -> None:
        limiter = LocalLimiter(RateLimits(rate_per_s=rate, starting=starting))
        under_way = 0

        async def one(at: float, held_s: float, launch: bool) -> None:
            nonlocal under_way, most
            await asyncio.sleep(at)
            if not launch:
                async with limiter.call_slot():
                    made.append(now())
                return
            async with limiter.launch_slot():
                made.append(now())
                under_way += 1
                most = max(most, under_way)
                try:
                    await asyncio.sleep(held_s)
                finally:
                    under_way -= 1

        async with asyncio.TaskGroup() as group:
            for at, held_s, launch, given_up in arrivals:
                task = group.create_task(one(at, held_s, launch))
                if given_up:
                    asyncio.get_running_loop().call_later(at + held_s / 2, task.cancel)

    run(main())
    assert_within(made, rate)
    assert most <= (starting or len(arrivals))


def test_launches_use_the_whole_rate(limited: Callable[[RateLimits], Limiter]) -> None:
    async def main() -> float:
        limiter = limited(RateLimits(rate_per_s=50, cold_start_s=2))

        async def one() -> None:
            async with limiter.launch_slot():
                await asyncio.sleep(1.9)

        async with asyncio.TaskGroup() as group:
            for _ in range(500):
                group.create_task(one())
        return now()

    assert run(main()) == pytest.approx(500 / 50 + 1.9, abs=0.5)


@pytest.mark.parametrize(
    ("pace", "places"),
    [
        (RateLimits(), None),
        (RateLimits(rate_per_s=25), None),
        (RateLimits(rate_per_s=25, cold_start_s=10), 375),
        (RateLimits(rate_per_s=0.1, cold_start_s=2), 1),
        (RateLimits(rate_per_s=2.5, cold_start_s=1), 4),
        (RateLimits(rate_per_s=25, cold_start_s=10, starting=7), 7),
    ],
)
def test_places_are_what_the_rate_brings_about_in_a_cold_start_that_takes_half_again_as_long(
    pace: RateLimits, places: int | None
) -> None:
    assert pace.max_launching == places


def test_no_more_launches_are_under_way_than_there_are_places(
    limited: Callable[[RateLimits], Limiter],
) -> None:
    async def main() -> tuple[int, float]:
        limiter = limited(RateLimits(rate_per_s=1000, starting=4))
        under_way = most = 0

        async def one() -> None:
            nonlocal under_way, most
            async with limiter.launch_slot():
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(10)
                under_way -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(one())
        return most, now()

    most, took = run(main())
    assert most == 4
    assert took == pytest.approx(50, abs=2)


@pytest.mark.parametrize("late_s", [0.005, 0.01, 0.015])
def test_turns_that_a_busy_machine_takes_late_are_made_up_for(late_s: float) -> None:
    """Late by so much on average, and now and then by much more; one turn is waited for at a time."""
    chance, rhythm, now, made = random.Random(1), RateController(), 0.0, list[float]()
    for _ in range(1000):
        due = rhythm.reserve(now, 25)
        now = max(now, due) + chance.expovariate(1 / late_s)
        rhythm.late(due, now, 25)
        made.append(now)
    assert len(made) / now >= 0.95 * 25
    assert all(later - first >= 1 for first, later in zip(made, made[25:], strict=False))


def test_a_launch_that_raises_frees_its_slot(limited: Callable[[RateLimits], Limiter]) -> None:
    async def main() -> None:
        limiter = limited(RateLimits(rate_per_s=100, starting=1))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="refused"):
                async with limiter.launch_slot():
                    raise RuntimeError("refused")

    run(main())


@pytest.mark.parametrize(
    "bad",
    [
        {"rate_per_s": 0},
        {"rate_per_s": float("inf")},
        {"stop_per_s": -1},
        {"cold_start_s": -1},
        {"starting": 0},
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} .*must be"):
        RateLimits(**bad)  # pyright: ignore[reportArgumentType]


# --- fairness ------------------------------------------------------------------------------------


def test_launches_go_in_the_order_they_came(limited: Callable[[RateLimits], Limiter]) -> None:
    async def main() -> list[int]:
        limiter = limited(RateLimits(rate_per_s=10, starting=3))
        order: list[int] = []

        async def one(n: int) -> None:
            async with limiter.launch_slot():
                order.append(n)
                await asyncio.sleep(random.Random(n).uniform(0, 1))

        async with asyncio.TaskGroup() as group:
            for n in range(40):
                group.create_task(one(n))
        return order

    assert run(main()) == list(range(40))


@pytest.mark.parametrize("first", ["launches", "stops"])
def test_neither_launches_nor_stops_wait_behind_a_thousand_of_the_other(
    first: str, limited: Callable[[RateLimits], Limiter]
) -> None:
    async def main() -> float:
        limiter = limited(RateLimits(rate_per_s=10))
        crowd, other = limiter.launch_slot, limiter.call_slot
        if first == "stops":
            crowd, other = other, crowd

        async def one() -> None:
            async with crowd():
                pass

        tasks = [asyncio.create_task(one()) for _ in range(1000)]
        await asyncio.sleep(1)
        for _ in range(10):
            async with other():
                pass
        took = now() - 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return took

    # Every other turn is theirs: ten turns of twenty.
    assert run(main()) == pytest.approx(2, abs=0.3)


def test_a_stop_does_not_wait_for_a_launch_slot(limited: Callable[[RateLimits], Limiter]) -> None:
    async def main() -> float:
        limiter = limited(RateLimits(rate_per_s=10, starting=1))
        async with limiter.launch_slot():

            async def next_one() -> None:
                async with limiter.launch_slot():
                    pass

            waiting = asyncio.create_task(next_one())
            await asyncio.sleep(1)
            async with limiter.call_slot():
                took = now() - 1
        await waiting
        return took

    assert run(main()) <= 0.2


def test_waiters_that_give_up_cost_the_others_no_more_than_a_turn(
    limited: Callable[[RateLimits], Limiter],
) -> None:
    async def main() -> float:
        limiter = limited(RateLimits(rate_per_s=10, starting=100))

        async def one() -> None:
            async with limiter.launch_slot():
                pass

        given_up = [asyncio.create_task(one()) for _ in range(100)]
        await asyncio.sleep(0.05)
        last = asyncio.create_task(one())
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await last
        return now()

    assert run(main()) <= 0.3


# --- refusals ------------------------------------------------------------------------------------


class Bucket:
    """Allows `rate` calls a second from a bucket of a few, and refuses above."""

    def __init__(self, rate: float, bucket: float = 5) -> None:
        self._rate, self._bucket, self._left, self._at = rate, bucket, bucket, 0.0

    def takes(self) -> bool:
        self._left = min(self._bucket, self._left + (now() - self._at) * self._rate)
        self._at = now()
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Window:
    """Allows `rate` calls in any second, and refuses the next."""

    def __init__(self, rate: float) -> None:
        self._rate, self._taken = rate, list[float]()

    def takes(self) -> bool:
        self._taken = [at for at in self._taken if at > now() - 1]
        if len(self._taken) >= self._rate:
            return False
        self._taken.append(now())
        return True


SERVERS: dict[str, Callable[[float], Bucket | Window]] = {"bucket": Bucket, "window": Window}


def launched(
    limiter_for: Callable[[], Limiter],
    launches: int,
    *,
    server_of: Callable[[float], Bucket | Window] = Bucket,
    jitter_s: float = 0.05,
    seed: int = 1,
) -> tuple[float, float]:
    """The part of the server's 25 a second that was reached, and the part of calls that was refused."""

    async def main() -> tuple[float, float]:
        limiter, server, chance = limiter_for(), server_of(25), random.Random(seed)
        refused = 0

        async def one() -> None:
            nonlocal refused
            while True:
                async with limiter.launch_slot():
                    await asyncio.sleep(0.02 + chance.uniform(0, jitter_s))
                    taken = server.takes()
                    await asyncio.sleep(0.02)
                if taken:
                    return
                refused += 1
                limiter.slow_down(None)

        async with asyncio.TaskGroup() as group:
            for _ in range(launches):
                group.create_task(one())
        return launches / now() / 25, refused / (launches + refused)

    return run(main())


@pytest.mark.parametrize(
    ("server", "jitter_s"), [("bucket", 0.02), ("bucket", 0.1), ("window", 0.02), ("window", 0.04)]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_launches_reach_the_servers_rate_and_are_hardly_refused(
    limited: Callable[[RateLimits], Limiter], server: str, jitter_s: float, seed: int
) -> None:
    reached, refused = launched(
        lambda: limited(RateLimits(rate_per_s=25)),
        1000,
        server_of=SERVERS[server],
        jitter_s=jitter_s,
        seed=seed,
    )
    assert reached >= 0.95
    assert refused <= 0.01


@pytest.mark.parametrize(("rate", "least", "most"), [(30, 0.9, 0.01), (50, 0.85, 0.02), (None, 0.35, 1.0)])
def test_a_rate_that_is_too_high_or_missing_is_found_out(
    rate: float | None, least: float, most: float
) -> None:
    """Without a rate the first thousand come at once, and most of them are refused, once."""
    reached, refused = launched(lambda: LocalLimiter(RateLimits(rate_per_s=rate)), 1000)
    assert reached >= least
    assert refused <= most


def test_the_refusals_of_one_burst_halve_the_rate_once_and_it_is_back_in_half_a_minute() -> None:
    async def main() -> list[float | None]:
        limiter = LocalLimiter(RateLimits(rate_per_s=40))
        seen: list[float | None] = []
        for _ in range(50):
            limiter.slow_down(None)
        seen.append(limiter.rate_per_s)
        await asyncio.sleep(1)
        limiter.slow_down(None)
        seen.append(limiter.rate_per_s)
        for _ in range(3):
            await asyncio.sleep(10)
            seen.append(limiter.rate_per_s)
        return seen

    first, second, *later = run(main())
    # Two of them were chance; of 40 a second, 96 % are used then.
    assert (first, second) == (pytest.approx(19.2), pytest.approx(13.44))
    grown = [rate or 0.0 for rate in later]
    assert grown == sorted(grown)
    assert later[-1] == pytest.approx(0.96 * 40)


def test_single_refusals_are_chance_and_cost_next_to_nothing() -> None:
    async def main() -> list[float | None]:
        limiter, seen = LocalLimiter(RateLimits(rate_per_s=100)), list[float | None]()
        for _ in range(6):
            limiter.slow_down(None)
            seen.append(limiter.rate_per_s)
            await asyncio.sleep(3)
        return seen

    assert run(main()) == pytest.approx([96.5, 96, 95.5, 95.5, 95.5, 95.5])


def test_the_pause_that_was_asked_for_is_kept_by_launches_and_stops(
    limited: Callable[[RateLimits], Limiter],
) -> None:
    async def main() -> list[float]:
        limiter = limited(RateLimits(rate_per_s=10))
        made: list[float] = []

        async def one(launch: bool) -> None:
            async with limiter.launch_slot() if launch else limiter.call_slot():
                made.append(now())

        async with asyncio.TaskGroup() as group:
            for n in range(40):
                group.create_task(one(n % 2 == 0))
            await asyncio.sleep(1)
            limiter.slow_down(7.0)
        return made

    made = run(main())
    assert len([at for at in made if 1 < at < 7.99]) == 0
    assert len(made) == 40
    assert_within(made, 10)


def test_without_a_rate_the_first_refusals_teach_one() -> None:
    async def main() -> tuple[float | None, float | None]:
        limiter = LocalLimiter(RateLimits())
        before = limiter.rate_per_s
        for _ in range(100):
            async with limiter.launch_slot():
                pass
        for _ in range(70):
            limiter.slow_down(None)
        async with limiter.launch_slot():
            pass
        return before, limiter.rate_per_s

    before, learned = run(main())
    assert before is None
    assert learned == pytest.approx(30, abs=1)


def test_unlimited_holds_nothing_back_until_a_call_is_refused() -> None:
    async def main() -> list[float]:
        limiter, seen = Unlimited(), list[float]()
        for refused in (False, True):
            if refused:
                limiter.slow_down(5)
            for _ in range(1000):
                async with limiter.launch_slot(), limiter.call_slot():
                    pass
            seen.append(now())
        return seen

    before, after = run(main())
    assert before == 0
    assert after >= 5


# --- stops apart ---------------------------------------------------------------------------------


def test_stops_with_a_rate_of_their_own_take_no_turns_of_launches(
    limited: Callable[[RateLimits], Limiter],
) -> None:
    async def main() -> tuple[float, float]:
        limiter = limited(RateLimits(rate_per_s=10, stop_per_s=20))
        last = {"launch": 0.0, "stop": 0.0}

        async def one(kind: str) -> None:
            async with limiter.launch_slot() if kind == "launch" else limiter.call_slot():
                last[kind] = now()

        async with asyncio.TaskGroup() as group:
            for n in range(400):
                group.create_task(one("launch" if n % 2 else "stop"))
        return last["launch"], last["stop"]

    launches, stops = run(main())
    assert launches == pytest.approx(200 / 9.7, abs=0.2)
    assert stops == pytest.approx(200 / 19.4, abs=0.2)


def test_refused_stops_slow_down_stops_alone_where_they_have_their_own_rate(
    limited: Callable[[RateLimits], Limiter],
) -> None:
    async def main() -> tuple[float, float]:
        limiter = limited(RateLimits(rate_per_s=10, stop_per_s=10))
        limiter.slow_down(5.0, stop=True)
        async with limiter.launch_slot():
            launched = now()
        async with limiter.call_slot():
            return launched, now()

    launched_at, stopped_at = run(main())
    assert launched_at < 0.5
    assert stopped_at >= 5


# --- several processes ---------------------------------------------------------------------------


def sharing(
    place: Path | str, rate: float, starting: int, seconds: float, hold_s: float
) -> subprocess.Popen[str]:
    arguments = map(str, (SHARING, place, rate, starting, seconds, hold_s, LEASE_S))
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)


def spans(said: str) -> list[tuple[float, float | None]]:
    """Begin and end of each launch; the end is None where its process was killed in it."""
    found: dict[float, float | None] = {}
    for line in said.splitlines():
        began, ended = json.loads(line)
        found[began] = ended
    return list(found.items())


def most_at_once(launches: list[tuple[float, float]]) -> int:
    events = sorted([(began, 1) for began, _ in launches] + [(ended, -1) for _, ended in launches])
    return max(itertools.accumulate(change for _, change in events))


def test_four_processes_share_one_rate_and_one_set_of_places(tmp_path: Path) -> None:
    others = [sharing(tmp_path / "limiter", 40, 12, 3, 0.2) for _ in range(4)]
    said = [spans(one.communicate(timeout=60)[0]) for one in others]
    assert all(one.returncode == 0 for one in others)
    launches = [(began, ended) for one in said for began, ended in one if ended is not None]
    began = sorted(at for at, _ in launches)
    # Each process has its share, all of them together the rate.
    assert all(len(one) >= 12 for one in said), [len(one) for one in said]
    assert len(began) / (began[-1] - began[0]) >= 0.8 * 40
    # Timers of a busy machine are late now and then.
    assert_within(began, 40, slack_s=0.5)
    assert most_at_once(launches) <= 12


def test_the_places_of_a_killed_process_come_free_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "limiter"
    victim = sharing(path, 1000, 3, 60, 600)
    assert victim.stdout is not None
    for _ in range(3):
        victim.stdout.readline()

    async def launch(limiter: SharedLimiter) -> float:
        async with asyncio.timeout(60), limiter.launch_slot():
            return time.monotonic()

    with closing(SharedLimiter(RateLimits(rate_per_s=1000, starting=3), path, lease_s=LEASE_S)) as limiter:

        async def main() -> float:
            launching = asyncio.create_task(launch(limiter))
            # Longer than a lease: a living process keeps its places.
            await asyncio.sleep(1.5 * LEASE_S)
            assert not launching.done()
            victim.kill()
            killed = time.monotonic()
            return await launching - killed

        assert asyncio.run(main()) <= LEASE_S + 2
    victim.communicate()


def test_refusals_that_one_process_saw_slow_the_others_down(tmp_path: Path) -> None:
    async def main() -> float:
        pace = RateLimits(rate_per_s=10)
        with (
            closing(SharedLimiter(pace, tmp_path / "l", clock=now)) as one,
            closing(SharedLimiter(pace, tmp_path / "l", clock=now)) as other,
        ):
            one.slow_down(5.0)
            async with other.call_slot():
                return now()

    assert run(main()) == pytest.approx(5, abs=0.2)


def test_a_clock_that_is_set_back_stops_nothing(tmp_path: Path) -> None:
    async def main() -> float:
        ahead_s = 3600.0
        pace = RateLimits(rate_per_s=10, starting=1)
        with closing(SharedLimiter(pace, tmp_path / "l", clock=lambda: now() + ahead_s)) as limiter:
            lost = limiter.launch_slot()
            await lost.__aenter__()
            limiter.slow_down(30)
        ahead_s = 0.0
        began = now()
        with closing(SharedLimiter(pace, tmp_path / "l", clock=now)) as limiter:
            for _ in range(10):
                async with limiter.launch_slot():
                    pass
        return now() - began

    assert run(main()) <= 3


def test_refusals_of_one_burst_that_several_processes_saw_count_once(tmp_path: Path) -> None:
    async def main() -> float:
        pace = RateLimits(rate_per_s=10)
        # Its refusal is a little older than the cut it meets in the file.
        behind = SharedLimiter(pace, tmp_path / "l", clock=lambda: now() - 0.01)
        with closing(SharedLimiter(pace, tmp_path / "l", clock=now)) as one, closing(behind) as other:
            await asyncio.sleep(1)
            for _ in range(3):
                one.slow_down(None)
                other.slow_down(None)
            began = now()
            for _ in range(4):
                async with one.call_slot():
                    pass
            return now() - began

    # Three gaps at half the rate, which grows; at a quarter they would take twice as long.
    assert 0.4 <= run(main()) <= 0.7


def test_a_file_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    async def main(path: Path) -> None:
        with closing(SharedLimiter(RateLimits(), path)) as limiter:
            async with limiter.call_slot():
                pass

    (tmp_path / "not-sqlite").write_bytes(b"x" * 5000)
    for name, remedy in (("missing/limiter", "local disk"), ("not-sqlite", "restore a copy or remove it")):
        with pytest.raises(UsageError, match=f"{name}.*{remedy}"):
            asyncio.run(main(tmp_path / name))
