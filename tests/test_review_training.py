"""What a sceptical reader of the trainers tried: odd batches, odd rewards, odd settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from afield.assembly import linear
from afield.sdk.context import Context
from afield.trainers.packing import pack
from afield.trainers.passes import Pass, log_probabilities, to_passes
from afield.trainers.policy import PolicyModel
from afield.trainers.rows import to_batch
from afield.trainers.tree import Tree, walk
from afield.types import FailureKind, Reason, Rollout, Task
from collecting import ask_model, bench
from grouping import finished, forest, group
from tiny_model import build_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("review") / "model", hidden=32, max_positions=128)


# --- layers that are computed again --------------------------------------------------------------


def test_a_policy_with_checkpointing_attends_once_and_has_the_same_gradient(model_path: Path) -> None:
    """The model as a whole stays in evaluation mode; only its layers believe to be training."""
    parts = [finished(str(n), float(n), linear(forest(n)).trajectories) for n in range(3)]
    rows = to_batch([group(*parts)], {f"g-{n}": 1.0 for n in range(3)}).rows
    (batch,) = to_passes(rows, 10_000, CPU)
    tree = Tree(pack([row.trajectory.token_ids for row in batch.rows]), CPU, "peeled")
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(model_path, device=CPU, checkpointing=checkpointing)
        with walk(tree, policy.model) as walked:
            assert walked.kept.first is checkpointing
            walked.seen = True
        gradients.append(gradient(policy, batch._replace(layout=tree)))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-6


def gradient(policy: PolicyModel, batch: Pass) -> torch.Tensor:
    log_probabilities(policy.model, batch).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable if p.grad is not None])


# --- rewards that name what is not there ---------------------------------------------------------


def rollout(name: str = "r") -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": 0}))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("named", "says"),
    [({"t99": 1.0}, "'t99' has a reward, and there is no such turn"), ({"t1": 1.0, "0": 1.0}, "two rewards")],
)
async def test_a_reward_of_no_turn_is_the_failure_of_its_rollout(
    tmp_path: Path, named: dict[str, float], says: str
) -> None:
    async def agent(task: dict[str, Any], context: Context) -> dict[str, Any]:
        await ask_model(context)
        return {"reward": 1.0, "turn_rewards": named}

    async with bench(tmp_path, agent) as b, b.conducting(retries={FailureKind.VERIFIER: 1}) as (_, conductor):
        note = await conductor.run(rollout())
        assert b.spool.get("r").outcome == note.outcome
    failure = note.outcome.failure
    assert note.attempts == 2 and note.outcome.reward is None and not note.outcome.turn_rewards
    assert failure and failure.kind is FailureKind.VERIFIER and failure.reason is Reason.REWARD
    assert says in failure.message


@pytest.mark.anyio
async def test_a_rollout_without_a_reward_that_is_weighed_fails_alone(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> dict[str, Any]:
        await ask_model(context)
        second = context.session_id.endswith(".2")
        return {"reward": 1.0, "rewards": {"answer": 1.0, **({"style": 0.5} if second else {})}}

    async with bench(tmp_path, agent) as b, b.conducting(rewards=("answer", "style")) as (_, conductor):
        note = await conductor.run(rollout())
        (first, _) = b.ledger.attempts("r")
    assert note.outcome.reward == 1.0 and note.attempts == 2
    assert first.failure and "has no reward named 'style'; it has: answer" in first.failure.message
