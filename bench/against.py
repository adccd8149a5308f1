"""CPU of this checkout's gateway per call, beside that of an earlier revision, under one load in one run.

`python bench/against.py REVISION [--json]` starts both in front of the same upstream and loads them in turns:
small calls, streamed calls, and turns 8 and 128 of long conversations. The ratio of each kind is the median
over rounds of this checkout's CPU time over the earlier one's, with the lowest and the highest of them. Saved
as bench/results/against-COMMIT.json unless --quick. The exit code is 0 if no ratio is above --most.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from bars import RESULTS, ROOT, commit
from loads import HEADLINE, Bench
from workload import Workload

from servers import ADMIN, free_port, running, upstream

SECONDS, ROUNDS = 2.0, 7
QUICK_SECONDS, QUICK_ROUNDS = 0.5, 2
WINDOWS = (8, 128)
MOST = 1.03  # what two runs of one and the same revision differ by


def unpack(revision: str, into: Path) -> Path:
    """The sources of a revision; installed packages are this checkout's."""
    done = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{revision!r} is no revision of this repository: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into / "src"


async def measure(trees: dict[str, Path], quick: bool, cache: Path, scratch: Path) -> dict[str, Any]:
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    work = Workload(cache / "bench")
    costs: dict[str, dict[str, list[int]]] = {}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(upstream(work.told(), scratch))
        benches: dict[str, Bench] = {}
        for label, tree in trees.items():
            home = scratch / label
            home.mkdir()
            port = free_port()
            command = [sys.executable, "-m", "afield", "gateway", "--model", str(work.model)]
            command += ["--engine", f"vllm={engine.url}", "--port", str(port)]
            command += ["--store", str(home / "store"), "--admin-key", ADMIN]
            up = running("afield", command, port, home, "/health", {"PYTHONPATH": str(tree)})
            benches[label] = Bench(await stack.enter_async_context(up), work, engine, seconds)
            await benches[label].prepare()
        for n in range(rounds):
            order = list(benches) if n % 2 else list(benches)[::-1]
            for kind in HEADLINE:
                for label in order:
                    for key, told in (await benches[label].headline(kind, WINDOWS)).items():
                        if told.get("errors"):
                            raise SystemExit(f"{label}, {key}: {told['errors']} errors: {told['problems']}")
                        costs.setdefault(key, {}).setdefault(label, []).append(told["cpu_us"])
            print(f"round {n + 1} of {rounds}", file=sys.stderr, flush=True)
    return {key: compared(both["before"], both["now"]) for key, both in costs.items()}


def compared(before: list[int], now: list[int]) -> dict[str, Any]:
    ratios = [new / old for new, old in zip(now, before, strict=True)]
    return {
        "before_us": round(statistics.median(before)),
        "now_us": round(statistics.median(now)),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="the earlier revision, as git names it")
    parser.add_argument("--most", type=float, default=MOST, help=f"the highest ratio that passes ({MOST})")
    parser.add_argument("--quick", action="store_true", help="a fraction of the time; not saved")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    cache = Path.home() / ".cache" / "afield"
    of = commit()
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        scratch = Path(name)
        trees = {"before": unpack(args.revision, scratch / "tree"), "now": ROOT / "src"}
        told = loop.run(measure(trees, args.quick, cache, scratch))
    for key, row in told.items():
        print(
            f"{key:10} {row['before_us']:>8,} us {row['now_us']:>8,} us   x {row['ratio']:.3f}"
            f"  ({row['lowest']:.3f} to {row['highest']:.3f})"
        )
    line = {"commit": of, "against": args.revision, "cpu": told, "load_15m": round(os.getloadavg()[2], 1)}
    if not args.quick:
        (RESULTS / f"against-{of}.json").write_text(json.dumps(line, indent=1) + "\n")
    if args.json:
        print(json.dumps(line))
    return int(any(row["ratio"] > args.most for row in told.values()))


if __name__ == "__main__":
    raise SystemExit(main())
