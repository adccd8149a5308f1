"""Data of each page, as JSON values or columnar bytes.

Texts of agents, tasks and models appear here as plain strings; the page shows them as text only.
"""

from __future__ import annotations

import json
import math
import sqlite3
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from afield.errors import AfieldError, DamagedFile, NotFound, UsageError
from afield.jobs.evaluation import mean_pass, mean_reward
from afield.runs.cost import cost_of
from afield.runs.exclusions import REASONS, UntrainedReason
from afield.ui.data import LoadedRollout, RunData, TurnTokens, read_json
from afield.utils.columns import indexed, numbers, pack

SHOWN_TEXT = 4_000
"""Characters of a message or task in a page's data; the rest is requested when it is unfolded."""
SHOWN_EVENTS = 30_000
SHOWN_TASKS = 5_000
PASS_KS = (1, 2, 4, 8, 16)
BUCKETS = 400
MAX_WHOLE = 1 << 53
"""Largest whole number of a query."""
TEXT_COLUMNS = (
    *("id", "split", "group_id", "task_id", "question"),
    *("failure_kind", "failure_reason", "stop_reason"),
)
NUMBER_COLUMNS = (
    *("seq", "step", "reward", "advantage", "attempts", "turns", "branches", "tool_calls", "refused_calls"),
    *("context_tokens", "sampled_tokens", "trained_tokens", "excluded_tokens", "min_version", "max_version"),
    *("started", "seconds", "queue_s", "launch_s", "model_s", "tool_s", "grade_s", "greedy", "removed"),
)
Query = dict[str, str]


def number(query: Query, name: str, default: float) -> float:
    """A finite number of a query."""
    try:
        value = float(query.get(name, default))
    except ValueError as error:
        raise UsageError(f"{name}={query[name]!r} is not a number") from error
    if not math.isfinite(value):
        raise UsageError(f"{name}={query[name]!r} is not a finite number")
    return value


def integer(query: Query, name: str, default: int) -> int:
    """A whole number of a query, within the range of a row's number."""
    return int(max(-MAX_WHOLE, min(number(query, name, default), MAX_WHOLE)))


# --- runs ----------------------------------------------------------------------------------------


def run_summary(run: RunData) -> dict[str, Any]:
    """Line of the list of runs; the reward is that of the last step, or of all rollouts without steps."""
    settings = run.settings()
    split = "val" if settings.get("kind") == "eval" else "train"
    [row] = run.query(
        "SELECT count(*) AS rollouts, max(step) AS step, min(started) AS started, max(ended) AS ended,"
        " coalesce(sum(failure_kind IS NOT NULL), 0) AS failed FROM rollouts WHERE split=?",
        split,
    )
    [last] = run.query(
        "SELECT avg(reward) AS reward FROM rollouts"
        " WHERE split=? AND step IS (SELECT max(step) FROM rollouts WHERE split=?)",
        *(split, split),
    )
    if split == "val":
        row["step"] = None
    return {
        "run": run.key,
        "path": str(run.directory.path),
        "state": run.state(),
        "split": split,
        **settings,
        **row,
        **last,
    }


def summary_or_error(run: RunData) -> dict[str, Any]:
    """A line of the list of runs; of one that cannot be read, the error, so that others are listed."""
    try:
        return run_summary(run)
    except (AfieldError, OSError, sqlite3.Error) as error:
        return {
            "run": run.key,
            "path": str(run.directory.path),
            "state": "unreadable",
            "error": str(error),
            "rollouts": 0,
            "reward": None,
            "step": None,
            "failed": 0,
        }


def task_table(run: RunData, split: str) -> dict[str, Any]:
    """Mean reward and pass@k with intervals, and a row per task, of a run without training steps."""
    attempts = run.query(
        "SELECT task_id, question, reward, seconds, group_id, failure_kind FROM rollouts WHERE split=?"
        " ORDER BY seq",
        split,
    )
    rewards: dict[str, list[float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for one in attempts:
        task = one["task_id"]
        row = rows.setdefault(
            task, {"task": task, "question": one["question"], "group": one["group_id"], "n": 0, "failed": 0}
        )
        row["n"] += 1
        row["failed"] += one["failure_kind"] is not None
        if one["reward"] is not None:
            rewards.setdefault(task, []).append(one["reward"])
    bar = read_json(run.directory.summary).get("pass_reward")
    bar = float(bar) if isinstance(bar, int | float) else 1.0
    for task, row in rows.items():
        values = rewards.get(task, [])
        row["reward"] = sum(values) / len(values) if values else None
        row["passed"] = sum(value >= bar for value in values)
    estimates = {"mean reward": mean_reward(rewards)} | {
        f"pass@{k}": mean_pass(rewards, k, bar) for k in PASS_KS
    }
    return {
        "pass_reward": bar,
        "estimates": {name: one._asdict() for name, one in estimates.items() if one is not None},
        "task_count": len(rows),
        "tasks": list(rows.values())[:SHOWN_TASKS],
    }


def run_page(run: RunData, query: Query) -> dict[str, Any]:
    """Metrics from step `from` on, and the outcomes of rollouts by step, owner and reason."""
    first = integer(query, "from", 0)
    summary = run_summary(run)
    lines = run.query("SELECT split, line FROM steps WHERE step >= ? ORDER BY step", first)
    trains = bool(lines) or summary["step"] is not None
    return {
        **summary,
        **({} if trains else {"evaluation": task_table(run, summary["split"])}),
        "metrics": [json.loads(row["line"]) for row in lines if row["split"] == "train"],
        "validation": [json.loads(row["line"]) for row in lines if row["split"] == "val"],
        "outcomes": run.query(
            "SELECT step, split, failure_kind AS kind, failure_reason AS reason, count(*) AS n,"
            " sum(reward IS NOT NULL) AS rewarded, avg(reward) AS reward, sum(reward > 0) AS positive,"
            " sum(sampled_tokens) AS sampled_tokens, sum(trained_tokens) AS trained_tokens"
            " FROM rollouts WHERE coalesce(step, 1e9) >= ? GROUP BY 1, 2, 3, 4 ORDER BY 1",
            first,
        ),
        "exactness": exactness(run, summary["split"]),
        "cost": msgspec.to_builtins(cost_of(run.directory.path, summary.get("kind", ""), run.query)),
    }


def exactness(run: RunData, split: str) -> dict[str, Any]:
    """Evidence that the trainer sees the tokens as sampled: differences by tier, and the token account."""
    lines = [json.loads(row["line"]) for row in run.query("SELECT line FROM steps WHERE split='train'")]
    trainer = [line.get("trainer") or {} for line in lines]
    prefix = "sampler_trainer_logprob_diff_max"
    worst: dict[str, float] = {}
    for metrics in trainer:
        for name, value in metrics.items():
            if name.startswith(prefix) and value is not None:  # None is a number that was not finite
                tier = name[len(prefix) + 1 :] or "all"
                worst[tier] = max(worst.get(tier, 0.0), value)
    [tokens] = run.query(
        "SELECT coalesce(sum(sampled_tokens), 0) AS sampled, coalesce(sum(excluded_tokens), 0) AS excluded,"
        " coalesce(sum(refused_calls), 0) AS refused FROM rollouts WHERE split=?",
        split,
    )
    trained = sum(line.get("trained_tokens", 0) for line in lines)
    return {"logprob_diff_max": worst, "trained": trained, "steps": len(lines), **tokens}


# --- rollouts ------------------------------------------------------------------------------------


def rollouts(run: RunData, query: Query) -> dict[str, Any]:
    """Rows of the rollouts after row `after`, at most `limit`."""
    after, limit = integer(query, "after", 0), integer(query, "limit", 1000)
    names = ", ".join((*NUMBER_COLUMNS, *TEXT_COLUMNS))
    rows = run.query(f"SELECT {names} FROM rollouts WHERE seq > ? ORDER BY seq LIMIT ?", after, limit)
    return {"rollouts": rows}


def rollouts_columns(run: RunData, query: Query) -> bytes:
    """All rollouts in columns; `after` leaves out the rows up to this one."""
    after = integer(query, "after", 0)
    texts = [f"substr({name}, 1, 120)" if name == "question" else name for name in TEXT_COLUMNS]
    names = ", ".join((*NUMBER_COLUMNS, *texts))
    table = run.tuples(f"SELECT {names} FROM rollouts WHERE seq > ? ORDER BY seq", after)
    values: list[Sequence[Any]] = list(zip(*table, strict=True)) or [()] * (
        len(NUMBER_COLUMNS) + len(TEXT_COLUMNS)
    )
    columns: dict[str, array[Any]] = {}
    strings: dict[str, list[str]] = {}
    for name, column in zip(NUMBER_COLUMNS, values, strict=False):
        columns[name] = numbers("f8" if name == "started" else "f4", column)
    for name, column in zip(TEXT_COLUMNS, values[len(NUMBER_COLUMNS) :], strict=True):
        columns[name], strings[name] = indexed(column)
    return pack(columns, strings)


def fates(run: RunData, rollout: LoadedRollout) -> dict[str, str]:
    """Fate of each turn's sampled tokens: `trained`, `pending`, `validation`, or why they are not trained."""
    excluded = {exclusion.turn: exclusion.reason for exclusion in rollout.record.excluded}
    rest = rollout_fate(run, rollout)
    return {s.turn.id: excluded.get(s.turn.id, rest) for s in rollout.segments}


def rollout_fate(run: RunData, rollout: LoadedRollout) -> str:
    row = rollout.row
    if row.split == "val":
        return "validation"
    if row.untrained:
        return next(iter(row.untrained))
    if run.query("SELECT reason FROM dropped WHERE group_id=?", row.group_id):
        return str(UntrainedReason.DROPPED_GROUP)
    if row.step is None:
        return "pending"
    return "trained" if row.advantage != 0 else str(UntrainedReason.NO_ADVANTAGE)


def rollout_page(run: RunData, rollout_id: str) -> dict[str, Any]:
    """A rollout with its turns and messages; long texts are cut to `SHOWN_TEXT` characters."""
    rollout = run.rollout(rollout_id)
    record, turn_fates = rollout.record, fates(run, rollout)
    outcome = record.outcome
    events = run.query(
        "SELECT t, seconds, kind, turn, value FROM events WHERE rollout=? ORDER BY t", rollout.row.seq
    )
    neighbours = run.query(
        "SELECT (SELECT id FROM rollouts WHERE seq < ? ORDER BY seq DESC LIMIT 1) AS previous,"
        " (SELECT id FROM rollouts WHERE seq > ? ORDER BY seq LIMIT 1) AS next",
        rollout.row.seq,
        rollout.row.seq,
    )
    return {
        "run": run.key,
        **{name: getattr(rollout.row, name) for name in (*NUMBER_COLUMNS, *TEXT_COLUMNS)},
        "rewards": rollout.row.rewards,
        "metrics": rollout.row.metrics,
        "refused": record.refused,
        "task": cut(as_text(record.rollout.task.input)),
        "returned": cut(as_text(record.returned)),
        "returned_left_out": record.returned_left_out,
        "failure": outcome.failure,
        "attempt": outcome.attempt,
        "turn_rewards": outcome.turn_rewards,
        "fate": rollout_fate(run, rollout),
        "tokens": len(rollout.ids),
        "text": run.tokenizer() is not None,
        "recorded": rollout.training is not None,
        "not_recorded": why_not_recorded(run, rollout),
        "main": [segment.turn.id for segment in rollout.path()],
        "turns": [turn_json(segment, turn_fates[segment.turn.id]) for segment in rollout.segments],
        "events": events,
        **neighbours[0],
    }


def why_not_recorded(run: RunData, rollout: LoadedRollout) -> str:
    """Why the rollout has no training record; empty if it has one."""
    if rollout.training is not None or rollout.training_error:
        return rollout.training_error
    kind, row = run.settings().get("kind"), rollout.row
    if kind not in (None, "train", "demo"):
        return f"they come from the embedded trainer, and this is a run of kind {kind}"
    if row.split == "val" or row.greedy:
        return "validation and baselines are not trained"
    if row.step is None:
        return "no step has trained this rollout"
    if row.advantage is None:
        return "this rollout was not trained"
    return "train with --record-training to record them"


def turn_json(segment: TurnTokens, fate: str) -> dict[str, Any]:
    turn = segment.turn
    return {
        "id": turn.id,
        "parent": turn.parent,
        "status": turn.status,
        "tier": turn.tier,
        "dialect": turn.dialect,
        "finish_reason": turn.finish_reason,
        "temperature": turn.sampling.temperature,
        "tags": turn.tags,
        "links": turn.links,
        "started": turn.started,
        "first_token": turn.first_token,
        "ended": turn.ended,
        "versions": turn.versions,
        "fate": fate,
        "start": segment.start,
        "prompt": segment.prompt,
        "sampled": segment.sampled,
        "messages": [
            {
                "role": message.role,
                "content": cut(message.content),
                "reasoning": cut(message.reasoning),
                "name": message.name,
                "images": len(message.images),
                "tool_calls": [
                    {"id": c.id, "name": c.name, "arguments": cut(c.arguments)} for c in message.tool_calls
                ],
                "tool_call_id": message.tool_call_id,
            }
            for message in turn.messages
        ],
    }


def cut(text: str) -> str | dict[str, Any]:
    """The text, or its beginning and its length if it is long."""
    return text if len(text) <= SHOWN_TEXT else {"text": text[:SHOWN_TEXT], "length": len(text)}


def as_text(values: dict[str, Any]) -> str:
    """JSON to read; empty without values."""
    return json.dumps(values, indent=1, ensure_ascii=False) if values else ""


def whole_values(run: RunData, rollout_id: str) -> dict[str, str]:
    """Task and returned values of a rollout, whole."""
    record = run.rollout(rollout_id).record
    return {"task": as_text(record.rollout.task.input), "returned": as_text(record.returned)}


def messages(run: RunData, rollout_id: str, turn_id: str) -> dict[str, Any]:
    """All messages of a turn, whole."""
    rollout = run.rollout(rollout_id)
    return {"messages": rollout.path(turn_id)[-1].turn.messages}


def tokens(run: RunData, rollout_id: str, query: Query) -> bytes:
    """Token ids, log-probabilities and, if recorded, values of the trainer of tokens [a, b), in the order of
    the turns. `logprob` is the sampler's, `trainer_logprob` the trainer's."""
    rollout = run.rollout(rollout_id)
    a, b = token_range(rollout, query)
    columns: dict[str, array[Any]] = {"id": rollout.ids[a:b], "logprob": rollout.logprobs[a:b]}
    strings: dict[str, Sequence[str]] = {}
    if rollout.training is not None:
        for name, column in rollout.training.columns.items():
            columns["trainer_logprob" if name == "logprob" else name] = column[a:b]
        strings["mask"] = rollout.training.reasons
    return pack(columns, strings, a=a, total=len(rollout.ids))


def token_text(run: RunData, rollout_id: str, query: Query) -> dict[str, Any]:
    """Text of tokens [a, b), one string each; ids if the model's tokenizer is not on this machine."""
    rollout = run.rollout(rollout_id)
    a, b = token_range(rollout, query)
    tokenizer = run.tokenizer()
    ids = rollout.ids[a:b]
    if tokenizer is None:
        return {"a": a, "tokens": [f"{token} " for token in ids]}
    return {"a": a, "tokens": [tokenizer.decode([token], skip_special_tokens=False) for token in ids]}


def token_range(rollout: LoadedRollout, query: Query) -> tuple[int, int]:
    total = len(rollout.ids)
    a = min(max(0, integer(query, "a", 0)), total)
    return a, min(max(a, integer(query, "b", total)), total)


# --- groups and differences ----------------------------------------------------------------------


def shared_prefix(a: array[int], b: array[int]) -> int:
    """Number of equal tokens at the beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices is faster than a loop
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def group_page(run: RunData, group_id: str) -> dict[str, Any]:
    """Rollouts of a group, and where each first differs from the first one."""
    rows = run.rows("group_id=?", group_id)
    if not rows:
        raise NotFound(f"run {run.key} has no finished rollout of group {group_id!r}")
    [group] = run.query("SELECT * FROM groups WHERE id=?", group_id)
    attempts: list[dict[str, Any]] = []
    first: array[int] | None = None
    for row in rows:
        attempt = {name: getattr(row, name) for name in (*NUMBER_COLUMNS, *TEXT_COLUMNS)}
        try:
            rollout = run.rollout(row.id)
        except (NotFound, DamagedFile) as error:
            attempts.append({**attempt, "missing": str(error)})
            continue
        path = rollout.path()
        ids = rollout.path_ids(path)
        shared = len(ids) if first is None else shared_prefix(first, ids)
        first = ids if first is None else first
        reply = path[-1].turn.messages[-1] if path and path[-1].turn.messages else None
        attempts.append(
            {
                **attempt,
                "tokens": len(ids),
                "shared": shared,
                "differs_in": turn_at(path, shared),
                "failure": rollout.record.outcome.failure,
                "turn_ids": [segment.turn.id for segment in path],
                "calls": [c.name for s in path if s.turn.messages for c in s.turn.messages[-1].tool_calls],
                "reply": cut(reply.content) if reply else "",
            }
        )
    return {"run": run.key, **group, "attempts": attempts}


def turn_at(path: Sequence[TurnTokens], position: int) -> str | None:
    """Turn of the token at a position of a path; None behind its end."""
    for segment in path:
        length = segment.end - segment.start
        if position < length:
            return segment.turn.id
        position -= length
    return None


def diff_page(a: tuple[RunData, str], b: tuple[RunData, str]) -> dict[str, Any]:
    """Two rollouts, their paths with the most tokens, and the number of tokens that both begin with."""
    sides: list[dict[str, Any]] = []
    paths: list[array[int]] = []
    for run, rollout_id in (a, b):
        rollout = run.rollout(rollout_id)
        path = rollout.path()
        paths.append(rollout.path_ids(path))
        sides.append({**rollout_page(run, rollout_id), "length": len(paths[-1])})
    shared = shared_prefix(*paths)
    return {"shared": shared, "sides": sides}


# --- excluded ------------------------------------------------------------------------------------


def excluded_page(run: RunData) -> dict[str, Any]:
    """Sampled tokens that were not trained: totals by reason, and rollouts with the most of them."""
    row = "SELECT r.seq, r.id, r.step, r.group_id, r.reward"
    whole = "r.trained_tokens AS tokens, 'untrained' AS how FROM rollouts r"
    union = " UNION ALL ".join(
        (
            *(
                f"{row}, e.key AS reason, e.value AS tokens, '{column}' AS how"
                f" FROM rollouts r, json_each(r.{column}) e WHERE r.split='train' AND e.value > 0"
                for column in ("excluded", "untrained")
            ),
            f"{row}, 'dropped_group' AS reason, {whole} JOIN dropped d ON d.group_id = r.group_id"
            " WHERE r.trained_tokens > 0",
            f"{row}, 'no_advantage' AS reason, {whole} WHERE r.split='train' AND r.step IS NOT NULL"
            " AND r.advantage = 0 AND r.trained_tokens > 0"
            " AND r.group_id NOT IN (SELECT group_id FROM dropped)",
        )
    )
    reasons = run.query(
        f"SELECT reason, how, sum(tokens) AS tokens, count(*) AS rollouts FROM ({union})"
        " GROUP BY 1, 2 ORDER BY 3 DESC"
    )
    [total] = run.query("SELECT coalesce(sum(sampled_tokens), 0) AS n FROM rollouts WHERE split='train'")
    steps = run.query(f"SELECT step, reason, sum(tokens) AS tokens FROM ({union}) GROUP BY 1, 2 ORDER BY 1")
    account: Counter[str] = Counter()
    for row in run.query("SELECT line FROM steps WHERE split='train'"):
        line = json.loads(row["line"])
        account.update(line.get("excluded_tokens", {}))
        account.update(line.get("untrained_tokens", {}))
    return {
        "run": run.key,
        "sampled": total["n"],
        "reasons": [{**row, "remedy": remedy(row["reason"])} for row in reasons],
        "trainer_account": account,
        "steps": steps,
        "rollouts": run.query(f"SELECT * FROM ({union}) ORDER BY tokens DESC, seq LIMIT 5000"),
    }


def remedy(reason: str) -> str:
    if reason in REASONS:
        return REASONS[reason].remedy
    reasons = {str(item): item for item in UntrainedReason}
    doc = {
        UntrainedReason.NO_ADVANTAGE: "rewards of the group are equal: choose other tasks, or more rollouts",
        UntrainedReason.DROPPED_GROUP: "see the reason in the step's dropped_groups",
    }
    return doc.get(reasons[reason], "the rollout has no reward: see its failure") if reason in reasons else ""


# --- timeline ------------------------------------------------------------------------------------


def timeline_page(run: RunData, query: Query) -> dict[str, Any]:
    """Range of the events, changes of the number at once by kind, steps, versions, discarded work."""
    [span] = run.query("SELECT min(t) AS t0, max(t + seconds) AS t1, count(*) AS events FROM events")
    if span["t0"] is None:
        return {"run": run.key, **span, "buckets": [], "marks": [], **discarded_work(run)}
    t0 = number(query, "t0", span["t0"])
    t1 = max(number(query, "t1", span["t1"]), t0 + 1e-3)
    width = (t1 - t0) / BUCKETS
    changes = " UNION ALL ".join(  # bucket -1 has the events before t0
        f"SELECT CASE WHEN {at} < ? THEN -1 ELSE cast(({at} - ?) / ? AS INTEGER) END AS bucket, kind,"
        f" {n} AS n FROM events WHERE rollout IS NOT NULL"
        for at, n in (("t", 1), ("t + seconds", -1))
    )
    buckets = run.query(
        f"SELECT bucket, kind, sum(n) AS change FROM ({changes}) WHERE bucket < {BUCKETS} GROUP BY 1, 2",
        *(2 * (t0, t0, width)),
    )
    marks = run.query(
        "SELECT t, seconds, kind, value FROM events WHERE rollout IS NULL AND t >= ? AND t <= ? ORDER BY t",
        *(t0, t1),
    )
    window = {"from": t0, "to": t1, "width": width, "bucket_count": BUCKETS, "buckets": buckets}
    return {"run": run.key, **span, **window, "marks": marks, **discarded_work(run)}


def discarded_work(run: RunData) -> dict[str, Any]:
    """Tokens of retried attempts, of rollouts without a reward and of dropped groups; and the rollouts."""
    retried = run.retried_tokens()
    source = "FROM rollouts r LEFT JOIN dropped d ON d.group_id = r.group_id"
    [tokens] = run.query(
        "SELECT coalesce(sum(CASE WHEN r.reward IS NULL THEN r.sampled_tokens END), 0) AS failed_rollouts,"
        " coalesce(sum(CASE WHEN r.reward IS NOT NULL AND d.reason IS NOT NULL THEN r.sampled_tokens END), 0)"
        f" AS dropped_groups, coalesce(sum(r.sampled_tokens), 0) AS sampled {source}"
    )
    rows = run.query(
        "SELECT r.id, r.step, r.started, r.ended, r.attempts, r.failure_kind, r.failure_reason,"
        f" r.sampled_tokens, r.retries_s, d.reason AS dropped {source}"
        " WHERE r.attempts > 1 OR (r.failure_kind IS NOT NULL AND r.failure_kind <> 'policy')"
        " OR d.reason IS NOT NULL ORDER BY r.seq DESC LIMIT 500"
    )
    tokens = {"retried_attempts": sum(retried.values()), **tokens}
    discarded = [{**row, "retried_tokens": retried.get(row["id"], 0)} for row in rows]
    return {"discarded": discarded, "discarded_tokens": tokens}


def events_columns(run: RunData, query: Query) -> bytes:
    """Events of rollouts between t0 and t1, in columns; the latest `SHOWN_EVENTS` if there are more."""
    t0, t1 = number(query, "t0", 0.0), number(query, "t1", 1e12)
    table = run.tuples(
        "SELECT e.t, e.seconds, e.value, e.kind, e.turn, r.id, r.failure_kind FROM events e"
        " JOIN rollouts r ON r.seq = e.rollout"
        " WHERE e.t >= ? AND e.t <= ? ORDER BY e.t DESC LIMIT ?",
        *(t0, t1, SHOWN_EVENTS),
    )
    values = list(zip(*reversed(table), strict=True)) or [()] * 7
    columns: dict[str, array[Any]] = {
        "t": numbers("f8", values[0]),
        "seconds": numbers("f4", values[1]),
        "value": numbers("f4", values[2]),
    }
    strings: dict[str, list[str]] = {}
    for name, column in zip(("kind", "turn", "rollout", "failure"), values[3:], strict=True):
        columns[name], strings[name] = indexed(column)
    return pack(columns, strings, cut=len(table) == SHOWN_EVENTS)
