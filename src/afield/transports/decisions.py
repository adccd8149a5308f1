"""Decisions about attempts in an outcome store: outcomes, fences, late outcomes.

1. The first commit of an attempt decides it: the agent's outcome, or the collector's fence.
2. An agent built with `agentcore-rl-toolkit` writes one result object and no commit; `commit_result` commits
   it.
   The object is the return value of the agent's function with `status_code`, `stop_reason` and a copy of the
   payload, from which the session's key is removed. The last of a list of rewards counts, as in the toolkit;
   several named rewards need a `reward` too.
"""

from __future__ import annotations

import json
from typing import Any

from afield import wire
from afield.errors import RolloutFailure, TaskFailure, Unavailable
from afield.interfaces.transport import Fence, PendingAttempt
from afield.sdk.classify import storable
from afield.sdk.results import read_result
from afield.sdk.stores import committed_record, read_object
from afield.transports.stores.base import CollectorStore
from afield.types import Attempt, Failure, Outcome
from afield.wire import CommitRecord, OutcomeRecord

MAX_KEY_BYTES = 1024
TOOLKIT_KEYS = frozenset({"status_code", "traceback", "input_id", "s3_bucket", "result_key", "payload"})
TOOLKIT_OK = 200


def commit_key(waiting: PendingAttempt) -> str:
    return wire.commit_key(waiting.rollout.exp_id, waiting.attempt.session_id)


def result_keys(store: CollectorStore, waiting: PendingAttempt) -> list[str]:
    """Keys at which an attempt's result may be stored without a commit.

    In a store that other programs write to, these include keys with the unescaped task id and with the
    AgentCore session id.
    """
    exp_id, task_id, session_id = waiting.rollout.exp_id, waiting.rollout.task.id, waiting.attempt.session_id
    own_key = wire.data_key(exp_id, task_id, session_id)
    if not store.foreign:
        return [own_key]
    folders, names = [own_key.rpartition("/")[0]], [session_id, wire.runtime_session_id(session_id)]
    parts = task_id.split("/")
    # S3 takes almost any key, but S3-compatible servers reject these.
    if {"", ".", ".."}.isdisjoint(parts) and parts[0] not in wire.OWN_PARTS:
        folders.append(f"{exp_id}/{task_id}")
    keys = dict.fromkeys(f"{folder}/{name}.json" for folder in folders for name in names)
    return [key for key in keys if len(key.encode()) <= MAX_KEY_BYTES]


def decision(store: CollectorStore, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
    """Return the committed outcome or fence; None while the attempt is undecided."""
    commit = read_object(store, commit_key(waiting), CommitRecord)
    return None if commit is None else _decided_by(store, commit)


def _decided_by(store: CollectorStore, commit: CommitRecord) -> OutcomeRecord | Fence:
    return Fence(commit.fenced) if commit.fenced else committed_record(store, commit)


def fence(store: CollectorStore, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
    """Abandon an attempt unless it is decided; returns the decision that counts."""
    commit = CommitRecord(session_id=waiting.attempt.session_id, fenced=reason)
    if not store.put_if_absent(commit_key(waiting), wire.encode(commit)):
        return _decided(store, waiting)
    if store.foreign:
        # Other programs do not record a late result themselves; `late` compares results with this mark.
        store.put_if_absent(wire.fenced_key(waiting.rollout.exp_id, waiting.attempt.session_id), b"{}")
    return Fence(reason)


def decidable(store: CollectorStore, waiting: PendingAttempt) -> bool:
    """Whether there is a commit, or a result without one."""
    keys = [commit_key(waiting), *result_keys(store, waiting)]
    return any(store.get(key) is not None for key in keys)


def late(store: CollectorStore, exp_id: str) -> list[Attempt]:
    """Attempts whose outcome arrived after another decision."""
    prefix = f"{exp_id}/" if store.foreign else f"{exp_id}/{wire.LATE}/"
    sessions: dict[str, set[str]] = {}
    for part, name in filter(None, map(_part_and_session, store.list(prefix))):
        sessions.setdefault(part if part in wire.OWN_PARTS else "results", set()).add(name)
    results = sessions.get("results", set())
    fenced = {
        name
        for name in sessions.get(wire.FENCED, set())
        if not results.isdisjoint((name, wire.runtime_session_id(name)))
    }
    return [Attempt.from_session_id(name) for name in sorted(sessions.get(wire.LATE, set()) | fenced)]


def _part_and_session(key: str) -> tuple[str, str] | None:
    """Return the middle part of a key and its session id, or AgentCore session id; None for other keys."""
    if parsed := wire.read_key(key):
        return parsed[1], parsed[2]
    folder, _, file = key.rpartition("/")
    name = file.removesuffix(".json")
    return ("", name) if wire.is_runtime_session_id(name) and folder else None


def _decided(store: CollectorStore, waiting: PendingAttempt) -> OutcomeRecord | Fence:
    commit = read_object(store, commit_key(waiting), CommitRecord)
    if commit is None:
        raise Unavailable(
            f"the commit {commit_key(waiting)} exists but cannot be read; check that no other program deletes"
            " objects and that the credentials may read them"
        )
    return _decided_by(store, commit)


# --- agentcore-rl-toolkit ------------------------------------------------------------------------


def commit_result(store: CollectorStore, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
    """Commit a toolkit result, if there is one; another collector may commit first."""
    for key in result_keys(store, waiting):
        data = store.get(key)
        record = None if data is None else read_toolkit_result(data, waiting)
        if record is None:
            continue
        record_key = wire.adopted_key(record.exp_id, record.session_id)
        store.put_if_absent(record_key, wire.encode(record))
        commit = CommitRecord(session_id=record.session_id, data_key=record_key)
        store.put_if_absent(commit_key(waiting), wire.encode(commit))
        return _decided(store, waiting)
    return None


def read_toolkit_result(data: bytes, waiting: PendingAttempt) -> OutcomeRecord | None:
    """Convert a toolkit result to an outcome record; None for other objects."""
    try:
        result = json.loads(data)
    except ValueError:
        return None
    if not isinstance(result, dict) or "status_code" not in result or "outcome" in result:
        return None
    payload = result.get("payload")
    echo = {k: v for k, v in payload.items() if k != wire.ROLLOUT_FIELD} if isinstance(payload, dict) else {}
    outcome, extra = _toolkit_outcome(result, waiting)
    return OutcomeRecord(
        exp_id=waiting.rollout.exp_id,
        input_id=waiting.rollout.task.id,
        group_id=waiting.rollout.group_id,
        session_id=waiting.attempt.session_id,
        outcome=outcome,
        payload=echo,
        extra=extra,
    )


def _toolkit_outcome(result: dict[str, Any], waiting: PendingAttempt) -> tuple[Outcome, dict[str, Any]]:
    attempt = waiting.attempt
    try:
        if result["status_code"] != TOOLKIT_OK:
            raise TaskFailure(f"the agent answered {result['status_code']}: {result.get('stop_reason', '')}")
        returned = {key: value for key, value in result.items() if key not in TOOLKIT_KEYS}
        parsed = read_result(returned, reward_from=waiting.reward_from)
    except RolloutFailure as error:
        failure = error.failure
        trace = str(result.get("traceback") or failure.traceback)
        failure = storable(Failure(failure.kind, failure.reason, failure.message, trace))
        return wire.failed(attempt.rollout_id, attempt.n, failure), {}
    outcome = Outcome(
        rollout_id=attempt.rollout_id,
        attempt=attempt.n,
        reward=parsed.reward,
        reward_pending=parsed.reward is None,
        rewards=parsed.rewards,
        turn_rewards=parsed.turn_rewards,
        named_turn_rewards=parsed.named_turn_rewards,
        metrics=parsed.metrics,
        stop_reason=parsed.stop_reason,
    )
    return outcome, parsed.extra
