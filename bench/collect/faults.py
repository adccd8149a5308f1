"""Fault injection at every interface, in simulated time.

    python -m bench.collect.faults [--every] [--json]

1. Random faults: ten runs of 32 rollouts with a verifier and nine faults each (errors of afield's and of
   foreign classes, hangs, slow, late, lost and repeated replies, kills of the collector). Each rollout must
   be trained once.
2. With --every: each fault of each method of each interface, for one rollout in 32. The other 31 must train;
   the one must train or have a failure that explains it.

The last line is JSON; the exit code is 0 only if no rollout is missing, duplicated or unexplained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from afield.transports.stores.memory import MemoryTransport
from afield.types import FailureKind
from support import virtual_time
from support.fault_cases import METHODS, every_case, problems
from support.faults import Fault, Kind, Script, Scripts
from support.simulated_run import Parts, Result, every_rollout, run

SEEDS, FAULTS = 10, 9
RETRIES = dict.fromkeys((FailureKind.TASK, FailureKind.VERIFIER, FailureKind.INFRASTRUCTURE), FAULTS)
# What a part may raise; whose fault a rollout's end is, no part says of its own calls.
RAISED = (
    *("UsageError", "DamagedFile", "WireError", "Conflict", "NotFound", "Unavailable", "RateLimited"),
    *("OSError", "TimeoutError", "RuntimeError", "sqlite3.OperationalError"),
)
KINDS: tuple[Kind, ...] = ("raise", "raise", "raise", "hang", "slow", "twice", "late", "lost")
KILLS = 2  # of the nine
LONGEST_S = 60.0  # of a run, until a kill
MOST_RUNS = 40  # a run that is ended by a fault goes on; this many times at most


def drawn(chance: random.Random) -> Script:
    """A fault of some method: about one rollout, or at some call."""
    methods = [method for method, about in METHODS.items() if about in ("rollout", "run")]
    method = chance.choice(methods)
    blocking = method.startswith("Trainer.") or method.endswith((".address", ".capabilities"))
    kind = chance.choice(["raise", "twice", "lost"] if blocking else KINDS)
    fault = Fault(kind=kind, error=chance.choice(RAISED), seconds=chance.uniform(1.0, 20.0))
    if METHODS[method] == "rollout" and chance.random() < 0.5:
        return Script(method, fault, rollout=chance.choice(every_rollout()), most=chance.randint(1, 3))
    return Script(method, fault, numbers=[chance.randrange(3 if METHODS[method] == "run" else 24)])


async def lived(seed: int, place: Path) -> tuple[Result, Counter[str], int]:
    """The run's result, the faults that were met, and how often it had to go on."""
    chance = random.Random(f"faults {seed}")
    scripts = [drawn(chance) for _ in range(FAULTS - KILLS)]
    kills = sorted(chance.uniform(0.5, LONGEST_S) for _ in range(KILLS))
    store, before = MemoryTransport(), None
    for runs in range(MOST_RUNS):
        parts = Parts(Scripts(scripts), store, before)
        before = parts.inner
        limit_s = kills.pop(0) if kills else None
        try:
            async with asyncio.timeout(limit_s) as killed:
                result = await run(place, parts, retries=RETRIES)
            met = Counter(f"{s.method} {s.fault.name}" for s in scripts if s.met)
            met["kill"] = KILLS - len(kills)
            return result, met, runs
        except BaseException as error:
            if isinstance(error, TimeoutError) and killed.expired():
                continue
            if not isinstance(error, Exception):
                raise
            print(f"seed {seed}: the run ended with {error!r} and goes on", file=sys.stderr)
    raise SystemExit(f"seed {seed}: the run did not come to its end in {MOST_RUNS} runs")


def random_faults(seeds: int) -> dict[str, Any]:
    missing: list[str] = []
    doubled: list[str] = []
    explained: list[str] = []
    met: Counter[str] = Counter()
    resumed = retried = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="afield-faults-") as place:
            result, seen, runs = virtual_time.run(lived(seed, Path(place)))
        met += seen
        resumed += runs
        retried += sum(finished.attempts - 1 for finished in result.finished.values())
        missing += [f"{seed}/{one}" for one in every_rollout() if not result.trained[one]]
        doubled += [f"{seed}/{one}" for one, times in result.trained.items() if times > 1]
        explained += [
            f"{seed}/{one}: {finished.outcome.failure.message[:200]}"
            for one, finished in result.finished.items()
            if finished.outcome.failure is not None
        ]
    return {
        "seeds": seeds,
        "faults": FAULTS,
        "met": sum(met.values()),
        "rollouts": seeds * len(every_rollout()),
        "missing": missing,
        "doubled": doubled,
        "explained": explained,
        "retried": retried,
        "resumed": resumed,
    }


def every_fault() -> dict[str, Any]:
    cases = list(every_case())
    wrong = {str(case): case_problems for case in cases if (case_problems := problems(case))}
    return {"cases": len(cases), "methods": len({case.method for case in cases}), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--every", action="store_true", help="also each fault of each method, one at a time")
    parser.add_argument("--json", action="store_true", help="nothing but one line of JSON on stdout")
    args = parser.parse_args()
    logging.getLogger("afield").setLevel(logging.CRITICAL + 1)
    result = random_faults(args.seeds)
    ok = not result["missing"] and not result["doubled"]
    if args.every:
        result["every"] = every_fault()
        ok = ok and not result["every"]["wrong"]
    if not args.json:
        print(json.dumps(result, indent=2))
    print(json.dumps(result | {"ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
