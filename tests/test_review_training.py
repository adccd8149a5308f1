"""What a sceptical reader of the trainers tried: odd batches, odd rewards, odd settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from afield import wiring
from afield.assembly import linear
from afield.config import assigned, train_config
from afield.errors import UsageError
from afield.sdk.context import Context
from afield.trainers.packing import pack
from afield.trainers.passes import Pass, log_probabilities, to_passes
from afield.trainers.policy import PolicyModel
from afield.trainers.rows import to_batch
from afield.trainers.tinker import Reply, Tuner, taught
from afield.trainers.tree import Tree, walk
from afield.types import FailureKind, Reason, Rollout, Sampling, Task
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


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["learn.rewards.style=nan"], "learn: rewards.style = nan must be a finite number"),
        (["learn.rewards.style=inf"], "learn: rewards.style = inf must be a finite number"),
        (['learn.lora.targets=["q_proj"]'], "learn.lora: rank = 0 trains every weight"),
        (["learn.lora.alpha=16"], "learn.lora: rank = 0 trains every weight"),
        (["learn.device=bogus"], "device 'bogus' cannot be used: .*; leave it out"),
        (["learn.device=cuda:99"], "device 'cuda:99' cannot be used"),
        (["learn.device=meta"], "device 'meta' computes nothing"),
        (["learn.device=cuda", "learn.devices=99"], "devices = 99, but this machine has"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_collected(
    model_path: Path, words: list[str], says: str
) -> None:
    given = {"agent": "agent.py", "model": str(model_path), "tasks": "tasks.jsonl"}
    with pytest.raises(UsageError, match=says):
        wiring.trainer(train_config(None, {**given, **assigned(words)}))


# --- a loop of one's own -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuner(model_path: Path):
    with Tuner.open(model_path, lr=1e-3, slots=4) as made:
        yield made


@pytest.fixture(scope="module")
def replies(tuner: Tuner) -> list[Reply]:
    return tuner.sample([5, 6, 7], 2, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"aggregate": "mean"}, "unknown aggregate 'mean'; choose one of: rollout, token, constant"),
        ({"aggregate": "constant", "length": 0}, "length = 0 must be at least 1"),
        ({"of": -1}, "of = -1 must be at least 1"),
        ({"of": 0}, "of = 0 must be at least 1"),
        ({"of": 8, "aggregate": "token"}, "of counts rollouts"),
        ({"loss": lambda seen: torch.zeros_like(seen.logp)}, "has no gradient"),
        ({"loss": lambda seen: None}, "has no gradient"),
        ({"proximal": [[math.nan] * 4] * 2}, "proximal log-probability is not a finite number"),
    ],
)
def test_a_loop_that_asks_for_what_cannot_be_is_told_so_and_adds_nothing_up(
    tuner: Tuner, replies: list[Reply], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuner.forward_backward([reply.datum(1.0) for reply in replies], **settings)
    with pytest.raises(UsageError, match="there is no gradient"):
        tuner.optim_step()


@pytest.mark.parametrize(
    ("advantages", "says"),
    [
        ((), "rollout reply-0, turn reply-0: 0 advantages for 1 turns"),
        ((1.0, 2.0), "rollout reply-0, turn reply-0: 2 advantages for 1 turns"),
        ((math.nan,), "rollout reply-0, turn reply-0: its advantage nan is not a finite number"),
    ],
)
def test_data_whose_advantages_do_not_line_up_is_refused_by_rollout_and_turn(
    tuner: Tuner, replies: list[Reply], advantages: tuple[float, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuner.forward_backward([structs.replace(replies[0].datum(1.0), advantages=advantages)])


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_a_learning_rate_that_is_none_breaks_no_weights(
    tuner: Tuner, replies: list[Reply], lr: float
) -> None:
    tuner.forward_backward([reply.datum(1.0) for reply in replies])
    with pytest.raises(UsageError, match=r"lr = .* must be 0 or positive"):
        tuner.optim_step(lr)
    tuner.updates.clear()
    assert all(bool(torch.isfinite(weight).all()) for weight in tuner.policy.trainable)


def test_nothing_to_imitate_is_refused() -> None:
    with pytest.raises(UsageError, match="rollout a: there are no tokens to imitate"):
        taught("a", [1, 2], [])
