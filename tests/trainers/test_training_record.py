"""The training record of a step, against values computed by the bare model, one sequence at a time."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from transformers import AutoModelForCausalLM

from afield.runs.training_record import TokenRecord, decode
from afield.settings.train import train_config
from afield.trainers.fsdp.rank import ShardedGRPO
from afield.trainers.grpo import GRPO
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import Exclusion, FinishReason, Group, Sampling, Turn, TurnStatus, VersionSpan
from support.tiny_model import build_tiny_model
from support.training_groups import finished, group

REWARDS = (1.0, 0.0, 0.25, 0.5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("record") / "model", hidden=32, max_positions=64)


def branching_tree(seed: int, stem: tuple[int, ...]) -> TurnTree:
    """Four turns at two temperatures; the third branches from the first."""
    rng = random.Random(seed)
    tree = TurnTree()
    for n, parent in enumerate((None, "t0", "t0", "t2")):
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
                sampling=Sampling(temperature=1.0 if n % 2 else 0.7),
                digest=f"d{n}",
            )
        )
    return tree


TREES = {f"g-{n}": branching_tree(n, (5, 6, 7, 8)) for n in range(len(REWARDS))}


def groups() -> list[Group]:
    rows = [linear(tree).trajectories for tree in TREES.values()]
    return [group(*(finished(str(n), REWARDS[n], rows[n]) for n in range(len(REWARDS))))]


def records(trainer: GRPO, batch: list[Group] | None = None) -> dict[str, TokenRecord]:
    report = trainer.step(batch or groups())
    return {rollout_id: decode(block) for rollout_id, block in report.records.items()}


def grpo(path: Path, **settings: Any) -> GRPO:
    return GRPO(path, lr=1e-2, device="cpu", record_training=True, **settings)


@torch.no_grad()
def expected(model: Any, tree: TurnTree) -> dict[str, dict[str, list[float]]]:
    """Log-probability and entropy of each sampled token by turn, by one plain pass per turn."""
    values: dict[str, dict[str, list[float]]] = {}
    for turn in tree.turns:
        ids = tree.ids(turn.id)
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        first = len(ids) - len(turn.token_ids)
        logprobs = torch.log_softmax(logits / turn.sampling.temperature, dim=-1)
        places = range(first, len(ids))
        values[turn.id] = {
            "logprob": [float(logprobs[p - 1, ids[p]]) for p in places],
            "entropy": [float(-(logprobs[p - 1].exp() * logprobs[p - 1]).sum()) for p in places],
        }
    return values


def turn_values(record: TokenRecord, name: str) -> dict[str, list[float]]:
    return {t.id: list(record.columns[name][t.start : t.start + t.tokens]) for t in record.turns}


def check_against(path: Path, found: dict[str, TokenRecord]) -> None:
    """Log-probability, entropy, importance weight and advantage of every token."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    mean, deviation = np.mean(REWARDS), np.std(REWARDS, ddof=1) + 1e-4
    assert sorted(found) == sorted(TREES)
    for number, (rollout_id, tree) in enumerate(TREES.items()):
        record = found[rollout_id]
        assert {turn.id: turn.tokens for turn in record.turns} == {t.id: len(t.token_ids) for t in tree.turns}
        assert [a.start + a.tokens for a, _ in pairwise(record.turns)] == [t.start for t in record.turns[1:]]
        for turn_id, values in expected(model, tree).items():
            for name, numbers in values.items():
                assert turn_values(record, name)[turn_id] == pytest.approx(numbers, abs=2e-5)
            behind = np.array(values["logprob"]) - np.array(tree[turn_id].logprobs)
            weights = np.minimum(np.exp(behind), 2.0)
            assert turn_values(record, "importance")[turn_id] == pytest.approx(weights, rel=1e-4)
        advantage = (REWARDS[number] - mean) / deviation
        assert list(record.columns["advantage"]) == pytest.approx(
            [advantage] * len(record.columns["advantage"]), rel=1e-4
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "tree"},
        {"layout": "padded"},
        {"layout": "tree", "max_tokens_per_pass": 40},
        {"layout": "tree", "minibatches": 2},
        {"layout": "padded", "checkpointing": True, "epochs": 2},
    ],
    ids=str,
)
def test_record_equals_a_plain_pass_over_each_turn(model_path: Path, settings: dict[str, Any]) -> None:
    found = records(grpo(model_path, **settings))
    check_against(model_path, found)
    for record in found.values():
        assert not any(math.isnan(value) for name in record.columns for value in record.columns[name])


def test_single_update_has_ratio_one_and_masks_nothing(model_path: Path) -> None:
    for record in records(grpo(model_path)).values():
        assert set(record.columns["ratio"]) == {1.0}
        assert set(record.columns["mask"]) == {0}


def test_ratio_of_a_second_epoch_is_that_of_the_first_update(model_path: Path, tmp_path: Path) -> None:
    """The second update of a step sees the weights of a step with one update."""
    once = GRPO(model_path, lr=1e-2, device="cpu")
    once.step(groups())
    once.export(tmp_path / "once")
    before = AutoModelForCausalLM.from_pretrained(model_path).eval()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "once").eval()
    found = records(grpo(model_path, epochs=2))
    moved = clipped = 0
    for number, (rollout_id, tree) in enumerate(TREES.items()):
        old, new, record = expected(before, tree), expected(after, tree), found[rollout_id]
        for turn_id in old:
            ratios = np.exp(np.array(new[turn_id]["logprob"]) - np.array(old[turn_id]["logprob"]))
            assert turn_values(record, "ratio")[turn_id] == pytest.approx(ratios, rel=2e-4)
            moved += int((abs(ratios - 1) > 1e-3).sum())
            up = REWARDS[number] > np.mean(REWARDS)
            outside = ratios > 1.28 if up else ratios < 0.8
            if min(abs(ratios - (1.28 if up else 0.8))) > 1e-3:
                reasons = [record.reasons[int(code)] for code in turn_values(record, "mask")[turn_id]]
                assert reasons == ["clipped" if out else "" for out in outside]
                clipped += int(outside.sum())
    assert moved and clipped


def test_minibatches_record_the_ratio_of_the_update_that_a_rollout_is_in(model_path: Path) -> None:
    ratios = [set(r.columns["ratio"]) for r in records(grpo(model_path, minibatches=2)).values()]
    assert sorted(ratio == {1.0} for ratio in ratios) == [False, False, True, True]


def test_sharded_model_records_the_same_values(model_path: Path, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        found = records(ShardedGRPO(model_path, lr=1e-2, device="cpu", record_training=True, epochs=2))
    finally:
        dist.destroy_process_group()
    check_against(model_path, found)


def test_masked_tokens_have_their_reason(model_path: Path) -> None:
    (whole,) = groups()
    first = structs.replace(whole.finished[0], excluded=(Exclusion("t9", 4, "aborted"),))
    rows = linear(branching_tree(9, (1, 2))).trajectories
    equal = group(*(finished(str(n), 0.5, rows, "e") for n in (8, 9)), name="e")
    short, long = (linear(branching_tree(n, (4,) * 60 * n)).trajectories for n in (0, 1))
    mixed = group(finished("0", 0.0, short, "l"), finished("1", 1.0, long, "l"), name="l")
    found = records(grpo(model_path, importance="masked"), [group(first, *whole.finished[1:]), equal, mixed])
    turn = found["g-0"].turns[-1]
    assert (turn.id, turn.tokens, turn.start, turn.reason) == ("t9", 4, -1, "aborted")
    for rollout_id, reason in (("e-8", "no_advantage"), ("l-1", "too_long")):
        record = found[rollout_id]
        assert {record.reasons[code] for code in record.columns["mask"]} == {reason}
        assert all(map(math.isnan, record.columns["logprob"]))
    for rollout_id in TREES:
        record = found[rollout_id]
        away = [weight == 0 for weight in record.columns["importance"]]
        assert [record.reasons[c] == "importance" for c in record.columns["mask"]] == away


def test_nothing_is_recorded_unless_asked(model_path: Path) -> None:
    assert GRPO(model_path, lr=1e-2, device="cpu").step(groups()).records == {}


def test_frozen_weights_have_nothing_to_record(model_path: Path) -> None:
    with pytest.raises(Exception, match="record_training records what training computes"):
        train_config(
            None,
            {"model": str(model_path), "agent": "a.py:f", "freeze_weights": True, "record_training": True},
        )
