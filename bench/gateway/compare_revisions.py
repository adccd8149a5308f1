"""Gateway CPU per call of this checkout against an earlier revision.

    python -m bench.gateway.compare_revisions REVISION [--quick] [--json]

Both run in front of the same upstream and take turns under the same load: small calls, streamed calls, and
turns 8 and 128 of long conversations. Each ratio is the median over rounds of this checkout's CPU time over
the earlier one's, with quartiles. Saves bench/results/against-COMMIT.json unless --quick. The exit code is 0
if no ratio is above --limit.
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

from bench import ROOT, report
from bench.gateway.loads import Bench
from bench.gateway.servers import ADMIN, free_port, running, upstream
from bench.gateway.workload import Workload

SECONDS = 0.4  # short, so that both see the same machine
ROUNDS = {"small": 40, "stream": 40, "turns": 5}
QUICK = {"small": 5, "stream": 5, "turns": 1}
WINDOWS = (8, 128)
LIMIT = 1.03  # two runs of one revision differ by up to this


def unpack(revision: str, into: Path) -> Path:
    """The sources of a revision; installed packages are this checkout's."""
    done = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{revision!r} is not a revision of this repository: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into / "src"


async def measure(trees: dict[str, Path], quick: bool, cache: Path, scratch: Path) -> dict[str, Any]:
    work = Workload(cache / "bench")
    costs: dict[str, dict[str, list[int]]] = {}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(upstream(work.answer(), scratch))
        benches: dict[str, Bench] = {}
        for label, tree in trees.items():
            home = scratch / label
            home.mkdir()
            port = free_port()
            command = [sys.executable, "-m", "afield", "gateway", "--model", str(work.model)]
            command += ["--engine", f"vllm={engine.url}", "--port", str(port)]
            command += ["--store", str(home / "store"), "--admin-key", ADMIN]
            up = running("afield", command, port, home, "/health", {"PYTHONPATH": str(tree)})
            benches[label] = Bench(await stack.enter_async_context(up), work, engine, SECONDS)
            await benches[label].prepare()
        for kind, rounds in (QUICK if quick else ROUNDS).items():
            print(f"{kind}: {rounds} rounds", file=sys.stderr, flush=True)
            for n in range(rounds):
                for label in list(benches)[:: 1 if n % 2 else -1]:
                    for key, results in (await benches[label].headline(kind, WINDOWS)).items():
                        if results.get("errors"):
                            raise SystemExit(
                                f"{label}, {key}: {results['errors']} errors: {results['problems']}"
                            )
                        costs.setdefault(key, {}).setdefault(label, []).append(results["cpu_us"])
    return {key: compared(both["before"], both["now"]) for key, both in costs.items()}


def compared(before: list[int], now: list[int]) -> dict[str, Any]:
    ratios = [new / old for new, old in zip(now, before, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "before_us": round(statistics.median(before)),
        "now_us": round(statistics.median(now)),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="the earlier revision, as git names it")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"largest ratio that passes ({LIMIT})")
    parser.add_argument("--quick", action="store_true", help="a fraction of the time; not saved")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    cache = Path.home() / ".cache" / "afield"
    started_at = report.commit()
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        scratch = Path(name)
        trees = {"before": unpack(args.revision, scratch / "tree"), "now": ROOT / "src"}
        results = loop.run(measure(trees, args.quick, cache, scratch))
    for key, row in results.items():
        print(
            f"{key:10} {row['before_us']:>8,} us {row['now_us']:>8,} us   x {row['ratio']:.3f}"
            f"  ({row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f})"
        )
    line = {
        "commit": started_at,
        "against": args.revision,
        "cpu": results,
        "load_15m": round(os.getloadavg()[2], 1),
    }
    if not args.quick:
        report.save("against", line, started_at)
    if args.json:
        print(json.dumps(line))
    return int(any(row["ratio"] > args.limit for row in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
