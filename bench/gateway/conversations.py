"""Long conversations: each turn re-sends the history plus one tool result."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.gateway.http_client import Connection, connect, post
from bench.gateway.servers import Server
from bench.gateway.workload import Workload

WINDOWS = {8: (5, 12), 32: (29, 36), 64: (61, 68), 96: (93, 100), 128: (121, 128)}


class Conversations:
    """One conversation per session, all at the same turn."""

    def __init__(self, server: Server, work: Workload, targets: list[tuple[str, str]]) -> None:
        self.server, self._work, self._targets = server, work, targets
        self._messages = [work.opening(n) for n in range(len(targets))]
        self._turn = 1

    def __len__(self) -> int:
        return len(self._targets)

    def skip_to(self, turn: int) -> None:
        """As if the turns before had been answered; only for servers that remember nothing."""
        while self._turn < turn:
            for messages in self._messages:
                self._append(messages, self._work.assistant(f"call_{self._turn}"))
            self._turn += 1

    async def play_to(self, turn: int) -> None:
        """So that this turn is the next; made up where the server would not remember it anyway."""
        if self.server.name != "afield":
            self.skip_to(turn)
        elif self._turn < turn:
            await self.run(self._turn, turn - 1)

    async def run(self, first: int, last: int) -> None:
        """Play turns `first` to `last`."""
        assert self._turn == first, f"at turn {self._turn}, not {first}"
        for start in range(0, len(self), 64):
            group = range(start, min(start + 64, len(self)))
            await asyncio.gather(*(self._play(index, last - first + 1) for index in group))
        self._turn = last + 1

    async def _play(self, index: int, turns: int) -> None:
        connection = await connect(self.server.url)
        try:
            for _ in range(turns):
                self._append(self._messages[index], await self._answer(connection, index))
        finally:
            connection.close()

    async def _answer(self, connection: Connection, index: int) -> dict[str, Any]:
        reply = await connection.ask(self.request(index))
        if reply.status != 200:
            raise SystemExit(f"{self.server.name} answers {reply.status}: {reply.body[:500]!r}")
        message = json.loads(reply.body)["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}

    def request(self, index: int, number: int | None = None) -> bytes:
        """The call of the current turn; with a `number`, one with another tool result at the end."""
        messages = self._messages[index]
        if number is not None:
            messages = [*messages[:-1], {**messages[-1], "content": self._work.tool_result(number)}]
        path, key = self._targets[index]
        return post(path, self._work.body(messages, ids=self.server.asks_ids), key)

    def body(self, index: int) -> bytes:
        return self._work.body(self._messages[index])

    def _append(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> None:
        call = answer["tool_calls"][0]["id"]
        result = self._work.tool_result(len(messages))
        messages += [answer, {"role": "tool", "tool_call_id": call, "content": result}]


async def turn_costs(talk: Conversations, windows: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """CPU per call around some turns of conversations that only grow."""
    costs: dict[str, dict[str, float]] = {}
    for turn in windows:
        first, last = WINDOWS[turn]
        await talk.play_to(first)
        before = await talk.server.quiet_cpu_s()
        await talk.run(first, last)
        cpu = await talk.server.quiet_cpu_s() - before
        calls = len(talk) * (last - first + 1)
        costs[f"turn_{turn}"] = {
            "cpu_us": round(cpu / calls * 1e6),
            "calls": calls,
            "bytes": len(talk.body(0)),
        }
    return costs
