"""Stock TRL's asynchronous GRPO trainer trains the demo's shop agent; afield collects its rollouts."""

import argparse
from pathlib import Path

import torch

try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'trl==1.16.0' requests 'afield[demo]'") from None

from afield import demo
from afield.demo import shop
from afield.integrations.trl import Rollouts

DEMO = Path(demo.__file__).parent
MODEL = str(DEMO / "policy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/trl")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    args = AsyncGRPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=64,
        num_generations=16,
        max_completion_length=64,
        max_staleness=1,
        token_budget=0,
        learning_rate=1.5e-3,
        adam_epsilon=1e-4,
        max_grad_norm=0.1,
        epsilon_high=0.28,
        seed=arguments.seed,
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    rollouts = Rollouts(
        args,
        agent=f"{DEMO / 'agents' / 'openai_agent.py'}:agent",
        model=MODEL,
        tasks=shop.tasks(arguments.seed, 4 * arguments.steps + 16),
        advantage="dr_grpo",
        max_calls=8,
        attempt_timeout_s=60.0,
    )
    AsyncGRPOTrainer(model=MODEL, args=args, **rollouts.trainer_kwargs).train()


if __name__ == "__main__":
    main()
