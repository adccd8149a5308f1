"""Everything is killed, nothing is lost: `python bench/chaos.py --json`.

200 tasks x 4 rollouts of an agent of random length on the scripted engine, collected and trained by
processes that are killed with SIGKILL at random, each kind at least eight times. The same without kills is
run for comparison. What was trained is then read from files and held against the data set; see
chaos_audit.py. Ends with one line of JSON; the exit code is 0 only if every bar is met. A kill
of agents meets a long attempt more often than a short one: a retry that drew its length anew would make the
trained ones shorter, which `ks_p` would show. The model says how long an attempt is; both runs draw apart.
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

import ks
from chaos_audit import (
    REUSED,
    Trained,
    compared_with_dataset,
    died_with_agents,
    in_steps,
    read_decided,
    read_learnt,
    read_sampled,
    read_trained,
    reused,
    selection,
)
from chaos_world import KINDS, Left, Size, World
from msgspec import structs

KILLS = {"collector": 12, "gateway": 10, "trainer": 12, "agents": 10}
SMALL = Size(tasks=24, batch=4, concurrency=16, step_s=0.4, work_s=0.3, limit_s=300.0)
SMALL_KILLS = 2  # of each kind
STARTING_S = 1.0
SHOWN = (
    *("kills", "kills_in_starts", "kills_in_steps", "trained_equals_dataset", "groups", "rollouts"),
    *("duplicates", "orphans", "reused", "attempts", "died_with_agents", "given_up", "discarded", "late"),
    *("max_staleness", "turns", "tokens", "wall_s"),
)


def audit(world: World, whole: bool, left: Left) -> dict[str, Any]:
    """What came of a run, from its files."""
    trained = read_trained(world.run)
    learnt, decided = read_learnt(world.run), read_decided(world.commits)
    dead = died_with_agents(world.kills, decided)
    told = compared_with_dataset(trained, learnt, world.task_ids, world.size.rollouts)
    kept = reused(world.kills, read_sampled(world.ledger), trained, dead)
    oldest = (t.step - 1 - t.low for t in trained if t.low is not None)
    return {
        "whole": whole,
        "kills": len(world.kills),
        "kills_by_kind": dict(Counter(kill.kind for kill in world.kills)),
        "kills_in_starts": sum(kill.age_s < STARTING_S for kill in world.kills),
        "kills_in_steps": in_steps(world.kills),
        "trained_equals_dataset": told.pop("equal") and whole,
        **told,
        "orphans": left.orphans,
        "left": structs.asdict(left),  # by name
        "reused": round(kept["share"], 4) if kept["share"] is not None else None,
        "reused_tokens": [kept["kept"], kept["tokens"]],
        "lost_sessions": len(kept["lost"]),
        "died_with_agents": len(dead),
        "attempts": len(decided),
        "fenced": dict(Counter(_kind_of(d.fenced) for d in decided.values() if d.fenced).most_common(8)),
        "late": sum(1 for _ in (world.commits.parent / "late").glob("*.json")),
        "spool": sum(1 for _ in (world.run / "spool").glob("*")),
        "max_staleness": max(oldest, default=None),
        **selection(trained, decided, dead, world.place / "notes"),
        "crashes": [crash for part in world.parts for crash in part.crashes],
    }


def _kind_of(reason: str) -> str:
    """Reasons that differ in numbers only are one."""
    return "".join("#" if c.isdigit() else c for c in reason)[:90]


async def lived(
    place: Path, size: Size, seed: int, kills: dict[str, int]
) -> tuple[dict[str, Any], list[Trained]]:
    began = time.monotonic()
    world = World(place, size, seed)
    whole, left = await world.live(kills)
    told = audit(world, whole, left) | {"wall_s": round(time.monotonic() - began, 1)}
    return told, read_trained(world.run)


async def run(place: Path, size: Size, seed: int, kills: dict[str, int]) -> dict[str, Any]:
    """Other names in both: equal draws would make the lengths equal whatever is trained."""
    told, lengths = await lived(place / "chaos", size, 2 * seed + 1, kills)
    calm, expected = await lived(place / "calm", size, 2 * seed, {})
    seen, wanted = [t.tokens for t in lengths], [t.tokens for t in expected]
    told["ks_p"] = round(ks.p_value(seen, wanted), 4) if seen and wanted else None
    told["calm"] = calm
    return told


def failed(told: dict[str, Any], kills: dict[str, int], size: Size) -> list[str]:
    """The bars that were not met."""
    calm = told["calm"]
    bars = {
        "kills": all(told["kills_by_kind"].get(kind, 0) >= n for kind, n in kills.items()),
        "trained_equals_dataset": told["trained_equals_dataset"],
        "duplicates": told["duplicates"] == 0,
        "orphans": told["orphans"] == 0,
        "reused": (told["reused"] or 0.0) >= 0.95,
        "ks_p": (told["ks_p"] or 0.0) >= 0.01,
        "max_staleness": told["max_staleness"] is not None and told["max_staleness"] <= size.staleness,
        "calm": calm["trained_equals_dataset"] and not calm["duplicates"] and not calm["orphans"],
    }
    return [name for name, met in bars.items() if not met]


def show(told: dict[str, Any]) -> None:
    calm = told["calm"]
    print(f"\n{'':24} {'with kills':>20} {'without':>20}")
    for name in SHOWN:
        print(f"{name:24} {told[name]!s:>20} {calm[name]!s:>20}")
    print(f"{'ks_p':24} {told['ks_p']!s:>20}\n\nreused: {REUSED}\nfenced: {told['fenced']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help=f"of each kind (default: {KILLS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deliver", choices=("store", "gateway"), default="store", help="where outcomes go")
    parser.add_argument("--small", action="store_true", help="a few tasks and kills, for tests")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files there")
    parser.add_argument("--json", action="store_true", help="nothing but one line of JSON on stdout")
    args = parser.parse_args()
    size = structs.replace(SMALL if args.small else Size(), deliver=args.deliver)
    kills: dict[str, int] = dict.fromkeys(KINDS, SMALL_KILLS) if args.small else KILLS
    kills = kills if args.kills is None else dict.fromkeys(KINDS, int(args.kills))
    place = args.keep or Path(tempfile.mkdtemp(prefix="afield-chaos-"))
    try:
        told = asyncio.run(run(place.resolve(), size, args.seed, kills))
    finally:
        if not args.keep:
            shutil.rmtree(place, ignore_errors=True)
    missed = failed(told, kills, size)
    if not args.json:
        show(told)
    print(json.dumps(told | {"missed": missed, "ok": not missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
