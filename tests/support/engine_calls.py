"""Calls to engines behind fake servers, and their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import structs

from afield.engines.probe import MODE_TOKENS
from afield.engines.scripted import ScriptedReply
from afield.interfaces.engine import Chunk, Engine, GenerateRequest
from afield.types import Sampling

BOUND_S = 90


def a_call(**changes: Any) -> GenerateRequest:
    call = GenerateRequest(
        id="call-1",
        session_id="rollout.1",
        prompt_ids=(5, 6, 7),
        sampling=Sampling(),
        max_tokens=12,
        stop_ids=(0,),
        stream=True,
    )
    return structs.replace(call, **changes)


class CallGate:
    """Holds the calls of a fake server after their third token, while `closed`; probes are not held."""

    def __init__(self) -> None:
        self.closed = False
        self.arrivals = 0
        """Number of times that a call has been held."""

    async def wait(self, call: GenerateRequest, sampled: int, ended: Callable[[], bool]) -> None:
        if self.closed and sampled >= 3 and call.max_tokens > MODE_TOKENS:
            self.arrivals += 1
            while self.closed and not ended():
                await asyncio.sleep(0.005)


class FakeServer(Protocol):
    @property
    def gate(self) -> CallGate: ...


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def counting_on(call: GenerateRequest) -> ScriptedReply:
    """Counts on from the prompt's last id, so that a resumed call shows its place."""
    first = call.prompt_ids[-1] + 1
    return ScriptedReply(token_ids=tuple(range(first, first + call.max_tokens)))


async def begin(fake: FakeServer, engine: Engine, call: GenerateRequest) -> asyncio.Task[list[Chunk]]:
    """Start a call; returns when the server has sampled a few tokens and holds it until `finish`."""
    fake.gate.closed, before = True, fake.gate.arrivals
    task = asyncio.create_task(answer(engine, call))
    async with asyncio.timeout(BOUND_S):
        while fake.gate.arrivals == before:
            await asyncio.sleep(0.005)
    return task


async def finish(fake: FakeServer, call: asyncio.Task[list[Chunk]]) -> list[Chunk]:
    """Let all calls of the server continue, and wait for this one."""
    fake.gate.closed = False
    return await call


def versions(chunks: list[Chunk]) -> list[int]:
    """One for each token."""
    assert all(chunk.low == chunk.high and chunk.versions is None for chunk in chunks)
    return [chunk.low for chunk in chunks for _ in chunk.token_ids]
