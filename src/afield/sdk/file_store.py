"""Outcomes in a directory: objects that are put only where none is, and a queue of hints beside them.

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

from afield.sdk.outcomes import Passing

log = logging.getLogger("afield.sdk")

HINTS = "hints.sqlite"
BUSY_S = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS notices
    (id INTEGER PRIMARY KEY, exp_id TEXT NOT NULL, body TEXT NOT NULL,
     leased_until REAL NOT NULL DEFAULT 0, times INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS notices_of ON notices (exp_id, leased_until);
CREATE TABLE IF NOT EXISTS dead
    (id INTEGER PRIMARY KEY, exp_id TEXT NOT NULL, body TEXT NOT NULL,
     reason TEXT NOT NULL, at REAL NOT NULL);
"""


class FileStore:
    """Keys are paths below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._writing(key):
            return _put_if_absent(self._path(key), data)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Passing(f"cannot read {key} under {self.root}: {error}; is the disk mounted?") from error

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix.rpartition("/")[0])
        keys = (path.relative_to(self.root).as_posix() for path in folder.rglob("*.json"))
        return sorted(key for key in keys if key.startswith(prefix))

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*key.split("/"))

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Passing(
                f"cannot write {key} under {self.root}: {error};"
                " the directory must be writable, have space left and allow hard links"
            ) from error


def _put_if_absent(path: Path, data: bytes) -> bool:
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


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- hints ---------------------------------------------------------------------------------------


def hint(root: Path, exp_id: str, body: bytes) -> None:
    """Say that something was decided. A hint that cannot be written is logged: the commit stands."""
    try:
        with contextlib.closing(open_hints(root)) as db:
            add_hint(db, exp_id, body)
    except sqlite3.Error as error:
        log.warning("no hint in %s (%s); the commit will be found by a sweep", root, error)


def add_hint(db: sqlite3.Connection, exp_id: str, body: bytes) -> None:
    with db:
        db.execute("INSERT INTO notices (exp_id, body) VALUES (?, ?)", (exp_id, body.decode()))


def open_hints(root: Path, busy_s: float = BUSY_S) -> sqlite3.Connection:
    db = sqlite3.connect(root / HINTS, timeout=busy_s)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    return db
