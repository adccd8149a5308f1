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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from bars import commit
from charts import draw
from loads import HEADLINE, PACE_MS, Bench, middle
from page import write
from turns import WINDOWS, Conversations
from workload import ANSWER, Workload

from support.servers import NAMES, PINS, Server, serving, upstream

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SECONDS, ROUNDS = 2.0, 3
QUICK_SECONDS, QUICK_ROUNDS = 0.5, 1


async def open_sessions(server: Server, work: Workload, sessions: int) -> dict[str, float]:
    """Memory with that many open sessions of three turns each."""
    empty = server.rss_mib()
    talk = Conversations(server, work, await server.fresh(sessions))
    await talk.run(1, 3)
    return {"empty": round(empty, 1), "open": round(server.rss_mib(), 1), "sessions": sessions}


async def measure(names: list[str], quick: bool, cache: Path, scratch: Path) -> dict[str, Any]:
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    work = Workload(cache / "bench")
    told: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(upstream(work.told(), scratch))
        say("upstream alone")
        told["upstream"] = await Bench(engine, work, engine, seconds).bare()
        benches: dict[str, Bench] = {}
        for name in names:
            say(f"{name} starts")
            home = serving(name, work.model, engine.url, cache / "envs", scratch / name)
            benches[name] = Bench(await stack.enter_async_context(home), work, engine, seconds)
            told[name] = await benches[name].prepare()
        say("all in turns")
        for name, kinds in (await in_turns(benches, rounds)).items():
            told[name] |= kinds
        for name, bench in benches.items():
            if name == "afield" or not quick:
                say(name)
                told[name] |= await bench.further()
    if "afield" in names:
        say("afield, 2,000 open sessions")
        told["afield"] |= await memory_and_reading(work, cache, scratch)
    return told


async def in_turns(benches: dict[str, Bench], rounds: int) -> dict[str, dict[str, Any]]:
    """One server after another under the same load, several times over: the machine's moods even out."""
    seen: dict[str, dict[str, list[Any]]] = {name: {} for name in benches}
    for n in range(rounds):
        windows = tuple(WINDOWS) if n == 0 and rounds > 1 else (8, 128)
        for kind in HEADLINE:
            for name, bench in benches.items():
                for key, told in (await bench.headline(kind, windows)).items():
                    seen[name].setdefault(key, []).append(told)
    return {name: {key: middle(told) for key, told in keys.items()} for name, keys in seen.items()}


async def memory_and_reading(work: Workload, cache: Path, scratch: Path) -> dict[str, Any]:
    from reading import reading_us

    async with upstream(work.told(), scratch) as engine:
        home = serving("afield", work.model, engine.url, cache / "envs", scratch / "many")
        async with home as server:
            memory = await open_sessions(server, work, 2000)
    return {"memory": memory, "reading_us": reading_us(work)}


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """The numbers that targets are set for."""
    kinds = ("small", "stream", "history_32k", "stream_paced", "history_32k_forks", "history_32k_unknown")
    servers = {name: told[name] | {"history_32k": told[name]["turn_128"]} for name in NAMES if name in told}
    line: dict[str, Any] = {
        "cpu_us": {n: {k: t[k]["cpu_us"] for k in kinds if k in t} for n, t in servers.items()}
    }
    if mine := told.get("afield"):
        turns = {"8": mine["turn_8"]["cpu_us"], "128": mine["turn_128"]["cpu_us"]}
        own = {turn: cost - mine["reading_us"][turn] for turn, cost in turns.items()}
        line["errors_512"] = mine["connections_512"]["errors"]
        line["turn128_over_turn8"] = round(own["128"] / own["8"], 3)
        line["turn_us"] = turns
        line["reading_us"] = mine["reading_us"]
        line["own_us"] = {k: round(value) for k, value in own.items()}
        line["us_per_streamed_token"] = round(mine["stream"]["cpu_us"] / ANSWER, 1)
        line["rss_mib_2000"] = mine["memory"]["open"]
    return line


def table(told: dict[str, Any]) -> str:
    kinds = ("small", "stream", "stream_paced", "turn_128")
    rows = [f"{'CPU us per call':18}" + "".join(f"{kind:>14}" for kind in kinds)]
    for name in NAMES:
        if name in told:
            costs = [f"{told[name][kind]['cpu_us']:,}" if kind in told[name] else "-" for kind in kinds]
            rows.append(f"{name:18}" + "".join(f"{cost:>14}" for cost in costs))
    return "\n".join(rows)


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def save(told: dict[str, Any], line: dict[str, Any], wall_s: float, of: str) -> Path:
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    run = {"summary": line, "servers": told, "peers": PINS, "machine": machine, "pace_ms": PACE_MS}
    run["commit"] = of
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
    began, of = time.monotonic(), commit()  # others may commit while this runs
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        told = loop.run(measure(args.only, args.quick, cache, Path(scratch)))
    line = summary(told)
    print(table(told))
    if not args.quick and set(args.only) == set(NAMES):
        print(f"saved {save(told, line, time.monotonic() - began, of).relative_to(ROOT)}")
    if args.json:
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
