"""What the tests of the vLLM engine ask, and of whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import structs

from afield.engines.scripted import Scripted
from afield.engines.vllm import VllmEngine
from afield.seams.engine import Call, Chunk, Engine
from afield.types import Sampling
from fake_vllm import FakeVllm, serving

BOUND_S = 90


def a_call(**changes: Any) -> Call:
    call = Call(
        id="call-1",
        session_id="rollout.1",
        prompt_ids=(5, 6, 7),
        sampling=Sampling(),
        max_tokens=12,
        stop_ids=(0,),
        stream=True,
    )
    return structs.replace(call, **changes)


def counting(call: Call) -> Scripted:
    return Scripted(token_ids=tuple(range(20, 60)), chunks=(1, 2))


async def answer(engine: Engine, call: Call) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@asynccontextmanager
async def connected(fake: FakeVllm, **options: Any) -> AsyncIterator[VllmEngine]:
    async with asyncio.timeout(BOUND_S), serving(fake) as url, VllmEngine(url, **options) as engine:
        yield engine
