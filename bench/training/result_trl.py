"""The help desk of examples/smollm with stock TRL: GRPOTrainer with its own tools and generation.

    python -m bench.training.result_trl --model DIR --tasks FILE --held-out FILE --out FILE [--vllm]

TRL runs the loop of model and tools itself, with the same prompt, tools, reward, groups and learning rate as
the run through afield. Every evaluation of the held-out tasks is added to OUT: the step, the seconds of
training before it, and the rewards by task. Evaluations do not count as training time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import ROOT

try:
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset
except ImportError as error:
    raise SystemExit(f"{error}: pip install trl==1.16.0 datasets==5.2.0") from None

sys.path.insert(0, str(ROOT / "examples" / "smollm"))
import tasks as desk

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How `transformers` parses a reply of the help desk's chat template."""


class HelpDesk:
    """TRL environment of one rollout; its public methods are the tools."""

    def reset(self, **row: Any) -> None:
        self._task = json.loads(row["task"])

    def find_orders(self, customer: str) -> str:
        """The orders of a customer.

        Args:
            customer: Name of the customer.
        """
        return desk.find_orders(self._task, customer)

    def get_order(self, order_id: str) -> str:
        """The details of an order.

        Args:
            order_id: Id of the order.
        """
        return desk.get_order(self._task, order_id)


class Rewards:
    """Reward function that keeps the rewards of held-out tasks until they are taken."""

    __name__ = "exact_answer"

    def __init__(self) -> None:
        self.held_out: dict[str, list[float]] = {}

    def __call__(self, completions: list[Any], task: list[str], **_: Any) -> list[float]:
        rewards = []
        for completion, text in zip(completions, task, strict=True):
            row = json.loads(text)
            last = completion[-1]
            answer = str(last.get("content") or "") if last["role"] == "assistant" else ""
            rewards.append(0.0 if last.get("tool_calls") else desk.grade(row, answer))
            if row["id"].startswith("held-out"):
                self.held_out.setdefault(row["id"], []).append(rewards[-1])
        return rewards


class TimedTrainer(GRPOTrainer):
    """Stock trainer; its evaluations are timed and written."""

    rewards: Rewards
    out: Path
    result: dict[str, Any]
    began = 0.0
    evaluating_s = 0.0

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        began = time.monotonic()
        self.rewards.held_out.clear()
        metrics = super().evaluate(*args, **kwargs)
        line = {
            "step": self.state.global_step,
            "seconds": round(began - self.began - self.evaluating_s, 3),
            "rewards": dict(self.rewards.held_out),
        }
        self.evaluating_s += time.monotonic() - began
        self.result["evaluations"].append(line)
        self.out.write_text(json.dumps(self.result) + "\n")
        success = sum(map(sum, line["rewards"].values())) / sum(map(len, line["rewards"].values()))
        print(f"step {line['step']}: {line['seconds']} s, held-out success {success:.3f}", flush=True)
        return metrics


def dataset(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [
                    {"role": "system", "content": desk.SYSTEM},
                    {"role": "user", "content": row["question"]},
                ],
                "task": json.dumps(row),
            }
            for row in rows
        ]
    )


def config(chosen: argparse.Namespace) -> GRPOConfig:
    cuda = torch.cuda.is_available()
    vllm: dict[str, Any] = {}
    if chosen.vllm:
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": chosen.vllm_memory}
        vllm["vllm_max_model_length"] = 1024
    return GRPOConfig(
        output_dir=str(chosen.out.with_suffix("")),
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.batch,
        gradient_accumulation_steps=chosen.rollouts // chosen.batch,
        num_generations=chosen.group,
        num_generations_eval=1,
        per_device_eval_batch_size=chosen.eval_batch,
        max_completion_length=chosen.max_completion,
        max_tool_calling_iterations=5,
        temperature=1.0,
        loss_type="grpo",  # every rollout weighs the same
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=chosen.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=chosen.eval_every,
        eval_on_start=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        seed=chosen.seed,
        disable_tqdm=True,
        **vllm,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model directory after the warm start")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--rollouts", type=int, default=256, help="in each step")
    parser.add_argument("--group", type=int, default=16, help="rollouts of one task")
    parser.add_argument("--batch", type=int, default=128, help="rollouts in one forward and backward pass")
    parser.add_argument("--eval-batch", type=int, default=256)
    parser.add_argument("--max-completion", type=int, default=320, help="tokens of replies and tool results")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the trainer's process")
    parser.add_argument("--vllm-memory", type=float, default=0.3)
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    tokenizer.response_template = RESPONSE
    rewards = Rewards()
    trainer = TimedTrainer(
        model=str(chosen.model),
        args=config(chosen),
        reward_funcs=rewards,
        train_dataset=dataset(chosen.tasks),
        eval_dataset=dataset(chosen.held_out),
        processing_class=tokenizer,
        environment_factory=HelpDesk,
    )
    trainer.rewards, trainer.out = rewards, chosen.out
    trainer.result = {"settings": json.loads(json.dumps(vars(chosen), default=str)), "evaluations": []}
    trainer.began = time.monotonic()
    trainer.train()
    trainer.result["wall_s"] = round(time.monotonic() - trainer.began, 1)
    trainer.result["steps"] = [
        {name: line[name] for name in ("reward", "step_time") if name in line}
        for line in trainer.state.log_history
        if "reward" in line
    ]
    chosen.out.write_text(json.dumps(trainer.result) + "\n")


if __name__ == "__main__":
    main()
