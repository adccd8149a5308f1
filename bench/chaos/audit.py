"""Audit of a chaos run from its files: rollouts trained, reused, duplicated, missing.

Three records must agree on what was trained: the rollouts of each step, the weights of the last checkpoint
(the trainer stores the ids of the rollouts that it learned from), and the data set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.chaos.processes import Kill

LEARNED = "learned.json"
REUSED = (
    "of the tokens of calls that the engine had completed when the collector or the trainer was killed, in"
    " sessions that no finished step had trained by then and that did not die with their agent's process:"
    " the share that some step trained; each call counts once, however many kills it lived through"
)


class Trained(Struct, frozen=True, kw_only=True):
    """A rollout as a step trained it."""

    step: int
    at: float
    """When the step's file was written, in seconds since the epoch."""
    rollout_id: str
    group_id: str
    task_id: str
    session_id: str
    calls: dict[str, int]
    """Sampled tokens of each model call, by turn id."""
    low: int | None
    """Oldest weights version; None without trajectories."""
    attempts: int

    @property
    def tokens(self) -> int:
        return sum(self.calls.values())


class Sampled(Struct, frozen=True):
    """A call that the engine completed."""

    session_id: str
    turn: str
    tokens: int
    end: int
    """Byte offset at which its line ends in the recording of engine calls."""


class Decided(Struct, frozen=True):
    """The decision about an attempt in the outcome store."""

    fenced: str
    """Reason of a fence; empty for an outcome."""
    at: float


def read_trained(run: Path) -> list[Trained]:
    dropped = {group for line in _lines(run / "metrics.jsonl") for group in line.get("dropped_groups", ())}
    trained: list[Trained] = []
    for path in sorted((run / "rollouts").glob("step-*.jsonl")):
        step, at = int(path.stem.removeprefix("step-")), path.stat().st_mtime
        trained += [
            _trained(line, step, at)
            for line in _lines(path)
            if line["rollout"]["group_id"] not in dropped and carries_reward(line["outcome"])
        ]
    return trained


def carries_reward(outcome: dict[str, Any]) -> bool:
    failure = outcome.get("failure")
    return outcome.get("reward") is not None or bool(failure and failure["kind"] == "policy")


def _trained(line: dict[str, Any], step: int, at: float) -> Trained:
    rollout, outcome = line["rollout"], line["outcome"]
    rows = line.get("trajectories", [])
    return Trained(
        step=step,
        at=at,
        rollout_id=rollout["id"],
        group_id=rollout["group_id"],
        task_id=rollout["task"]["id"],
        session_id=f"{outcome['rollout_id']}.{outcome['attempt']}",
        calls={turn["id"]: turn["end"] - turn["start"] for row in rows for turn in row["turns"]},
        low=min((span[2] for row in rows for span in row["versions"]), default=None),
        attempts=line.get("attempts", 1),
    )


def read_learned(run: Path) -> list[str]:
    """Ids of the rollouts in the last checkpoint's weights, one entry per time each was trained."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return json.loads((checkpoints[-1] / LEARNED).read_text()) if checkpoints else []


def read_sampled(path: Path) -> list[Sampled]:
    """Completed calls; skips a line that a kill truncated and the line written after it."""
    calls: list[Sampled] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        end += len(line)
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["served"] == "complete":
            turn = entry["call_id"].rpartition("/")[2]
            calls.append(Sampled(entry["session_id"], turn, len(entry["token_ids"]), end))
    return calls


def read_decided(commits: Path) -> dict[str, Decided]:
    decisions: dict[str, Decided] = {}
    for path in commits.glob("*.json"):
        fenced = json.loads(path.read_bytes()).get("fenced", "")
        decisions[path.name.removesuffix(".json")] = Decided(fenced, path.stat().st_mtime)
    return decisions


def died_with_agents(kills: Iterable[Kill], decided: dict[str, Decided]) -> set[str]:
    """Sessions that ran, and were not fenced, in an agent process when it was killed."""
    dead: set[str] = set()
    for kill in kills:
        if kill.kind != "agents":
            continue
        for session_id in {line["session"] for line in _lines(kill.notes)}:
            stands = decided.get(session_id)
            if stands is None or (stands.fenced and stands.at > kill.at):
                dead.add(session_id)
    return dead


def selection(
    trained: Sequence[Trained], decided: dict[str, Decided], dead: set[str], notes: Path
) -> dict[str, Any]:
    """Attempts lost without a kill of their agent, and mean lengths.

    `discarded` delivered an outcome that was not trained; `given_up` were fenced while their agent ran.
    """
    began = {
        line["session"]
        for path in notes.glob("agents-*.jsonl")
        for line in _lines(path)
        if line["what"] == "began"
    }
    counted = {t.session_id for t in trained}
    return {
        "discarded": sum(not d.fenced and session not in counted for session, d in decided.items()),
        "given_up": sum(bool(d.fenced) and s in began and s not in dead for s, d in decided.items()),
        "turns": mean([len(t.calls) for t in trained]),
        "tokens": mean([t.tokens for t in trained]),
    }


def mean(values: Sequence[int]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def in_steps(kills: Iterable[Kill]) -> int:
    """Kills of the trainer during a step."""
    last = [(_lines(kill.notes) or [{"what": "none"}])[-1] for kill in kills if kill.kind == "trainer"]
    return sum(line["what"] == "began" for line in last)


def reused(
    kills: Iterable[Kill], sampled: Sequence[Sampled], trained: Sequence[Trained], dead: set[str]
) -> dict[str, Any]:
    """The share described by REUSED, with the tokens and sessions behind it."""
    done = {t.session_id: t.at for t in trained}
    calls = {(t.session_id, turn) for t in trained for turn in t.calls}
    stake: dict[tuple[str, str], int] = {}
    for kill in kills:
        if kill.kind in ("collector", "trainer"):
            for call in sampled:
                alive = done.get(call.session_id, kill.at) >= kill.at and call.session_id not in dead
                if call.end <= kill.sampled and alive:
                    stake[call.session_id, call.turn] = call.tokens
    total = sum(stake.values())
    kept = sum(tokens for call, tokens in stake.items() if call in calls)
    lost = Counter(session_id for session_id, turn in stake if (session_id, turn) not in calls)
    return {"share": kept / total if total else None, "tokens": total, "kept": kept, "lost": dict(lost)}


def compared_with_dataset(
    trained: Sequence[Trained], learned: Sequence[str], tasks: Iterable[str], rollouts: int
) -> dict[str, Any]:
    """Whether every task is one group, trained once, with all its rollouts, in files and in weights."""
    times = Counter(t.rollout_id for t in trained)
    groups = {(t.group_id, t.task_id, t.step) for t in trained}
    counted = Counter(task_id for _, task_id, _ in groups)
    expected = Counter(tasks)
    whole = Counter(t.group_id for t in trained)
    agree = Counter(learned) == times
    return {
        "equal": counted == expected and agree and set(whole.values()) <= {rollouts},
        "groups": sum(counted.values()),
        "rollouts": len(trained),
        "duplicates": sum(n - 1 for n in times.values()) + sum(n - 1 for n in Counter(learned).values()),
        "missing": sorted((expected - counted).elements())[:10],
        "extra": sorted((counted - expected).elements())[:10],
        "not_whole": sorted(group for group, n in whole.items() if n != rollouts)[:10],
        "weights_agree": agree,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, without a line that a kill truncated."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
