"""What a gateway costs: afield, two peers and a bare capture proxy in front of the same upstream.

`python bench/gateway.py` measures them one after another in one run and saves bench/results/gateway.json;
`--json` ends with one line of JSON, `--quick` takes a fraction of the time, `--page` writes the page in docs.
CPU is that of the server's processes, so a busy machine changes rates and latencies but hardly the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from accept import commit
from charts import draw
from client import connect, drive, post
from kept import kept
from page import write
from servers import NAMES, PINS, Server, serving, upstream
from turns import WINDOWS, Conversations, turn_costs
from workload import ANSWER, TURNS, Workload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CONNECTIONS = 16  # for CPU per call
POOL = 512  # sessions that calls are spread over
PACE_MS = 5
WHOLE, STREAMED = b"format_help", b"data: [DONE]"  # in every good answer
ROUNDS = 4  # of 512 calls in flight
SECONDS, QUICK = 4.0, 0.6  # for each load


class Bench:
    """One server under every load."""

    def __init__(self, server: Server, work: Workload, engine: Server, seconds: float, quick: bool) -> None:
        self.server, self.work, self.engine = server, work, engine
        self.seconds, self.quick = seconds, quick
        self._number = 0

    async def all(self) -> dict[str, Any]:
        await self.server.prepare(POOL)
        await self._measure(CONNECTIONS, self._calls())  # to be warm
        told: dict[str, Any] = {"small": await self._measure(CONNECTIONS, self._calls())}
        told["kept"] = await kept(self.server, self.work, self.server.target(0)[0])
        told["stream"] = await self._measure(CONNECTIONS, self._calls(stream=True), expect=STREAMED)
        if self.server.name == "afield" or not self.quick:
            told |= await self._loads()
        told |= await self._histories()
        return told

    async def _loads(self) -> dict[str, Any]:
        """Few and many connections, and an upstream that takes its time."""
        told = {f"connections_{n}": await self._measure(n, self._calls()) for n in (1, 64)}
        rounds = ROUNDS if self.server.name == "afield" else 1
        told["connections_512"] = await self._measure(512, self._calls(), at_least=rounds)
        told["stream_1"] = await self._measure(1, self._calls(stream=True), expect=STREAMED)
        await self._pace(PACE_MS)
        told["stream_paced"] = await self._measure(CONNECTIONS, self._calls(stream=True), expect=STREAMED)
        await self._pace(0)
        return told

    async def bare(self) -> dict[str, Any]:
        """The upstream itself: what a call takes without anything in between."""
        await self.server.prepare(POOL)
        told = {"connections_1": await self._measure(1, self._calls())}
        told["stream_1"] = await self._measure(1, self._calls(stream=True), expect=STREAMED)
        return told

    async def _histories(self) -> dict[str, Any]:
        sessions = CONNECTIONS if self.server.name in ("afield", "capture") else 4
        talk = Conversations(self.server, self.work, await self.server.fresh(sessions))
        turns = tuple(WINDOWS) if not self.quick else (8, 128) if self.server.name == "afield" else ()
        told: dict[str, Any] = {"turns": await turn_costs(talk, turns)}
        talk.skip_to(TURNS + 1)  # where it was not played
        told["history_32k"] = await self._measure(sessions, lambda i, n: talk.request(i, 10_000 + n))
        if self.server.name == "afield":
            targets = await self.server.fresh(sessions)
            told["history_32k_unknown"] = await self._measure(
                sessions, lambda i, n: post(targets[i][0], self.work.body(self._stranger()), targets[i][1])
            )
        return told

    def _stranger(self) -> list[dict[str, Any]]:
        self._number += 1
        return self.work.stranger(self._number)

    def _calls(self, *, stream: bool = False) -> Callable[[int, int], bytes]:
        """Calls with the same 600-token prompt but for a number, each session's in turn."""

        def job(connection: int, n: int) -> bytes:
            self._number += 1
            path, key = self.server.target(connection + n * CONNECTIONS)
            messages = self.work.opening(self._number)
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
        asked = load.done + load.errors
        return {
            "calls": asked,
            "errors": load.errors,
            "problems": sorted(set(load.problems))[:5],
            "cpu_us": round(cpu / max(1, asked) * 1e6),
            "per_s": round(asked / load.wall_s, 1),
            "p50_ms": round(load.quantile(0.5), 2),
            "p99_ms": round(load.quantile(0.99), 2),
            "first_p50_ms": round(load.quantile(0.5, load.firsts), 2),
        }

    async def _pace(self, milliseconds: int) -> None:
        connection = await connect(self.engine.url)
        await connection.ask(post(f"/pace?ms={milliseconds}", b""))
        connection.close()


async def open_sessions(server: Server, work: Workload, sessions: int) -> dict[str, float]:
    """Memory with that many open sessions of three turns each."""
    empty = server.rss_mib()
    talk = Conversations(server, work, await server.fresh(sessions))
    await talk.run(1, 3)
    return {"empty": round(empty, 1), "open": round(server.rss_mib(), 1), "sessions": sessions}


async def measure(names: list[str], quick: bool, cache: Path, scratch: Path) -> dict[str, Any]:
    seconds = QUICK if quick else SECONDS
    work = Workload(cache / "bench")
    told: dict[str, Any] = {}
    async with upstream(work.told(), scratch) as engine:
        say("upstream alone")
        told["upstream"] = await Bench(engine, work, engine, seconds, quick).bare()
        for name in names:
            say(name)
            async with serving(name, work.model, engine.url, cache / "envs", scratch / name) as server:
                told[name] = await Bench(server, work, engine, seconds, quick).all()
        if "afield" in names:
            say("afield, 2,000 open sessions")
            async with serving("afield", work.model, engine.url, cache / "envs", scratch / "many") as server:
                told["afield"]["memory"] = await open_sessions(server, work, 2000)
            from reading import reading_us

            told["afield"]["reading_us"] = reading_us(work)
    return told


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """The numbers that targets are set for."""
    kinds = ("small", "stream", "stream_paced", "history_32k", "history_32k_unknown")
    servers = {name: told[name] for name in NAMES if name in told}
    line: dict[str, Any] = {
        "cpu_us": {n: {k: t[k]["cpu_us"] for k in kinds if k in t} for n, t in servers.items()}
    }
    if mine := told.get("afield"):
        own = {k: mine["turns"][k]["cpu_us"] - mine["reading_us"][k] for k in ("8", "128")}
        line["errors_512"] = mine["connections_512"]["errors"]
        line["turn128_over_turn8"] = round(own["128"] / own["8"], 3)
        line["turn_us"] = {k: mine["turns"][k]["cpu_us"] for k in own}
        line["reading_us"] = mine["reading_us"]
        line["own_us"] = {k: round(value) for k, value in own.items()}
        line["us_per_streamed_token"] = round(mine["stream"]["cpu_us"] / ANSWER, 1)
        line["rss_mib_2000"] = mine["memory"]["open"]
    return line


def table(told: dict[str, Any]) -> str:
    kinds = ("small", "stream", "stream_paced", "history_32k")
    rows = [f"{'CPU us per call':18}" + "".join(f"{kind:>14}" for kind in kinds)]
    for name in NAMES:
        if name in told:
            costs = [f"{told[name][kind]['cpu_us']:,}" if kind in told[name] else "-" for kind in kinds]
            rows.append(f"{name:18}" + "".join(f"{cost:>14}" for cost in costs))
    return "\n".join(rows)


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def save(told: dict[str, Any], line: dict[str, Any], wall_s: float) -> Path:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    run = {"summary": line, "servers": told, "peers": PINS, "machine": machine, "pace_ms": PACE_MS}
    run["commit"] = commit()
    run |= {"seconds_per_load": SECONDS, "wall_s": round(wall_s), "load_15m": round(os.getloadavg()[2], 1)}
    path = RESULTS / "gateway.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a fraction of the time; not saved")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="not saved")
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks.md of the last saved run")
    args = parser.parse_args()
    if args.page:
        run = json.loads((RESULTS / "gateway.json").read_text())
        draw(run, ROOT / "docs" / "img")
        write(run, ROOT / "docs" / "benchmarks.md")
        return 0
    cache = Path.home() / ".cache" / "afield"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        told = loop.run(measure(args.only, args.quick, cache, Path(scratch)))
    line = summary(told)
    print(table(told))
    if not args.quick and set(args.only) == set(NAMES):
        print(f"saved {save(told, line, time.monotonic() - began).relative_to(ROOT)}")
    if args.json:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
