"""The help desk of examples/smollm: held-out success before and after GRPO, against TRL and a frozen control.

    python -m bench.training.result --out DIR [--parts embedded,vllm,frozen,trl] [--seeds 0,1,2] [--small]

1. Writes the tasks and makes the warm start, once in DIR.
2. Runs each part and seed that DIR has no result of, and writes DIR/PART-SEED.json when it ends. A run that
   was cut begins again. `--parallel N` runs N at once; their times do not count for the comparison.
3. `--merge` saves bench/results/result-COMMIT.json from these files, and draws docs/img/result.svg.

Parts: `embedded` and `vllm` train with that engine, `embedded-async` and `vllm-async` in mode async, `frozen`
samples as often but never trains, `trl` is stock TRL, see `result_trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from afield.jobs.evaluation import mean_reward
from afield.runs.index import RunIndex
from bench import ROOT, report

EXAMPLE = ROOT / "examples" / "smollm"
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "models"
MODEL = HOME / "smollm2-135m-instruct"
ENGINES = {"embedded": "torch", "vllm": "vllm"}
PARTS = (*ENGINES, *(f"{engine}-async" for engine in ENGINES), "frozen", "trl")
PACKAGES = ("torch", "transformers", "vllm", "trl", "langgraph")
SAMPLED, TRAINED, WEIGHTS, TOOLS, IDLE = ACTIVITIES = ("sampling", "training", "weights", "tools", "idle")


class Sizes(NamedTuple):
    """Size of a run, the same for all parts."""

    steps: int
    """Training steps."""
    val_every: int
    """Steps between two evaluations of the held-out tasks."""
    tasks_per_step: int
    """Groups of each step."""
    group: int
    """Rollouts of each group."""
    held_out: int
    """Number of held-out tasks."""
    conversations: int
    """Demonstrations of the warm start."""

    @property
    def rollouts(self) -> int:
        return self.tasks_per_step * self.group


FULL = Sizes(steps=60, val_every=10, tasks_per_step=16, group=16, held_out=200, conversations=192)
SMALL = Sizes(steps=1, val_every=1, tasks_per_step=1, group=2, held_out=4, conversations=16)


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)


# --- commands -------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "PYTHONPATH": path, **more}


def execute(out: Path, name: str, *words: object, allowed: tuple[int, ...] = (0,)) -> None:
    """Run a Python program with its output in DIR/logs; raises RuntimeError with the end of the log."""
    log = out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as lines:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=out,
            env=environment(AFIELD_RUNS=str(out / "runs")),
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            check=False,
        )
    if done.returncode not in allowed:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{log.read_text()[-3000:]}")


def prepare(chosen: argparse.Namespace, sizes: Sizes) -> None:
    """Write the tasks and make the warm start, unless DIR has them."""
    out: Path = chosen.out
    if (out / "warm.json").exists():
        return
    if not chosen.model.is_dir():
        raise SystemExit(f"{chosen.model} is not there; make it with examples/smollm/get.py, or give --model")
    say("warm start")
    execute(out, "tasks", EXAMPLE / "tasks.py", "tasks", "--held-out", sizes.held_out)
    began = time.monotonic()
    words = ("--tasks", "tasks/train.jsonl", "--conversations", sizes.conversations, "--right", chosen.right)
    execute(out, "warm", EXAMPLE / "warm_start.py", chosen.model, "warm", *words)
    line = {"seconds": round(time.monotonic() - began, 1), "conversations": sizes.conversations}
    (out / "warm.json").write_text(json.dumps({**line, "right": chosen.right}) + "\n")


def train(chosen: argparse.Namespace, sizes: Sizes, part: str, seed: int) -> dict[str, Any]:
    """A run of `afield train`, with the held-out tasks as validation."""
    out: Path = chosen.out
    name = f"{part}-{seed}"
    shutil.rmtree(out / "runs" / name, ignore_errors=True)
    engine, _, mode = part.partition("-")
    words: list[object] = ["-m", "afield", "train", "--config", EXAMPLE / "train.toml", "--run", name]
    words += ["--model", out / "warm" / "model", "--tasks", out / "tasks" / "train.jsonl"]
    words += ["--val-tasks", out / "tasks" / "held-out.jsonl", "--val-every", sizes.val_every]
    words += ["--val-temperature", 1, "--steps", sizes.steps, "--tasks-per-step", sizes.tasks_per_step]
    words += ["--rollouts", sizes.group, "--seed", seed, "--lr", chosen.lr, "--mode", mode or "sync"]
    words += ["--engine", ENGINES.get(engine, "torch")]
    if chosen.workers:
        words += ["--workers", chosen.workers]
    if engine == "vllm":
        words += ["--vllm-memory", round(0.4 / chosen.parallel, 3)]
    if part == "frozen":
        words.append("--freeze-weights")
    words += [word for setting in chosen.set for word in ("--set", setting)]
    began = time.monotonic()
    # A frozen run in which no group has rewards of both kinds ends with 1, although all went well.
    execute(out, name, *words, allowed=(0, 1) if part == "frozen" else (0,))
    result = read_run(out / "runs" / name)
    if part == "frozen":
        result["evaluations"] += evaluate_again(out, sizes, name, seed)
    return {**result, "wall_s": round(time.monotonic() - began, 1)}


def evaluate_again(out: Path, sizes: Sizes, name: str, seed: int) -> list[dict[str, Any]]:
    """The same weights on the held-out tasks, with other random numbers."""
    shutil.rmtree(out / "runs" / f"{name}-after", ignore_errors=True)
    agent = f"{EXAMPLE / 'agent.py'}:agent"
    words = ["-m", "afield", "eval", agent, "--run", f"{name}-after", "--model", out / "warm" / "model"]
    words += ["--tasks", out / "tasks" / "held-out.jsonl", "--temperature", 1, "--seed", 1000 + seed]
    execute(out, f"{name}-after", *words, "--max-tokens", 48, "--concurrency", 256)
    with RunIndex(out / "runs" / f"{name}-after") as index:
        index.refresh()
        return [{"step": sizes.steps, "seconds": None, **success(rewards_of(index, "split='val'"))}]


def trl(chosen: argparse.Namespace, sizes: Sizes, seed: int) -> dict[str, Any]:
    """The same with stock TRL."""
    out: Path = chosen.out
    path = out / "runs" / f"trl-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    words: list[object] = ["-m", "bench.training.result_trl", "--model", out / "warm" / "model"]
    words += ["--tasks", out / "tasks" / "train.jsonl", "--held-out", out / "tasks" / "held-out.jsonl"]
    words += ["--out", path, "--steps", sizes.steps, "--eval-every", sizes.val_every, "--lr", chosen.lr]
    words += ["--rollouts", sizes.rollouts, "--group", sizes.group, "--seed", seed]
    words += ["--batch", min(chosen.trl_batch, sizes.rollouts), "--eval-batch", min(256, sizes.held_out)]
    if chosen.trl_vllm:
        words += ["--vllm", "--vllm-memory", round(0.3 / chosen.parallel, 3)]
    began = time.monotonic()
    execute(out, f"trl-{seed}", *words)
    line = json.loads(path.read_text())
    evaluations = [
        {"step": each["step"], "seconds": each["seconds"], **success(each["rewards"])}
        for each in line["evaluations"]
    ]
    steps = [
        {"step": n, "reward": each["reward"], "seconds": each.get("step_time")}
        for n, each in enumerate(line["steps"], 1)
    ]
    return {
        "evaluations": evaluations,
        "steps": steps,
        "settings": line["settings"],
        "wall_s": round(time.monotonic() - began, 1),
    }


# --- results --------------------------------------------------------------------------------------


def success(rewards: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Share of right answers with its 95 % interval."""
    estimate = mean_reward(rewards)
    if estimate is None:
        raise RuntimeError("no held-out task has a reward")
    return {
        "success": round(estimate.mean, 4),
        "low": None if estimate.low is None else round(estimate.low, 4),
        "high": None if estimate.high is None else round(estimate.high, 4),
        "tasks": estimate.tasks,
    }


def rewards_of(index: RunIndex, where: str, *values: object) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for row in index.rollouts(where, *values):
        if row.reward is not None:
            rewards.setdefault(row.task_id, []).append(row.reward)
    return rewards


def read_run(directory: Path) -> dict[str, Any]:
    """Evaluations, steps and times of a run of `afield train`, from its own records."""
    with RunIndex(directory) as index:
        index.refresh()
        runs = index.query("SELECT t, t + seconds AS e, kind, value FROM events WHERE rollout IS NULL")
        done = {(event["kind"], event["value"]): (event["t"], event["e"]) for event in runs}
        steps = [
            json.loads(row["line"])
            for row in index.query("SELECT line FROM steps WHERE split='train' ORDER BY step")
        ]
        began = index.fetch("SELECT min(started) FROM rollouts")[0][0]
        ready = {step: done["published", step][1] - began for step in served(done)}
        evaluated = index.query("SELECT step FROM steps WHERE split='val' ORDER BY step")
        evaluations = [
            {
                "step": step,
                "seconds": round(ready[step], 3) if step else 0.0,
                **success(rewards_of(index, "split='val' AND step=?", step)),
            }
            for step in (row["step"] for row in evaluated)
        ]
        end = max((event["e"] for event in runs), default=began)
        times = time_split(index, done, began, max(end, began))
        calls = index.query(
            "SELECT count(*) AS n, sum(turns) AS turns, sum(tool_calls) AS tools,"
            " sum(prompt_tokens) AS prompt, sum(sampled_tokens) AS sampled,"
            " sum(failure_kind = 'infrastructure') AS lost FROM rollouts"
        )[0]
    return {
        "evaluations": evaluations,
        "steps": [
            {
                "step": line["step"],
                "reward": line["reward"],
                "seconds": round(ready[line["step"]], 3) if line["step"] in ready else None,
                "staleness": line["staleness"],
                "logprob_diff_times_control": line["trainer"].get("logprob_diff_times_control"),
                "update_kept": line["trainer"].get("update_kept"),
            }
            for line in steps
        ],
        "rollouts": calls["n"],
        "failed": calls["lost"] or 0,
        "turns_per_rollout": round(calls["turns"] / calls["n"], 2),
        "tool_calls_per_rollout": round(calls["tools"] / calls["n"], 2),
        "sampled_tokens": calls["sampled"],
        "prompt_tokens": calls["prompt"],
        **times,
    }


Spans = list[tuple[float, float]]


def served(done: Mapping[tuple[str, int], tuple[float, float]]) -> list[int]:
    return sorted(value for kind, value in done if kind == "published")


def time_split(
    index: RunIndex, done: Mapping[tuple[str, int], tuple[float, float]], began: float, end: float
) -> dict[str, Any]:
    """Seconds of each activity, from the first rollout to the last published weights.

    `seconds` divides the time: a moment in which several activities run counts for the first one of
    `ACTIVITIES`. `busy` is the time in which an activity runs at all. Weights are written, sent and loaded
    between the end of a step's training and the moment the gateway serves them.
    """

    def during(spans: Iterable[tuple[float, float]]) -> Spans:
        return union((max(a, began), min(b, end)) for a, b in spans if b > began and a < end)

    ended = {value: e for (kind, value), (_, e) in done.items() if kind == "trained"}
    spans = {
        SAMPLED: during(events(index, "call")),
        TRAINED: during(span for (kind, _), span in done.items() if kind == "trained"),
        WEIGHTS: during((ended[step], done["published", step][1]) for step in served(done) if step in ended),
        TOOLS: during(events(index, "tool")),
    }
    seconds: dict[str, float] = {}
    taken: Spans = []
    for name, each in spans.items():
        both = union([*taken, *each])
        seconds[name] = length(both) - length(taken)
        taken = both
    seconds[IDLE] = end - began - length(taken)
    total = max(end - began, 1e-9)
    return {
        "span_s": round(total, 2),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "busy": {name: round(length(each) / total, 4) for name, each in spans.items()},
    }


def events(index: RunIndex, kind: str) -> Spans:
    return [(t, e) for t, e in index.fetch("SELECT t, t + seconds FROM events WHERE kind=?", kind)]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Spans that do not overlap, in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


# --- merging --------------------------------------------------------------------------------------


def merge(out: Path) -> dict[str, Any]:
    """All results of DIR in one object."""
    parts = {name: {} for name in PARTS}
    settings: dict[str, Any] = {}
    for path in sorted(out.glob("*-[0-9]*.json")):
        name, _, seed = path.stem.rpartition("-")
        if name in parts:
            line = json.loads(path.read_text())
            settings |= line.pop("sizes")
            parts[name][seed] = line
    warm = json.loads((out / "warm.json").read_text())
    return {"settings": settings, "warm_start": warm, "parts": {n: p for n, p in parts.items() if p}}


def print_part(name: str, line: Mapping[str, Any]) -> None:
    first, last = line["evaluations"][0], line["evaluations"][-1]
    before, after = (f"{e['success']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in (first, last))
    say(f"{name}: held-out success {before} -> {after}, {line['wall_s']} s")
    if "seconds" in line:
        shares = {key: 100 * value / line["span_s"] for key, value in line["seconds"].items()}
        say(f"{name}:", ", ".join(f"{k} {v:.1f} s ({shares[k]:.0f} %)" for k, v in line["seconds"].items()))
        say(f"{name}: engine busy {100 * line['busy'][SAMPLED]:.1f} %")


# --- the program ----------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"device": device, "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def measure(chosen: argparse.Namespace, sizes: Sizes, job: tuple[str, int]) -> bool:
    part, seed = job
    name = f"{part}-{seed}"
    say(f"{name} begins")
    try:
        line = trl(chosen, sizes, seed) if part == "trl" else train(chosen, sizes, part, seed)
    except RuntimeError as error:
        say(error)
        return False
    own = {"sizes": {**sizes._asdict(), "lr": chosen.lr}, "parallel": chosen.parallel, "set": chosen.set}
    head = {"commit": report.commit() if (ROOT / ".git").exists() else "unknown", "machine": machine()}
    fresh = chosen.out / f".{name}.json"
    fresh.write_text(json.dumps({**own, **head, **line}) + "\n")
    fresh.rename(chosen.out / f"{name}.json")
    print_part(name, line)
    return True


def sizes_of(chosen: argparse.Namespace) -> Sizes:
    sizes = SMALL if chosen.small else FULL
    given = {name: getattr(chosen, name) for name in Sizes._fields if getattr(chosen, name) is not None}
    return sizes._replace(**given)


def default_lr() -> float:
    return tomllib.loads((EXAMPLE / "train.toml").read_text())["train"]["lr"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "result", help="directory of the parts")
    parser.add_argument("--model", type=Path, default=MODEL, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--parts", default="embedded,vllm,frozen,trl", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once")
    parser.add_argument("--small", action="store_true", help="a step of two rollouts, to try the command")
    for name in Sizes._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {getattr(FULL, name)}")
    parser.add_argument("--right", type=float, default=0.6, help="share of right decisions in the warm start")
    parser.add_argument("--lr", type=float, default=default_lr(), help="learning rate of GRPO")
    parser.add_argument("--workers", type=int, default=0, help="agent processes, instead of the example's")
    parser.add_argument("--trl-batch", type=int, default=128, help="rollouts in one pass of TRL's trainer")
    parser.add_argument("--no-trl-vllm", dest="trl_vllm", action="store_false", help="TRL without vLLM")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of `afield train`")
    parser.add_argument("--merge", action="store_true", help="only save the results that DIR has")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    chosen.out = chosen.out.resolve()
    parts = [part for part in chosen.parts.split(",") if part]
    if unknown := sorted(set(parts) - set(PARTS)):
        raise SystemExit(f"unknown part {unknown[0]!r}; choose some of {', '.join(PARTS)}")
    ok = True
    if not chosen.merge:
        sizes = sizes_of(chosen)
        chosen.out.mkdir(parents=True, exist_ok=True)
        prepare(chosen, sizes)
        seeds = [int(seed) for seed in chosen.seeds.split(",")]
        jobs = [(part, seed) for part in parts for seed in seeds]
        missing = [job for job in jobs if not (chosen.out / f"{job[0]}-{job[1]}.json").exists()]
        with ThreadPoolExecutor(chosen.parallel) as pool:
            ok = all(list(pool.map(partial(measure, chosen, sizes), missing)))
    result = merge(chosen.out)
    if chosen.merge:
        from bench.training.result_page import draw

        say(f"saved {report.save('result', result, report.commit())}")
        draw(result, ROOT / "docs" / "img")
        say("write docs/results.md with python -m bench.benchmarks_page")
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
