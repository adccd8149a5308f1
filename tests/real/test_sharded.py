"""The sharded trainer with two ranks on the CPU, against one process that trains on the same groups."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from afield.errors import DamagedFile, Unavailable, UsageError
from afield.interfaces.weight_probe import read_weight_probe
from afield.runs.training_record import decode
from afield.settings.trainer import LoraOptions
from afield.trainers.fsdp.trainer import FSDPTrainer
from afield.trainers.grpo import GRPO
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import (
    FinishReason,
    Group,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.tiny_model import build_tiny_model

pytestmark = pytest.mark.real  # a dozen processes that each load torch
SETTINGS = {"lr": 1e-3, "eps": 1e-4, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("sharded") / "model", hidden=32, tied=True)


@pytest.fixture
def two_ranks(model_path: Path) -> Iterator[Callable[..., FSDPTrainer]]:
    """Start trainers of two ranks; they end with the test, also when it fails."""
    with ExitStack() as trainers:

        def start(**settings: Any) -> FSDPTrainer:
            return trainers.enter_context(closing(FSDPTrainer(model_path, devices=2, **settings)))

        yield start


def branching_tree(rng: random.Random, stem: tuple[int, ...]) -> TurnTree:
    """Two turns after a prompt all share, and a third that branches from the first."""
    tree = TurnTree()
    for n, parent in enumerate((None, "t0", "t0")):
        sampled = tuple(rng.randrange(300) for _ in range(rng.randint(2, 5)))
        tree.add(
            Turn(
                id=f"t{n}",
                root="root",
                parent=parent,
                delta_ids=(*(stem if parent is None else ()), *(rng.randrange(300) for _ in range(3))),
                token_ids=sampled,
                logprobs=tuple(-rng.uniform(5.0, 7.0) for _ in sampled),
                versions=(VersionSpan(0, len(sampled), 0, 0),),
                finish_reason=FinishReason.STOP,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(temperature=0.9),
                digest=f"d{n}",
            )
        )
    return tree


def group(name: str, seed: int, rollouts: int = 5) -> Group:
    rng = random.Random(seed)
    stem = tuple(rng.randrange(300) for _ in range(6))
    finished = []
    for n in range(rollouts):
        rollout = Rollout(id=f"{name}-{n}", exp_id="exp", group_id=name, task=Task("task", {}))
        outcome = Outcome(rollout_id=rollout.id, attempt=1, reward=float(n % 3))
        rows = linear(branching_tree(rng, stem)).trajectories
        finished.append(RolloutResult(rollout=rollout, outcome=outcome, trajectories=rows))
    return Group(id=name, task_id="task", epoch=0, split=Split.TRAIN, finished=tuple(finished))


BATCHES = [[group("a", 1), group("b", 2, 3)], [group("c", 3, 7)], [group("d", 4)]]


def weights(trainer: GRPO | FSDPTrainer, directory: Path) -> dict[str, torch.Tensor]:
    trainer.export(directory)
    adapter = directory / "adapter_model.safetensors"
    return load_file(adapter if adapter.is_file() else directory / "model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


CASES = {
    "checkpointed, several updates and passes": {
        "checkpointing": True,
        "minibatches": 2,
        "epochs": 2,
        "max_tokens_per_pass": 40,
    },
    "padded, with a reference": {"layout": "padded", "kl": 0.1, "loss": "gspo"},
    "adapters, with a reference": {"lora": LoraOptions(rank=4, alpha=8, publish="merged"), "kl": 0.1},
    "adapters, published alone": {"lora": LoraOptions(rank=4, alpha=8, publish="adapter")},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(model_path, tmp_path, two_ranks, case):
    settings = {**SETTINGS, **CASES[case]}
    alone, ranks = GRPO(model_path, **settings), two_ranks(**settings)
    begin = weights(alone, tmp_path / "v0")
    for batch in BATCHES[:2]:
        one, two = alone.step(batch), ranks.step(batch)
        assert (one.rollouts, one.tokens) == (two.rollouts, two.tokens)
        assert one.metrics.keys() == two.metrics.keys()
        for name in ("loss", "grad_norm", "entropy", "sampler_trainer_logprob_diff_max", "row_tokens"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4, abs=1e-6)
    ours, theirs = weights(alone, tmp_path / "one"), weights(ranks, tmp_path / "two")
    assert apart(ours, begin) > 5e-4
    assert apart(ours, theirs) < 1e-6
    told, expected = read_weight_probe(tmp_path / "two"), read_weight_probe(tmp_path / "one")
    assert told is not None
    assert expected is not None
    assert told.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_two_ranks_scale_the_loss_in_float16_as_one_process_does(model_path, two_ranks):
    settings = {**SETTINGS, "dtype": "float16"}
    alone, ranks = GRPO(model_path, **settings), two_ranks(**settings)
    one, two = alone.step(BATCHES[0]), ranks.step(BATCHES[0])
    assert two.metrics["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=0.02)
    assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=0.02, abs=1e-3)


def test_a_run_continues_bit_for_bit_and_with_another_number_of_devices(model_path, tmp_path, two_ranks):
    ranks, again = two_ranks(**SETTINGS), two_ranks(**SETTINGS)
    for batch in BATCHES[:2]:
        ranks.step(batch)
    ranks.save(tmp_path / "checkpoint")
    again.restore(tmp_path / "checkpoint")
    alone = GRPO(model_path, **SETTINGS)
    alone.restore(tmp_path / "checkpoint")
    assert alone.steps == 2
    assert ranks.step(BATCHES[2]) == again.step(BATCHES[2])
    alone.step(BATCHES[2])
    expected = weights(ranks, tmp_path / "unbroken")
    assert apart(weights(again, tmp_path / "again"), expected) == 0
    assert apart(weights(alone, tmp_path / "alone"), expected) < 1e-6
    alone.save(tmp_path / "by one")
    ranks.restore(tmp_path / "by one")


def test_a_killed_rank_is_resumed_bit_for_bit_from_a_checkpoint_that_was_written_meanwhile(
    model_path, tmp_path, two_ranks
):
    ranks = two_ranks(**SETTINGS)
    ranks.step(BATCHES[0])
    finish = ranks.begin_save(tmp_path / "checkpoint")
    ranks.step(BATCHES[1])  # the checkpoint is of the step before, whatever is trained while it is written
    assert not (tmp_path / "checkpoint").exists()
    finish()
    assert {path.name for path in (tmp_path / "checkpoint" / "shards").glob("__*")} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }
    expected = weights(ranks, tmp_path / "unbroken")
    ranks.begin_save(tmp_path / "lost")
    os.kill(ranks._ranks[1].process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="rank 1 of 2 failed: it was killed by SIGKILL"):
        ranks.step(BATCHES[2])
    assert not (tmp_path / "lost").exists()  # a checkpoint without all shards never gets its name
    again = two_ranks(**SETTINGS)
    again.restore(tmp_path / "checkpoint")
    again.step(BATCHES[1])
    assert apart(weights(again, tmp_path / "again"), expected) == 0
    alone = GRPO(model_path, **SETTINGS)
    alone.restore(tmp_path / "checkpoint")
    assert alone.steps == 1
    alone.step(BATCHES[1])
    assert apart(weights(alone, tmp_path / "alone"), expected) < 1e-6


def test_four_ranks_learn_what_one_process_learns_and_read_shards_of_two(model_path, tmp_path, two_ranks):
    alone, two = GRPO(model_path, **SETTINGS), two_ranks(**SETTINGS)
    with closing(FSDPTrainer(model_path, devices=4, **SETTINGS)) as four:
        for trainer in (alone, two, four):
            trainer.step(BATCHES[0])
        expected = weights(alone, tmp_path / "one")
        assert apart(weights(two, tmp_path / "two"), expected) < 1e-6
        assert apart(weights(four, tmp_path / "four"), expected) < 1e-6
        two.save(tmp_path / "checkpoint")
        four.restore(tmp_path / "checkpoint")
        assert apart(weights(four, tmp_path / "restored"), weights(two, tmp_path / "two")) == 0
        for trainer in (two, four):
            trainer.step(BATCHES[1])
        assert apart(weights(four, tmp_path / "four"), weights(two, tmp_path / "two")) < 1e-6


def test_shards_of_another_model_or_cut_off_ones_are_refused_by_name(model_path, tmp_path, two_ranks):
    ranks = two_ranks(**SETTINGS)
    ranks.save(tmp_path / "checkpoint")
    other = GRPO(build_tiny_model(tmp_path / "other", hidden=48, tied=True), **SETTINGS)
    with pytest.raises(UsageError, match=r"the checkpoint has \[\d+, 32\] for .* the model \[\d+, 48\]"):
        other.restore(tmp_path / "checkpoint")
    shard = tmp_path / "checkpoint" / "shards" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(DamagedFile, match="shards cannot be read"):
        ranks.restore(tmp_path / "checkpoint")


def test_a_restored_run_has_its_own_settings_on_several_devices_too(model_path, tmp_path, two_ranks):
    ranks = two_ranks(**SETTINGS)
    ranks.step(BATCHES[0])
    ranks.save(tmp_path / "checkpoint")
    settings = {**SETTINGS, "eps": 1e-2, "weight_decay": 0.5}
    alone, two = GRPO(model_path, **settings), two_ranks(**settings)
    for trainer in (alone, two):
        trainer.restore(tmp_path / "checkpoint")
        trainer.step(BATCHES[1])
    assert apart(weights(two, tmp_path / "two"), weights(alone, tmp_path / "one")) < 1e-6


def test_what_is_refused_leaves_the_ranks_as_they_were(tmp_path, two_ranks):
    ranks = two_ranks(**SETTINGS)
    ranks.step(BATCHES[0])
    before = weights(ranks, tmp_path / "before")
    with pytest.raises(UsageError, match="more than once"):
        ranks.step([*BATCHES[1], *BATCHES[1]])
    with pytest.raises(UsageError, match="holds no trainer"):
        ranks.restore(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be written"):
        ranks.save(tmp_path / "file" / "checkpoint")
    assert apart(weights(ranks, tmp_path / "after"), before) == 0
    ranks.step(BATCHES[1])


def test_killed_rank_raises_unavailable_with_its_number_and_signal(two_ranks):
    ranks = two_ranks(**SETTINGS)
    victim = ranks._ranks[1].process
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match=r"rank 1 of 2 failed: it was killed by SIGKILL; .*checkpoint"):
        ranks.step(BATCHES[0])
    assert all(rank.process.poll() is not None for rank in ranks._ranks)
    with pytest.raises(Unavailable, match="rank 1 of 2 failed"):
        ranks.step(BATCHES[0])


def test_a_model_that_does_not_exist_is_named_as_by_one_process(tmp_path):
    with pytest.raises(UsageError, match="nowhere is not a model directory"):
        FSDPTrainer(tmp_path / "nowhere", devices=2, **SETTINGS)


@pytest.mark.parametrize("lora", [None, "merged", "adapter"])
def test_ranks_publish_the_bits_of_one_process(model_path, tmp_path, two_ranks, lora):
    settings = {**SETTINGS, "seed": 4}
    if lora:
        settings["lora"] = LoraOptions(rank=4, alpha=8, publish=lora)
    alone = GRPO(model_path, **settings)
    with_ranks = two_ranks(**settings)
    alone.step(BATCHES[0])
    alone.save(tmp_path / "saved")
    with_ranks.restore(tmp_path / "saved")  # the very same masters
    name = "adapter_model.safetensors" if lora == "adapter" else "model.safetensors"
    told = [
        trainer.publish(tmp_path / where, version=9, dtype="bfloat16")
        for trainer, where in ((alone, "one"), (with_ranks, "two"))
    ]
    one, two = (load_file(tmp_path / where / name) for where in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}
    assert told[1] == pytest.approx(told[0], rel=1e-4)
    probes = [read_weight_probe(tmp_path / where) for where in ("one", "two")]
    assert probes[1].logprobs == pytest.approx(probes[0].logprobs, abs=1e-4)


def test_two_ranks_record_the_tokens_that_one_process_records(model_path, two_ranks):
    settings = {**SETTINGS, "record_training": True, "minibatches": 2, "max_tokens_per_pass": 40}
    alone, ranks = GRPO(model_path, **settings), two_ranks(**settings)
    one, other = alone.step(BATCHES[0]).records, ranks.step(BATCHES[0]).records
    assert one.keys() == other.keys()
    for rollout_id in one:
        a, b = decode(one[rollout_id]), decode(other[rollout_id])
        assert (a.turns, a.reasons) == (b.turns, b.reasons)
        for name in a.columns:
            assert list(a.columns[name]) == pytest.approx(
                list(b.columns[name]), rel=1e-3, abs=1e-4, nan_ok=True
            )
