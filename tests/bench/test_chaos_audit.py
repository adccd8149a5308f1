"""Arithmetic of the chaos audit; tests/real/test_chaos.py runs the benchmark in small."""

from __future__ import annotations

import json
from pathlib import Path

from bench.chaos.audit import (
    Decided,
    Sampled,
    Trained,
    compared_with_dataset,
    died_with_agents,
    read_sampled,
    reused,
)
from bench.chaos.processes import Kill


def trained(rollout: str, step: int = 1, at: float = 100.0, attempt: int = 1, **calls: int) -> Trained:
    group = rollout.rpartition("-")[0]
    return Trained(
        step=step,
        at=at,
        rollout_id=rollout,
        group_id=group,
        task_id=group,
        session_id=f"{rollout}.{attempt}",
        calls=calls or {"t1": 1},
        low=0,
        attempts=attempt,
    )


def kill(kind: str, at: float, sampled: int = 0, notes: Path = Path("none")) -> Kill:
    return Kill(kind=kind, part=kind, at=at, age_s=1.0, sampled=sampled, notes=notes)


def test_missing_duplicate_or_incomplete_group_is_not_equal() -> None:
    rows = [trained("a-0"), trained("a-1"), trained("b-0", step=2), trained("b-1", step=2)]
    ids = [row.rollout_id for row in rows]
    assert compared_with_dataset(rows, ids, ["a", "b"], 2)["equal"]
    assert compared_with_dataset(rows, ids, ["a", "b", "c"], 2)["missing"] == ["c"]
    assert not compared_with_dataset(rows, ids, ["a", "b", "c"], 2)["equal"]
    assert not compared_with_dataset(rows[:-1], ids[:-1], ["a", "b"], 2)["equal"]
    doubled = compared_with_dataset([*rows, trained("a-0", step=3)], ids, ["a", "b"], 2)
    assert (doubled["equal"], doubled["duplicates"], doubled["extra"]) == (False, 1, ["a"])


def test_group_trained_twice_is_a_duplicate_even_without_records() -> None:
    rows = [trained("a-0"), trained("a-1")]
    told = compared_with_dataset(rows, ["a-0", "a-1", "a-0"], ["a"], 2)
    assert (told["equal"], told["duplicates"]) == (False, 1)
    assert not compared_with_dataset(rows, ["a-0"], ["a"], 2)["equal"]


def test_reuse_counts_each_call_that_a_kill_could_lose_once() -> None:
    sampled = [
        Sampled("a-0.1", "t1", 10, 1),  # trained later: kept
        Sampled("a-0.1", "t2", 10, 6),  # after all kills: not at stake
        Sampled("a-1.1", "t1", 20, 2),  # given up, tried again: lost
        Sampled("b-0.1", "t1", 40, 3),  # trained before the kill: not at stake
        Sampled("b-1.1", "t1", 80, 4),  # died with its agent: nobody's fault
    ]
    rows = [trained("a-0", t1=10, t2=10), trained("a-1", attempt=2), trained("b-0", at=5.0, t1=40)]
    kills = [kill("collector", 10.0, 4), kill("trainer", 11.0, 5), kill("gateway", 12.0, 99)]
    told = reused(kills, sampled, rows, {"b-1.1"})
    assert (told["tokens"], told["kept"], told["lost"]) == (30, 10, {"a-1.1": 1})
    assert reused([kill("gateway", 10.0, 9)], sampled, rows, set())["share"] is None


def test_sessions_end_with_their_agent_unless_already_ended_or_abandoned(tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    sessions = ("open.1", "delivered.1", "before.1", "after.1")
    notes.write_text("".join(json.dumps({"session": s, "what": "began"}) + "\n" for s in sessions) + '{"cut')
    decided = {
        "delivered.1": Decided("", 9.0),
        "before.1": Decided("silent", 9.0),
        "after.1": Decided("died", 11.0),
        "elsewhere.1": Decided("died", 11.0),
    }
    assert died_with_agents([kill("agents", 10.0, notes=notes)], decided) == {"open.1", "after.1"}
    assert died_with_agents([kill("collector", 10.0, notes=notes)], decided) == set()


def test_only_calls_recorded_so_far_are_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    rows = [
        {"call_id": "a.1/t1", "session_id": "a.1", "token_ids": [1, 2], "served": "complete"},
        {"call_id": "a.1/t2", "session_id": "a.1", "token_ids": [1], "served": "abandoned"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"call_id": "a.1')
    assert read_sampled(path) == [Sampled("a.1", "t1", 2, len(json.dumps(rows[0])) + 1)]
