"""TRL on a CPU: its asynchronous GRPO trainer learns from afield's rollouts.

    python -m bench.training.trl [--json]

Runs `examples/trl/train_async.py` unchanged in TRL's environment; `tests/trl_cpu` replaces the GPU kernel.
The last line has the rewards of the first and last steps, and the largest difference between the trainer's
and the sampler's log-probabilities at step 1, where both have the same weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench import ROOT
from support.trl_env import trl_environment, trl_python

RUN_S = 1500


def measured(steps: int, seed: int) -> list[dict[str, Any]]:
    """What the trainer logged, step by step."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = Path(scratch) / "steps.jsonl"
        script = [ROOT / "examples" / "trl" / "train_async.py", "--steps", str(steps), "--seed", str(seed)]
        command = [trl_python(), "-m", "trl_cpu", "--measure", lines, *script, "--out", f"{scratch}/out"]
        with (Path(scratch) / "log").open("w+") as log:
            done = subprocess.run(
                command,
                cwd=scratch,
                env=trl_environment(),
                stdout=log,
                stderr=log,
                timeout=RUN_S,
                check=False,
            )
            log.seek(0)
            if done.returncode:
                raise SystemExit(f"the trainer ended with {done.returncode}:\n{log.read()[-3000:]}")
        result = [json.loads(line) for line in lines.read_text().splitlines()]
    return [line for line in result if "loss" in line]


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The first and last tenth and more of the steps, as the demo's bar takes 2 and 3 of its 20."""
    rewards = [line["reward"] for line in lines]
    head, tail = max(1, len(lines) // 10), max(1, 3 * len(lines) // 20)
    return {
        "first": round(sum(rewards[:head]) / head, 4),
        "last": round(sum(rewards[-tail:]) / tail, 4),
        "steps": len(lines),
        "logprob_diff": lines[0]["logprob_diff_max"],
        "logprob_diff_mean": lines[0]["logprob_diff_mean"],
        "ratio": lines[0]["ratio"],
        "staleness": max(line["sample/staleness_max"] for line in lines),
        "failed": sum(line["rollout/failed_total"] for line in lines if "rollout/failed_total" in line),
        "dropped": sum(line.get("sample/dropped_stale_total", 0.0) for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the summary as one last line of JSON")
    arguments = parser.parse_args()
    lines = measured(arguments.steps, arguments.seed)
    for number, line in enumerate(lines, 1):
        print(f"step {number:3d}  reward {line['reward']:.3f}  ratio {line['ratio']:.4f}", flush=True)
    result = summary(lines)
    print(json.dumps(result) if arguments.json else "\n".join(f"{k}: {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
