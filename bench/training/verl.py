"""veRL on a CPU: learns the demo's task through the example's launch script.

    python -m bench.training.verl --json [--mode separate_async] [--estimator remax] [--steps 12]

Its environment is created once under the cache. The reward must rise by 0.2. `probs_diff` is veRL's own
difference between the sampler's and the trainer's probabilities; in mode sync, where both have the same
weights, it is the rounding of veRL's float32 `logit - logsumexp`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from support.verl_env import verl_python
from verl_cpu import launching

RISE = 0.2
TASKS, ROLLOUTS, UPDATES = 8, 16, 2
RUN_S = 3000
# The demo's own recipe, in veRL's words.
RECIPE = (
    f"data.train_batch_size={TASKS}",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=128",
    "actor_rollout_ref.actor.optim.lr=1.5e-3",
    "actor_rollout_ref.actor.optim.clip_grad=0.1",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.actor.optim.override_optimizer_config={eps: 1e-4}",
)
# The asynchronous trainer wants every mini-batch to be a synchronisation of weights, or a whole step.
MINIBATCH = {"sync": TASKS // UPDATES, "separate_async": TASKS}


def learn(mode: str, estimator: str, steps: int, folder: Path) -> list[dict[str, Any]]:
    python = verl_python()
    launching.write_tasks(python, folder, TASKS * (steps + 2))
    more = (*RECIPE, f"actor_rollout_ref.actor.ppo_mini_batch_size={MINIBATCH[mode]}")
    more += (f"algorithm.adv_estimator={estimator}",)
    return launching.train(python, folder, mode, "learning", steps, *more, timeout_s=RUN_S)


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [round(step["critic/score/mean"], 3) for step in log]
    stale = [step["training/off_policy/trajectory_staleness_worst/max"] for step in log]
    fresh = [step for step, lag in zip(log, stale, strict=True) if lag == 0]
    return {
        "first": rewards[0],
        "last": rewards[-1],
        "steps": len(log),
        "rewards": rewards,
        "probs_diff_max": max(step["training/rollout_probs_diff_max"] for step in fresh),
        "probs_diff_mean": max(step["training/rollout_probs_diff_mean"] for step in fresh),
        "staleness_max": max(stale),
        "step_s": round(sum(step["timing_s/step"] for step in log) / len(log), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=list(MINIBATCH), default="sync")
    parser.add_argument("--estimator", choices=["grpo", "remax"], default="grpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result = summary(learn(arguments.mode, arguments.estimator, arguments.steps, Path(scratch)))
    result |= {"mode": arguments.mode, "wall_s": round(time.monotonic() - began, 1)}
    result["ok"] = result["last"] >= result["first"] + RISE
    for step, reward in enumerate(result["rewards"], 1):
        print(f"step {step}: reward {reward}")
    print(json.dumps(result) if arguments.json else f"{result['first']} -> {result['last']}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
