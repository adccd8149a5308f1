"""What a run of bench/chaos.py left behind, read from its files: what was trained, and what it was made of.

Nothing here asks the product what it thinks it did. Three witnesses must agree on what was trained: the
records of the steps, the weights of the last checkpoint (whose trainer remembers what it learnt), and the
data set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chaos_parts import Kill
from msgspec import Struct

LEARNT = "learnt.json"
REUSED = (
    "of the tokens of calls that the engine had completed when the collector or the trainer was killed, in"
    " sessions that no finished step had trained by then and that did not die with their agent's process:"
    " the share that some step trained; each call counts once, however many kills it lived through"
)


class Trained(Struct, frozen=True, kw_only=True):
    """A rollout as a step trained it. `calls` are the tokens of each model call; `low` the oldest version."""

    step: int
    at: float
    rollout_id: str
    group_id: str
    task_id: str
    session_id: str
    calls: dict[str, int]
    low: int | None
    attempts: int

    @property
    def tokens(self) -> int:
        return sum(self.calls.values())


class Sampled(Struct, frozen=True):
    """A call that the engine completed; `end` is where its line ends in the engine's ledger."""

    session_id: str
    turn: str
    tokens: int
    end: int


class Decided(Struct, frozen=True):
    """What stands for an attempt in the store; `fenced` is empty for an outcome."""

    fenced: str
    at: float


def read_trained(run: Path) -> list[Trained]:
    dropped = {group for line in _lines(run / "metrics.jsonl") for group in line.get("dropped_groups", ())}
    found: list[Trained] = []
    for path in sorted((run / "rollouts").glob("step-*.jsonl")):
        step, at = int(path.stem.removeprefix("step-")), path.stat().st_mtime
        found += [
            _trained(line, step, at)
            for line in _lines(path)
            if line["rollout"]["group_id"] not in dropped and carries_reward(line["outcome"])
        ]
    return found


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


def read_learnt(run: Path) -> list[str]:
    """The rollouts that the last checkpoint's weights are made of, as often as each was learnt."""
    found = sorted(path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return json.loads((found[-1] / LEARNT).read_text()) if found else []


def read_sampled(path: Path) -> list[Sampled]:
    """A line that a kill cut short, and the one written after it, cannot be read and are left out."""
    found: list[Sampled] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        end += len(line)
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["served"] == "complete":
            turn = entry["call_id"].rpartition("/")[2]
            found.append(Sampled(entry["session_id"], turn, len(entry["token_ids"]), end))
    return found


def read_decided(commits: Path) -> dict[str, Decided]:
    found: dict[str, Decided] = {}
    for path in commits.glob("*.json"):
        fenced = json.loads(path.read_bytes()).get("fenced", "")
        found[path.name.removesuffix(".json")] = Decided(fenced, path.stat().st_mtime)
    return found


def died_with_agents(kills: Iterable[Kill], decided: dict[str, Decided]) -> set[str]:
    """Sessions that were under way in an agent's process, and not given up, when that was killed."""
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
    """Whether anything but kills of agents chose among attempts.

    `discarded` delivered an outcome that was not trained; `given_up` were fenced though their agent lived.
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
    """Kills that met the trainer half way through a step."""
    last = [(_lines(kill.notes) or [{"what": "none"}])[-1] for kill in kills if kill.kind == "trainer"]
    return sum(line["what"] == "began" for line in last)


def reused(
    kills: Iterable[Kill], sampled: Sequence[Sampled], trained: Sequence[Trained], dead: set[str]
) -> dict[str, Any]:
    """See REUSED."""
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
    trained: Sequence[Trained], learnt: Sequence[str], tasks: Iterable[str], rollouts: int
) -> dict[str, Any]:
    """Every task is one group, trained once, with all its rollouts; the weights say the same."""
    times = Counter(t.rollout_id for t in trained)
    groups = {(t.group_id, t.task_id, t.step) for t in trained}
    seen = Counter(task_id for _, task_id, _ in groups)
    wanted = Counter(tasks)
    whole = Counter(t.group_id for t in trained)
    agree = Counter(learnt) == times
    return {
        "equal": seen == wanted and agree and set(whole.values()) <= {rollouts},
        "groups": sum(seen.values()),
        "rollouts": len(trained),
        "duplicates": sum(n - 1 for n in times.values()) + sum(n - 1 for n in Counter(learnt).values()),
        "missing": sorted((wanted - seen).elements())[:10],
        "extra": sorted((seen - wanted).elements())[:10],
        "not_whole": sorted(group for group, n in whole.items() if n != rollouts)[:10],
        "weights_agree": agree,
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """A line that a kill cut short is left out."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
