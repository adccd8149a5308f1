"""Batches that were tampered with, shuffled or made by hand: what is told of them, and by which turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from msgspec import structs

from afield import trajectories
from afield.advantages import compute_advantages
from afield.batches.groups import from_groups, to_groups
from afield.batches.jsonl import read_jsonl, write_jsonl
from afield.batches.parquet import read_parquet, write_parquet
from afield.batches.rows import Batch
from afield.batches.tensors import from_tensordict, to_tensordict
from afield.batches.tree import to_tree
from afield.errors import UsageError
from afield.turn_tree import TurnTree
from afield.types import Group, Outcome, Rollout, RolloutResult, Split, Task, Trajectory, Turn
from support.random_groups import branching, group, turn


def rewritten(path: Path, line: int, change: Callable[[dict], object]) -> Path:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines[line])
    path.write_text("".join(json.dumps(text) + "\n" for text in lines))
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A head, two records, then two rows of each rollout: t1 and t2; t3, behind t1."""
    write_jsonl(tmp_path / "batch.jsonl", from_groups([group(branching("g-1", 1.0), branching("g-2", 0.0))]))
    return tmp_path / "batch.jsonl"


@pytest.mark.parametrize(
    ("line", "change", "says"),
    [
        (
            4,
            lambda row: row["prompt_ids"].__setitem__(0, 9),
            "turn t3: its prompt does not begin with the tokens of its parent, turn t1",
        ),
        (
            4,
            lambda row: row.update(prompt_ids=[1, 2]),
            "turn t3: its prompt does not begin with the tokens of its parent, turn t1",
        ),
        (
            4,
            lambda row: row["turns"][0].update(parent="t9"),
            "turn t3: its parent t9 does not come before it",
        ),
        (3, lambda row: row["turns"][1].update(parent=""), "turn t2: the row has this turn after t1"),
        (3, lambda row: row["logprobs"].__setitem__(0, 5.0), "turn t1: the log-probability 5 is above 0"),
        (3, lambda row: row["logprobs"].__setitem__(0, None), "turn t1: Expected `float`, got `null`"),
        (3, lambda row: row["response_ids"].__setitem__(0, 2**63), "turn t1: token id 9223372036854775808"),
        (3, lambda row: row.update(turns="no"), r"turn \(none\): Expected `array`"),
    ],
)
def test_a_line_that_was_tampered_with_is_refused_by_rollout_and_turn(
    written: Path, line: int, change: Callable[[dict], object], says: str
) -> None:
    with pytest.raises(UsageError, match=f"rollout g-1, {says}"):
        read_jsonl(rewritten(written, line, change))


def test_rows_of_several_turns_are_not_rows_per_turn(written: Path) -> None:
    with pytest.raises(
        UsageError, match="rollout g-1, turn t1: the row has 2 turns; form per_turn allows one"
    ):
        read_jsonl(rewritten(written, 0, lambda head: head.update(form="per_turn")))


def test_weights_that_are_not_the_rows_parts_are_refused() -> None:
    tensors = to_tensordict(from_groups([group(branching("g-1", 1.0))]), pad_token_id=0)
    tensors["weight"] = tensors["weight"].flip(0)
    with pytest.raises(UsageError, match=r"rollout g-1, turn t1: weight 0\.4.* trained tokens, 3 of 5"):
        from_tensordict(tensors)


@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("temperature", (0, 0), 0.5, "turn t1: temperature is 0.5 at response token 0, where 1.0 belongs"),
        ("rollout_log_probs", (1, 3), -1.0, "turn t3: rollout_log_probs is -1.0 at response token 3"),
    ],
)
def test_tensors_that_say_more_than_the_rows_are_refused(
    name: str, place: tuple[int, int], value: float, says: str
) -> None:
    tensors = to_tensordict(from_groups([group(branching("g-1", 1.0))]), pad_token_id=0)
    tensors[name][place] = value
    with pytest.raises(UsageError, match=f"rollout g-1, {says}"):
        from_tensordict(tensors)


def test_rows_come_back_whatever_order_they_are_in(tmp_path: Path) -> None:
    given = [group(branching("g-1", 1.0), branching("g-2", 0.0))]
    batch = from_groups(given)
    tensors = to_tensordict(batch, pad_token_id=0, dtype=torch.float64)
    write_parquet(tmp_path / "batch.parquet", batch)
    table = pyarrow.parquet.read_table(tmp_path / "batch.parquet")
    pyarrow.parquet.write_table(table.take([3, 1, 0, 2]), tmp_path / "batch.parquet")
    read = read_parquet(tmp_path / "batch.parquet")
    assert isinstance(read, Batch)
    for found in (from_tensordict(tensors[torch.tensor([3, 1, 0, 2])]), read):
        assert to_groups(found) == to_groups(batch)


@pytest.mark.parametrize("form", ["linear", "tree"])
def test_a_table_that_lacks_a_column_or_a_value_says_which(tmp_path: Path, form: str) -> None:
    batch = from_groups([group(branching("g-1", 1.0))])
    path = tmp_path / "batch.parquet"
    write_parquet(path, batch if form == "linear" else to_tree(batch, share=False))
    table = pyarrow.parquet.read_table(path)
    for name in table.column_names:
        pyarrow.parquet.write_table(table.drop_columns([name]), path)
        with pytest.raises(UsageError, match=f"has no column '{name}'"):
            read_parquet(path)
        lines = table.to_pylist()
        lines[0][name] = None
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines, schema=table.schema), path)
        with pytest.raises(
            UsageError, match=r"row 0: rollout g-1|rows of 1 rollouts, but its metadata states"
        ):
            read_parquet(path)


def other_context(row: Trajectory) -> Trajectory:
    return structs.replace(row, token_ids=(9, *row.token_ids[1:]))


def other_version(row: Trajectory) -> Trajectory:
    return structs.replace(row, versions=tuple(structs.replace(s, low=0) for s in row.versions))


def other_temperature(row: Trajectory) -> Trajectory:
    return structs.replace(row, turns=tuple(structs.replace(t, temperature=0.5) for t in row.turns))


@pytest.mark.parametrize("damage", [other_context, other_version, other_temperature])
def test_rows_are_compared_with_all_that_was_recorded(damage: Callable[[Trajectory], Trajectory]) -> None:
    good = branching("g-1", 1.0)
    wrong = structs.replace(good, trajectories=(good.trajectories[0], damage(good.trajectories[1])))
    with pytest.raises(UsageError, match=r"rollout g-1, turn t[13]: "):
        from_groups([group(wrong)])


def alone(turns: tuple[Turn, ...], *, kept: bool) -> Group:
    made = trajectories.linear(TurnTree(turns)).trajectories
    return group(structs.replace(branching("g-1", 1.0), trajectories=made, turns=turns if kept else ()))


@pytest.mark.parametrize("kept", [True, False])
def test_twins_that_sampled_the_same_keep_their_own_descendants(kept: bool) -> None:
    turns = (
        turn("a1", None, (1, 2), (3, 4)),
        turn("a2", "a1", (5,), (6,)),
        turn("b1", None, (1, 2), (3, 4)),
        turn("b2", "b1", (5,), (7,)),
    )
    batch = from_groups([alone(turns, kept=kept)])
    assert [owned.parent for row in batch.rows for owned in row.turns] == ["", "a1", "", "b1"]
    assert to_tree(batch).to_rows() == batch


def test_a_group_in_which_all_are_equal_counts_in_the_deviation_of_its_batch() -> None:
    def rewarded(name: str, *rewards: float) -> Group:
        members = [
            RolloutResult(
                rollout=Rollout(id=f"{name}-{n}", exp_id="exp", group_id=name, task=Task("t", {})),
                outcome=Outcome(rollout_id=f"{name}-{n}", attempt=1, reward=reward),
            )
            for n, reward in enumerate(rewards)
        ]
        return Group(id=name, task_id="t", epoch=0, split=Split.TRAIN, finished=tuple(members))

    got = compute_advantages(
        [rewarded("a", 1.0, 1.0), rewarded("b", 0.0, 1.0)], "reinforce_plus_plus_baseline", eps=0
    )
    deviation = float(torch.tensor([0.0, 0.0, -0.5, 0.5]).std())
    wanted = {"a-0": 0.0, "a-1": 0.0, "b-0": -0.5 / deviation, "b-1": 0.5 / deviation}
    assert got == pytest.approx(wanted)
