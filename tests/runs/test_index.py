"""The index of a run has what its files have, however they came about."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from array import array
from pathlib import Path

import pytest
from msgspec import structs

from afield.errors import DamagedFile, NotFound
from afield.orchestrator.state import RolloutStore, RunDirectory
from afield.runs.index import INDEX_FILE, STAGES, RolloutRow, RunIndex, events_of, stage_seconds
from afield.runs.training_record import VALUES, RecordedTurn, TokenRecord
from afield.types import (
    Exclusion,
    Failure,
    FailureKind,
    FinishReason,
    Outcome,
    Reason,
    RefusedCalls,
    Rollout,
    RolloutResult,
    RolloutTimes,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.random_groups import Maker


def rollouts(seed: int, prefix: str, number: int = 4) -> list[RolloutResult]:
    maker = Maker(seed, kept=True)
    return [maker.finished(f"{prefix}-r{k}", prefix) for k in range(number)]


def rows(run: RunDirectory) -> dict[str, RolloutRow]:
    return {row.id: structs.replace(row, seq=0) for row in run.index.rollouts()}


def rebuilt(run: RunDirectory) -> RunDirectory:
    """The same run, read without its index."""
    run.index.close()
    for path in run.path.glob(f"{INDEX_FILE}*"):
        path.unlink()
    again = RunDirectory(run.path)
    again.index.refresh()
    return again


def collected(path: Path) -> tuple[RunDirectory, RolloutStore]:
    """A run with two steps, a validation, and rollouts that no step has taken."""
    run = RunDirectory(path)
    run.path.mkdir()
    store = RolloutStore(run.rollout_store, index=run.index)
    for step in (1, 2):
        for result in rollouts(step, f"g{step}"):
            store.put(result)
        results = [store.get(f"g{step}-r{k}") for k in range(4)]
        run.write_rollouts(step, [structs.replace(r, advantage=0.25) for r in results])
        for k in range(4):
            store.remove(f"g{step}-r{k}")
        run.append_event("trained", value=step, seconds=0.5)
        run.append_metrics({"step": step, "dropped_groups": {"g2": "too few rewards"} if step == 2 else {}})
    validated = [
        structs.replace(r, rollout=structs.replace(r.rollout, split=Split.VAL)) for r in rollouts(3, "v")
    ]
    run.write_validation({"step": 2, "reward": 0.5}, validated)
    for result in rollouts(4, "g3"):
        store.put(result)
    return run, store


def test_rows_written_while_collecting_equal_those_of_a_rebuilt_index(tmp_path: Path) -> None:
    run, store = collected(tmp_path / "run")
    written = rows(run)
    assert {row.step for row in written.values()} == {1, 2, None}
    assert not any(row.removed for row in written.values())
    again = rebuilt(run)
    assert rows(again) == written
    groups = again.index.query("SELECT id, step, rollouts, dropped FROM groups ORDER BY id")
    assert [(g["id"], g["step"], g["rollouts"], g["dropped"]) for g in groups] == [
        ("g1", 1, 4, None),
        ("g2", 2, 4, "too few rewards"),
        ("g3", None, 4, None),
        ("v", 2, 4, None),
    ]
    steps = again.index.query("SELECT split, step FROM steps ORDER BY split, step")
    assert [(s["split"], s["step"]) for s in steps] == [("train", 1), ("train", 2), ("val", 2)]
    trained = again.index.query("SELECT value FROM events WHERE kind='trained' ORDER BY t")
    assert [event["value"] for event in trained] == [1, 2]
    for row in again.index.rollouts():
        result = again.index.read(row)
        assert result.rollout.id == row.id
        assert sum(e.tokens for e in result.excluded) == row.excluded_tokens
    assert store.get("g3-r0") == again.index.read(again.index.find("g3-r0"))


def test_rotation_keeps_rows_marked_as_removed(tmp_path: Path) -> None:
    run, _ = collected(tmp_path / "run")
    assert run.prune_rollouts(0, keep_steps=1) == [1]
    assert {row.id for row in run.index.rollouts("removed=1")} == {f"g1-r{k}" for k in range(4)}
    with pytest.raises(NotFound, match="keep_rollouts_gb"):
        run.index.read(run.index.find("g1-r0"))
    before = rows(run)
    run.index.refresh()
    assert rows(run) == before


def test_training_records_are_found_by_row_and_removed_with_their_step(tmp_path: Path) -> None:
    run, _ = collected(tmp_path / "run")
    blocks = {
        f"g7-r{k}": TokenRecord(
            (RecordedTurn("t0", 2, 0), RecordedTurn("t1", 3, reason="aborted")),
            {**{name: array("f", [k, 0.5]) for name in VALUES}, "mask": array("B", [0, 1])},
            ("", "clipped"),
        ).encode()
        for k in (0, 1)
    }
    run.write_rollouts(3, rollouts(7, "g7", 3), records=blocks)
    for index in (run.index, rebuilt(run).index):
        record = index.read_record(index.find("g7-r1"))
        assert record is not None and record.encode() == blocks["g7-r1"]
        assert list(record.columns["logprob"]) == [1.0, 0.5]
        assert index.read_record(index.find("g7-r2")) is None  # without an advantage
        assert index.read_record(index.find("g1-r0")) is None
    run.write_rollouts(3, rollouts(7, "g7", 3))  # trained again without records, after a crash
    assert run.index.read_record(run.index.find("g7-r1")) is None
    run.write_rollouts(3, rollouts(7, "g7", 3), records=blocks)
    whole = sum(path.stat().st_size for path in (run.path / "rollouts").iterdir())
    assert run.prune_rollouts(whole, keep_steps=0) == []
    assert run.prune_rollouts(whole - 1, keep_steps=0) == [1]
    run.rewind(None)
    assert list((run.path / "rollouts").iterdir()) == []


def test_damaged_training_record_is_named(tmp_path: Path) -> None:
    run, _ = collected(tmp_path / "run")
    block = TokenRecord((), {name: array("f") for name in VALUES} | {"mask": array("B")}).encode()
    run.write_rollouts(3, rollouts(7, "g7", 1), records={"g7-r0": block})
    row = run.index.find("g7-r0")
    path = run.rollouts(3).with_suffix(".tokens")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedFile, match=r"step-0003\.tokens cannot be read"):
        run.index.read_record(row)
    path.write_bytes(b"something else")
    assert rebuilt(run).index.find("g7-r0").record_offset is None


def test_files_that_another_process_changed_are_read_again(tmp_path: Path) -> None:
    run, _ = collected(tmp_path / "run")
    other = RunDirectory(run.path)
    other.index.refresh()
    run.append_rollouts(3, rollouts(9, "g9", 2))
    with run.rollouts(3).open("ab") as out:
        out.write(b'{"rollout": "cut sho')  # a crash in the middle of a line
    run.rollouts(2).unlink()
    other.index.refresh()
    assert {row.id for row in other.index.rollouts("step=3")} == {"g9-r0", "g9-r1"}
    assert {row.removed for row in other.index.rollouts("step=2 AND split='train'")} == {1}
    run.write_rollouts(3, rollouts(10, "g10", 3))  # replaces the file
    other.index.refresh()
    assert {row.id for row in other.index.rollouts("step=3")} == {"g10-r0", "g10-r1", "g10-r2"}
    assert other.index.read(other.index.find("g10-r2")).rollout.id == "g10-r2"


def test_rollouts_of_a_lost_checkpoint_return_to_the_store(tmp_path: Path) -> None:
    run, store = collected(tmp_path / "run")
    for result in run.read_rollouts(2):
        store.put(result)
    run.rewind(None)
    for row in run.index.rollouts("group_id='g2'"):
        assert (row.step, row.removed, row.file) == (None, 0, f"rollout_store/{row.id}.rollout")
    assert run.index.query("SELECT * FROM steps WHERE split='train'") == []


@pytest.mark.parametrize("damage", ["garbage", "truncated", "other format", "half"])
def test_a_damaged_or_outdated_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    run, _ = collected(tmp_path / "run")
    written = rows(run)
    path = run.path / INDEX_FILE
    if damage == "other format":
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version=999")
    run.index.close()
    for beside in (f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm"):
        (run.path / beside).unlink(missing_ok=True)
    if damage == "garbage":
        path.write_bytes(b"not a database at all" * 500)
    elif damage == "truncated":
        os.truncate(path, 5000)
    elif damage == "half":
        data = bytearray(path.read_bytes())
        data[8192:16384] = b"\xff" * 8192
        path.write_bytes(data)
    again = RunDirectory(run.path)
    again.index.refresh()
    assert rows(again) == written


def test_an_index_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / INDEX_FILE).mkdir()
    store = RolloutStore(run.rollout_store, index=run.index)
    for result in rollouts(1, "g"):
        store.put(result)
    assert store.holds("g-r3")
    assert caplog.text.count("is not written") == 1
    (run.path / INDEX_FILE).rmdir()
    run.index.refresh()
    assert len(run.index.rollouts()) == 4


def turn(n: int, start: float, end: float, parent: int | None = None) -> Turn:
    return Turn(
        id=f"t{n}",
        root="root",
        parent=None if parent is None else f"t{parent}",
        delta_ids=(1, 2),
        token_ids=(3,),
        logprobs=(-0.5,),
        versions=(VersionSpan(0, 1, n, n + 1),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        started=start,
        ended=end,
    )


def timed() -> RolloutResult:
    """Two parallel calls, a tool, and one more call; then a verifier."""
    return RolloutResult(
        rollout=Rollout(
            id="r",
            exp_id="e",
            group_id="g",
            task=Task(
                "t", {"messages": [{"role": "user", "content": "What\n is  6*7?"}], "hidden": {"a": 42}}
            ),
        ),
        outcome=Outcome(
            rollout_id="r",
            attempt=2,
            reward=None,
            failure=Failure(FailureKind.POLICY, Reason.CONTEXT, "too long"),
        ),
        excluded=(Exclusion("t1", 1, "aborted"),),
        turns=(turn(1, 110.0, 112.0), turn(2, 111.0, 114.0), turn(3, 119.0, 120.0, 2)),
        attempts=2,
        refused=(
            RefusedCalls("context_length_exceeded", 400, 3, "prompt of 9 tokens", 120.5, 121.0),
            RefusedCalls("rate", 429, 1, "slow down", 118.0, 118.0),
        ),
        times=RolloutTimes(
            submitted=100.0,
            started=101.0,
            attempted=105.0,
            launched=108.0,
            grading=123.0,
            outcome=126.0,
            ended=126.5,
        ),
    )


def test_the_seconds_of_all_stages_add_up() -> None:
    stages = stage_seconds(timed())
    assert stages == {
        "queue_s": 1.0,
        "retries_s": 4.0,
        "launch_s": 3.0,
        "startup_s": 2.0,
        "model_s": 5.0,
        "tool_s": 5.0,
        "finish_s": 3.0,
        "grade_s": 3.0,
        "store_s": 0.5,
    }
    assert tuple(stages) == STAGES
    assert sum(seconds or 0.0 for seconds in stages.values()) == 26.5


def test_a_row_has_the_calls_refusals_and_question_of_its_rollout(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.append_rollouts(7, [timed()])
    with RunIndex(run.path) as index:
        row = index.find("r.2")
        assert (row.step, row.reward, row.failure_kind, row.failure_reason) == (7, 0.0, "policy", "context")
        assert row.question == "What is 6*7?"
        assert (row.turns, row.branches, row.context_tokens) == (3, 2, 6)
        assert row.prompt_tokens == 2 + 2 + 5
        assert (row.min_version, row.max_version, row.seconds) == (1, 4, 26.5)
        assert row.refused == {"context_length_exceeded": 3, "rate": 1}
        assert (row.refused_calls, row.refusal) == (4, "prompt of 9 tokens")
        kinds = [event["kind"] for event in index.query("SELECT kind FROM events ORDER BY t, kind")]
    assert sorted(kinds) == sorted(kind for _, _, kind, _, _ in events_of(timed()))
    assert kinds.count("call") == 3
    assert kinds.count("tool") == 1


def test_lines_that_are_no_records_of_steps_and_events_are_left_out(tmp_path: Path) -> None:
    run, _ = collected(tmp_path / "run")
    steps, events = (run.index.query(f"SELECT * FROM {table}") for table in ("steps", "events"))
    for line in ("[]", "5", '{"step": "x"}', '{"step": {}}', '{"step": 1e40}', f'{{"step": {10**30}}}', "{}"):
        for name in ("metrics.jsonl", "validation.jsonl"):
            with (run.path / name).open("a") as file:
                file.write(line + "\n")
    for line in ("[]", '{"t": {}, "kind": "trained"}', '{"t": 1.0, "kind": []}', '{"t": 1, "kind": 5}'):
        with (run.path / "events.jsonl").open("a") as file:
            file.write(line + "\n")
    run.index.refresh()
    assert run.index.query("SELECT * FROM steps") == steps
    assert run.index.query("SELECT * FROM events") == events
    assert [line["step"] for line in run.read_metrics()] == [1, 2]
    assert [line["step"] for line in run.read_validation()] == [2]
