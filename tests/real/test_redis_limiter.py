"""One launch budget for processes that reach a real Redis at two addresses."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.ratelimit.test_limiter import LEASE_S, assert_within, most_at_once, sharing, spans
from tests.real.conftest import Get

from afield.errors import Unavailable, UsageError
from afield.ratelimit import RateLimits, RedisLimiter
from support import servers

pytestmark = [pytest.mark.real, pytest.mark.timeout(170)]
HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def redis(server: Get) -> servers.Server:
    return server("redis_server")


@pytest.fixture
def urls(redis: servers.Server, request: pytest.FixtureRequest) -> list[str]:
    """The budget of this test, at each address of the server."""
    return [f"redis://{host}:{redis.port}/0?name={request.node.name}" for host in HOSTS]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_processes_at_two_addresses_share_one_rate_and_one_set_of_slots(urls: list[str]) -> None:
    others = [sharing(url, 40, 12, 4, 0.2) for url in (*urls, *urls)]
    printed = [spans(one.communicate(timeout=100)[0]) for one in others]
    assert all(one.returncode == 0 for one in others)
    launches = [(began, ended) for one in printed for began, ended in one if ended is not None]
    began = sorted(at for at, _ in launches)
    assert all(len(one) >= 12 for one in printed), [len(one) for one in printed]
    assert len(began) / (began[-1] - began[0]) >= 0.8 * 40
    assert_within(began, 40, slack_s=0.5)
    assert most_at_once(launches) <= 12


def test_slots_of_a_killed_process_become_free(
    urls: list[str], processes: list[subprocess.Popen[str]]
) -> None:
    victim = sharing(urls[0], 1000, 3, 60, 600)
    processes.append(victim)
    assert victim.stdout is not None
    for _ in range(3):
        victim.stdout.readline()

    async def main() -> float:
        limits = RateLimits(rate_per_s=1000, starting=3)
        with closing(RedisLimiter(limits, urls[1], lease_s=LEASE_S)) as limiter:

            async def launch() -> float:
                async with asyncio.timeout(60), limiter.launch_slot():
                    return time.monotonic()

            launching = asyncio.create_task(launch())
            await asyncio.sleep(1.5 * LEASE_S)
            assert not launching.done(), "a living process keeps its slots"
            victim.kill()
            killed = time.monotonic()
            return await launching - killed

    assert asyncio.run(main()) <= LEASE_S + 5


def test_a_refusal_at_one_address_slows_the_other_down(urls: list[str]) -> None:
    async def main() -> float:
        limits = RateLimits(rate_per_s=100)
        with (
            closing(RedisLimiter(limits, urls[0])) as one,
            closing(RedisLimiter(limits, urls[1])) as other,
        ):
            async with one.call_slot():
                one.slow_down(3.0)
            refused = time.monotonic()
            async with one.call_slot():  # also writes the refusal
                pass
            async with other.call_slot():
                return time.monotonic() - refused

    assert asyncio.run(main()) >= 2.9


def test_a_budget_survives_a_restart_of_the_server(redis: servers.Server, urls: list[str]) -> None:
    async def main() -> int:
        limits = RateLimits(rate_per_s=20, starting=2)
        with closing(RedisLimiter(limits, urls[0], lease_s=30)) as one:
            async with one.launch_slot():
                redis.stop()
                waiting = asyncio.create_task(one.call_slot().__aenter__())
                await asyncio.sleep(0.5)
                assert not waiting.done()
                redis.start()
                await asyncio.wait_for(waiting, 30)
                with closing(RedisLimiter(limits, urls[1], lease_s=30)) as other:
                    async with other.launch_slot():
                        third = asyncio.create_task(other.launch_slot().__aenter__())
                        await asyncio.sleep(0.5)
                        taken = 2 + third.done()
                        third.cancel()
                        await asyncio.gather(third, return_exceptions=True)
                        return taken

    assert asyncio.run(main()) == 2


def test_errors_name_the_address_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be like redis://HOST:PORT"):
        RedisLimiter(RateLimits(), "http://127.0.0.1:1")
    with (
        closing(RedisLimiter(RateLimits(), "redis://u:hush@127.0.0.1:1/0")) as limiter,
        pytest.raises(Unavailable, match=r"redis://127\.0\.0\.1:1/0 does not answer") as caught,
    ):
        limiter.check()
    assert "hush" not in str(caught.value)
