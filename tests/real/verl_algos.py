"""Our advantages and veRL's on the same rewards, and a batch there and back with its tensordict; as JSON.

Run by `test_verl_algos.py` in an environment that has veRL. Where veRL weighs by tokens every response has
one token here, since ours weigh by rollouts.
"""

from __future__ import annotations

import json
import random
import sys

import numpy
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from afield.advantages import compute_advantages
from afield.batches.groups import from_groups
from afield.batches.tensors import from_tensordict, to_tensordict
from afield.types import Group, Outcome, Rollout, RolloutResult, Split, Task
from support.random_groups import Maker

SIZES = (2, 3, 5, 8)
GREEDY = 0.25


def finished(id: str, group_id: str, reward: float) -> RolloutResult:
    rollout = Rollout(id=id, exp_id="exp", group_id=group_id, task=Task("t", {}))
    return RolloutResult(rollout=rollout, outcome=Outcome(rollout_id=id, attempt=1, reward=reward))


def groups_of(rewards: list[list[float]]) -> list[Group]:
    return [
        Group(
            id=f"g{g}",
            task_id="t",
            epoch=0,
            split=Split.TRAIN,
            finished=tuple(finished(f"g{g}-{k}", f"g{g}", value) for k, value in enumerate(members)),
            baseline=finished(f"g{g}-greedy", f"g{g}", GREEDY),
        )
        for g, members in enumerate(rewards)
    ]


def main() -> dict[str, float]:
    torch.set_num_threads(1)
    draw = random.Random(5)
    rewards = [[draw.uniform(-1, 1) for _ in range(size)] for size in SIZES]
    scores = torch.tensor([[v] for members in rewards for v in members], dtype=torch.float64)
    mask = torch.ones_like(scores)
    index = numpy.array([g for g, members in enumerate(rewards) for _ in members])
    given = {"token_level_rewards": scores, "response_mask": mask}
    config = AlgoConfig(gamma=1.0)
    greedy = torch.full((len(scores),), GREEDY, dtype=torch.float64)
    grpo, pp = core_algos.compute_grpo_outcome_advantage, core_algos.get_adv_estimator_fn
    theirs = {
        "grpo": grpo(**given, index=index, epsilon=1e-6),
        "dr_grpo": grpo(**given, index=index, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(**given, index=index),
        "reinforce_plus_plus": pp("reinforce_plus_plus")(**given, config=config),
        "reinforce_plus_plus_baseline": pp("reinforce_plus_plus_baseline")(
            **given, index=index, config=config
        ),
        "remax": core_algos.compute_remax_outcome_advantage(**given, reward_baselines=greedy),
    }
    apart: dict[str, float] = {}
    for how, (values, _) in theirs.items():
        ours = compute_advantages(groups_of(rewards), how, eps=1e-6 if how == "grpo" else 0.0)
        mine = [ours[f"g{g}-{k}"] for g, members in enumerate(rewards) for k in range(len(members))]
        apart[how] = float((torch.tensor(mine, dtype=torch.float64) - values[:, 0]).abs().max())
    batch = from_groups(Maker(11, True).groups())
    tensors = to_tensordict(batch, pad_token_id=0, dtype=torch.float64)
    apart["tensordict"] = float(from_tensordict(tensors) != batch)
    return apart


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
