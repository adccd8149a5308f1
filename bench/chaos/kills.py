"""Chaos benchmark: SIGKILL every process at random, compare trained rollouts with the data set.

    python -m bench.chaos.kills [--small] [--json]

1. 200 tasks x 4 rollouts of an agent of random length run on the scripted engine. Gateway, agents, collector
   and trainer are killed at random, each kind at least ten times.
2. The same runs without kills.
3. `bench/chaos/audit.py` reads from files what was trained. `ks_p` compares the lengths of both runs: kills
   hit long attempts more often, so retries that redraw their length would make trained rollouts shorter.

The last line is JSON; the exit code is 0 only if every criterion is met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec import structs
from scipy import stats

from bench.chaos.audit import (
    REUSED,
    Trained,
    compared_with_dataset,
    died_with_agents,
    in_steps,
    read_decided,
    read_learned,
    read_sampled,
    read_trained,
    reused,
    selection,
)
from bench.chaos.deployment import KINDS, Deployment, Leftovers, Size

KILLS = {"collector": 12, "gateway": 10, "trainer": 12, "agents": 10}
SMALL = Size(tasks=24, batch=4, concurrency=16, step_s=0.4, work_s=0.3, limit_s=300.0)
SMALL_KILLS = 2  # of each kind
STARTING_S = 1.0
REPORTED = (
    *("kills", "kills_in_starts", "kills_in_steps", "trained_equals_dataset", "groups", "rollouts"),
    *("duplicates", "orphans", "reused", "attempts", "died_with_agents", "given_up", "discarded", "late"),
    *("max_staleness", "turns", "tokens", "wall_s"),
)


def audit(deployment: Deployment, whole: bool, left: Leftovers) -> dict[str, Any]:
    """Result of a run, from its files."""
    trained = read_trained(deployment.run)
    learned, decided = read_learned(deployment.run), read_decided(deployment.commits)
    dead = died_with_agents(deployment.kills, decided)
    result = compared_with_dataset(trained, learned, deployment.task_ids, deployment.size.rollouts)
    reuse = reused(deployment.kills, read_sampled(deployment.ledger), trained, dead)
    staleness = (t.step - 1 - t.low for t in trained if t.low is not None)
    return {
        "whole": whole,
        "kills": len(deployment.kills),
        "kills_by_kind": dict(Counter(kill.kind for kill in deployment.kills)),
        "kills_in_starts": sum(kill.age_s < STARTING_S for kill in deployment.kills),
        "kills_in_steps": in_steps(deployment.kills),
        "trained_equals_dataset": result.pop("equal") and whole,
        **result,
        "orphans": left.orphans,
        "left": structs.asdict(left),  # by name
        "reused": round(reuse["share"], 4) if reuse["share"] is not None else None,
        "reused_tokens": [reuse["kept"], reuse["tokens"]],
        "lost_sessions": len(reuse["lost"]),
        "died_with_agents": len(dead),
        "attempts": len(decided),
        "fenced": dict(Counter(_kind_of(d.fenced) for d in decided.values() if d.fenced).most_common(8)),
        "late": sum(1 for _ in (deployment.commits.parent / "late").glob("*.json")),
        "rollout_store": sum(1 for _ in (deployment.run / "rollout_store").glob("*")),
        "max_staleness": max(staleness, default=None),
        **selection(trained, decided, dead, deployment.directory / "notes"),
        "crashes": [crash for part in deployment.parts for crash in part.crashes],
    }


def _kind_of(reason: str) -> str:
    """A fence reason with digits replaced, to count reasons that differ only in numbers."""
    return "".join("#" if c.isdigit() else c for c in reason)[:90]


async def run_once(
    directory: Path, size: Size, seed: int, kills: dict[str, int]
) -> tuple[dict[str, Any], list[Trained]]:
    began = time.monotonic()
    deployment = Deployment(directory, size, seed)
    whole, left = await deployment.live(kills)
    result = audit(deployment, whole, left) | {"wall_s": round(time.monotonic() - began, 1)}
    return result, read_trained(deployment.run)


async def run(directory: Path, size: Size, seed: int, kills: dict[str, int]) -> dict[str, Any]:
    """Run with kills and without, with different seeds: equal draws would make the lengths equal."""
    result, lengths = await run_once(directory / "chaos", size, 2 * seed + 1, kills)
    without_kills, expected = await run_once(directory / "calm", size, 2 * seed, {})
    samples = [t.tokens for t in lengths], [t.tokens for t in expected]
    result["ks_p"] = round(float(stats.ks_2samp(*samples).pvalue), 4) if all(samples) else None
    result["calm"] = without_kills
    return result


def missed_criteria(result: dict[str, Any], kills: dict[str, int], size: Size) -> list[str]:
    """Names of the criteria that are not met."""
    without_kills = result["calm"]
    criteria = {
        "kills": all(result["kills_by_kind"].get(kind, 0) >= n for kind, n in kills.items()),
        "trained_equals_dataset": result["trained_equals_dataset"],
        "duplicates": result["duplicates"] == 0,
        "orphans": result["orphans"] == 0,
        "reused": (result["reused"] or 0.0) >= 0.95,
        "ks_p": (result["ks_p"] or 0.0) >= 0.01,
        "max_staleness": result["max_staleness"] is not None and result["max_staleness"] <= size.staleness,
        "calm": without_kills["trained_equals_dataset"]
        and not without_kills["duplicates"]
        and not without_kills["orphans"],
    }
    return [name for name, met in criteria.items() if not met]


def show(result: dict[str, Any]) -> None:
    without_kills = result["calm"]
    print(f"\n{'':24} {'with kills':>20} {'without':>20}")
    for name in REPORTED:
        print(f"{name:24} {result[name]!s:>20} {without_kills[name]!s:>20}")
    print(f"{'ks_p':24} {result['ks_p']!s:>20}\n\nreused: {REUSED}\nfenced: {result['fenced']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help=f"kills of each kind (default: {KILLS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of kills and agents")
    parser.add_argument(
        "--deliver", choices=("store", "gateway"), default="store", help="outcome destination"
    )
    parser.add_argument("--small", action="store_true", help="24 tasks and 2 kills of each kind")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all files in DIR")
    parser.add_argument("--json", action="store_true", help="print only one line of JSON")
    args = parser.parse_args()
    size = structs.replace(SMALL if args.small else Size(), deliver=args.deliver)
    kills: dict[str, int] = dict.fromkeys(KINDS, SMALL_KILLS) if args.small else KILLS
    kills = kills if args.kills is None else dict.fromkeys(KINDS, int(args.kills))
    directory = args.keep or Path(tempfile.mkdtemp(prefix="afield-chaos-"))
    try:
        result = asyncio.run(run(directory.resolve(), size, args.seed, kills))
    finally:
        if not args.keep:
            shutil.rmtree(directory, ignore_errors=True)
    missed = missed_criteria(result, kills, size)
    if not args.json:
        show(result)
    print(json.dumps(result | {"missed": missed, "ok": not missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
