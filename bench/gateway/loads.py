"""Load patterns that every server is measured under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gateway.conversations import Conversations, turn_costs
from bench.gateway.http_client import connect, drive, post
from bench.gateway.recorded_tokens import kept
from bench.gateway.servers import Server
from bench.gateway.workload import TURNS, Workload

TALKS = 16  # long conversations at once
CONNECTIONS = 64  # for CPU per call
POOL = 512  # sessions that calls are spread over
PACE_MS = 5
WHOLE, STREAMED = b"format_help", b"data: [DONE]"  # in every good answer
ROUNDS_512 = 4  # of 512 calls in flight
HEADLINE = ("small", "stream", "turns")


class Bench:
    def __init__(self, server: Server, work: Workload, engine: Server, seconds: float) -> None:
        self.server, self.work, self.engine, self.seconds = server, work, engine, seconds
        self._number = 0
        self._mine = server.name == "afield"

    async def prepare(self) -> dict[str, Any]:
        """Warm; what that already tells."""
        await self.server.prepare(POOL)
        await self._measure(CONNECTIONS, self._calls())
        return {"kept": await kept(self.server, self.work, self.server.target(0)[0])}

    async def headline(self, kind: str, windows: tuple[int, ...]) -> dict[str, dict[str, Any]]:
        """A load that is measured in turns with the other servers, so that all see the same machine."""
        if kind == "small":
            return {"small": await self._measure(CONNECTIONS, self._calls())}
        if kind == "stream":
            return {"stream": await self._measure(CONNECTIONS, self._calls(stream=True), expect=STREAMED)}
        return await turn_costs(await self._talk(), windows)

    async def _talk(self) -> Conversations:
        """New conversations, at their first turn."""
        sessions = TALKS if self.server.name in ("afield", "capture") else 4
        return Conversations(self.server, self.work, await self.server.fresh(sessions))

    async def further(self) -> dict[str, Any]:
        """Few and many connections, and an upstream that takes its time."""
        results = {f"connections_{n}": await self._measure(n, self._calls()) for n in (1, 64)}
        rounds = ROUNDS_512 if self._mine else 1
        results["connections_512"] = await self._measure(512, self._calls(), at_least=rounds)
        results["stream_1"] = await self._measure(1, self._calls(stream=True), expect=STREAMED)
        await self._pace(PACE_MS)
        results["stream_paced"] = await self._measure(CONNECTIONS, self._calls(stream=True), expect=STREAMED)
        await self._pace(0)
        if self._mine:
            results["history_32k_forks"] = await self._forks()
            results["history_32k_unknown"] = await self._unknown()
        return results

    async def bare(self) -> dict[str, Any]:
        """The upstream itself: what a call takes without anything in between."""
        await self.server.prepare(POOL)
        results = {"connections_1": await self._measure(1, self._calls())}
        results["stream_1"] = await self._measure(1, self._calls(stream=True), expect=STREAMED)
        return results

    async def _forks(self) -> dict[str, Any]:
        """Many calls that leave the same long conversation at the same point."""
        talk = await self._talk()
        await talk.play_to(TURNS)

        def job(index: int, n: int) -> bytes:
            return talk.request(index, self._next())

        return await self._measure(len(talk), job)

    async def _unknown(self) -> dict[str, Any]:
        """Long histories that the server never saw."""
        targets = await self.server.fresh(TALKS)

        def job(index: int, n: int) -> bytes:
            path, key = targets[index]
            return post(path, self.work.body(self.work.stranger(self._next())), key)

        return await self._measure(TALKS, job)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _calls(self, *, stream: bool = False) -> Callable[[int, int], bytes]:
        """Calls with the same 600-token prompt but for a number, each session's in turn."""

        def job(connection: int, n: int) -> bytes:
            path, key = self.server.target(connection + n * CONNECTIONS)
            messages = self.work.opening(self._next())
            return post(path, self.work.body(messages, stream=stream, ids=self.server.asks_ids), key)

        return job

    async def _measure(
        self,
        connections: int,
        job: Callable[[int, int], bytes],
        *,
        at_least: int = 1,
        expect: bytes = WHOLE,
    ) -> dict[str, Any]:
        before = await self.server.quiet_cpu_s()
        load = await drive(
            self.server.url, connections, job, expect=expect, seconds=self.seconds, at_least=at_least
        )
        cpu = await self.server.quiet_cpu_s() - before
        calls = load.done + load.errors
        return {
            "calls": calls,
            "errors": load.errors,
            "problems": sorted(set(load.problems))[:5],
            "cpu_us": round(cpu / max(1, calls) * 1e6),
            "per_s": round(calls / load.wall_s, 1),
            "p50_ms": round(load.quantile(0.5), 2),
            "p99_ms": round(load.quantile(0.99), 2),
            "first_p50_ms": round(load.quantile(0.5, load.firsts), 2),
        }

    async def _pace(self, milliseconds: int) -> None:
        connection = await connect(self.engine.url)
        await connection.ask(post(f"/pace?ms={milliseconds}", b""))
        connection.close()


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the median cost; the costs and errors of all are kept beside it."""
    ordered = sorted(rounds, key=lambda one: one["cpu_us"])
    costs = [one["cpu_us"] for one in rounds]
    whole = {**ordered[(len(ordered) - 1) // 2], "cpu_us_rounds": costs}
    if "errors" in whole:
        whole["errors"] = sum(one["errors"] for one in rounds)
        whole["problems"] = sorted({problem for one in rounds for problem in one["problems"]})[:5]
    return whole
