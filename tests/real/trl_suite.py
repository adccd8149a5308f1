"""Run by `test_trl.py` in an environment with stock TRL: its real classes, afield's rollouts."""

from __future__ import annotations

import inspect
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutWorkerProtocol,
    WeightTransferProtocol,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import trl_cpu
from afield import demo
from afield.advantages import compute_advantages
from afield.batches.rows import rows_of
from afield.demo import shop
from afield.engines.torch.weights import read_model
from afield.errors import NoRewards, Unavailable, UsageError
from afield.integrations.trl import Rollouts, SyncRollouts
from afield.integrations.trl.rows import MeanLength, RowConfig, samples
from afield.integrations.trl.sync import check_version
from afield.integrations.trl.weights import write
from afield.settings.trainer import Aggregate
from afield.trainers.batch import to_batch
from afield.trainers.losses import LossInputs, Objective, compute_loss, token_weights
from afield.trainers.micro_batches import split_micro_batches, token_logprobs
from afield.trainers.model_directory import load_model
from afield.trainers.tree_attention import install_tree_attention
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)

pytestmark = pytest.mark.real
HERE = Path(__file__).parent
DEMO = Path(demo.__file__).parent
POLICY = DEMO / "policy"
CLIP = (0.2, 0.28)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu() -> None:
    torch.set_num_threads(1)
    trl_cpu.install()


def arguments(out: Path, **more: Any) -> AsyncGRPOConfig:
    usual = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 32,
        "max_staleness": 1,
        "token_budget": 0,
        "epsilon": CLIP[0],
        "epsilon_high": CLIP[1],
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
    }
    return AsyncGRPOConfig(output_dir=str(out), **{**usual, **more})


def rollouts_of(folder: Path, agent: str, **more: Any) -> Rollouts:
    how = {"model": POLICY, "tasks": shop.tasks(0, 8), "directory": folder / "run", "attempt_timeout_s": 60.0}
    return Rollouts(arguments(folder / "out"), agent=agent, **{**how, **more})


# --- recorded rollouts ---------------------------------------------------------------------------


def branching(rng: random.Random, turns: int, vocabulary: int, version: int) -> TurnTree:
    """A conversation of random ids whose turns go on from any earlier one."""
    tree = TurnTree()
    for n in range(turns):
        parent = rng.choice(tree.turns).id if n else None
        sampled = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 6)))
        tree.add(
            Turn(
                id=f"t{n}",
                root="root",
                parent=parent,
                delta_ids=tuple(rng.randrange(vocabulary) for _ in range(rng.randint(2, 6))),
                token_ids=sampled,
                logprobs=(-1.0,) * len(sampled),
                versions=(VersionSpan(0, len(sampled), version, version + n % 2),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(),
                digest=f"d{n}",
            )
        )
    return tree


def recorded(seed: int, *, sizes: tuple[int, ...] = (3, 1, 6, 4), name: str = "g") -> Group:
    """The last one broke. The same prompt begins all rollouts of a real group; here they share nothing."""
    rng = random.Random(seed)
    finished: list[RolloutResult] = []
    for k, turns in enumerate((*sizes, 2)):
        failure = Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "gone") if k == len(sizes) else None
        rollout = Rollout(id=f"{name}-r{k}", exp_id="exp", group_id=name, task=Task("t", {}))
        reward = None if failure else rng.random()
        outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=reward, failure=failure)
        trajectories = linear(branching(rng, turns, 90, version=5 + k)).trajectories
        finished.append(RolloutResult(rollout=rollout, outcome=outcome, trajectories=trajectories))
    return Group(id=name, task_id="t", epoch=0, split=Split.TRAIN, finished=tuple(finished))


def test_every_row_of_every_rewarded_rollout_becomes_one_sample() -> None:
    group = recorded(0)
    made = samples(group, RowConfig(), number=7, base=4, lengths=MeanLength())
    wanted = [(f, t) for f in group.finished[:-1] for t in f.trajectories if t.owned]
    assert len(made) == len(wanted) > 4, "some of them branch"
    earned = compute_advantages([group])
    for sample, (finished, row) in zip(made, wanted, strict=True):
        assert isinstance(sample, RolloutSample)
        assert sample.input_ids.tolist() == list(row.token_ids)
        assert sample.completion_mask.tolist() == list(row.loss_mask)
        assert sample.old_log_probs.tolist() == pytest.approx(row.logprobs)
        assert sample.model_version == min(s.low for t in finished.trajectories for s in t.versions) - 4
        assert sample.group_id == 7
        assert sample.metrics["reward"] == finished.outcome.reward
        assert math.copysign(1, sample.advantage) == math.copysign(1, earned[finished.rollout.id])
    assert {f.name for f in fields(RolloutSample)} == {*RolloutSample.__slots__}
    # One for a whole row: the reason that rewards by turn are refused.
    assert {f.name: f.type for f in fields(RolloutSample)}["advantage"] in (float, "float")


def test_rollouts_weigh_the_same_whatever_their_length_and_branches() -> None:
    group = recorded(1)
    made = samples(group, RowConfig(), number=0, base=0, lengths=MeanLength())
    earned = compute_advantages([group])
    tokens = sum(int(sample.completion_mask.sum()) for sample in made)
    place = iter(made)
    for finished in group.finished[:-1]:
        mine = [next(place) for t in finished.trajectories if t.owned]
        total = sum(sample.advantage * int(sample.completion_mask.sum()) for sample in mine)
        assert total / tokens == pytest.approx(earned[finished.rollout.id] / 4)


def test_what_the_trainer_would_rescore_differently_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"rollout g-r0, turn t0: sampled at temperature 1, .* at 0\.7"):
        samples(recorded(0), RowConfig(temperature=0.7), number=0, base=0, lengths=MeanLength())


def test_the_protocols_are_met_as_trl_has_them(tmp_path: Path) -> None:
    made = rollouts_of(tmp_path, f"{HERE / 'trl_agents.py'}:branching")
    for protocol, ours in ((RolloutWorkerProtocol, made.worker), (WeightTransferProtocol, made.weights)):
        verbs = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f) and not n.startswith("_")}
        assert verbs
        for name, verb in verbs.items():
            assert list(inspect.signature(verb).parameters)[1:] == list(
                inspect.signature(getattr(ours, name)).parameters
            )
        assert all(hasattr(ours, name) for name in inspect.get_annotations(protocol))


# --- gradients -----------------------------------------------------------------------------------


def near_the_policy(groups: list[Group]) -> list[Group]:
    """The same, with log-probabilities of a sampler that was near the policy, some beyond the clip."""
    from msgspec import structs

    model = load_model(POLICY, torch.device("cpu"))
    rng = random.Random(9)

    def near(row: Any) -> Any:
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([row.token_ids])).logits[0], -1)
        logprobs = tuple(
            float(scores[p - 1, token]) + rng.uniform(-0.4, 0.4) if owned else 0.0
            for p, (token, owned) in enumerate(zip(row.token_ids, row.loss_mask, strict=True))
        )
        return structs.replace(row, logprobs=logprobs)

    return [
        structs.replace(
            group,
            finished=tuple(
                structs.replace(f, trajectories=tuple(near(t) for t in f.trajectories))
                for f in group.finished
            ),
        )
        for group in groups
    ]


def by_trl(folder: Path, samples: list[RolloutSample]) -> dict[str, torch.Tensor]:
    """The gradient of the stock trainer's own loss, through its planner, collator and tree attention."""
    doors = rollouts_of(folder, f"{HERE / 'trl_agents.py'}:branching").trainer_kwargs
    trainer = AsyncGRPOTrainer(model=str(POLICY), args=arguments(folder / "out"), **doors)
    trainer.current_gradient_accumulation_steps = 1
    keys = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
    source: Any = [{key: getattr(sample, key) for key in keys} for sample in samples]
    planned = next(iter(FixedCountBatcher(source, 1, len(samples))))
    batch = DataCollatorForRollout(0)([planned])
    model = trainer.model.eval()
    trainer.compute_loss(model, batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def by_afield(groups: list[Group], aggregate: Aggregate, layout: Any) -> dict[str, torch.Tensor]:
    model = load_model(POLICY, torch.device("cpu"))
    install_tree_attention(model)
    batch = to_batch(groups, compute_advantages(groups))
    for part in split_micro_batches(batch.rows, 10_000, torch.device("cpu"), layout):
        weight, divisor = token_weights(
            part.weight, aggregate, rollouts=len(batch.rollout_ids), tokens=batch.tokens, length=1
        )
        logp = token_logprobs(model, part)
        tokens = LossInputs(logp, part.sampler, part.sampler, part.advantage, weight, part.row)
        loss = compute_loss(tokens, Objective(clip=CLIP))
        assert 0 < float(loss.clipped.float().mean()) < 1
        (loss.total / divisor).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize(("aggregate", "seeds"), [("rollout", [3]), ("token", [4, 5, 6])])
def test_recorded_rollouts_give_the_same_gradient_through_trls_loss_and_ours(
    tmp_path: Path, aggregate: Any, seeds: list[int], layout: str, record_property: Any
) -> None:
    groups = near_the_policy([recorded(seed, name=f"g{seed}") for seed in seeds])
    recipe, lengths = RowConfig(weigh=aggregate), MeanLength()
    built = [
        sample
        for n, group in enumerate(groups)
        for sample in samples(group, recipe, number=n, base=0, lengths=lengths)
    ]
    theirs, ours = by_trl(tmp_path, built), by_afield(groups, aggregate, layout)
    assert theirs.keys() == ours.keys()
    apart = math.sqrt(sum(float((theirs[n] - ours[n]).square().sum()) for n in ours))
    error = apart / math.sqrt(sum(float(g.square().sum()) for g in ours.values()))
    record_property("relative_error", error)
    assert error <= 1e-5


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_as_a_directory_that_engines_load(tmp_path: Path, tied: bool) -> None:
    config = transformers.AutoConfig.from_pretrained(POLICY, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (tmp_path / "base").mkdir()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    frozen = "model.norm.weight"
    sent = ((n, p) for n, p in model.named_parameters() if n != frozen)
    write(tmp_path / "base", tmp_path / "v1", sent)
    found, before = (
        load_file(tmp_path / "v1" / "model.safetensors"),
        load_file(tmp_path / "base" / "model.safetensors"),
    )
    assert torch.equal(found[frozen], before[frozen]), "what is not sent stays"
    assert torch.equal(found["lm_head.weight"], model.get_output_embeddings().weight)
    loaded = read_model(tmp_path / "v1", torch.float32, torch.device("cpu"))
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_adapters_arrive_merged(tmp_path: Path) -> None:
    doors = rollouts_of(tmp_path, f"{HERE / 'trl_agents.py'}:branching").trainer_kwargs
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = AsyncGRPOTrainer(model=str(POLICY), args=arguments(tmp_path / "out"), peft_config=lora, **doors)
    trainer.model.merge_adapter()
    write(POLICY, tmp_path / "v1", trainer._streaming_iter())
    trainer.model.unmerge_adapter()
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = read_model(tmp_path / "v1", torch.float32, torch.device("cpu"))
    trainer.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        theirs, ours = trainer.model.eval()(ids).logits, loaded(ids).logits
        start = load_model(POLICY, torch.device("cpu"))(ids).logits
    assert torch.allclose(theirs, ours, atol=1e-4)
    assert not torch.allclose(theirs, start, atol=1e-2)


# --- a worker that collects ----------------------------------------------------------------------


def told(worker: Any, within_s: float, enough: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end and not enough():
        worker.check_health(60.0)
        time.sleep(0.2)
    assert enough(), f"nothing came in {within_s} s"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Rollouts]]:
    """As TRL does it when training begins: weights first, then rollouts."""
    made: list[Rollouts] = []

    def start(agent: str, **more: Any) -> Rollouts:
        rollouts = rollouts_of(tmp_path, agent, **more)
        made.append(rollouts)
        rollouts.weights.init_weight_transfer()
        send(rollouts, 1)
        rollouts.worker.start()
        return rollouts

    yield start
    for rollouts in made:
        rollouts.worker.stop()
        rollouts.weights.destroy()


def send(rollouts: Rollouts, version: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    rollouts.weights.pause()
    rollouts.weights.send_weights(iter(model.named_parameters()))
    rollouts.weights.resume()
    rollouts.worker.update_model_version(version)


def test_branches_versions_and_failures_arrive_and_a_dead_gateway_is_reported(
    started: Callable[..., Rollouts],
) -> None:
    rollouts = started(f"{HERE / 'trl_agents.py'}:branching", retries_infrastructure=0, advantage="rloo")
    worker, buffer = rollouts.worker, rollouts.worker.rollout_buffer
    told(worker, 300, lambda: buffer.qsize() >= 6)
    time.sleep(1)
    groups = {sample.group_id for sample in list(buffer.queue)}
    assert len(groups) <= 3 * 8 // 4, "no more is begun than three steps can take, if nothing branched"
    first = [buffer.get() for _ in range(6)]
    assert {sample.group_id for sample in first} == {first[0].group_id}, "a group comes together"
    assert {sample.model_version for sample in first} == {1}
    assert [int(s.completion_mask.sum()) > 0 for s in first] == [True] * 6, "3 of 4 rollouts, 2 rows each"
    for one, other in zip(first[::2], first[1::2], strict=True):
        least = min(len(one.input_ids), len(other.input_ids))
        shared = int((one.input_ids[:least] == other.input_ids[:least]).cumprod().sum())
        trained = one.completion_mask[:shared] + other.completion_mask[:shared]
        assert trained.max() == 1 and one.completion_mask[:shared].any(), "each token once"
        assert one.advantage == other.advantage
    measures = worker.metrics_queue.get(timeout=60)
    while "rollout/failed_total" not in measures:  # publications have measures of their own
        measures = worker.metrics_queue.get(timeout=60)
    assert measures["rollout/failed_total"] == 1.0
    assert measures["rollout/rows_per_rollout"] == (6, 3)
    send(rollouts, 2)
    while not buffer.empty():
        buffer.get()
    told(worker, 300, lambda: any(s.model_version == 2 for s in list(buffer.queue)) or drain(buffer))
    child = rollouts.worker._collector.start().child
    assert child is not None
    os.kill(child._process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="the gateway ended with code"):
        told(worker, 300)


def drain(buffer: Any) -> bool:
    """Rows of the version before make room for those of the next."""
    while not buffer.empty() and buffer.queue[0].model_version < 2:
        buffer.get()
    return False


def test_rollouts_that_never_get_a_reward_end_the_training_with_the_reason(
    started: Callable[..., Rollouts],
) -> None:
    worker = started(f"{HERE / 'trl_agents.py'}:broken", retries_task=0).worker
    with pytest.raises(NoRewards, match="the shop burnt down"):
        told(worker, 300)


# --- what is refused before anything starts ------------------------------------------------------


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    agent = f"{HERE / 'trl_agents.py'}:branching"
    how: dict[str, Any] = {"agent": agent, "model": POLICY, "tasks": shop.tasks(0, 2)}
    with pytest.raises(UsageError, match="token_budget is not set"):
        Rollouts(arguments(tmp_path, token_budget=None), **how)
    with pytest.raises(UsageError, match="truncated sampling"):
        Rollouts(arguments(tmp_path, top_p=0.9), **how)
    with pytest.raises(UsageError, match="give it as num_generations"):
        Rollouts(arguments(tmp_path), rollouts=8, **how)
    with pytest.raises(UsageError, match="minibatches has no effect"):
        Rollouts(arguments(tmp_path), minibatches=2, **how)
    shared = tmp_path / "shared.toml"
    shared.write_text('[train]\nminibatches = 2\n[train.learn]\ncredit = "turns"\n')
    with pytest.raises(UsageError, match=r"learn\.credit = 'turns' .* one advantage per row"):
        Rollouts(arguments(tmp_path), config=shared, **how)
    shared.write_text("[train.learn.rewards]\nfound = 1.0\n")
    with pytest.raises(UsageError, match=r"learn\.rewards is not supported"):
        Rollouts(arguments(tmp_path), config=shared, **how)
    with pytest.raises(UsageError, match="needs the whole batch"):
        Rollouts(arguments(tmp_path), advantage="reinforce_plus_plus", **how)
    with pytest.raises(UsageError, match="was used before"):
        Rollouts(arguments(tmp_path), **{**how, "tasks": [{"id": "a"}, {"id": "a"}]})


# --- the synchronous trainer ---------------------------------------------------------------------


def sync_arguments(out: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64,
        max_steps=2,
        learning_rate=1e-3,
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
    )


def test_the_synchronous_trainer_learns_through_rollout_func(tmp_path: Path) -> None:
    args = sync_arguments(tmp_path / "out")
    agent = f"{DEMO / 'agents' / 'openai_agent.py'}:agent"
    tasks = shop.tasks(0, 16)
    before = load_file(POLICY / "model.safetensors")
    with SyncRollouts(args, agent=agent, model=POLICY, tasks=tasks, directory=tmp_path / "run") as rollouts:
        trainer = GRPOTrainer(model=str(POLICY), args=args, **rollouts.trainer_kwargs)
        trainer.train()
        served = load_file(rollouts._collector.run.weights(2) / "model.safetensors")
    steps = [line for line in trainer.state.log_history if "reward" in line]
    assert len(steps) == 2
    assert all(0 <= line["reward"] <= 1 for line in steps)
    assert any(not torch.equal(before[name], served[name]) for name in before), "step 2 samples anew"


def test_rollout_func_refuses_branches_unless_told_to_keep_the_main_one(tmp_path: Path) -> None:
    args = sync_arguments(tmp_path / "out")
    how: dict[str, Any] = {"model": POLICY, "tasks": shop.tasks(0, 2), "agent": "trl_agents:branching"}
    finished = recorded(1).finished[2]
    assert len(finished.trajectories) > 1
    with pytest.raises(UsageError, match=r"rollout g-r2 has \d branches"):
        SyncRollouts(args, **how)._columns(finished, None)
    row = SyncRollouts(args, branches="main", **how)._columns(finished, None)
    assert sum(row["env_mask"]) == max(t.owned for t in finished.trajectories)
    broken = SyncRollouts(args, **how)._columns(recorded(1).finished[-1], None)
    assert not any(broken["env_mask"])


def test_rollout_func_refuses_tokens_of_other_weights() -> None:
    finished = recorded(0).finished[1]
    (row,) = rows_of(finished)
    with pytest.raises(UsageError, match="GRPOTrainer ignores the sampler's log-probabilities"):
        check_version(row, 3)
    check_version(row, 6)
    check_version(row, None)
