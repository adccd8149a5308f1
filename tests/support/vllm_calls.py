"""A vLLM for a test, and the engine that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from afield.engines.scripted import ScriptedReply
from afield.engines.vllm.engine import VllmEngine
from afield.interfaces.engine import GenerateRequest
from support.engine_calls import BOUND_S
from support.fake_vllm import FakeVllm, serving


def counting(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(range(20, 60)), chunks=(1, 2))


@asynccontextmanager
async def connected(fake: FakeVllm, **options: Any) -> AsyncIterator[VllmEngine]:
    async with asyncio.timeout(BOUND_S), serving(fake) as url, VllmEngine(url, **options) as engine:
        yield engine
