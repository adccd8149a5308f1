"""`make accept`: everything that must be shown, part by part, with its numbers saved.

Each part runs the real commands, checks its bars, and writes bench/results/PART-COMMIT.json. The exit
code is 0 only if every bar of every chosen part was met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
AFIELD = [str(Path(sys.executable).parent / "afield")]
SEEDS = (0, 1, 2)


class Bars:
    """What was asked for, what was seen."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def check(self, name: str, seen: Any, ok: bool, bar: str) -> None:
        self.rows.append({"name": name, "seen": seen, "bar": bar, "ok": ok})
        print(f"  {'ok  ' if ok else 'MISS'} {name}: {seen} (bar: {bar})", flush=True)

    @property
    def ok(self) -> bool:
        return all(row["ok"] for row in self.rows)


def demo(cwd: Path, *options: object, before: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [*before, *AFIELD, "demo", "--json", *map(str, options)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: value for key, value in told.items() if key not in ("run", "agent")}  # paths of a machine


def loop(bars: Bars, cwd: Path) -> dict[str, Any]:
    """The whole loop: learning over seeds, frozen weights, other agents, offline."""
    runs: dict[str, Any] = {}
    for seed in SEEDS:
        told = runs[f"seed {seed}"] = demo(cwd, "--seed", seed)
        check_learning(bars, f"seed {seed}", told)
    for seed in SEEDS:
        told = runs[f"frozen, seed {seed}"] = demo(cwd, "--seed", seed, "--freeze-weights")
        change = abs(told["last"] - told["first"])
        bars.check(f"frozen, seed {seed}: |last - first|", round(change, 4), change <= 0.12, "<= 0.12")
    for agent in ("strands", "langgraph"):
        told = runs[agent] = demo(cwd, "--agent", agent)
        check_learning(bars, agent, told)
    offline = offline_prefix()
    if offline:
        told = runs["offline"] = demo(cwd, "--steps", 3, before=offline)
        bars.check("offline: failed rollouts", told["failed"], told["failed"] == 0, "0")
    else:
        bars.check("offline", "unshare is not here", False, "runs without a network")
    exact = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/test_exactness.py"], cwd=ROOT, check=False
    )
    bars.check("exactness tests", exact.returncode, exact.returncode == 0, "pass")
    return runs


def check_learning(bars: Bars, name: str, told: dict[str, Any]) -> None:
    bars.check(f"{name}: first", told["first"], told["first"] <= 0.35, "<= 0.35")
    bars.check(f"{name}: last", told["last"], told["last"] >= 0.80, ">= 0.80")
    turns = told["turns_per_rollout"]
    bars.check(f"{name}: turns per rollout", turns, turns >= 2, ">= 2")
    bars.check(f"{name}: wall time", told["wall_s"], told["wall_s"] <= 180, "<= 180 s")
    bars.check(f"{name}: failed rollouts", told["failed"], told["failed"] == 0, "0")


def offline_prefix() -> tuple[str, ...]:
    """A network namespace with nothing in it but loopback."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return ()
    return ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "offline")


PARTS: dict[str, Callable[[Bars, Path], dict[str, Any]]] = {"loop": loop}


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short=12", "HEAD") + dirty


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS])
    asked = parser.parse_args().part
    met = True
    for name in PARTS if asked == "all" else (asked,):
        print(f"{name}:", flush=True)
        bars = Bars()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            numbers = PARTS[name](bars, Path(scratch))
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }
        result = {"part": name, "commit": commit(), "ok": bars.ok, "bars": bars.rows, "runs": numbers}
        result |= {"machine": machine, "wall_s": round(time.monotonic() - began, 1)}
        path = RESULTS / f"{name}-{commit()}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"  saved {path.relative_to(ROOT)}")
        met &= bars.ok
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
