"""The limited mode: TRL's synchronous GRPOTrainer trains the shop agent through its rollout_func."""

import argparse
from pathlib import Path

import torch

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'trl==1.16.0' requests 'afield[demo]'") from None

from afield import demo
from afield.demo import shop
from afield.integrations.trl import SyncRollouts

DEMO = Path(demo.__file__).parent
MODEL = str(DEMO / "policy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trl-sync")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    args = GRPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=64,
        num_generations=16,
        max_completion_length=64,
        loss_type="grpo",  # every rollout weighs the same
        scale_rewards=False,
        learning_rate=1.5e-3,
        adam_epsilon=1e-4,
        max_grad_norm=0.1,
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    agent = f"{DEMO / 'agents' / 'openai_agent.py'}:agent"
    with SyncRollouts(args, agent=agent, model=MODEL, tasks=shop.tasks(0, 4 * arguments.steps)) as rollouts:
        GRPOTrainer(model=MODEL, args=args, **rollouts.trainer_kwargs).train()


if __name__ == "__main__":
    main()
