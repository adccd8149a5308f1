"""What a store says of an attempt, and how a collector decides one: the other side of `sdk.outcomes`.

Plain functions over any store. Whoever puts the commit first decides; all others read what stands.
"""

from __future__ import annotations

from afield import wire
from afield.errors import Unavailable
from afield.interfaces.transport import Fence, PendingAttempt
from afield.sdk import outcomes
from afield.transports import toolkit
from afield.transports.stores.base import Store
from afield.types import Attempt
from afield.wire import CommitRecord, OutcomeRecord

MAX_KEY = 1024


def commit_key(waiting: PendingAttempt) -> str:
    return wire.commit_key(waiting.rollout.exp_id, waiting.attempt.session_id)


def result_keys(store: Store, waiting: PendingAttempt) -> list[str]:
    """Where a result may lie that has no commit: as afield names it; where strangers write, also with the
    task's id as it is, and with the name that AgentCore knows the session by.
    """
    exp_id, task_id, session_id = waiting.rollout.exp_id, waiting.rollout.task.id, waiting.attempt.session_id
    ours = wire.data_key(exp_id, task_id, session_id)
    if not store.foreign:
        return [ours]
    folders, names = [ours.rpartition("/")[0]], [session_id, wire.runtime_session_id(session_id)]
    parts = task_id.split("/")
    # S3 itself takes almost any key; others refuse to be asked for these.
    if {"", ".", ".."}.isdisjoint(parts) and parts[0] not in wire.OWN_PARTS:
        folders.append(f"{exp_id}/{task_id}")
    keys = dict.fromkeys(f"{folder}/{name}.json" for folder in folders for name in names)
    return [key for key in keys if len(key.encode()) <= MAX_KEY]


def decision(store: Store, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
    commit = outcomes.read(store, commit_key(waiting), CommitRecord)
    if commit is None:
        return _adopt(store, waiting)
    return Fence(commit.fenced) if commit.fenced else outcomes.standing(store, commit)


def fence(store: Store, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
    commit = CommitRecord(session_id=waiting.attempt.session_id, fenced=reason)
    if not store.put_if_absent(commit_key(waiting), wire.encode(commit)):
        return _decided(store, waiting)
    if store.foreign:
        # A result that a stranger puts later leaves no other trace; see `late`.
        store.put_if_absent(wire.fenced_key(waiting.rollout.exp_id, waiting.attempt.session_id), b"{}")
    return Fence(reason)


def decidable(store: Store, waiting: PendingAttempt) -> bool:
    """Whether there is a decision, or a result to decide on."""
    keys = [commit_key(waiting), *result_keys(store, waiting)]
    return any(store.get(key) is not None for key in keys)


def late(store: Store, exp_id: str) -> list[Attempt]:
    prefix = f"{exp_id}/" if store.foreign else f"{exp_id}/{wire.LATE}/"
    under: dict[str, set[str]] = {}
    for key in filter(None, map(_parts, store.list(prefix))):
        part, name = key
        under.setdefault(part if part in wire.OWN_PARTS else "results", set()).add(name)
    results = under.get("results", set())
    fenced = under.get(wire.FENCED, set())
    unwanted = {one for one in fenced if not results.isdisjoint((one, wire.runtime_session_id(one)))}
    return [Attempt.from_session_id(one) for one in sorted(under.get(wire.LATE, set()) | unwanted)]


def _parts(key: str) -> tuple[str, str] | None:
    """The part between, and the session's name, which may be AgentCore's."""
    if read := wire.read_key(key):
        return read[1], read[2]
    folder, _, file = key.rpartition("/")
    name = file.removesuffix(".json")
    return ("", name) if wire.is_runtime_session_id(name) and folder else None


def _adopt(store: Store, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
    """Commit what an agent left that knows only how to put one object; somebody else may be first."""
    for key in result_keys(store, waiting):
        data = store.get(key)
        record = None if data is None else toolkit.read(data, waiting)
        if record is None:
            continue
        kept = wire.adopted_key(record.exp_id, record.session_id)
        store.put_if_absent(kept, wire.encode(record))
        commit = CommitRecord(session_id=record.session_id, data_key=kept)
        store.put_if_absent(commit_key(waiting), wire.encode(commit))
        return _decided(store, waiting)
    return None


def _decided(store: Store, waiting: PendingAttempt) -> OutcomeRecord | Fence:
    commit = outcomes.read(store, commit_key(waiting), CommitRecord)
    if commit is None:
        raise Unavailable(
            f"the commit {commit_key(waiting)} is refused and cannot be read: is something deleting objects,"
            " or is permission to read them missing?"
        )
    return Fence(commit.fenced) if commit.fenced else outcomes.standing(store, commit)
