"""What a sceptical reader of the trainers tried: odd batches, odd rewards, odd settings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from afield import factory
from afield.batches.jsonl import read_jsonl
from afield.cli.main import main
from afield.cli.train import add, resume, save_config
from afield.errors import Unavailable, UsageError
from afield.factory.tuner import open_tuner
from afield.orchestrator.state import RunDirectory, RunState
from afield.sdk.agent import Context
from afield.settings.environment import Environment
from afield.settings.train import train_config
from afield.settings.values import assigned
from afield.trainers.batch import to_batch
from afield.trainers.grpo import GRPO
from afield.trainers.micro_batches import MicroBatch, split_micro_batches, token_logprobs
from afield.trainers.model import PolicyModel
from afield.trainers.packing import pack
from afield.trainers.tinker import Objective, SampledReply, Tuner, supervised_row
from afield.trainers.tree_attention import TokenTree, tree_pass
from afield.trajectories import linear
from afield.types import FailureKind, Message, Reason, Rollout, RolloutResult, Sampling, Task, ToolCall
from support.in_process_collection import ask_model, collection
from support.tiny_model import build_tiny_model
from support.training_groups import finished, forest, group, group_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("review") / "model", hidden=32, max_positions=128)


# --- layers that are computed again --------------------------------------------------------------


def test_a_policy_with_checkpointing_attends_once_and_has_the_same_gradient(model_path: Path) -> None:
    """The model as a whole stays in evaluation mode; only its layers believe to be training."""
    parts = [finished(str(n), float(n), linear(forest(n)).trajectories) for n in range(3)]
    rows = to_batch([group(*parts)], {f"g-{n}": 1.0 for n in range(3)}).rows
    (batch,) = split_micro_batches(rows, 10_000, CPU)
    tree = TokenTree(pack([row.trajectory.token_ids for row in batch.rows]), CPU, "prefix")
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(model_path, device=CPU, checkpointing=checkpointing)
        with tree_pass(tree, policy.model) as walked:
            assert walked.attention.first is checkpointing
            walked.used = True
        gradients.append(gradient(policy, batch._replace(layout=tree)))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-6


def gradient(policy: PolicyModel, batch: MicroBatch) -> torch.Tensor:
    token_logprobs(policy.model, batch).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable if p.grad is not None])


# --- rewards that name what is not there ---------------------------------------------------------


def rollout(name: str = "r") -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": 0}))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("named", "says"),
    [({"t99": 1.0}, "'t99' has a reward, but there is no such turn"), ({"t1": 1.0, "0": 1.0}, "two rewards")],
)
async def test_a_reward_of_no_turn_is_the_failure_of_its_rollout(
    tmp_path: Path, named: dict[str, float], says: str
) -> None:
    async def agent(task: dict[str, Any], context: Context) -> dict[str, Any]:
        await ask_model(context)
        return {"reward": 1.0, "turn_rewards": named}

    async with collection(tmp_path, agent) as b, b.runner(retries={FailureKind.VERIFIER: 1}) as (_, runner):
        summary = await runner.run(rollout())
        assert b.rollout_store.get("r").outcome == summary.outcome
    failure = summary.outcome.failure
    assert summary.attempts == 2 and summary.outcome.reward is None and not summary.outcome.turn_rewards
    assert failure and failure.kind is FailureKind.VERIFIER and failure.reason is Reason.REWARD
    assert says in failure.message


@pytest.mark.anyio
async def test_a_rollout_without_a_reward_that_is_weighed_fails_alone(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> dict[str, Any]:
        await ask_model(context)
        second = context.session_id.endswith(".2")
        return {"reward": 1.0, "rewards": {"answer": 1.0, **({"style": 0.5} if second else {})}}

    async with collection(tmp_path, agent) as b, b.runner(rewards=("answer", "style")) as (_, runner):
        summary = await runner.run(rollout())
        (first, _) = b.run_state.attempts("r")
    assert summary.outcome.reward == 1.0 and summary.attempts == 2
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
def test_invalid_trainer_settings_are_refused_before_anything_is_collected(
    model_path: Path, words: list[str], says: str
) -> None:
    config = {"agent": "agent.py", "model": str(model_path), "tasks": "tasks.jsonl"}
    with pytest.raises(UsageError, match=says):
        factory.trainer(train_config(None, {**config, **assigned(words)}))


def test_a_run_that_lacked_memory_continues_in_smaller_parts_and_learns_nothing_else(
    tmp_path: Path, model_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.write_tasks([Task("t", {})])
    (tmp_path / "agent.py").write_text("def agent(task): ...\n")
    given = {"agent": f"{tmp_path / 'agent.py'}:agent", "model": str(model_path), "tasks": "tasks.jsonl"}
    save_config(run, train_config(None, given))
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    told = [
        "learn.max_tokens_per_pass=512",
        "learn.checkpointing=true",
        "learn.devices=2",
        "learn.device=cpu",
    ]
    words = [word for key in told for word in ("--set", key)]
    changed = parser.parse_args(["train", "--resume", "run", *words])
    config, _ = resume(run, changed, "train", Environment.read())
    assert (config.learn.max_tokens_per_pass, config.learn.devices) == (512, 2)
    changed_words = ["train", "--resume", "run", "--set"]
    for other in ("learn.loss=cispo", "learn.lora.rank=4", "learn.dtype=bfloat16"):
        with pytest.raises(UsageError, match="learn cannot change in a resumed run"):
            resume(run, parser.parse_args([*changed_words, other]), "train", Environment.read())


def test_too_little_memory_says_what_to_do(model_path: Path) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")

    trainer = GRPO(model_path, lr=1e-3, device="cpu")
    trainer.model.get_decoder().layers[0].register_forward_hook(full)
    with pytest.raises(
        Unavailable, match=r"\(CUDA out of memory\); resume with max_tokens_per_pass below 16384"
    ):
        trainer.step([group_of([1.0, 0.0])])


# --- what a step says and refuses ----------------------------------------------------------------


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_without_gradient_reports_the_sampler_trainer_difference(
    model_path: Path, minibatches: int
) -> None:
    flat = group_of([0.5, 0.5])
    metrics = GRPO(model_path, lr=1e-2, device="cpu", minibatches=minibatches).step([flat]).metrics
    assert metrics["sampler_trainer_logprob_diff_max"] >= metrics["sampler_trainer_logprob_diff_mean"] > 0
    assert "grad_norm" not in metrics
    with pytest.raises(UsageError, match=r"rollout \S+, turn \S+: sampler and trainer differ by .*"):
        GRPO(model_path, lr=1e-2, device="cpu", max_logprob_diff=1e-6).step([flat])


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"loss": "dpo"}, "unknown loss 'dpo'; choose one of: ppo, "),
        ({"aggregate": "mean"}, "unknown aggregate 'mean'; choose one of: rollout, "),
        ({"importance": "is"}, "unknown importance 'is'; choose one of: token, "),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'; choose one of: k1, "),
        ({"minibatches": 0}, "minibatches = 0 must be at least 1"),
        ({"epochs": -1}, "epochs = -1 must be at least 1"),
        ({"lr": -1.0}, r"lr = -1\.0 must be 0 or positive"),
    ],
)
def test_grpo_refuses_unknown_choices_by_name(model_path: Path, choice: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        GRPO(model_path, **{"lr": 1e-2, "device": "cpu", **choice})


# --- a loop of one's own -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuner(model_path: Path):
    with open_tuner(model_path, lr=1e-3, slots=4) as made:
        yield made


@pytest.fixture(scope="module")
def replies(tuner: Tuner) -> list[SampledReply]:
    return tuner.sample([5, 6, 7], 2, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"aggregate": "mean"}, "unknown aggregate 'mean'; choose one of: rollout, token, constant"),
        ({"aggregate": "constant", "length": 0}, "length = 0 must be at least 1"),
        ({"num_rollouts": -1}, "num_rollouts = -1 must be at least 1"),
        ({"num_rollouts": 0}, "num_rollouts = 0 must be at least 1"),
        ({"num_rollouts": 8, "aggregate": "token"}, "aggregate 'token' divides by tokens"),
        ({"loss": lambda seen: torch.zeros_like(seen.logp)}, "returned no gradient"),
        ({"loss": lambda seen: None}, "returned no gradient"),
        ({"proximal": [[math.nan] * 4] * 2}, "proximal log-probability is not a finite number"),
        ({"loss": "dr_grpo"}, "loss 'dr_grpo' divides by a constant; give aggregate='constant'"),
        ({"loss": Objective(loss="dpo")}, "unknown loss 'dpo'; choose one of: ppo, "),  # pyright: ignore[reportArgumentType]
        ({"loss": Objective(importance="is")}, "unknown importance 'is'; choose one of: token, "),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_loop_that_asks_for_what_cannot_be_is_reported_and_adds_nothing_up(
    tuner: Tuner, replies: list[SampledReply], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuner.forward_backward([reply.to_row(1.0) for reply in replies], **settings)
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
    tuner: Tuner, replies: list[SampledReply], advantages: tuple[float, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuner.forward_backward([structs.replace(replies[0].to_row(1.0), advantages=advantages)])


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_an_invalid_learning_rate_changes_no_weights(
    tuner: Tuner, replies: list[SampledReply], lr: float
) -> None:
    tuner.forward_backward([reply.to_row(1.0) for reply in replies])
    with pytest.raises(UsageError, match=r"lr = .* must be 0 or positive"):
        tuner.optim_step(lr)
    tuner.optimizer.zero_grad()
    assert all(bool(torch.isfinite(weight).all()) for weight in tuner.policy.trainable)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "has an empty prompt; it needs at least one id"),
        ([99999], "has the id 99999; the vocabulary has "),
        ([1, {"role": "user", "content": "hi"}], "a prompt is ids or messages; this one has both"),
        ([{"role": "user", "text": "hi"}], "a message has 'text'; it may have: content, "),
        ([{"role": "alien", "content": "hi"}], "message .*alien.* cannot be read"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "message .*tool_calls.* cannot be read"),
    ],
)
def test_a_prompt_that_cannot_be_is_reported_and_none_of_it_is_left_out(
    tuner: Tuner, prompt: Any, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuner.sample(prompt, 1, Sampling(max_tokens=4))
    with pytest.raises(UsageError, match="n = 0 must be at least 1"):
        tuner.sample("hi", 0)


def test_messages_may_be_those_of_the_openai_api(tuner: Tuner) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    ours = [
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=(ToolCall("a", "add", '{"x": 1}'),)),
        Message(role="tool", tool_call_id="a", content="2"),
    ]
    short = Sampling(max_tokens=2)
    assert tuner.sample(messages, 1, short)[0].prompt_ids == tuner.sample(ours, 1, short)[0].prompt_ids


def test_an_advantage_may_be_a_number_of_torch(replies: list[SampledReply]) -> None:
    assert replies[0].to_row(torch.tensor(0.5)) == replies[0].to_row(0.5)  # pyright: ignore[reportArgumentType]
    assert replies[0].to_row(torch.tensor([0.5])) == replies[0].to_row([0.5])  # pyright: ignore[reportArgumentType]


def test_after_a_gradient_that_is_not_finite_a_loop_continues(
    tuner: Tuner, replies: list[SampledReply]
) -> None:
    data = [reply.to_row(1.0) for reply in replies]
    tuner.forward_backward(data, lambda seen: seen.logp * math.inf)
    with pytest.raises(UsageError, match="the gradient's norm is nan"):
        tuner.optim_step()
    tuner.forward_backward(data)
    assert math.isfinite(tuner.optim_step())


def test_nothing_to_imitate_is_refused() -> None:
    with pytest.raises(UsageError, match="rollout a: there are no tokens to imitate"):
        supervised_row("a", [1, 2], [])


# --- named rewards -------------------------------------------------------------------------------


def named(reward: float, **rewards: float) -> RolloutResult:
    name = str(int(reward))
    made = finished(name, reward, linear(forest(int(reward))).trajectories, "exp-e0-t")
    return structs.replace(made, outcome=structs.replace(made.outcome, rewards=rewards))


def test_a_step_tells_the_weighed_reward_that_it_learned_from(model_path: Path) -> None:
    trainer = GRPO(model_path, lr=1e-3, device="cpu", rewards={"answer": 1.0, "style": 0.5})
    parts = (named(7.0, answer=1.0, style=1.0), named(8.0, answer=0.0, style=0.0))
    assert trainer.step([group(*parts, name="exp-e0-t")]).metrics["weighed_reward"] == 0.75
    assert (
        "weighed_reward"
        not in GRPO(model_path, lr=1e-3, device="cpu").step([group(*parts, name="exp-e0-t")]).metrics
    )


def test_an_export_has_the_weighed_rewards_that_a_run_was_trained_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text('{"learn": {"rewards": {"answer": 1.0, "style": 0.5}}}')
    run.write_rollouts(1, [named(7.0, answer=1.0, style=1.0), named(8.0, answer=0.0, style=0.0)])
    run.append_metrics({"step": 1, "dropped_groups": {}})
    with RunState(run.run_state) as run_state:
        run_state.begin_group("exp-e0-t", 0, 0)
        run_state.complete_group("exp-e0-t", ["exp-e0-t-7", "exp-e0-t-8"], None, None)
    assert main(["export", str(run.path), "--out", str(tmp_path / "batch.jsonl")]) == 0
    batch = read_jsonl(tmp_path / "batch.jsonl")
    assert [record.score for record in batch.rollouts] == [1.5, 0.0]
