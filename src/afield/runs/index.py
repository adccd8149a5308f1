"""Run index: one SQLite row per rollout and event of a run.

`index.sqlite` in the run directory is written by the processes that write rollouts, in the same order, so
that `afield show` and `afield ui` never scan rollouts. It has no data of its own: `RunIndex.refresh` compares
it with the files of the run and repairs or rebuilds it.

Tables:

1. `rollouts`: one row per rollout, in the order in which they ended (`seq`); the columns are the fields of
   `RolloutRow`. `file`, `offset` and `length` locate the whole rollout; `removed` is 1 once it was deleted.
2. `events(t, seconds, kind, rollout, turn, value)`: `t` is the wall-clock start. Events of a rollout
   (`rollout` is its `seq`): `queue`, `retries` (attempts before the one that counts), `launch`, `first_call`,
   `call` (`turn`, `value` sampled tokens), `tool` (no call of the rollout runs), `refused` (`turn` is the
   class of error, `value` the number of calls), `grade`, `outcome`. Events of the run (`rollout` is NULL):
   `trained` (`value` step) and `published` (`value` version).
3. `steps(split, step, line)`: JSON lines of metrics.jsonl (split `train`) and validation.jsonl (`val`).
4. `dropped(group_id, step, reason)`: groups that a step dropped.
5. `files(name, inode, mtime_ns, size)`: files of the run as indexed; `size` is the number of bytes indexed.
6. `groups` (view): `id, task_id, split, step, rollouts, failed, reward, min_reward, max_reward, seconds,
   sampled_tokens, dropped`, one row per group.

Dictionaries are stored as JSON: `json_extract(refused, '$.context_length_exceeded')`.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from afield.errors import AfieldError, DamagedFile, NotFound, UsageError
from afield.runs.token_account import count_tokens
from afield.runs.training_record import TokenRecord, read_record, read_table, record_file
from afield.runs.turn_facts import turn_facts, turn_tags
from afield.types import HIDDEN_FIELD, RolloutResult, Split, Task, Turn
from afield.utils.sqlite import Database

log = logging.getLogger(__name__)

INDEX_FILE = "index.sqlite"
LINE_FILES = ("metrics.jsonl", "validation.jsonl", "events.jsonl")
FORMAT = 4
"""Number of the schema; an index with another one is rebuilt."""
BUSY_TIMEOUT_S = 5.0
"""Seconds to wait for another process that writes the index."""
QUESTION_FIELDS = ("question", "prompt", "instruction", "problem", "query", "task", "input", "messages")
QUESTION_LENGTH = 200
MESSAGE_LENGTH = 500
STAGES = (
    "queue_s",
    "retries_s",
    "launch_s",
    "startup_s",
    "model_s",
    "tool_s",
    "finish_s",
    "grade_s",
    "store_s",
)
"""Columns with the seconds of each stage of a rollout, in order; they add up to `seconds`."""
_STORED = msgspec.msgpack.Decoder(RolloutResult)
_LINE = msgspec.json.Decoder(RolloutResult)


class RolloutRow(Struct, frozen=True, kw_only=True):
    """Row of the table `rollouts`. Columns that count calls and tokens are of the attempt that counts."""

    seq: int = 0
    """Number of the row, in the order in which rollouts ended."""
    id: str
    """Rollout id."""
    step: int | None
    """Training step that took it, or step of its validation; None before or outside of training."""
    split: str
    """`train` or `val`."""
    group_id: str
    """Group id."""
    task_id: str
    """Task id."""
    question: str
    """First characters of the task's question, on one line."""
    attempts: int
    """Number of attempts, including the one that counts."""
    attempt: int
    """Number of the attempt that counts; its session id is `ID.ATTEMPT`."""
    greedy: int
    """1 if it was sampled greedily, as validations and ReMax baselines are; else 0."""
    reward: float | None
    """Reward; 0 for a policy failure without one, None for other failures."""
    advantage: float | None
    """Advantage in the step that trained it; None without one."""
    rewards: dict[str, float]
    """Named rewards."""
    metrics: dict[str, float]
    """Numbers that the agent reported."""
    failure_kind: str | None
    """`policy`, `task`, `verifier` or `infrastructure`; None without a failure."""
    failure_reason: str | None
    """See `types.Reason`; None without a failure."""
    failure_message: str | None
    """First characters of the failure's message; None without a failure."""
    stop_reason: str
    """Why the agent stopped."""
    turns: int
    """Number of recorded model calls."""
    branches: int
    """Number of turns that no other turn continues."""
    tool_calls: int
    """Number of tool calls of the model."""
    trajectories: int
    """Number of training sequences."""
    context_tokens: int
    """Tokens of the longest conversation, prompt and replies."""
    prompt_tokens: int
    """Prompt tokens of all recorded model calls, each with its whole prompt."""
    sampled_tokens: int
    """Sampled tokens: trained, excluded and untrained ones."""
    trained_tokens: int
    """Tokens that may be trained, before the trainer's own limits."""
    excluded_tokens: int
    """Tokens of excluded turns."""
    excluded: dict[str, int]
    """Tokens of excluded turns, by reason (`exclusions.REASONS`)."""
    untrained: dict[str, int]
    """Tokens of a rollout that contributes no gradient, by reason (`exclusions.UntrainedReason`)."""
    min_version: int | None
    """Oldest policy version that sampled a token; None without tokens."""
    max_version: int | None
    """Newest policy version that sampled a token; None without tokens."""
    refused_calls: int
    """Number of model calls that the gateway refused."""
    refused: dict[str, int]
    """Refused calls by class of error."""
    refusal: str | None
    """Message of the last refused call; None without one."""
    tags: dict[str, int]
    """Number of turns by tag, such as `malformed-call`."""
    facts: dict[str, int]
    """Counts of the turns' properties (`turn_facts.FACTS`); zeros are left out."""
    started: float | None
    """Wall-clock time of the request to run it, in seconds; None if unknown."""
    ended: float | None
    """Wall-clock time of its end, in seconds; None if unknown."""
    seconds: float | None
    """Seconds from `started` to `ended`; None if unknown."""
    queue_s: float | None
    """Seconds until a concurrency slot was free."""
    retries_s: float | None
    """Seconds of the attempts before the one that counts."""
    launch_s: float | None
    """Seconds until the agent accepted its payload."""
    startup_s: float | None
    """Seconds from there to the first model call, or to the outcome without calls."""
    model_s: float | None
    """Seconds in which a model call ran."""
    tool_s: float | None
    """Seconds between model calls, in which none ran."""
    finish_s: float | None
    """Seconds from the last model call to the agent's end."""
    grade_s: float | None
    """Seconds of the separate verifier."""
    store_s: float | None
    """Seconds to read the record of the session."""
    file: str
    """File with the whole rollout, relative to the run directory."""
    offset: int
    """Position of its line in the file, in bytes."""
    length: int
    """Length of its line, in bytes."""
    record_offset: int | None = None
    """Position of its training record, in bytes, in the file of the same name with the suffix `.tokens`; None
    without one."""
    record_length: int | None = None
    """Length of its training record, in bytes."""
    removed: int = 0
    """1 if the file was removed since."""


COLUMNS = tuple(name for name in RolloutRow.__struct_fields__ if name != "seq")
_JSON = ("rewards", "metrics", "excluded", "untrained", "refused", "tags", "facts")
_REAL = ("reward", "advantage", "started", "ended", "seconds", *STAGES)
_TEXT = (
    *("id", "split", "group_id", "task_id", "question", "stop_reason", "refusal", "file"),
    *("failure_kind", "failure_reason", "failure_message", *_JSON),
)


def _declared(name: str) -> str:
    kind = "REAL" if name in _REAL else "TEXT" if name in _TEXT else "INTEGER"
    return f"{name} {kind}{' NOT NULL UNIQUE' if name == 'id' else ''}"


SCHEMA = f"""
CREATE TABLE rollouts (seq INTEGER PRIMARY KEY AUTOINCREMENT,
  {", ".join(map(_declared, COLUMNS))});
CREATE INDEX by_group ON rollouts (group_id);
CREATE INDEX by_file ON rollouts (file);
CREATE INDEX by_step ON rollouts (split, step);
CREATE TABLE events (t REAL NOT NULL, seconds REAL NOT NULL, kind TEXT NOT NULL,
  rollout INTEGER, turn TEXT, value INTEGER);
CREATE INDEX by_time ON events (t);
CREATE INDEX by_rollout ON events (rollout);
CREATE TABLE steps (split TEXT NOT NULL, step INTEGER NOT NULL, line TEXT NOT NULL,
  PRIMARY KEY (split, step));
CREATE TABLE dropped (group_id TEXT PRIMARY KEY, step INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE files (name TEXT PRIMARY KEY, inode INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
  size INTEGER NOT NULL);
CREATE VIEW groups AS SELECT r.group_id AS id, r.task_id, r.split, max(r.step) AS step,
  count(*) AS rollouts, sum(r.failure_kind IS NOT NULL) AS failed, avg(r.reward) AS reward,
  min(r.reward) AS min_reward, max(r.reward) AS max_reward, max(r.seconds) AS seconds,
  sum(r.sampled_tokens) AS sampled_tokens, d.reason AS dropped
  FROM rollouts r LEFT JOIN dropped d ON d.group_id = r.group_id GROUP BY r.group_id
"""
_UPSERT = (
    f"INSERT INTO rollouts ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
    f" ON CONFLICT (id) DO UPDATE SET {', '.join(f'{c}=excluded.{c}' for c in COLUMNS if c != 'id')}"
    " RETURNING seq"
)


class RunEvent(Struct, frozen=True):
    """Line of events.jsonl."""

    t: float
    """Wall-clock start, in seconds."""
    kind: str
    """`trained` or `published`."""
    seconds: float = 0.0
    """Duration, in seconds."""
    value: int | None = None
    """Step or version; None without one."""


_RUN_EVENT = msgspec.json.Decoder(RunEvent)
Event = tuple[float, float, str, str | None, int | None]
"""Time, seconds, kind, turn and value of an event."""


def _records_of(path: Path) -> dict[str, tuple[int, int]]:
    """Places of the training records of a file of rollouts; empty without any."""
    try:
        return read_table(record_file(path))
    except DamagedFile as error:
        log.warning("training records are not listed: %s", error)
        return {}


class FilePosition(Struct, frozen=True):
    """Position of a rollout in a file of its run directory."""

    file: str
    """File, relative to the run directory."""
    offset: int
    """Position of its line in the file, in bytes."""
    length: int
    """Length of its line, in bytes."""
    record_offset: int | None = None
    """Position of its training record, in bytes; None without one."""
    record_length: int | None = None
    """Length of its training record, in bytes."""


class RunIndex:
    """Index of a run directory, for writers and readers. Thread-safe.

    Writing never raises: an index that cannot be written is logged, and the next `refresh` repairs it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.RLock()
        self._database: Database | None = None
        self._broken = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    @property
    def _db(self) -> Database:
        """The database; one with another schema, or a damaged one, is replaced by an empty one."""
        with self._lock:
            if self._database is None:
                path = self._path()
                try:
                    self._database = self._opened(path)
                except (AfieldError, sqlite3.Error) as error:
                    if isinstance(error, UsageError) and not path.is_file():
                        raise
                    log.warning("index %s is rebuilt: %s", path, error)
                    self._database = self._replaced(path)
            return self._database

    def _path(self) -> Path:
        """File of the index; in a temporary directory if the run directory cannot be written."""
        if os.access(self.directory, os.W_OK):
            return self.directory / INDEX_FILE
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="afield-index-")
        return Path(self._scratch.name) / INDEX_FILE

    def _opened(self, path: Path) -> Database:
        database = Database(
            path,
            "",
            name="the run's index",
            remedy="remove the file, it is built again",
            busy_timeout_s=BUSY_TIMEOUT_S,
            private_parent=False,
        )
        try:
            with database.transaction() as connection:
                (file_format,) = connection.execute("PRAGMA user_version").fetchone()
                if not file_format and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for statement in SCHEMA.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version={FORMAT}")
                elif file_format != FORMAT:
                    raise DamagedFile(f"its format is {file_format}, not {FORMAT}")
                connection.execute("SELECT max(seq) FROM rollouts")
        except BaseException:
            database.close()
            raise
        return database

    def _replaced(self, path: Path) -> Database:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return self._opened(path)

    # --- writing -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Repair the index before rollouts are written."""
        with self._writing():
            self.refresh()

    def put(self, results: Iterable[tuple[RolloutResult, FilePosition]], step: int | None = None) -> None:
        """Add or replace the rows and events of rollouts. Repeating is harmless."""
        with self._writing():
            rows = [(row_of(result, place, step), events_of(result)) for result, place in results]
            with self._db.transaction() as connection:
                self._insert(connection, rows)

    def put_file(
        self, path: Path, results: Sequence[tuple[RolloutResult, int, int]], step: int | None
    ) -> None:
        """Add the rollouts of a file that this process has just written, with offset and length of each."""
        with self._writing():
            name, records = self._name(path), _records_of(path)
            rows = [
                (row_of(r, FilePosition(name, at, size, *records.get(r.rollout.id, ())), step), events_of(r))
                for r, at, size in results
            ]
            with self._db.transaction() as connection:
                self._forget(connection, name)
                self._insert(connection, rows)
                if (status := _identity(path)) is not None:
                    _mark(connection, name, status)

    def put_line(self, path: Path) -> None:
        """Read the lines that this process has appended to a file."""
        with self._writing(), self._db.transaction() as connection:
            self._read_new(connection, path)

    def mark_removed(self, name: str) -> None:
        """Keep the rows of a file that was removed, marked as removed."""
        with self._writing(), self._db.transaction() as connection:
            connection.execute("UPDATE rollouts SET removed=1 WHERE file=?", (name,))
            connection.execute("DELETE FROM files WHERE name=?", (name,))

    @contextmanager
    def _writing(self) -> Generator[None]:
        """Log the first error of writing the index and ignore later ones."""
        try:
            yield
        except (AfieldError, OSError, sqlite3.Error) as error:
            if not self._broken:
                self._broken = True
                log.warning("index of %s is not written, readers repair it: %s", self.directory, error)

    def _insert(
        self, connection: sqlite3.Connection, rows: Iterable[tuple[RolloutRow, Sequence[Event]]]
    ) -> None:
        for row, events in rows:
            values = [_encoded(getattr(row, name)) for name in COLUMNS]
            ((seq,),) = connection.execute(_UPSERT, values).fetchall()
            connection.execute("DELETE FROM events WHERE rollout=?", (seq,))
            connection.executemany(
                "INSERT INTO events VALUES (?,?,?,?,?,?)",
                [(t, seconds, kind, seq, turn, value) for t, seconds, kind, turn, value in events],
            )

    def _name(self, path: Path) -> str:
        return path.relative_to(self.directory).as_posix()

    # --- repair ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Compare the index with the run's files, and read what it does not have.

        A file that grew is read from where it ended, and one that was replaced is read again. Rows of a
        file that was removed are marked; those of a lost checkpoint are found in the rollout store.
        """
        try:
            self._refresh()
        except (DamagedFile, sqlite3.DatabaseError) as error:
            log.warning("index %s is rebuilt: %s", self._path(), error)
            with self._lock:
                if self._database is not None:
                    self._database.close()
                self._database = self._replaced(self._path())
            self._refresh()

    def _refresh(self) -> None:
        """Read new lines, in one transaction per file, so that no writer of rollouts waits for long."""
        lines = [self.directory / name for name in LINE_FILES]
        files = list(self._rollout_files())
        for path in (*lines, *files):
            if self._indexed(path) != _identity(path):
                with self._db.transaction() as connection:
                    self._read_new(connection, path)
        on_disk, stored = set(map(self._name, files)), self._stored()
        rows = self._db.fetch_all("SELECT id, file, removed FROM rollouts")
        present = on_disk | stored.keys()
        missing = stored.keys() - {file for _, file, _ in rows}
        lost = [(rollout_id, removed) for rollout_id, file, removed in rows if file not in present]
        for batch in _batches(sorted(missing)):
            with self._db.transaction() as connection:
                for name in batch:
                    self._read_stored(connection, name, stored[name])
        gone = [i for i, removed in lost if not removed and f"rollout_store/{i}.rollout" not in stored]
        self._db.execute_many("UPDATE rollouts SET removed=1 WHERE id=?", [(i,) for i in gone])

    def _indexed(self, path: Path) -> tuple[int, int, int] | None:
        sql = "SELECT inode, mtime_ns, size FROM files WHERE name=?"
        return self._db.fetch_one(sql, self._name(path))

    def _rollout_files(self) -> Iterator[Path]:
        for folder in ("rollouts", "validation"):
            yield from sorted((self.directory / folder).glob("*.jsonl"))

    def _stored(self) -> dict[str, int]:
        """Files of the rollout store with their sizes."""
        with suppress(FileNotFoundError), os.scandir(self.directory / "rollout_store") as entries:
            names = [entry for entry in entries if entry.name.endswith(".rollout")]
            return {f"rollout_store/{entry.name}": entry.stat().st_size for entry in names}
        return {}

    def _read_stored(self, connection: sqlite3.Connection, name: str, size: int) -> None:
        try:
            result = _STORED.decode((self.directory / name).read_bytes())
        except FileNotFoundError:
            return  # a step has taken it since
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read and is not listed: %s", self.directory / name, error)
            return
        row = row_of(result, FilePosition(name, 0, size), None)
        at = connection.execute("SELECT file FROM rollouts WHERE id=?", (row.id,)).fetchone()
        if at is None or not (self.directory / at[0]).exists():
            self._insert(connection, [(row, events_of(result))])

    def _read_new(self, connection: sqlite3.Connection, path: Path) -> None:
        """Read the lines of a file that the index does not have."""
        name = self._name(path)
        before, status = self._indexed(path), _identity(path)
        if status is None or before == status:
            return
        begin = 0
        if before is not None and before[0] == status[0] and before[2] <= status[2]:
            begin = before[2]  # the file has grown
        elif before is not None:
            self._forget(connection, name)
        end, records = begin, _records_of(path)
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written, or cut short by a crash
                self._read_line(connection, path, line, end, records)
                end += len(line)
        _mark(connection, name, (*status[:2], end))

    def _forget(self, connection: sqlite3.Connection, name: str) -> None:
        if name == "metrics.jsonl":
            connection.execute("DELETE FROM steps WHERE split='train'")
            connection.execute("DELETE FROM dropped")
        elif name == "validation.jsonl":
            connection.execute("DELETE FROM steps WHERE split='val'")
        elif name == "events.jsonl":
            connection.execute("DELETE FROM events WHERE rollout IS NULL")
        else:
            owned = "SELECT seq FROM rollouts WHERE file=?"
            connection.execute(f"DELETE FROM events WHERE rollout IN ({owned})", (name,))
            connection.execute("DELETE FROM rollouts WHERE file=?", (name,))

    def _read_line(
        self,
        connection: sqlite3.Connection,
        path: Path,
        line: bytes,
        offset: int,
        records: Mapping[str, tuple[int, int]],
    ) -> None:
        name = self._name(path)
        try:
            if name in ("metrics.jsonl", "validation.jsonl"):
                split = Split.TRAIN if name == "metrics.jsonl" else Split.VAL
                self._read_step(connection, split, step_line(line))
            elif name == "events.jsonl":
                event = _RUN_EVENT.decode(line)
                values = (event.t, event.seconds, event.kind, event.value)
                connection.execute("INSERT INTO events VALUES (?,?,?,NULL,NULL,?)", values)
            else:
                result = _LINE.decode(line)
                step = path.stem.removeprefix("step-")
                place = FilePosition(name, offset, len(line) - 1, *records.get(result.rollout.id, ()))
                row = row_of(result, place, int(step) if step.isdigit() else None)
                self._insert(connection, [(row, events_of(result))])
        except (ValueError, KeyError, TypeError) as error:  # msgspec's errors are ValueErrors
            log.warning("%s is damaged at byte %d; the line is not listed: %s", path, offset, error)

    def _read_step(self, connection: sqlite3.Connection, split: Split, line: Mapping[str, Any]) -> None:
        values = (str(line.get("split", split)), line["step"], json.dumps(line))
        connection.execute("INSERT OR REPLACE INTO steps VALUES (?,?,?)", values)
        for group_id, reason in (line.get("dropped_groups") or {}).items():
            connection.execute(
                "INSERT OR REPLACE INTO dropped VALUES (?,?,?)", (group_id, line["step"], reason)
            )

    # --- reading -----------------------------------------------------------------------------------

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of a SELECT as dictionaries by column; JSON columns stay text."""
        with self._lock:
            cursor = self._db.open().execute(sql, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def fetch(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a SELECT as tuples, for many rows."""
        return self._db.fetch_all(sql, *values)

    def rollouts(
        self, where: str = "1", *values: Any, order: str = "seq", limit: int = -1
    ) -> list[RolloutRow]:
        """Rows of `rollouts`; `where` and `order` are SQL of this program, never of a user."""
        columns = ", ".join(RolloutRow.__struct_fields__)
        sql = f"SELECT {columns} FROM rollouts WHERE {where} ORDER BY {order} LIMIT ?"
        return [_decoded(row) for row in self._db.fetch_all(sql, *values, limit)]

    def find(self, rollout_id: str) -> RolloutRow:
        """The row of a rollout, by its id or by the session id of the attempt that counts."""
        rows = self.rollouts("id=?", rollout_id) or self.rollouts("id || '.' || attempt = ?", rollout_id)
        if not rows:
            raise NotFound(f"{self.directory.name} has no finished rollout {rollout_id!r}")
        return rows[0]

    def read_record(self, row: RolloutRow) -> TokenRecord | None:
        """Training record of a row; None without one. Raises DamagedFile if it cannot be read."""
        if row.record_offset is None or row.record_length is None:
            return None
        return read_record(record_file(self.directory / row.file), row.record_offset, row.record_length)

    def read(self, row: RolloutRow) -> RolloutResult:
        """The whole rollout of a row; raises NotFound if its file was removed."""
        path = self.directory / row.file
        try:
            with path.open("rb") as file:
                file.seek(row.offset)
                data = file.read(row.length)
            return (_STORED if path.suffix == ".rollout" else _LINE).decode(data)
        except FileNotFoundError:
            raise NotFound(
                f"rollout {row.id} was in {path}, which was removed (keep_rollouts_gb); only its row is left"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise DamagedFile(f"rollout {row.id} cannot be read from {path}: {error}") from error


def step_line(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl or validation.jsonl; raises ValueError for one without a number of its step."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    step = values.get("step")
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise ValueError(f"step = {step!r} is not the number of a step")
    return values


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of change and size of a file; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _mark(connection: sqlite3.Connection, name: str, identity: tuple[int, int, int]) -> None:
    connection.execute("INSERT OR REPLACE INTO files VALUES (?,?,?,?)", (name, *identity))


def _batches(names: Sequence[str], size: int = 256) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), size):
        yield names[first : first + size]


def _encoded(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _decoded(values: Sequence[Any]) -> RolloutRow:
    row = dict(zip(RolloutRow.__struct_fields__, values, strict=True))
    return RolloutRow(**{name: json.loads(v) if name in _JSON else v for name, v in row.items()})


# --- one rollout -----------------------------------------------------------------------------------


def row_of(result: RolloutResult, place: FilePosition, step: int | None) -> RolloutRow:
    """Row of a rollout."""
    rollout, outcome, turns = result.rollout, result.outcome, result.turns
    account = count_tokens([result])
    failure = outcome.failure
    spans = [span for turn in turns for span in turn.versions]
    parents = {turn.parent for turn in turns}
    contexts = context_lengths(turns)
    stages: dict[str, Any] = {**stage_seconds(result)}
    return RolloutRow(
        id=rollout.id,
        step=step,
        split=str(rollout.split),
        group_id=rollout.group_id,
        task_id=rollout.task.id,
        question=question(rollout.task),
        attempts=result.attempts,
        attempt=outcome.attempt,
        greedy=int(rollout.sampling is not None and rollout.sampling.temperature == 0),
        reward=outcome.reward_or_floor(0.0),
        advantage=result.advantage,
        rewards=outcome.rewards,
        metrics=outcome.metrics,
        failure_kind=str(failure.kind) if failure else None,
        failure_reason=str(failure.reason) if failure else None,
        failure_message=failure.message[:MESSAGE_LENGTH] if failure else None,
        stop_reason=outcome.stop_reason,
        turns=len(turns),
        branches=sum(turn.id not in parents for turn in turns),
        tool_calls=sum(len(turn.messages[-1].tool_calls) for turn in turns if turn.messages),
        trajectories=len(result.trajectories),
        context_tokens=max(contexts.values(), default=0),
        prompt_tokens=sum(contexts[turn.id] - len(turn.token_ids) for turn in turns),
        sampled_tokens=account.sampled,
        trained_tokens=account.trained,
        excluded_tokens=sum(account.excluded.values()),
        excluded=dict(account.excluded),
        untrained=dict(account.untrained),
        min_version=min((span.low for span in spans), default=None),
        max_version=max((span.high for span in spans), default=None),
        refused_calls=sum(refused.count for refused in result.refused),
        refused={refused.code: refused.count for refused in result.refused},
        refusal=max(result.refused, key=lambda r: r.last).message[:MESSAGE_LENGTH]
        if result.refused
        else None,
        tags=turn_tags(turns),
        facts=turn_facts(turns, result.excluded),
        started=result.times.submitted,
        ended=result.times.ended,
        seconds=_between(result.times.submitted, result.times.ended),
        file=place.file,
        offset=place.offset,
        length=place.length,
        record_offset=place.record_offset,
        record_length=place.record_length,
        **stages,
    )


def question(task: Task) -> str:
    """First characters of a task's question: a usual field, the last message, or the whole input."""
    for name in QUESTION_FIELDS:
        value = task.input.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")
        if isinstance(value, str) and value.strip():
            return _one_line(value)
    return _one_line(
        json.dumps({k: v for k, v in task.input.items() if k != HIDDEN_FIELD}, ensure_ascii=False)
    )


def _one_line(text: str) -> str:
    return " ".join(text[: 2 * QUESTION_LENGTH].split())[:QUESTION_LENGTH]


def context_lengths(turns: Sequence[Turn]) -> dict[str, int]:
    """Tokens of prompt and reply of each turn."""
    lengths: dict[str, int] = {}
    for turn in turns:
        own = len(turn.delta_ids) + len(turn.token_ids)
        lengths[turn.id] = own + (lengths.get(turn.parent, 0) if turn.parent else 0)
    return lengths


def calls_of(turns: Iterable[Turn]) -> list[tuple[float, float, Turn]]:
    """Start, end and turn of the calls that have both, by start."""
    timed = [(turn.started, turn.ended, turn) for turn in turns if turn.started and turn.ended is not None]
    return sorted(timed, key=lambda call: (call[0], call[1]))


def pauses(calls: Sequence[tuple[float, float, Turn]]) -> list[tuple[float, float]]:
    """Start and length of the times between calls in which none ran."""
    gaps: list[tuple[float, float]] = []
    busy_until = calls[0][1] if calls else 0.0
    for started, ended, _ in calls:
        if started > busy_until:
            gaps.append((busy_until, started - busy_until))
        busy_until = max(busy_until, ended)
    return gaps


def stage_seconds(result: RolloutResult) -> dict[str, float | None]:
    """Seconds of each stage; None where its times are unknown."""
    times, calls = result.times, calls_of(result.turns)
    first = calls[0][0] if calls else None
    last = max(ended for _, ended, _ in calls) if calls else None
    tools = sum(length for _, length in pauses(calls))
    done = times.grading or times.outcome
    return {
        "queue_s": _between(times.submitted, times.started),
        "retries_s": _between(times.started, times.attempted),
        "launch_s": _between(times.attempted, times.launched or (None if calls else times.outcome)),
        "startup_s": _between(times.launched, first if calls else done),
        "model_s": last - first - tools if first is not None and last is not None else None,
        "tool_s": tools if calls else None,
        "finish_s": _between(last, done),
        "grade_s": _between(times.grading, times.outcome),
        "store_s": _between(times.outcome, times.ended),
    }


def _between(start: float | None, end: float | None) -> float | None:
    """Seconds between two times, at least 0: the gateway's clock may differ from the collector's."""
    return None if start is None or end is None else round(max(0.0, end - start), 6)


def events_of(result: RolloutResult) -> list[Event]:
    """Events of a rollout."""
    times, calls = result.times, calls_of(result.turns)
    events: list[Event] = []
    for kind, start, end in (
        ("queue", times.submitted, times.started),
        ("retries", times.started, times.attempted if result.attempts > 1 else None),
        ("launch", times.attempted, times.launched),
        ("grade", times.grading, times.outcome),
    ):
        if start is not None and end is not None:
            events.append((start, max(0.0, end - start), kind, None, None))
    if calls:
        events.append((calls[0][0], 0.0, "first_call", calls[0][2].id, None))
    events += [(t, end - t, "call", turn.id, len(turn.token_ids)) for t, end, turn in calls]
    events += [(t, length, "tool", None, None) for t, length in pauses(calls)]
    events += [(r.first, r.last - r.first, "refused", r.code, r.count) for r in result.refused]
    if times.outcome is not None:
        events.append((times.outcome, 0.0, "outcome", None, None))
    return events
