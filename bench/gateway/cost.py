"""CPU, rate, latency and memory of afield's gateway, two peers and a bare proxy.

    python -m bench.gateway.cost [--quick] [--json]

All servers run in front of the same upstream and take turns under the same load. CPU is that of the server's
processes, so a busy machine changes rates and latencies but hardly the CPU. Saves
bench/results/gateway-cost-COMMIT.json; `python -m bench.benchmarks_page` writes the page from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.gateway.conversations import WINDOWS, Conversations
from bench.gateway.loads import HEADLINE, PACE_MS, Bench, middle
from bench.gateway.request_parsing import reading_us
from bench.gateway.servers import NAMES, PINS, Server, serving, upstream
from bench.gateway.workload import Workload

SECONDS, ROUNDS = 2.0, 3
QUICK_SECONDS, QUICK_ROUNDS = 0.5, 1


async def open_sessions(server: Server, work: Workload, sessions: int) -> dict[str, float]:
    """Memory before and after opening sessions of three turns each."""
    empty = server.rss_mib()
    talk = Conversations(server, work, await server.fresh(sessions))
    await talk.run(1, 3)
    return {"empty": round(empty, 1), "open": round(server.rss_mib(), 1), "sessions": sessions}


async def measure(names: list[str], quick: bool, cache: Path, scratch: Path) -> dict[str, Any]:
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    work = Workload(cache / "bench")
    results: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(upstream(work.answer(), scratch))
        progress("upstream alone")
        results["upstream"] = await Bench(engine, work, engine, seconds).bare()
        benches: dict[str, Bench] = {}
        for name in names:
            progress(f"{name} starts")
            home = serving(name, work.model, engine.url, cache / "envs", scratch / name)
            benches[name] = Bench(await stack.enter_async_context(home), work, engine, seconds)
            results[name] = await benches[name].prepare()
        progress("all in turns")
        for name, kinds in (await measure_in_turns(benches, rounds)).items():
            results[name] |= kinds
        for name, bench in benches.items():
            if name == "afield" or not quick:
                progress(name)
                results[name] |= await bench.further()
    if "afield" in names:
        progress("afield, 2,000 open sessions")
        results["afield"] |= await memory_and_reading(work, cache, scratch)
    return results


async def measure_in_turns(benches: dict[str, Bench], rounds: int) -> dict[str, dict[str, Any]]:
    """Measure the servers in turns, so that changes of the machine's load hit all of them."""
    rounds_of: dict[str, dict[str, list[Any]]] = {name: {} for name in benches}
    for n in range(rounds):
        windows = tuple(WINDOWS) if n == 0 and rounds > 1 else (8, 128)
        for kind in HEADLINE:
            for name, bench in benches.items():
                for key, results in (await bench.headline(kind, windows)).items():
                    rounds_of[name].setdefault(key, []).append(results)
    return {name: {key: middle(results) for key, results in keys.items()} for name, keys in rounds_of.items()}


async def memory_and_reading(work: Workload, cache: Path, scratch: Path) -> dict[str, Any]:
    async with upstream(work.answer(), scratch) as engine:
        home = serving("afield", work.model, engine.url, cache / "envs", scratch / "many")
        async with home as server:
            memory = await open_sessions(server, work, 2000)
    return {"memory": memory, "reading_us": reading_us(work)}


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The numbers that have requirements."""
    kinds = ("small", "stream", "history_32k", "stream_paced", "history_32k_forks", "history_32k_unknown")
    servers = {
        name: results[name] | {"history_32k": results[name]["turn_128"]} for name in NAMES if name in results
    }
    line: dict[str, Any] = {
        "cpu_us": {n: {k: t[k]["cpu_us"] for k in kinds if k in t} for n, t in servers.items()}
    }
    if afield := results.get("afield"):
        turns = {"8": afield["turn_8"]["cpu_us"], "128": afield["turn_128"]["cpu_us"]}
        own = {turn: cost - afield["reading_us"][turn] for turn, cost in turns.items()}
        line["errors_512"] = afield["connections_512"]["errors"]
        line["turn128_over_turn8"] = round(own["128"] / own["8"], 3)
        line["turn_us"] = turns
        line["reading_us"] = afield["reading_us"]
        line["own_us"] = {k: round(value) for k, value in own.items()}
        line["rss_mib_2000"] = afield["memory"]["open"]
    return line


def table(results: dict[str, Any]) -> str:
    kinds = ("small", "stream", "stream_paced", "turn_128")
    rows = [f"{'CPU us per call':18}" + "".join(f"{kind:>14}" for kind in kinds)]
    for name in NAMES:
        if name in results:
            costs = [f"{results[name][kind]['cpu_us']:,}" if kind in results[name] else "-" for kind in kinds]
            rows.append(f"{name:18}" + "".join(f"{cost:>14}" for cost in costs))
    return "\n".join(rows)


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a fraction of the time; not saved")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="servers; not saved")
    args = parser.parse_args()
    cache = Path.home() / ".cache" / "afield"
    began, started_at = time.monotonic(), report.commit()
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        servers = loop.run(measure(args.only, args.quick, cache, Path(scratch)))
    line = summary(servers)
    print(table(servers))
    if not args.quick and set(args.only) == set(NAMES):
        result = {"summary": line, "servers": servers, "peers": PINS, "pace_ms": PACE_MS}
        result |= {"seconds_per_load": SECONDS, "load_15m": round(os.getloadavg()[2], 1)}
        result["wall_s"] = round(time.monotonic() - began)
        print(f"saved {report.save('gateway-cost', result, started_at).name}")
    if args.json:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
