"""Time in an engine's own queue is not the policy's: known from first tokens, and from what engines say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.orchestrator.test_rollout import state

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.engine import SglangEngine
from afield.engines.vllm.engine import VllmEngine
from afield.gateway.engine_pool import EnginePool
from afield.gateway.queue_time import QueueWatch
from afield.interfaces import Chunk, GenerateRequest
from afield.orchestrator.deadlines import Deadlines, Progress, overdue_failure
from afield.types import FailureKind
from support.engine_calls import a_call
from support.fake_sglang import FakeSglang, serving_sglang
from support.fake_vllm import FakeVllm, serving

pytestmark = pytest.mark.anyio
ANSWER = ScriptedReply(token_ids=(5, 6))


class Full(ScriptedEngine):
    """Has room for so many calls; the others wait, in their order, and it says how many do."""

    def __init__(self, room: int) -> None:
        super().__init__(lambda _: ANSWER)
        self._room = asyncio.Semaphore(room)
        self.queue = 0
        self.done = asyncio.Event()

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        self.queue += 1
        async with self._room:
            self.queue -= 1
            await self.done.wait()
            async for chunk in super().generate(call):
                yield chunk

    async def waiting(self) -> int | None:
        return self.queue


async def asked(pool: EnginePool, session: str, **values: Any) -> None:
    async for _ in pool.generate(a_call(session_id=session, id=f"{session}/t1", **values)):
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_call_without_tokens_in_a_full_engine_is_queued(stream: bool) -> None:
    engine = Full(room=1)
    async with EnginePool({"engine": engine}) as pool, asyncio.TaskGroup() as tasks:
        watch = QueueWatch(pool.queue_time, lambda: pool._workers)
        for session in ("a", "b", "c"):
            tasks.create_task(asked(pool, session, stream=stream))
            await asyncio.sleep(0.02)
        await watch.look(after_s=0.0)
        await asyncio.sleep(0.1)
        waited = {session: pool.queue_time.waited_s(session) for session in ("a", "b", "c")}
        # Of a streamed one nothing is known but that no token came; the engine says who waits of the others.
        assert (waited["a"] > 0) == stream and waited["b"] >= 0.1 and waited["c"] >= 0.1
        engine.done.set()


async def test_vllm_and_sglang_report_waiting_calls() -> None:
    vllm = FakeVllm(ScriptedEngine(lambda _: ANSWER))
    async with serving(vllm) as url, VllmEngine(url) as client:
        assert await client.waiting() is None  # a server without metrics
        vllm.waiting = [3, 4]
        assert await client.waiting() == 7
    sglang = FakeSglang(ScriptedEngine(lambda _: ANSWER))
    async with serving_sglang(sglang) as url, SglangEngine(url) as client:
        assert await client.waiting() is None
        sglang.waiting = [2, 0]
        assert await client.waiting() == 2


def test_attempt_that_only_queued_is_an_infrastructure_failure() -> None:
    limits, where = Deadlines(attempt_timeout_s=100.0), Progress(rollout_started_at=0.0, launched_at=0.0)
    busy = state(in_flight=1, calls=1, idle_s=0.0)
    for now in range(1, 201):
        where.update_queue_time(state(in_flight=1, calls=1, waited_s=float(now)))
        assert overdue_failure(limits, where, busy, float(now)) is None
    where.update_queue_time(state(in_flight=1, calls=1, waited_s=201.0))
    failure = overdue_failure(limits, where, busy, 201.0)
    assert (
        failure and failure.kind is FailureKind.INFRASTRUCTURE and "waited for an engine" in failure.message
    )
