"""Several workers as one engine: placement, failover, pauses, weights and membership."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from msgspec import structs

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Conflict, NotFound, Unavailable, UsageError
from afield.gateway.engine_pool import EnginePool
from afield.gateway.queue_time import QueueTime
from afield.gateway.workers import WorkerHealth
from afield.interfaces.engine import Chunk, Engine, EngineInfo, GenerateRequest, Image
from afield.types import FinishReason, Sampling, VersionSpan

pytestmark = pytest.mark.anyio
BOUND_S = 90
PROMPT = tuple(range(10, 30))


def a_call(name: str = "c1", *, session: str = "s.1", max_tokens: int = 40, stop: int = 0) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        session_id=session,
        prompt_ids=PROMPT,
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_ids=(stop,),
        stream=True,
    )


def by_position(call: GenerateRequest) -> ScriptedReply:
    """Every token follows from its place, so that a call continued elsewhere gives the same ids."""
    start = len(call.prompt_ids)
    return ScriptedReply(token_ids=tuple(100 + p for p in range(start, start + 60)), chunks=(1, 3))


def slowly(call: GenerateRequest) -> ScriptedReply:
    answer = by_position(call)
    return ScriptedReply(token_ids=answer.token_ids, chunks=(2,), delay_s=0.005)


def breaking(after: int, fail: str = "unavailable") -> Callable[[GenerateRequest], ScriptedReply]:
    def script(call: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(token_ids=by_position(call).token_ids[:after], chunks=(2,), fail=fail)  # type: ignore[arg-type]

    return script


UNDISTURBED = tuple(100 + p for p in range(len(PROMPT), len(PROMPT) + 40))


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def spans(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    """(number of tokens, low, high), neighbours of one version joined."""
    found: list[tuple[int, int, int]] = []
    for chunk in chunks:
        n, low, high = len(chunk.token_ids), chunk.low, chunk.high
        if found and found[-1][1:] == (low, high):
            n += found.pop()[0]
        found.append((n, low, high))
    return found


@asynccontextmanager
async def pool_of(**workers: Engine) -> AsyncIterator[EnginePool]:
    async with asyncio.timeout(BOUND_S), EnginePool(workers, unavailable_timeout_s=2) as pool:
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.002)


# --- placement -----------------------------------------------------------------------------------


async def test_sessions_are_sticky_and_balanced() -> None:
    a, b = ScriptedEngine(by_position), ScriptedEngine(by_position)
    async with pool_of(a=a, b=b) as pool:
        for turn in range(3):
            for n in range(6):
                await answer(pool, a_call(f"{n}.{turn}", session=f"s.{n}"))
    homes = [{entry.session_id for entry in engine.recorded} for engine in (a, b)]
    assert [len(home) for home in homes] == [3, 3]
    assert not homes[0] & homes[1]
    assert [len(engine.recorded) for engine in (a, b)] == [9, 9]


async def test_concurrent_calls_are_balanced() -> None:
    engines = {name: ScriptedEngine(slowly) for name in "abcd"}
    async with pool_of(**engines) as pool:
        await asyncio.gather(*(answer(pool, a_call(session=f"s.{n}")) for n in range(20)))
    assert {len(engine.recorded) for engine in engines.values()} == {5}


# --- failover ------------------------------------------------------------------------------------


async def test_call_continues_on_another_worker_after_a_failure() -> None:
    good = ScriptedEngine(by_position, version=0)
    async with pool_of(a=ScriptedEngine(breaking(7)), b=good) as pool:
        chunks = await answer(pool, a_call())
        assert ids(chunks) == UNDISTURBED
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]
        assert good.recorded[0].prompt_ids == PROMPT + UNDISTURBED[:7]
        assert pool.stats()["failovers"] == 1
        assert pool.stats()["workers"]["a"]["failures"] == 1
        assert pool.stats()["in_flight"] == 0


async def test_failover_keeps_logprobs_and_versions() -> None:
    good = ScriptedEngine(
        lambda call: ScriptedReply(token_ids=by_position(call).token_ids, bump_after=3), version=0
    )
    async with pool_of(a=ScriptedEngine(breaking(7)), b=good) as pool:
        chunks = await answer(pool, a_call())
        assert spans(chunks) == [(10, 0, 0), (30, 1, 1)]
        assert sum(len(chunk.logprobs) for chunk in chunks) == 40


class LateVersions(ScriptedEngine):
    """Tells exact versions with the last chunk only, as vLLM does; aborts its first answer."""

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        n = 0
        async with aclosing(super().generate(call)) as chunks:
            async for chunk in chunks:
                n += len(chunk.token_ids)
                exact = (VersionSpan(0, 2, 5, 5), VersionSpan(2, n, 6, 6)) if chunk.finish else None
                yield structs.replace(chunk, low=5, high=6, versions=exact)


async def test_exact_versions_are_shifted_after_failover() -> None:
    finishes = iter([FinishReason.ABORTED, None])

    def script(call: GenerateRequest) -> ScriptedReply:
        finish = next(finishes)
        return ScriptedReply(token_ids=by_position(call).token_ids[: 6 if finish else 60], finish=finish)

    async with pool_of(a=LateVersions(script)) as pool:
        chunks = await answer(pool, a_call())
    assert ids(chunks) == UNDISTURBED
    assert [chunk.versions for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].versions == (
        VersionSpan(0, 2, 5, 5),
        VersionSpan(2, 6, 6, 6),
        VersionSpan(6, 8, 5, 5),
        VersionSpan(8, 40, 6, 6),
    )


async def test_call_continues_when_its_only_worker_recovers() -> None:
    answers = iter([breaking(5), breaking(9), by_position])
    engine = ScriptedEngine(lambda call: next(answers)(call))
    async with pool_of(a=engine) as pool:
        assert ids(await answer(pool, a_call())) == UNDISTURBED
        assert pool.list()[0].health is WorkerHealth.READY


async def test_an_aborted_answer_is_resumed() -> None:
    answers = iter([FinishReason.ABORTED, FinishReason.ABORTED, None])

    def script(call: GenerateRequest) -> ScriptedReply:
        finish = next(answers)
        tokens = by_position(call).token_ids
        return ScriptedReply(token_ids=tokens[:4] if finish else tokens, finish=finish)

    async with pool_of(a=ScriptedEngine(script)) as pool:
        chunks = await answer(pool, a_call())
    assert ids(chunks) == UNDISTURBED
    assert {chunk.finish for chunk in chunks} == {None, FinishReason.LENGTH}


async def test_complete_call_is_not_sampled_again_after_failover() -> None:
    stop = UNDISTURBED[5]
    good = ScriptedEngine(by_position)
    for call, finish in ((a_call(stop=stop), FinishReason.STOP), (a_call(max_tokens=6), FinishReason.LENGTH)):
        async with pool_of(a=ScriptedEngine(breaking(6)), b=good) as pool:
            chunks = await answer(pool, call)
            assert ids(chunks) == UNDISTURBED[:6]
            assert chunks[-1].finish is finish
        good = ScriptedEngine(by_position)
    assert not good.recorded


async def test_call_fails_after_all_tries_with_reasons() -> None:
    async with (
        asyncio.timeout(BOUND_S),
        EnginePool({"a": ScriptedEngine(breaking(0)), "b": ScriptedEngine(breaking(0))}, tries=3) as pool,
    ):
        with pytest.raises(Unavailable, match=r"given up after 3 tries: (a|b): the script fails call 'c1'"):
            await answer(pool, a_call())
        assert pool.stats()["in_flight"] == 0


async def test_call_without_workers_times_out_with_reasons() -> None:
    engine = ScriptedEngine(by_position)
    async with asyncio.timeout(BOUND_S), EnginePool({"a": engine}, unavailable_timeout_s=0.1) as pool:
        engine.break_down("the card fell off the bus")
        with pytest.raises(
            Unavailable, match=r"no worker for 0.1 s: a: the card fell off the bus \(tried: a: "
        ):
            await answer(pool, a_call())


async def test_invalid_prompt_raises_and_keeps_the_worker() -> None:
    async with pool_of(a=ScriptedEngine(by_position, max_context=20)) as pool:
        with pytest.raises(ValueError, match="prompt of 20 ids"):
            await answer(pool, a_call())
        assert pool.list()[0].health is WorkerHealth.READY


async def test_closed_call_frees_its_worker() -> None:
    engine = ScriptedEngine(slowly)
    async with pool_of(a=engine) as pool:
        async with aclosing(pool.generate(a_call())) as chunks:
            await anext(chunks)
            assert pool.stats()["in_flight"] == 1
        assert pool.stats()["in_flight"] == 0
        waiting = asyncio.create_task(answer(pool, a_call()))
        await until(lambda: pool.stats()["in_flight"] == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.stats()["in_flight"] == 0
    assert [entry.served for entry in engine.recorded] == ["abandoned", "abandoned"]


async def test_calls_complete_on_workers_that_keep_failing() -> None:
    def flaky(seed: int) -> Callable[[GenerateRequest], ScriptedReply]:
        asked = iter(range(seed, 10_000))

        def script(call: GenerateRequest) -> ScriptedReply:
            n = next(asked)
            return breaking(n % 7)(call) if n % 3 == 0 else slowly(call)

        return script

    workers: dict[str, Engine] = {f"w{n}": ScriptedEngine(flaky(n)) for n in range(4)}
    async with asyncio.timeout(BOUND_S), EnginePool(workers, tries=50) as pool:
        answers = await asyncio.gather(*(answer(pool, a_call(session=f"s.{n}")) for n in range(40)))
        assert {ids(chunks) for chunks in answers} == {UNDISTURBED}
        assert pool.failovers > 5


# --- pauses --------------------------------------------------------------------------------------


async def test_new_calls_wait_while_paused() -> None:
    engine = ScriptedEngine(by_position)
    async with pool_of(a=engine) as pool:
        await pool.pause("drain")
        await pool.pause("drain")
        waiting = asyncio.create_task(answer(pool, a_call()))
        await until(lambda: pool.stats()["waiting"] == 1)
        assert pool.stats()["paused"]
        assert not engine.recorded
        await pool.resume()
        assert ids(await waiting) == UNDISTURBED
        assert pool.stats()["waiting"] == 0


def test_queue_time_of_parallel_calls_counts_once() -> None:
    clock = iter([10.0, 12.0, 15.0])
    line = QueueTime(lambda: next(clock))
    line.enter("s", "a")
    line.enter("s", "b")
    assert line.waited_s("s") == 2.0
    line.leave("s", "a")
    line.leave("s", "b")
    line.leave("s", "b")
    assert line.waited_s("s") == 5.0
    line.add("s", 14.0, 16.0)  # one of its seconds was counted
    assert (line.waited_s("s"), line.waited_s("other")) == (6.0, 0.0)
    line.forget("s")
    assert line.waited_s("s") == 0.0


async def test_drain_waits_for_running_calls() -> None:
    async with pool_of(a=ScriptedEngine(slowly)) as pool:
        call = asyncio.create_task(answer(pool, a_call()))
        await until(lambda: pool.stats()["in_flight"] == 1)
        await pool.pause("drain")
        assert call.done()
        assert ids(call.result()) == UNDISTURBED


async def test_kept_calls_continue_with_new_weights() -> None:
    engine = ScriptedEngine(slowly)
    async with pool_of(a=engine) as pool:
        seen: list[Chunk] = []
        call = asyncio.create_task(collect_into(seen, pool, a_call()))
        await until(lambda: len(seen) >= 3)
        await pool.pause("keep")
        await asyncio.sleep(0.05)
        still = len(seen)
        await asyncio.sleep(0.05)
        assert len(seen) == still
        await pool.load(4, "weights-4")
        await pool.resume()
        stood = pool.queue_time.waited_s("s.1")
        assert stood > 0.08
        await call
        assert pool.queue_time.waited_s("s.1") == stood
    assert ids(seen) == UNDISTURBED
    assert [(low, high) for _, low, high in spans(seen)] == [(0, 0), (4, 4)]
    assert len(engine.recorded) == 1


async def collect_into(seen: list[Chunk], engine: Engine, call: GenerateRequest, busy_s: float = 0.0) -> None:
    """`busy_s` is how long the first chunk keeps its consumer from asking for the next."""
    async for chunk in engine.generate(call):
        seen.append(chunk)
        await asyncio.sleep(busy_s if len(seen) == 1 else 0)


@pytest.mark.parametrize("busy", [False, True], ids=["consumer waits", "consumer is busy"])
async def test_interrupted_calls_continue_after_resume(busy: bool) -> None:
    engine = ScriptedEngine(slowly)
    async with pool_of(a=engine) as pool:
        seen: list[Chunk] = []
        call = asyncio.create_task(collect_into(seen, pool, a_call(), 0.2 if busy else 0.0))
        await until(lambda: len(seen) >= 1)
        await pool.pause("resume")
        assert pool.stats()["in_flight"] == 0
        assert [entry.served for entry in engine.recorded] == ["abandoned"]
        cut_at = len(ids(seen))
        await pool.load(2, "weights-2")
        await pool.resume()
        await call
    assert ids(seen) == UNDISTURBED
    assert engine.recorded[1].prompt_ids == PROMPT + UNDISTURBED[:cut_at]
    assert spans(seen) == [(cut_at, 0, 0), (40 - cut_at, 2, 2)]
    assert pool.failovers == 0


async def test_cancelled_consumer_stays_cancelled_during_interrupt() -> None:
    async with pool_of(a=ScriptedEngine(slowly)) as pool:
        seen: list[Chunk] = []
        call = asyncio.create_task(collect_into(seen, pool, a_call()))
        await until(lambda: len(seen) >= 1)
        call.cancel()
        await pool.pause("resume")
        await asyncio.wait([call], timeout=60)
        assert call.cancelled()
        assert pool.stats()["in_flight"] == 0


# --- weights -------------------------------------------------------------------------------------


async def test_load_updates_all_workers_and_refuses_older_versions() -> None:
    a, b = ScriptedEngine(by_position), ScriptedEngine(by_position)
    async with pool_of(a=a, b=b) as pool:
        await pool.load(3, "three")
        await pool.load(3, "three")
        assert a.loaded == b.loaded == [(3, "three")]
        assert (await pool.info()).version == 3
        with pytest.raises(Conflict, match="version 2 is older than version 3"):
            await pool.load(2, "two")


class Stubborn(ScriptedEngine):
    """Fails to load as often as told."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__(by_position)
        self.error, self.times = error, times

    async def load(self, version: int, path: str) -> None:
        if self.times:
            self.times -= 1
            raise self.error
        await super().load(version, path)


async def test_worker_that_cannot_load_is_unhealthy_until_it_can() -> None:
    stubborn, good = Stubborn(Unavailable("disk full"), 2), ScriptedEngine(by_position)
    async with pool_of(a=stubborn, b=good) as pool:
        await pool.load(1, "one")
        assert [worker.health for worker in pool.list()] == [WorkerHealth.UNHEALTHY, WorkerHealth.READY]
        assert "version 1 was not loaded: disk full" in pool.list()[0].reason
        for n in range(4):
            await answer(pool, a_call(session=f"s.{n}"))
        assert not stubborn.recorded
        await until(lambda: pool.list()[0].health is WorkerHealth.READY)
        assert stubborn.loaded == [(1, "one")]
        assert pool.list()[0].version == 1


async def test_weights_refused_by_all_workers_change_nothing() -> None:
    async with pool_of(a=Stubborn(UsageError("no such directory"), 1)) as pool:
        with pytest.raises(UsageError, match="version 1 cannot be loaded: a: no such directory"):
            await pool.load(1, "nowhere")
        assert (await pool.info()).version == 0
        assert ids(await answer(pool, a_call())) == UNDISTURBED
        await pool.load(1, "one")
        assert (await pool.info()).version == 1


# --- membership ----------------------------------------------------------------------------------


async def test_added_worker_loads_the_current_weights() -> None:
    late = ScriptedEngine(by_position)
    workers = {"a": ScriptedEngine(by_position)}
    async with asyncio.timeout(BOUND_S), EnginePool(workers, connect=lambda kind, url: late) as pool:
        await pool.load(2, "two")
        added = await pool.add("scripted", "http://late:1/")
        assert (added.health, added.version, added.url) == (WorkerHealth.READY, 2, "http://late:1")
        assert await pool.add("scripted", "http://late:1") == added
        assert late.loaded == [(2, "two")]
        await asyncio.gather(*(answer(pool, a_call(session=f"s.{n}")) for n in range(4)))
        assert len(late.recorded) == 2


async def test_unusable_worker_is_not_added() -> None:
    async def check(engine: Engine) -> EngineInfo:
        info = await engine.info()
        if info.max_context < 1000:
            raise UsageError(f"a context of {info.max_context} is too short")
        return info

    connect = lambda kind, url: ScriptedEngine(by_position, max_context=5)  # noqa: E731
    async with EnginePool({"a": ScriptedEngine(by_position)}, connect=connect, check=check) as pool:
        with pytest.raises(UsageError, match="a context of 5 is too short"):
            await pool.add("scripted", "http://short")
        assert [worker.id for worker in pool.list()] == ["a"]
        assert (await pool.info()).max_context == 4096
    with pytest.raises(UsageError, match="too short"):
        async with EnginePool({"a": ScriptedEngine(by_position, max_context=5)}, check=check):
            pass


async def test_calls_of_a_removed_worker_continue() -> None:
    a, b = ScriptedEngine(slowly), ScriptedEngine(slowly)
    async with pool_of(a=a, b=b) as pool:
        seen: list[Chunk] = []
        call = asyncio.create_task(collect_into(seen, pool, a_call()))
        await until(lambda: len(seen) >= 2)
        (busy,) = [worker.id for worker in pool.list() if worker.in_flight]
        await pool.remove(busy)
        await call
        assert ids(seen) == UNDISTURBED
        assert [worker.id for worker in pool.list()] == [{"a": "b", "b": "a"}[busy]]
        with pytest.raises(NotFound, match=f"there is no worker '{busy}'"):
            await pool.remove(busy)


async def test_image_calls_go_to_workers_with_images() -> None:
    image = Image(digest="d", media_type="image/png", data=b"png")
    sees = ScriptedEngine(by_position, image_id=20, image_length=3)
    call = GenerateRequest(
        id="c1",
        session_id="s.1",
        prompt_ids=PROMPT,
        sampling=Sampling(),
        max_tokens=2,
        stop_ids=(),
        images=(image,),
    )
    async with pool_of(a=ScriptedEngine(by_position), b=sees) as pool:
        assert (await pool.info()).images
        for _ in range(3):
            chunks = await answer(pool, call)
            assert chunks[0].prompt_ids == (*PROMPT[:10], 20, 20, 20, *PROMPT[11:])
    assert len(sees.recorded) == 3


async def test_closed_pool_raises_unavailable() -> None:
    engine = ScriptedEngine(by_position)
    async with pool_of(a=engine) as pool:
        pass
    for attempt in (answer(pool, a_call()), pool.load(1, "one"), pool.info()):
        with pytest.raises(Unavailable, match="not running"):
            await attempt
    with pytest.raises(Unavailable, match="the engine was closed"):
        async with EnginePool({"a": engine}):
            pass
