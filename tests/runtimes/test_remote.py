"""Agents that somebody else serves: found, launched, watched, adopted, and let be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from afield.errors import InfrastructureFailure, RateLimited, TaskFailure, UsageError
from afield.interfaces.runtime import Exit
from afield.runtimes.remote import RemoteRuntime
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, FailureKind, Reason
from agents.invoking import invocation, payload
from agents.places import ACTING, BOUND_S, Place, alive, pids, serving, until

pytestmark = pytest.mark.anyio
UNREACHABLE_S = 5.0


def served(*urls: str, **options: Any) -> RemoteRuntime:
    return RemoteRuntime(urls, **{"poll_s": 0.05, "unreachable_s": UNREACHABLE_S, **options})


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FilesTransport]:
    async with FilesTransport(tmp_path / "store") as transport:
        yield transport


class Fake:
    """A server that answers as it is told, and counts what it is asked."""

    def __init__(self) -> None:
        self.ping: dict[str, Any] = {"status": "Healthy", "time_of_last_update": 0}
        self.answer: Callable[[dict[str, Any]], web.Response] = lambda _: web.json_response({})
        self.before_answer: Callable[[], None] = lambda: None
        self.posted: list[str] = []
        self.deleted: list[str] = []
        self.pings = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/ping", self._ping),
                web.post("/invocations", self._post),
                web.delete("/invocations/{id}", self._delete),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _ping(self, request: web.Request) -> web.Response:
        self.pings += 1
        return web.json_response(self.ping)

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.posted.append(body["_rollout"]["session_id"])
        self.before_answer()
        return self.answer(body)

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["id"])
        return web.json_response({})


async def launch(runtime: RemoteRuntime, rollout_id: str = "r", n: int = 1) -> Attempt:
    with anyio.fail_after(BOUND_S):
        await runtime.launch(Attempt(rollout_id, n), payload({}, invocation(rollout_id, n)))
    return Attempt(rollout_id, n)


async def ended(runtime: RemoteRuntime, attempt: Attempt) -> Exit:
    with anyio.fail_after(BOUND_S):
        return await runtime.wait(attempt)


# --- servers that die, and come back -------------------------------------------------------------


async def test_a_server_that_was_killed_has_lost_what_ran_there(
    store: FilesTransport, tmp_path: Path
) -> None:
    async with serving() as server, served(server.url, unreachable_s=1.0) as runtime:
        place = Place(runtime, store)
        attempts = [await place.launch({"do": "hang"}, f"r{n}") for n in range(3)]
        await server.kill()
        exits = [await place.wait(attempt) for attempt in attempts]
        for attempt, one in zip(attempts, exits, strict=True):
            assert one.failure
            assert (one.failure.kind, one.failure.reason) == (FailureKind.INFRASTRUCTURE, Reason.DIED)
            assert server.url in one.failure.message and attempt.session_id in one.failure.message


async def test_a_restarted_server_has_lost_what_ran_there_and_takes_more(store: FilesTransport) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving())
        # So patient that only the new process's own word can tell.
        runtime = await stack.enter_async_context(served(server.url, unreachable_s=600))
        place = Place(runtime, store)
        lost = await place.launch({"do": "hang"}, "lost")
        await server.kill()
        await stack.enter_async_context(serving(port=server.port))
        quick = await place.launch({"do": "reward"}, "quick")
        assert await place.wait(quick) == Exit()
        assert await place.reward(quick) == 1.0
        one = await place.wait(lost)
        assert one.failure and one.failure.reason is Reason.DIED and "restarted" in one.failure.message


async def test_a_server_that_is_silent_for_a_moment_has_lost_nothing(store: FilesTransport) -> None:
    async with serving() as server, served(server.url, unreachable_s=30) as runtime:
        place = Place(runtime, store)
        attempt = await place.launch({"do": "sleep", "seconds": 1.0})
        os.kill(server.process.pid, signal.SIGSTOP)
        await anyio.sleep(0.5)
        os.kill(server.process.pid, signal.SIGCONT)
        assert await place.wait(attempt) == Exit()
        assert await place.reward(attempt) == 1.0


# --- where an attempt goes -----------------------------------------------------------------------


async def test_attempts_are_balanced_over_the_servers(store: FilesTransport, tmp_path: Path) -> None:
    async with serving() as one, serving() as other, served(one.url, other.url) as runtime:
        place = Place(runtime, store)
        mark, go = tmp_path / "mark", tmp_path / "go"
        row = {"do": "sleep", "until": str(go), "mark": str(mark)}
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(place.launch, row, f"r{n}")
        go.touch()
        for n in range(10):
            assert await place.wait(Attempt(f"r{n}", 1)) == Exit()
        ran = pids(mark)
        assert {pid: ran.count(pid) for pid in ran} == {one.process.pid: 5, other.process.pid: 5}


async def test_an_address_that_refuses_connections_is_passed_over(store: FilesTransport) -> None:
    async with serving() as server, served("http://127.0.0.1:9", server.url) as runtime:
        await runtime.check()
        place = Place(runtime, store)
        for n in range(3):
            assert await place.wait(await place.launch({"do": "reward"}, f"r{n}")) == Exit()


async def test_no_address_that_answers_fails_the_launch_at_once_and_the_check_names_each() -> None:
    async with served("http://127.0.0.1:9", "http://127.0.0.1:10") as runtime:
        with pytest.raises(InfrastructureFailure, match=r"127\.0\.0\.1:9.*127\.0\.0\.1:10") as caught:
            await launch(runtime)
        assert caught.value.reason is Reason.LAUNCH
        with pytest.raises(UsageError, match=r"(?s)127\.0\.0\.1:9.*127\.0\.0\.1:10.*afield\.sdk\.serve"):
            await runtime.check()


@pytest.mark.parametrize(
    ("status", "failure"),
    [(400, TaskFailure), (422, TaskFailure), (404, InfrastructureFailure), (500, InfrastructureFailure)],
)
async def test_a_refusal_is_attributed(status: int, failure: type[Exception]) -> None:
    fake = Fake()
    fake.answer = lambda _: web.Response(status=status, text="because")
    async with fake.running() as url, served(url) as runtime:
        with pytest.raises(failure, match=f"{status}: because"):
            await launch(runtime)
        assert (await ended(runtime, Attempt("r", 1))).failure


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_takes_no_more_throttles_and_the_launch_may_be_repeated(status: int) -> None:
    fake = Fake()
    fake.answer = lambda _: web.Response(status=status, headers={"Retry-After": "7"})
    async with fake.running() as url, served(url) as runtime:
        with pytest.raises(RateLimited, match=f"{status}") as caught:
            await launch(runtime)
        assert caught.value.retry_after_s == 7
        fake.answer = lambda _: web.json_response({})
        assert await ended(runtime, await launch(runtime)) == Exit()
        assert fake.posted == ["r.1", "r.1"]


async def test_launch_skips_a_server_that_answers_503() -> None:
    full, free = Fake(), Fake()
    full.answer = lambda _: web.Response(status=503)
    async with full.running() as one, free.running() as other, served(one, other) as runtime:
        await launch(runtime)
        assert free.posted == ["r.1"]


async def test_a_launch_without_an_answer_is_never_made_in_two_places(store: FilesTransport) -> None:
    async with (
        serving() as dying,
        serving() as other,
        served(dying.url, other.url, unreachable_s=1.0) as runtime,
    ):
        place = Place(runtime, store)
        # It kills its server, most likely before the answer is out.
        with contextlib.suppress(InfrastructureFailure):
            await place.launch({"do": "kill"})
        assert (await place.wait(Attempt("r", 1))).failure
        assert alive(other.process.pid)


@pytest.mark.parametrize("bad", [[], ["127.0.0.1:8080"]])
def test_addresses_that_make_no_sense_are_refused(bad: list[str]) -> None:
    with pytest.raises(ValueError, match="http://"):
        RemoteRuntime(bad)


async def test_launching_outside_the_runtime_is_refused() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await served("http://127.0.0.1:9").launch(Attempt("r", 1), {})


# --- watching ------------------------------------------------------------------------------------


async def test_all_sessions_of_a_server_are_watched_with_one_request_per_poll() -> None:
    fake = Fake()
    fake.ping |= {"active": [f"r{n}.1" for n in range(200)]}
    async with fake.running() as url, served(url, poll_s=0.1) as runtime:
        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(launch, runtime, f"r{n}")
        waits = [asyncio.create_task(ended(runtime, Attempt(f"r{n}", 1))) for n in range(200)]
        before, began = fake.pings, time.monotonic()
        while fake.pings < before + 3:
            await anyio.sleep(0.05)
        assert fake.pings - before <= (time.monotonic() - began) / 0.1 + 1
        assert not any(wait.done() for wait in waits)
        fake.ping |= {"active": ["r7.1"]}
        assert await asyncio.gather(*(wait for n, wait in enumerate(waits) if n != 7)) == [Exit()] * 199
        assert not waits[7].done()
        waits[7].cancel()


async def test_a_ping_that_was_asked_before_a_launch_was_accepted_does_not_end_it() -> None:
    """The server has not heard of the session when it answers the ping, and has when it accepts."""
    fake = Fake()
    fake.ping |= {"active": ["first.1"]}
    requested, answered = asyncio.Event(), asyncio.Event()

    async def slow_ping(request: web.Request) -> web.Response:
        fake.pings += 1
        said = json.dumps(fake.ping)
        if fake.pings == 1:
            requested.set()
            await answered.wait()
        return web.Response(text=said, content_type="application/json")

    fake._ping = slow_ping
    async with fake.running() as url, served(url, unreachable_s=30) as runtime:
        await launch(runtime, "first")
        await requested.wait()
        fake.ping |= {"active": ["first.1", "second.1"]}
        second = await launch(runtime, "second")
        answered.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runtime.wait(second)
        assert fake.pings > 2
        fake.ping |= {"active": []}
        assert await ended(runtime, second) == Exit()


async def test_a_server_that_does_not_tell_its_sessions_apart_is_watched_until_it_is_idle() -> None:
    fake = Fake()
    fake.ping |= {"status": "HealthyBusy"}
    async with fake.running() as url, served(url) as runtime:
        attempts = [await launch(runtime, f"r{n}") for n in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await runtime.wait(attempts[0])
        assert await runtime.adopt(Attempt("other", 1)) is None
        fake.ping |= {"status": "Healthy"}
        assert [await ended(runtime, attempt) for attempt in attempts] == [Exit()] * 3


# --- adopting, stopping, closing -----------------------------------------------------------------


async def test_attempts_outlive_the_runtime_and_another_one_adopts_them(
    store: FilesTransport, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with serving() as server, serving() as other:
        async with served(server.url, other.url) as first:
            place = Place(first, store)
            attempts = [
                await place.launch({"do": "sleep", "until": str(go), "value": n}, f"r{n}") for n in range(6)
            ]
            waiting = asyncio.create_task(first.wait(attempts[0]))
            await asyncio.sleep(0)
        assert (await waiting).failure
        async with served(server.url, other.url) as second:
            place = Place(second, store)
            assert await second.adopt(Attempt("nobody", 1)) is False
            assert [await second.adopt(attempt) for attempt in attempts] == [True] * 6
            await anyio.Path(go).touch()
            for n, attempt in enumerate(attempts):
                assert await place.wait(attempt) == Exit()
                assert await place.reward(attempt) == n


async def test_many_adoptions_at_once_ask_once() -> None:
    fake = Fake()
    fake.ping |= {"active": [f"r{n}.1" for n in range(200)]}
    async with fake.running() as url, served(url, poll_s=5) as runtime:
        adopted = await asyncio.gather(*(runtime.adopt(Attempt(f"r{n}", 1)) for n in range(400)))
    assert adopted == [True] * 200 + [False] * 200
    assert fake.pings == 1


async def test_whether_a_silent_address_has_an_attempt_is_not_known_until_it_answers_or_is_given_up() -> None:
    fake = Fake()
    fake.ping |= {"active": ["there.1"]}
    async with fake.running() as url, served(url, "http://127.0.0.1:9", unreachable_s=1.0) as runtime:
        assert await runtime.adopt(Attempt("there", 1)) is True
        for _ in range(2):
            assert await runtime.adopt(Attempt("elsewhere", 1)) is None
        one = await ended(runtime, Attempt("elsewhere", 1))
        assert one.failure and one.failure.reason is Reason.DIED
        assert "127.0.0.1:9" in one.failure.message and url not in one.failure.message


async def test_an_attempt_on_a_server_that_was_silent_is_found_when_it_answers_again(
    store: FilesTransport, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with serving() as server, served(server.url) as runtime:
        attempt = await Place(runtime, store).launch({"do": "sleep", "until": str(go)})
        async with served(server.url, unreachable_s=1.0) as second:
            os.kill(server.process.pid, signal.SIGSTOP)
            assert await second.adopt(attempt) is None
            os.kill(server.process.pid, signal.SIGCONT)
            await anyio.Path(go).touch()
            place = Place(second, store)
            assert await place.wait(attempt) == Exit()
            assert await place.reward(attempt) == 1.0


async def test_an_attempt_on_a_server_that_does_not_tell_has_ended_when_it_is_idle() -> None:
    fake = Fake()
    fake.ping |= {"status": "HealthyBusy"}
    async with fake.running() as url, served(url, unreachable_s=0.3) as runtime:
        assert await runtime.adopt(Attempt("r", 1)) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await runtime.wait(Attempt("r", 1))
        fake.ping |= {"status": "Healthy"}
        assert await ended(runtime, Attempt("r", 1)) == Exit()


@pytest.mark.parametrize("by", ["the one that launched it", "another one"])
@pytest.mark.parametrize("target", ["acting.py:nap", "napping_toolkit.py:app"])
async def test_a_stopped_async_agent_is_cancelled_and_leaves_no_outcome(
    store: FilesTransport, tmp_path: Path, by: str, target: str
) -> None:
    mark = tmp_path / "mark"
    async with (
        serving(f"{Path(ACTING).parent / target}") as server,
        served(server.url) as runtime,
        served(server.url) as another,
    ):
        place = Place(runtime, store)
        attempt = await place.launch({"seconds": 600, "mark": str(mark)})
        await until(mark.exists)
        await (another if by == "another one" else runtime).stop(attempt)
        await until(lambda: mark.read_text() == "cancelled")
        one = await place.wait(attempt)
        assert (one.failure is None) == (by == "another one")
        with anyio.fail_after(BOUND_S):
            while await another.adopt(attempt):
                await anyio.sleep(0.05)
        assert await place.decision(attempt) is None


async def test_an_attempt_that_is_stopped_while_it_is_launched_is_stopped_where_it_landed() -> None:
    fake = Fake()
    async with fake.running() as url, served(url) as runtime:
        stops: list[asyncio.Task[None]] = []
        fake.before_answer = lambda: stops.append(asyncio.create_task(runtime.stop(Attempt("r", 1))))

        async def answer_later(request: web.Request) -> web.Response:
            answered = await Fake._post(fake, request)
            await asyncio.gather(*stops)
            return answered

        fake._post = answer_later
        with pytest.raises(InfrastructureFailure) as caught:
            await launch(runtime)
        assert caught.value.reason is Reason.CANCELLED
        assert fake.deleted == ["r.1"]


async def test_closing_leaves_no_task(store: FilesTransport) -> None:
    async with serving() as server:
        before = asyncio.all_tasks()
        async with served(server.url) as runtime:
            await Place(runtime, store).launch({"do": "sleep", "seconds": 1})
            waiting = asyncio.create_task(runtime.wait(Attempt("r", 1)))
            await asyncio.sleep(0)
        one = await waiting
        assert one.failure and one.failure.reason is Reason.CANCELLED
        assert asyncio.all_tasks() <= before
