"""Evaluation against the truth: intervals, pass@k, validation, and a resumed run.

    python bench/eval.py [--simulations 400] [--attempts 5000] [--kills 3] [--json]

1. Simulated agents of known skill: pass@k is compared with the enumeration of all subsets of attempts,
   standard errors with a cluster-robust regression in numpy, intervals with scipy's Student t.
2. Coverage: share of simulations whose 95 % interval has the true value, for equal and unequal numbers of
   attempts per task, and by mean skill and number of tasks.
3. `afield eval` and the validation of `afield train`, with the same seed and model, sample the same tokens.
4. `afield eval` is killed with SIGKILL several times; each attempt counts once, and no result changes.
5. Time that the index adds to storing a rollout.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from afield.jobs.evaluation import mean_pass, mean_reward
from afield.orchestrator.state import RolloutStore, RunDirectory
from afield.utils.statistics import Estimate, clustered_mean, pass_at_k
from bench import ROOT, report

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
AFIELD = [sys.executable, "-m", "afield"]
AGENT = f"{ROOT / 'tests' / 'agents' / 'skilled_agent.py'}:agent"
TASKS = 100
ATTEMPTS = 8
KS = (1, 2, 4, 8)
Rewards = dict[str, list[float]]


# --- statistics --------------------------------------------------------------------------------------


def simulated(rng: np.random.Generator, counts: Sequence[int]) -> Rewards:
    """Attempts of tasks whose skills are drawn from a beta distribution of mean 0.4."""
    skills = rng.beta(1.0, 1.5, len(counts))
    return {
        f"t{n}": [float(x) for x in rng.random(count) < skill]
        for n, (skill, count) in enumerate(zip(skills, counts, strict=True))
    }


def true_pass(k: int) -> float:
    """1 - E[(1 - skill)^k] for skills of Beta(1, 1.5): the moments of Beta(1.5, 1)."""
    a, b = 1.5, 1.0
    moment = 1.0
    for n in range(k):
        moment *= (a + n) / (a + b + n)
    return 1.0 - moment


def equal_counts(rng: np.random.Generator) -> list[int]:
    return [ATTEMPTS] * TASKS


def unequal_counts(rng: np.random.Generator) -> list[int]:
    """As after failures that are left out: between 2 and 14 attempts, whatever the task's skill."""
    return [int(n) for n in rng.integers(2, 15, TASKS)]


def covers(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None and estimate.low is not None and estimate.high is not None
    return estimate.low <= truth <= estimate.high


def coverage(simulations: int, seed: int) -> dict[str, float]:
    """Share of simulations whose interval has the true value, in percent."""
    rng = np.random.default_rng(seed)
    hits: dict[str, int] = {}
    designs: dict[str, Callable[[np.random.Generator], list[int]]] = {
        "equal": equal_counts,
        "unequal": unequal_counts,
    }
    for name, design in designs.items():
        for _ in range(simulations):
            rewards = simulated(rng, design(rng))
            keys = {f"{name} attempts, mean reward": covers(mean_reward(rewards), 0.4)}
            if name == "equal":
                keys |= {f"pass@{k}": covers(mean_pass(rewards, k, 1.0), true_pass(k)) for k in KS}
            for key, hit in keys.items():
                hits[key] = hits.get(key, 0) + hit
    return {key: round(100 * count / simulations, 2) for key, count in hits.items()}


GRID_SKILLS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)
GRID_TASKS = (20, 50, 100, 200)
GRID_SIMULATIONS = 1000
CONCENTRATION = 2.5
"""Sum of the two parameters of the skills' beta distribution."""


def coverage_grid(simulations: int, seed: int) -> dict[str, Any]:
    """Coverage of pass@k in percent by mean skill and number of tasks.

    Near 0 and 1 only a handful of tasks shows any difference, and no interval covers 95 % there: `usual` has
    the designs with at least 50 tasks and a true value from 0.1 to 0.97.
    """
    rng = np.random.default_rng(seed)
    designs: dict[str, float] = {}
    usual: dict[str, float] = {}
    for tasks, skill in itertools.product(GRID_TASKS, GRID_SKILLS):
        a, b = skill * CONCENTRATION, (1 - skill) * CONCENTRATION
        successes = rng.binomial(ATTEMPTS, rng.beta(a, b, (simulations, tasks)))
        for k in KS:
            truth = 1.0 - float(np.prod([(b + n) / (a + b + n) for n in range(k)]))
            values = [pass_at_k(ATTEMPTS, n, k) for n in range(ATTEMPTS + 1)]
            hits = sum(
                covers(clustered_mean({str(t): [values[n]] for t, n in enumerate(row)}, share=True), truth)
                for row in successes
            )
            name = f"skill {skill}, {tasks} tasks, pass@{k}"
            designs[name] = round(100 * hits / simulations, 2)
            if tasks >= 50 and 0.1 <= truth <= 0.97:
                usual[name] = designs[name]
    low, high = min(designs, key=designs.__getitem__), min(usual, key=usual.__getitem__)
    return {
        "simulations": simulations,
        "designs": len(designs),
        "within_93_97": sum(93 <= value <= 97 for value in designs.values()),
        "below_93": {name: value for name, value in designs.items() if value < 93},
        "lowest": [low, designs[low]],
        "usual": len(usual),
        "usual_within_93_97": sum(93 <= value <= 97 for value in usual.values()),
        "usual_lowest": [high, usual[high]],
        "usual_highest": max(usual.values()),
    }


def enumerated_pass(rewards: Sequence[float], k: int) -> float:
    subsets = list(itertools.combinations(rewards, k))
    return sum(max(subset) >= 1.0 for subset in subsets) / len(subsets)


def regression(rewards: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Mean, CR2 standard error and lower end of the interval of a regression on a constant, with matrices."""
    y = np.array([value for values in rewards.values() for value in values])
    cluster = np.array([n for n, values in enumerate(rewards.values()) for _ in values])
    total, number = len(y), cluster.max() + 1
    x = np.ones((total, 1))
    bread = np.linalg.inv(x.T @ x)
    annihilator = np.eye(total) - x @ bread @ x.T
    residuals = annihilator @ y
    columns = []
    variance = 0.0
    for g in range(number):
        rows = cluster == g
        block = annihilator[np.ix_(rows, rows)]
        values, vectors = np.linalg.eigh(block)
        root = vectors @ np.diag(1 / np.sqrt(np.maximum(values, 1e-12))) @ vectors.T
        weights = x[rows].T @ root
        variance += float((bread @ weights @ residuals[rows])[0] ** 2)
        columns.append((annihilator[rows].T @ (weights.T @ bread))[:, 0])
    gram = np.array(columns) @ np.array(columns).T
    degrees = np.trace(gram) ** 2 / (gram**2).sum()
    margin = stats.t.ppf(0.975, degrees) * np.sqrt(variance)
    mean = float(y.mean())
    return mean, float(np.sqrt(variance)), float(mean - margin)


def agreement(seed: int) -> dict[str, float]:
    """Largest differences from independent computations over several data sets."""
    rng = np.random.default_rng(seed)
    largest = {"pass@k": 0.0, "mean": 0.0, "standard error": 0.0, "interval": 0.0}
    for n in range(20):
        counts = equal_counts(rng) if n % 2 else unequal_counts(rng)
        rewards = simulated(rng, counts)
        for values in rewards.values():
            for k in range(1, len(values) + 1):
                difference = pass_at_k(len(values), int(sum(values)), k) - enumerated_pass(values, k)
                largest["pass@k"] = max(largest["pass@k"], abs(difference))
        estimate = mean_reward(rewards)
        assert estimate is not None and estimate.standard_error is not None and estimate.low is not None
        plain = clustered_mean(rewards)
        assert plain.low is not None
        mean, error, low = regression(rewards)
        for name, difference in (
            ("mean", estimate.mean - mean),
            ("standard error", estimate.standard_error - error),
            ("interval", plain.low - low),
        ):
            largest[name] = max(largest[name], abs(difference))
    return largest


# --- commands ----------------------------------------------------------------------------------------


def afield(cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*AFIELD, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def matches_validation(cwd: Path) -> dict[str, Any]:
    """Compare `eval` with the validation before the first step, both with the embedded engine."""
    rows = [{"id": f"q{n}", "question": f"What is {n} + {n}?", "by_reply": True} for n in range(6)]
    tasks = write_rows(cwd / "tasks.jsonl", rows)
    same = ("--model", POLICY, "--tasks", tasks, "--seed", 3, "--max-tokens", 24)
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2)
    validation = ("--val-tasks", tasks, "--val-rollouts", 4, "--val-temperature", 1.0, "--run", "trained")
    afield(cwd, "train", AGENT, *same, *sizes, *validation)
    afield(cwd, "eval", AGENT, *same, "-k", 4, "--temperature", 1.0, "--run", "evaluated")
    runs = [RunDirectory(cwd / "runs" / name).index for name in ("trained", "evaluated")]
    for index in runs:
        index.refresh()
    validated, evaluated = (
        {row.id: [turn.token_ids for turn in index.read(row).turns] for row in index.rollouts(where)}
        for index, where in ((runs[0], "split='val' AND step=0"), (runs[1], "split='val'"))
    )
    tokens = {ids for turns in evaluated.values() for ids in turns}
    return {"attempts": len(evaluated), "equal": validated == evaluated, "distinct_replies": len(tokens)}


def resumed(cwd: Path, attempts: int, kills: int) -> dict[str, Any]:
    """Kill an evaluation several times, and count its attempts at the end."""
    each = 50
    rng = random.Random(7)
    rows = [{"id": f"q{n}", "question": "?", "skill": rng.random()} for n in range(attempts // each)]
    tasks = write_rows(cwd / "many.jsonl", rows)
    script = cwd / "script.jsonl"
    script.write_text(json.dumps({"match": "", "one_of": ["Yes.", "No."]}) + "\n")
    words = ["eval", AGENT, "--tasks", tasks, "--model", POLICY, "--engine", f"scripted={script}"]
    words += ["--runtime", "inline", "-k", each, "--run", "killed", "--json"]
    store = cwd / "runs" / "killed" / "rollout_store"
    before: dict[str, float | None] = {}
    began = time.monotonic()
    for kill in range(kills):
        process = subprocess.Popen([*AFIELD, *map(str, words)], cwd=cwd, stdout=-3, stderr=-3)
        goal = attempts * (kill + 1) // (kills + 1)
        while process.poll() is None and len(RolloutStore(store)) < goal:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        index = RunDirectory(cwd / "runs" / "killed").index
        index.refresh()
        before |= {row.id: row.reward for row in index.rollouts()}
        index.close()
    result = json.loads(afield(cwd, *words).stdout.strip().splitlines()[-1])
    index = RunDirectory(cwd / "runs" / "killed").index
    after = {row.id: row.reward for row in index.rollouts()}
    skill = sum(row["skill"] for row in rows) / len(rows)
    return {
        "attempts": result["attempts"],
        "rows": len(after),
        "kills": kills,
        "ended_before_the_last_kill": len(before),
        "changed": sum(after[rollout_id] != reward for rollout_id, reward in before.items()),
        "per_task": sorted({task["attempts"] for task in result["by_task"]}),
        "mean_reward": result["reward"]["mean"],
        "mean_skill_of_these_tasks": skill,
        "wall_s": round(time.monotonic() - began, 1),
    }


def index_cost(cwd: Path, run: Path) -> dict[str, float]:
    """Microseconds to store a rollout of a run, without and with the index."""
    index = RunDirectory(run).index
    index.refresh()
    results = [index.read(row) for row in index.rollouts(limit=500)]
    times: dict[str, float] = {}
    for name, with_index in (("without", False), ("with", True), ("without", False), ("with", True)):
        directory = RunDirectory(cwd / f"cost-{name}-{time.monotonic_ns()}")
        directory.path.mkdir()
        store = RolloutStore(directory.rollout_store, index=directory.index if with_index else None)
        store.put(results[0])  # opens the database
        began = time.process_time()
        for result in results:
            store.put(result)
        spent = 1e6 * (time.process_time() - began) / len(results)
        times[name] = round(min(spent, times.get(name, spent)), 1)
    return {f"{name}_index_us": spent for name, spent in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulations", type=int, default=400)
    parser.add_argument("--attempts", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cwd = Path(scratch)
        result: dict[str, Any] = {"agreement": agreement(1), "coverage": coverage(args.simulations, 0)}
        result["coverage_grid"] = coverage_grid(max(args.simulations, GRID_SIMULATIONS), 5)
        result["validation"] = matches_validation(cwd)
        result["resumed"] = resumed(cwd, args.attempts, args.kills)
        result["index"] = index_cost(cwd, cwd / "runs" / "killed")
    if not args.json:
        for name, value in result.items():
            print(f"{name}: {value}")
    print(json.dumps({"commit": report.commit(), **result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
