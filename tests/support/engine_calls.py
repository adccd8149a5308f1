"""What the tests of engines that are servers ask of them."""

from __future__ import annotations

import asyncio
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


class Fake(Protocol):
    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the calls that have arrived."""
        ...


async def answer(engine: Engine, call: GenerateRequest) -> list[Chunk]:
    async with asyncio.timeout(BOUND_S):
        return [chunk async for chunk in engine.generate(call)]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def slowly(call: GenerateRequest) -> ScriptedReply:
    """Counts on from the prompt's last id, so that a resumed call shows its place. Probes do not wait."""
    first = call.prompt_ids[-1] + 1
    delay_s = 0.0 if call.max_tokens <= MODE_TOKENS else 0.04
    return ScriptedReply(token_ids=tuple(range(first, first + call.max_tokens)), delay_s=delay_s)


async def begin(fake: Fake, engine: Engine, call: GenerateRequest) -> asyncio.Task[list[Chunk]]:
    """Under way at the server, a few tokens of it sampled."""
    before = len(fake.bodies)
    begun = asyncio.create_task(answer(engine, call))
    async with asyncio.timeout(BOUND_S):
        while len(fake.bodies) == before:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    return begun


def versions(chunks: list[Chunk]) -> list[int]:
    """One for each token."""
    assert all(chunk.low == chunk.high and chunk.versions is None for chunk in chunks)
    return [chunk.low for chunk in chunks for _ in chunk.token_ids]
