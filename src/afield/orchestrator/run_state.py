"""What must be remembered to go on after a crash, in one SQLite file.

Attempts and how they failed, how every rollout ended, which groups were begun in which order, and what
was trained at which step. Collector and trainer meet here, in one process or in two: a group is noted
as ready only when its rollouts lie in the spool, and as taken only when the checkpoint that contains it
has its name. Noting the same thing again changes nothing; `rewind` goes back to a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from afield.sqlite import Database
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason

SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (rollout_id TEXT, n INTEGER, began REAL, kind TEXT, reason TEXT,
  message TEXT, tokens INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (rollout_id, n));
CREATE TABLE IF NOT EXISTS finished (rollout_id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (id TEXT PRIMARY KEY, position INTEGER NOT NULL UNIQUE,
  born INTEGER NOT NULL, ready INTEGER NOT NULL DEFAULT 0, dropped TEXT, step INTEGER);
CREATE INDEX IF NOT EXISTS untaken ON groups (position) WHERE step IS NULL;
CREATE TABLE IF NOT EXISTS members (group_id TEXT, n INTEGER, rollout_id TEXT, PRIMARY KEY (group_id, n));
CREATE TABLE IF NOT EXISTS trained (rollout_id TEXT PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""
BASELINE = -1  # the place in its group of the rollout that is only compared with


class RolloutSummary(Struct, frozen=True):
    """How a rollout ended, after how many attempts, and the tokens of the attempt that counts."""

    outcome: Outcome
    attempts: int
    tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None


class PendingGroup(Struct, frozen=True):
    """A group that was begun and that no step has taken yet. `born` counts steps that were done then."""

    id: str
    position: int
    begun_after_step: int
    ready: bool
    drop_reason: str | None


class AttemptRecord(Struct, frozen=True):
    """An attempt as it was noted; `failure` is None while nothing is known, and if it counted.

    `began` is when it was launched, by the wall clock; before that, when it was noted.
    """

    attempt: Attempt
    started_at: float
    failure: Failure | None
    tokens: int

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.started_at)


class RunState:
    """Used from any thread: the loop notes attempts while a thread notes a step."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """`durable`: what was written survives a power cut, too."""
        self._db = Database(
            path,
            SCHEMA,
            name="the run's state",
            remedy="make room or free the file, then resume the run",
            synchronous="FULL" if durable else "NORMAL",
        )

    def __enter__(self) -> Self:
        self._db.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.close()

    # --- attempts and rollouts -------------------------------------------------------------------

    def begin_attempt(self, attempt: Attempt) -> None:
        """Before it is launched."""
        sql = "INSERT OR IGNORE INTO attempts (rollout_id, n, began) VALUES (?,?,?)"
        self._db.execute(sql, attempt.rollout_id, attempt.n, time.time())

    def mark_launched(self, attempt: Attempt) -> None:
        """Its agent has it: from here on its time counts, whoever waits for it."""
        sql = "UPDATE attempts SET began=? WHERE rollout_id=? AND n=?"
        self._db.execute(sql, time.time(), attempt.rollout_id, attempt.n)

    def record_tokens(self, attempt: Attempt, tokens: int) -> None:
        """What an attempt cost that came to nothing, and is held against nobody."""
        sql = "UPDATE attempts SET tokens=? WHERE rollout_id=? AND n=?"
        self._db.execute(sql, tokens, attempt.rollout_id, attempt.n)

    def has_attempt(self, attempt: Attempt) -> bool:
        sql = "SELECT 1 FROM attempts WHERE rollout_id=? AND n=?"
        return self._db.fetch_one(sql, attempt.rollout_id, attempt.n) is not None

    def fail_attempt(self, attempt: Attempt, failure: Failure, tokens: int = 0) -> None:
        """An attempt failed and another one may follow: what it spent, of retries and tokens, is kept."""
        sql = "UPDATE attempts SET kind=?, reason=?, message=?, tokens=? WHERE rollout_id=? AND n=?"
        told = (str(failure.kind), str(failure.reason), failure.message[:2000], tokens)
        self._db.execute(sql, *told, attempt.rollout_id, attempt.n)

    def attempts(self, rollout_id: str) -> list[AttemptRecord]:
        """In their order."""
        sql = "SELECT n, began, kind, reason, message, tokens FROM attempts WHERE rollout_id=? ORDER BY n"
        return [
            AttemptRecord(
                Attempt(rollout_id, n),
                began,
                Failure(FailureKind(kind), Reason(reason), message) if kind else None,
                tokens,
            )
            for n, began, kind, reason, message, tokens in self._db.fetch_all(sql, rollout_id)
        ]

    def finish_rollout(self, rollout_id: str, note: RolloutSummary) -> None:
        body = msgspec.msgpack.encode(note)
        self._db.execute("INSERT OR IGNORE INTO finished VALUES (?,?)", rollout_id, body)

    def rollout_summary(self, rollout_id: str) -> RolloutSummary | None:
        row = self._db.fetch_one("SELECT body FROM finished WHERE rollout_id=?", rollout_id)
        return msgspec.msgpack.decode(row[0], type=RolloutSummary) if row else None

    def forget_rollout(self, rollout_id: str) -> None:
        """How it ended no longer counts: it was cancelled, and is wanted after all. Its attempts are kept."""
        self._db.execute("DELETE FROM finished WHERE rollout_id=?", rollout_id)

    def wasted_tokens(self, rollout_ids: Sequence[str]) -> int:
        """Tokens of attempts that came to nothing."""
        sql = f"SELECT coalesce(sum(tokens), 0) FROM attempts WHERE rollout_id IN ({_marks(rollout_ids)})"
        return self._db.fetch_one(sql, *rollout_ids)[0]

    # --- groups ----------------------------------------------------------------------------------

    def begin_group(self, group_id: str, position: int, born: int) -> None:
        sql = "INSERT OR IGNORE INTO groups (id, position, born) VALUES (?,?,?)"
        self._db.execute(sql, group_id, position, born)

    def groups_begun(self) -> int:
        """How many groups were begun; the next one has this position."""
        return self._db.fetch_one("SELECT coalesce(max(position), -1) + 1 FROM groups")[0]

    def complete_group(
        self, group_id: str, members: Sequence[str], baseline: str | None, dropped: str | None
    ) -> None:
        """All rollouts of a group have ended and lie in the spool; `dropped` says why it cannot train."""
        rows = [(group_id, n, rollout_id) for n, rollout_id in enumerate(members)]
        rows += [(group_id, BASELINE, baseline)] if baseline else []
        with self._db.transaction():
            self._db.execute_many("INSERT OR IGNORE INTO members VALUES (?,?,?)", rows)
            self._db.execute("UPDATE groups SET ready=1, dropped=? WHERE id=?", dropped, group_id)

    def pending_groups(self) -> list[PendingGroup]:
        """Groups that were begun and that no step has taken, in the order they were begun."""
        sql = "SELECT id, position, born, ready, dropped FROM groups WHERE step IS NULL ORDER BY position"
        return [
            PendingGroup(i, p, b, bool(ready), dropped) for i, p, b, ready, dropped in self._db.fetch_all(sql)
        ]

    def group_members(self, group_id: str) -> tuple[list[str], str | None]:
        """The rollouts of a group that is ready, and its baseline."""
        found = dict(
            self._db.fetch_all("SELECT n, rollout_id FROM members WHERE group_id=? ORDER BY n", group_id)
        )
        baseline = found.pop(BASELINE, None)
        return list(found.values()), baseline

    # --- steps -----------------------------------------------------------------------------------

    def finish_step(self, step: int, group_ids: Iterable[str], rollout_ids: Iterable[str]) -> None:
        """A step is done: these groups were its own, these rollouts it trained.

        One that another step took before is an error.
        """
        with self._db.transaction():
            for table, key, ids in (("groups", "id", group_ids), ("trained", "rollout_id", rollout_ids)):
                for one in ids:
                    known = self._db.fetch_one(f"SELECT step FROM {table} WHERE {key}=?", one)
                    if known and known[0] not in (None, step):
                        raise ValueError(f"{one} was taken by step {known[0]}, not {step}")
                    if table == "groups":
                        self._db.execute("UPDATE groups SET step=? WHERE id=?", step, one)
                    else:
                        self._db.execute("INSERT OR IGNORE INTO trained VALUES (?,?)", one, step)

    def rewind(self, step: int) -> None:
        """Forget training after this step: the weights that had it are gone."""
        with self._db.transaction():
            self._db.execute("DELETE FROM trained WHERE step > ?", step)
            self._db.execute("UPDATE groups SET step=NULL WHERE step > ?", step)

    def trained_rollouts(self) -> dict[str, int]:
        return dict(self._db.fetch_all("SELECT rollout_id, step FROM trained"))

    def groups_taken(self) -> int:
        """How many groups the steps have taken."""
        return self._db.fetch_one("SELECT count(*) FROM groups WHERE step IS NOT NULL")[0]

    @property
    def published_step(self) -> int:
        """The last step whose weights the engines sample with."""
        return self._fact("done")

    @published_step.setter
    def published_step(self, step: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('done', ?)", step)

    @property
    def base_version(self) -> int | None:
        """The policy version that the run began with; None before it was chosen."""
        row = self._db.fetch_one("SELECT value FROM facts WHERE key='base'")
        return row[0] if row else None

    @base_version.setter
    def base_version(self, version: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('base', ?)", version)

    @property
    def late_outcomes(self) -> int:
        """Outcomes that came after their attempt had been given up, and were refused."""
        return self._fact("late")

    @late_outcomes.setter
    def late_outcomes(self, number: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('late', ?)", number)

    # --- small things ----------------------------------------------------------------------------

    def _fact(self, key: str) -> int:
        row = self._db.fetch_one("SELECT value FROM facts WHERE key=?", key)
        return row[0] if row else 0


def _marks(values: Sequence[str]) -> str:
    return ",".join("?" * len(values))
