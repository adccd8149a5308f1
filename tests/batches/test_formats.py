"""Formats: there and back without loss; files that do not line up are refused by rollout and turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from afield.batches.groups import from_groups, to_groups
from afield.batches.jsonl import read_jsonl, write_jsonl
from afield.batches.parquet import read_parquet, write_parquet
from afield.batches.rows import Batch, Row
from afield.batches.tensors import from_tensordict, to_tensordict
from afield.batches.tree import Node, TreeBatch, to_tree
from afield.errors import UsageError
from afield.types import Group
from support.random_groups import branching, group
from support.strategies import groups

FORMATS = {"jsonl": (write_jsonl, read_jsonl), "parquet": (write_parquet, read_parquet)}
FORMS = ["linear", "per_turn", "tree"]


def made_as(form: str, given: list[Group]) -> Batch | TreeBatch:
    return to_tree(from_groups(given)) if form == "tree" else from_groups(given, form)


def hand_made() -> list[Group]:
    rewards = {"format": 0.1, "answer": 0.3}
    members = (
        branching("g-1", 0.1 + 0.2, rewards=rewards, turn_rewards={"t2": 1 / 3}),
        branching("g-2", -0.0),
        branching("g-3", None),
    )
    return [group(*members, baseline=branching("g-greedy", 0.5))]


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=40)
@given(given_groups=groups(), form=st.sampled_from(FORMS))
def test_a_file_gives_back_what_was_written(format: str, given_groups: list[Group], form: str) -> None:
    write, read = FORMATS[format]
    batch = made_as(form, given_groups)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "batch", batch)
        assert read(Path(folder) / "batch") == batch


def logprobs(row: Row | Node) -> list[str]:
    return [p.hex() for p in (row.trajectory.logprobs if isinstance(row, Row) else row.logprobs)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_come_back_bit_for_bit(tmp_path: Path, format: str, form: str) -> None:
    write, read = FORMATS[format]
    batch = made_as(form, hand_made())
    write(tmp_path / "batch", batch)
    again = read(tmp_path / "batch")
    rows = [b.nodes if isinstance(b, TreeBatch) else b.rows for b in (batch, again)]
    for before, after in zip(*rows, strict=True):
        assert logprobs(after) == logprobs(before)
    assert [str(r.score) for r in again.rollouts] == ["0.30000000000000004", "-0.0", "None", "0.5"]


@settings(deadline=None, max_examples=40)
@given(groups(), st.sampled_from(["linear", "per_turn"]))
def test_a_tensordict_of_doubles_gives_back_what_it_was_made_of(made: list[Group], form) -> None:
    batch = from_groups(made, form)
    if not batch.rows:
        with pytest.raises(UsageError, match="no rollout in it carries a reward"):
            to_tensordict(batch, pad_token_id=0)
        return
    assert from_tensordict(to_tensordict(batch, pad_token_id=0, dtype=torch.float64)) == batch


def test_a_tensordict_of_float32_rounds_log_probabilities_and_weights_alone() -> None:
    batch = from_groups(hand_made())
    again = from_tensordict(to_tensordict(batch, pad_token_id=0))
    assert again.rollouts == batch.rollouts
    for before, after in zip(batch.rows, again.rows, strict=True):
        exact = before.trajectory
        rounded = tuple(torch.tensor(exact.logprobs, dtype=torch.float32).tolist())
        weight = torch.tensor(exact.weight, dtype=torch.float32).item()
        trajectory = structs.replace(exact, logprobs=rounded, weight=weight)
        assert after == structs.replace(before, trajectory=trajectory)
    assert len(to_groups(again)[0].finished) == 3


def test_tensors_are_padded_as_trainers_expect() -> None:
    given = [group(branching("g-1", 0.75), branching("g-2", None))]
    tensors = to_tensordict(from_groups(given), pad_token_id=99, prompt_length=7, response_length=5)
    assert tensors.batch_size == torch.Size([2])
    assert tensors["prompts"].tolist() == [[99, 99, 99, 99, 1, 2, 3], [1, 2, 3, 10, 11, 5, 6]]
    assert tensors["responses"].tolist() == [[10, 11, 4, 12, 99], [13, 14, 99, 99, 99]]
    assert tensors["input_ids"].tolist()[0] == [99, 99, 99, 99, 1, 2, 3, 10, 11, 4, 12, 99]
    assert tensors["attention_mask"].tolist()[0] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert tensors["position_ids"].tolist()[0][:11] == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]]
    assert tensors["scores"].tolist() == [[0.0, 0.0, 0.0, 0.75, 0.0], [0.0, 0.75, 0.0, 0.0, 0.0]]
    assert tensors["version_low"].tolist() == [[3, 3, -1, 4, -1], [3, 3, -1, -1, -1]]
    assert tensors["version_high"].tolist() == tensors["version_low"].tolist()
    assert tensors["rollout_log_probs"].dtype == torch.float32
    assert tensors["rollout_log_probs"][0].tolist() == pytest.approx([-1.0, -1.1, 0.0, -1.2, 0.0])
    assert tensors["weight"].tolist() == pytest.approx([0.6, 0.4])
    assert list(tensors["rollout_id"]) == ["g-1", "g-1"] and list(tensors["group_id"]) == ["g", "g"]
    with pytest.raises(UsageError, match=r"rollout g-1, turn t3: its prompt has 7 tokens"):
        to_tensordict(from_groups(given), pad_token_id=0, prompt_length=5)


def test_whole_rollouts_of_a_tensordict_are_a_batch() -> None:
    batch = from_groups(hand_made())
    tensors = to_tensordict(batch, pad_token_id=0, dtype=torch.float64)
    some = from_tensordict(tensors[:2])
    assert [r.rollout.id for r in some.rollouts] == ["g-1", "g-3", "g-greedy"]
    assert some.rows == batch.rows[:2]
    with pytest.raises(UsageError, match=r"rollout g-1, turn t1: the weights .* a row is missing"):
        from_tensordict(tensors[:1])


@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("response_mask", (0, 1), 0, r"rollout g-1, turn t1: the mask is not 1 exactly"),
        (
            "rollout_log_probs",
            (0, 2),
            -1.0,
            r"rollout g-1, turn t1: a token with mask 0 has the log-probability",
        ),
        ("version_low", (0, 3), 9, r"rollout g-1, turn t2: version_low is 9 at response token 3"),
        ("scores", (1, 0), 1.0, r"rollout g-1, turn t3: scores is 1.0 at response token 0"),
        ("attention_mask", (0, 5), 0, r"rollout g-1, turn t1: its attention mask"),
        ("position_ids", (1, 3), 7, r"rollout g-1, turn t3: position_ids must count"),
        ("input_ids", (1, 3), 7, r"rollout g-1, turn t3: input_ids must be"),
    ],
)
def test_tensors_that_do_not_line_up_are_refused(name: str, place: tuple, value: float, says: str) -> None:
    tensors = to_tensordict(from_groups(hand_made()), pad_token_id=0)
    tensors[name][place] = value
    with pytest.raises(UsageError, match=says):
        from_tensordict(tensors)


def test_a_tensordict_without_a_column_is_refused_by_its_name() -> None:
    tensors = to_tensordict(from_groups(hand_made()), pad_token_id=0)
    del tensors["turns"]
    with pytest.raises(UsageError, match="'turns'"):
        from_tensordict(tensors)


# --- files that do not line up -------------------------------------------------------------------

REWARDED = {"rollout_id": "g-1", "attempt": 1, "reward": 1.0, "turn_rewards": {"t9": 1.0}}
REWARDED |= {"rewards": {"format": 0.1, "answer": 0.3}}


def written(folder: Path, form: str = "linear") -> Path:
    write_jsonl(folder / "batch.jsonl", made_as(form, hand_made()))
    return folder / "batch.jsonl"


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for kept, says in [
        (lines[:-1], "ends where a RowColumns should follow"),
        (lines[:3], "ends where a RolloutRecord should follow"),
        ([], "ends where a FileHeader should follow"),
        ([*lines, lines[-1]], "line 10: more rows than the 4 that its header states"),
        ([*lines[:-1], lines[-1][:40]], "line 9: "),
    ]:
        path.write_bytes(b"".join(kept))
        with pytest.raises(UsageError, match=says):
            read_jsonl(path)


@pytest.mark.parametrize(
    ("line", "change", "says"),
    [
        (5, {"logprobs": [-1.0]}, r"line 6: .*rollout g-1, turn t1: the row has 4 response ids"),
        (5, {"prompt_ids": ["x"]}, r"line 6: .*prompt_ids"),
        (5, {"score": 7.0}, r"is not a consistent batch: rollout g-1, turn t1: group, score"),
        (5, {"rollout_id": "g-3"}, r"rollout g-3, turn t1: .* its record is not trained"),
        (1, {"outcome": REWARDED}, r"rollout g-1, turn t9: the outcome has a reward for this turn"),
        (0, {"v": 2}, "format version 2"),
        (0, {"format": "other"}, "line 1"),
    ],
)
def test_lines_that_do_not_line_up_are_refused(tmp_path: Path, line: int, change: dict, says: str) -> None:
    path = written(tmp_path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line] |= change
    path.write_text("".join(json.dumps(text) + "\n" for text in lines))
    with pytest.raises(UsageError, match=says):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("column", "row", "value", "says"),
    [
        ("logprobs", 0, [-1.0], r"row 0: rollout g-1, turn t1: the row has 4 response ids"),
        ("response_mask", 1, [1, 0], r"row 1: rollout g-1, turn t3: the mask is not 1"),
        ("prompt_ids", 1, None, r"row 1: rollout g-1, turn t3: .*prompt_ids"),
        ("score", 0, 9.0, r"row 0: rollout g-1: score is 9.0, its record says"),
        ("row", 1, None, "3 rows of 4 rollouts, but its metadata states 4 of 4"),
    ],
)
def test_tables_that_do_not_line_up_are_refused(
    tmp_path: Path, column: str, row: int, value: object, says: str
) -> None:
    path = tmp_path / "batch.parquet"
    write_parquet(path, from_groups(hand_made()))
    table = pyarrow.parquet.read_table(path)
    values = table.column(column).to_pylist()
    values[row] = value
    place = table.schema.get_field_index(column)
    changed = pyarrow.array(values, type=table.schema.field(column).type)
    pyarrow.parquet.write_table(table.set_column(place, table.schema.field(column), changed), path)
    with pytest.raises(UsageError, match=says):
        read_parquet(path)


def test_files_of_others_are_refused_by_name(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "other.parquet")
    (tmp_path / "no.parquet").write_text("no table")
    (tmp_path / "other.jsonl").write_text('{"x": 1}\n')
    for read, name, says in [
        (read_parquet, "other.parquet", "was not written by afield"),
        (read_parquet, "no.parquet", "cannot read .*no.parquet"),
        (read_parquet, "gone.parquet", "cannot read .*gone.parquet"),
        (read_jsonl, "other.jsonl", "other.jsonl line 1"),
        (read_jsonl, "gone.jsonl", "cannot read .*gone.jsonl"),
    ]:
        with pytest.raises(UsageError, match=says):
            read(tmp_path / name)


def test_a_table_can_be_filtered_by_what_its_rollouts_got(tmp_path: Path) -> None:
    write_parquet(tmp_path / "batch.parquet", from_groups(hand_made()))
    table = pyarrow.parquet.read_table(tmp_path / "batch.parquet").to_pylist()
    assert [(r["rollout_id"], r["row"], r["failure"]) for r in table] == [
        ("g-1", 0, ""),
        ("g-1", 1, ""),
        ("g-2", 0, ""),
        ("g-2", 1, ""),
        ("g-3", None, "infrastructure"),
        ("g-greedy", None, ""),
    ]


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys\n"
        "import afield.batches.groups, afield.batches.tree, afield.batches.jsonl, afield.batches.rewards\n"
        "import afield.batches.parquet, afield.batches.tensors\n"
        "print([m for m in ('torch', 'pyarrow', 'tensordict', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
