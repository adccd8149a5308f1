"""CPU time to parse a re-sent history: decoding the body and hashing its messages."""

from __future__ import annotations

import time
from collections.abc import Callable

from afield.gateway.dialects import chat
from afield.gateway.dialects.base import RawRequest
from afield.gateway.request_cache import ConversationCache, MessageCache
from afield.turn_tree import TurnTree
from bench.gateway.workload import Workload


def reading_us(work: Workload, turns: tuple[int, ...] = (8, 128)) -> dict[str, float]:
    costs_us: dict[str, float] = {}
    for turn in turns:
        messages = work.opening(1)
        for n in range(1, turn):
            call = f"call_t{n}_0"
            result = {"role": "tool", "tool_call_id": call, "content": work.tool_result(n)}
            messages += [work.assistant(call), result]
        costs_us[str(turn)] = round(_once(work.body(messages[:-2]), work.body(messages)), 1)
    return costs_us


def _once(before: bytes, body: bytes) -> float:
    """A body whose client sent all but its end the last time."""
    memo, forest = MessageCache(), TurnTree()
    first, _ = chat.decode(RawRequest("/v1/chat/completions", before, {}, {}, {}, memo))
    raw = RawRequest("/v1/chat/completions", body, {}, {}, {}, memo)

    def read() -> None:
        recall = ConversationCache()
        recall.read(forest, "root", first.messages)
        timed.begin()
        request, _ = chat.decode(raw)
        recall.read(forest, "root", request.messages)
        timed.end()

    timed = _Timed()
    return min(_cpu_us(read, timed) for _ in range(5))


class _Timed:
    """CPU time between begin and end, added up."""

    def __init__(self) -> None:
        self.total = self._began = 0.0

    def begin(self) -> None:
        self._began = time.process_time()

    def end(self) -> None:
        self.total += time.process_time() - self._began


def _cpu_us(work: Callable[[], None], timed: _Timed, repeats: int = 40) -> float:
    work()
    timed.total = 0.0
    for _ in range(repeats):
        work()
    return timed.total / repeats * 1e6
