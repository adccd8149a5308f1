"""What it takes to read what a client sends again every turn: decoding the body, hashing its messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from workload import Workload

from afield.forest import chain
from afield.gateway.dialects import chat
from afield.gateway.dialects.base import Asked


def reading_us(work: Workload, turns: tuple[int, ...] = (8, 128)) -> dict[str, float]:
    told: dict[str, float] = {}
    for turn in turns:
        messages = work.opening(1)
        for n in range(1, turn):
            call = f"call_t{n}_0"
            result = {"role": "tool", "tool_call_id": call, "content": work.tool_result(n)}
            messages += [work.assistant(call), result]
        told[str(turn)] = round(_once(work.body(messages)), 1)
    return told


def _once(body: bytes) -> float:
    asked = Asked("/v1/chat/completions", body, {}, {}, {})

    def read() -> None:
        request, _ = chat.decode(asked)
        chain("root", request.messages)

    return min(_cpu_us(read) for _ in range(5))


def _cpu_us(work: Callable[[], None], repeats: int = 40) -> float:
    work()
    before = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - before) / repeats * 1e6
