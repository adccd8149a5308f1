"""Outcomes in a directory: data objects, commits that are put only where none is, and a queue of hints.

A file appears whole or not at all: it is written and synced under a temporary name, then linked to
its own, which fails where one stands. Hints lie in `hints.sqlite`; losing one loses nothing.
Shared by the agents that deliver and the transport that reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path

from afield import wire
from afield.errors import Unavailable, WireError
from afield.wire import CommitRecord, Invocation, OutcomeRecord

log = logging.getLogger("afield.sdk")

HINTS = "hints.sqlite"
BUSY_S = 10.0
SCHEMA = """CREATE TABLE IF NOT EXISTS hints
    (id INTEGER PRIMARY KEY, exp_id TEXT NOT NULL, session_id TEXT NOT NULL)"""


def deliver(root: Path, invocation: Invocation, record: OutcomeRecord) -> bool:
    """Data, commit, hint, in this order. False when the attempt was decided before.

    The first data object of an attempt stands, so that a commit never points at another's record.
    """
    commit = CommitRecord(session_id=invocation.session_id, data_key=invocation.data_key)
    data = wire.encode(record)
    with writing(root, invocation.session_id):
        if _path(root, invocation.commit_key).exists():
            return False
        path = _path(root, invocation.data_key)
        mine = put_if_absent(path, data) or path.read_bytes() == data
        won = put_if_absent(_path(root, invocation.commit_key), wire.encode(commit))
    hint(root, invocation.exp_id, invocation.session_id)
    return won and mine


def put_commit(root: Path, exp_id: str, commit: CommitRecord) -> bool:
    """Decide an attempt, unless it is decided already."""
    with writing(root, commit.session_id):
        return put_if_absent(_path(root, wire.commit_key(exp_id, commit.session_id)), wire.encode(commit))


def read_commit(root: Path, exp_id: str, session_id: str) -> CommitRecord | None:
    key = wire.commit_key(exp_id, session_id)
    try:
        data = _path(root, key).read_bytes()
    except FileNotFoundError:
        return None
    return wire.decode(data, CommitRecord, key)


def read_record(root: Path, commit: CommitRecord) -> OutcomeRecord:
    try:
        data = _path(root, commit.data_key).read_bytes()
    except FileNotFoundError:
        raise WireError(
            f"the commit of {commit.session_id} names {commit.data_key}, which is missing"
        ) from None
    return wire.decode(data, OutcomeRecord, commit.data_key)


def committed(root: Path, exp_id: str) -> list[str]:
    """The session ids of all decided attempts of an experiment."""
    folder = _path(root, wire.commit_key(exp_id, "any")).parent
    return sorted(p.name.removesuffix(".json") for p in folder.glob("*.json")) if folder.exists() else []


@contextlib.contextmanager
def writing(root: Path, session_id: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"cannot write the outcome of {session_id} under {root}: {error};"
            " the directory must be writable, have space left and allow hard links"
        ) from error


def put_if_absent(path: Path, data: bytes) -> bool:
    """Whether the file is now there because of this call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return False
    temporary = path.parent / f"{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)
    return True


# --- hints ---------------------------------------------------------------------------------------


def hint(root: Path, exp_id: str, session_id: str) -> None:
    """Say that something was decided. A hint that cannot be written is logged: the commit stands."""
    try:
        with contextlib.closing(open_hints(root)) as db, db:
            db.execute("INSERT INTO hints (exp_id, session_id) VALUES (?, ?)", (exp_id, session_id))
    except sqlite3.Error as error:
        log.warning("no hint for %s (%s); its commit will be found by a sweep", session_id, error)


def hinted(db: sqlite3.Connection, exp_id: str) -> bool:
    """Whether there is something to take. A reader blocks nobody and waits for nobody."""
    return db.execute("SELECT 1 FROM hints WHERE exp_id = ? LIMIT 1", (exp_id,)).fetchone() is not None


def take_hints(root: Path, exp_id: str) -> list[str]:
    """Hinted session ids, each taken by one caller only."""
    with contextlib.closing(open_hints(root)) as db, db:
        rows = db.execute("DELETE FROM hints WHERE exp_id = ? RETURNING session_id", (exp_id,)).fetchall()
    return list(dict.fromkeys(session_id for (session_id,) in rows))


def open_hints(root: Path) -> sqlite3.Connection:
    db = sqlite3.connect(root / HINTS, timeout=BUSY_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    return db


# --- paths ---------------------------------------------------------------------------------------


def _path(root: Path, key: str) -> Path:
    return root.joinpath(*key.split("/"))


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
