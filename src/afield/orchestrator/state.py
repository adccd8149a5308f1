"""Run state on disk: RunState, RolloutStore and the run directory.

1. `RunState` records attempts, rollouts, groups and steps in SQLite, for restarts.
2. `RolloutStore` keeps finished rollouts until a step has trained on them.
3. `RunDirectory` has the paths of a run, its checkpoints and its readable records.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
from msgspec import Struct, structs

from afield.errors import DamagedFile, NotFound, Unavailable, UsageError
from afield.runs.index import FilePosition, RunIndex, step_line
from afield.runs.training_record import encode_file, record_file
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason, RolloutResult, Task
from afield.utils.backoff import Backoff
from afield.utils.durable_files import write_whole
from afield.utils.private_files import private_directory
from afield.utils.sqlite import Database

log = logging.getLogger(__name__)

STEP_STATE_FILE = "state.json"
INFO_FILE = "info.json"
SHOWN_NAMES = 10
"""Names of runs that an error lists."""
T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RolloutResult)
STATE_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (rollout_id TEXT, n INTEGER, began REAL, kind TEXT, reason TEXT,
  message TEXT, tokens INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (rollout_id, n));
CREATE TABLE IF NOT EXISTS finished (rollout_id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (id TEXT PRIMARY KEY, position INTEGER NOT NULL UNIQUE,
  born INTEGER NOT NULL, ready INTEGER NOT NULL DEFAULT 0, dropped TEXT, step INTEGER);
CREATE INDEX IF NOT EXISTS untaken ON groups (position) WHERE step IS NULL;
CREATE TABLE IF NOT EXISTS members (group_id TEXT, n INTEGER, rollout_id TEXT, PRIMARY KEY (group_id, n));
CREATE TABLE IF NOT EXISTS refills (group_id TEXT PRIMARY KEY, position INTEGER NOT NULL,
  tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS renumberings (served INTEGER PRIMARY KEY, shift INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS trained (rollout_id TEXT PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS retried (rollout_id TEXT PRIMARY KEY, n INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS unwritten_rewards (rollout_id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""
BASELINE = -1  # member number of a group's greedy baseline


def poll_pause() -> Backoff:
    """Pauses while waiting for a change of the run state: about 5% of the wait, from 0.05 to 0.25 seconds."""
    return Backoff(0.05, 0.25, factor=1.05)


class RolloutSummary(Struct, frozen=True):
    """End of a rollout, without turns and trajectories."""

    outcome: Outcome
    """Outcome of the attempt that counts."""
    attempts: int
    """Number of attempts, including the one that counts."""
    tokens: int = 0
    """Trainable tokens of the attempt that counts."""
    min_version: int | None = None
    """Oldest policy version that sampled one of these tokens; None without tokens."""
    max_version: int | None = None
    """Newest policy version that sampled one of these tokens; None without tokens."""


class PendingGroup(Struct, frozen=True):
    """Group that has begun and that no step has taken yet."""

    id: str
    """Group id."""
    position: int
    """Position in the schedule, from 0."""
    begun_after_step: int
    """Number of steps that were published when the group began."""
    ready: bool
    """Whether all its rollouts have ended and are in the rollout store."""
    drop_reason: str | None
    """Why the group cannot be trained; None if it can."""


class AttemptRecord(Struct, frozen=True):
    """Attempt in the run state."""

    attempt: Attempt
    """Attempt of a rollout."""
    started_at: float
    """Wall-clock time of the launch, or of the registration before it, in seconds."""
    failure: Failure | None
    """Why it failed; None while it runs, or if its outcome counts."""
    tokens: int
    """Number of sampled tokens; 0 unless it failed or was abandoned."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.started_at)


class RunState:
    """Attempts, rollouts, groups and steps in one SQLite file. Thread-safe.

    Collector and training loop share it, in one process or in two. A group is completed after its rollouts
    are in the rollout store, and taken by a step after that step's checkpoint has its final name. Writes are
    idempotent; `rewind` goes back to a checkpoint.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """`durable` makes transactions survive a power cut, with an fsync each."""
        self._db = Database(
            path,
            STATE_SCHEMA,
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
        """Register an attempt before its launch."""
        sql = "INSERT OR IGNORE INTO attempts (rollout_id, n, began) VALUES (?,?,?)"
        self._db.execute(sql, attempt.rollout_id, attempt.n, time.time())

    def mark_launched(self, attempt: Attempt) -> None:
        """Record the time at which the agent accepted its payload."""
        sql = "UPDATE attempts SET began=? WHERE rollout_id=? AND n=?"
        self._db.execute(sql, time.time(), attempt.rollout_id, attempt.n)

    def record_tokens(self, attempt: Attempt, tokens: int) -> None:
        """Record the tokens of an abandoned attempt, which does not use up a retry."""
        sql = "UPDATE attempts SET tokens=? WHERE rollout_id=? AND n=?"
        self._db.execute(sql, tokens, attempt.rollout_id, attempt.n)

    def has_attempt(self, attempt: Attempt) -> bool:
        """Whether this run registered the attempt."""
        sql = "SELECT 1 FROM attempts WHERE rollout_id=? AND n=?"
        return self._db.fetch_one(sql, attempt.rollout_id, attempt.n) is not None

    def fail_attempt(self, attempt: Attempt, failure: Failure, tokens: int = 0) -> None:
        """Record a failed attempt; it uses up one retry of its failure kind."""
        sql = "UPDATE attempts SET kind=?, reason=?, message=?, tokens=? WHERE rollout_id=? AND n=?"
        values = (str(failure.kind), str(failure.reason), failure.message[:2000], tokens)
        self._db.execute(sql, *values, attempt.rollout_id, attempt.n)

    def attempts(self, rollout_id: str) -> list[AttemptRecord]:
        """All attempts of a rollout, oldest first."""
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

    def finish_rollout(self, rollout_id: str, summary: RolloutSummary) -> None:
        """Record how a rollout ended; the first record counts."""
        body = msgspec.msgpack.encode(summary)
        self._db.execute("INSERT OR IGNORE INTO finished VALUES (?,?)", rollout_id, body)

    def rollout_summary(self, rollout_id: str) -> RolloutSummary | None:
        row = self._db.fetch_one("SELECT body FROM finished WHERE rollout_id=?", rollout_id)
        return msgspec.msgpack.decode(row[0], type=RolloutSummary) if row else None

    def forget_rollout(self, rollout_id: str) -> None:
        """Let a rollout that ended run again; its attempts are kept."""
        self._db.execute("DELETE FROM finished WHERE rollout_id=?", rollout_id)

    def retry_rollout(self, outcome: Outcome) -> None:
        """Let a rollout that ended with this failure run again with all retries; its attempts are kept."""
        assert outcome.failure is not None
        with self._db.transaction():
            self.fail_attempt(Attempt(outcome.rollout_id, outcome.attempt), outcome.failure)
            n = max((record.attempt.n for record in self.attempts(outcome.rollout_id)), default=0)
            self._db.execute("INSERT OR REPLACE INTO retried VALUES (?,?)", outcome.rollout_id, n)
            self.forget_rollout(outcome.rollout_id)

    def retried_attempts(self, rollout_id: str) -> int:
        """Number of attempts before the rollout was retried as a whole; they use up no retries."""
        row = self._db.fetch_one("SELECT n FROM retried WHERE rollout_id=?", rollout_id)
        return row[0] if row else 0

    def give_rewards(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Replace outcomes whose reward is pending, all or none; returns the outcomes that count.

        An outcome that is no longer pending stays. The rollout store gets them with `write_rewards`.
        """
        counted: list[Outcome] = []
        with self._db.transaction():
            for outcome in outcomes:
                summary = self.rollout_summary(outcome.rollout_id)
                if summary is None:
                    raise NotFound(f"rollout {outcome.rollout_id} has not ended")
                if summary.outcome.reward_pending:
                    summary = structs.replace(summary, outcome=outcome)
                    body = msgspec.msgpack.encode(summary)
                    self._db.execute(
                        "UPDATE finished SET body=? WHERE rollout_id=?", body, outcome.rollout_id
                    )
                    sql = "INSERT OR IGNORE INTO unwritten_rewards VALUES (?)"
                    self._db.execute(sql, outcome.rollout_id)
                counted.append(summary.outcome)
        return counted

    def unwritten_rewards(self) -> set[str]:
        """Rollouts whose reward was given and is not in the rollout store yet."""
        return {
            rollout_id for (rollout_id,) in self._db.fetch_all("SELECT rollout_id FROM unwritten_rewards")
        }

    def mark_reward_written(self, rollout_id: str) -> None:
        self._db.execute("DELETE FROM unwritten_rewards WHERE rollout_id=?", rollout_id)

    def wasted_tokens(self, rollout_ids: Sequence[str]) -> int:
        """Tokens of failed and abandoned attempts of these rollouts."""
        placeholders = ",".join("?" * len(rollout_ids))
        sql = f"SELECT coalesce(sum(tokens), 0) FROM attempts WHERE rollout_id IN ({placeholders})"
        return self._db.fetch_one(sql, *rollout_ids)[0]

    # --- groups ----------------------------------------------------------------------------------

    def begin_group(self, group_id: str, position: int, published_step: int) -> None:
        """Register a group before its first rollout starts."""
        sql = "INSERT OR IGNORE INTO groups (id, position, born) VALUES (?,?,?)"
        self._db.execute(sql, group_id, position, published_step)

    def groups_begun(self) -> int:
        """Number of groups begun so far, which is the position of the next one."""
        return self._db.fetch_one("SELECT coalesce(max(position), -1) + 1 FROM groups")[0]

    def complete_group(
        self, group_id: str, members: Sequence[str], baseline: str | None, drop_reason: str | None
    ) -> None:
        """Record that all rollouts of a group have ended and are in the rollout store."""
        rows = [(group_id, n, rollout_id) for n, rollout_id in enumerate(members)]
        rows += [(group_id, BASELINE, baseline)] if baseline else []
        with self._db.transaction():
            self._db.execute_many("INSERT OR IGNORE INTO members VALUES (?,?,?)", rows)
            self._db.execute("UPDATE groups SET ready=1, dropped=? WHERE id=?", drop_reason, group_id)

    def refill_group(self, group_id: str, replacement: str, published_step: int, tokens: int) -> None:
        """Replace a group whose rewards are all equal by another one at its position.

        `tokens` are those that the replaced group sampled.
        """
        with self._db.transaction():
            row = self._db.fetch_one("SELECT position FROM groups WHERE id=?", group_id)
            if row is None:  # it was replaced before
                return
            sql = "INSERT OR IGNORE INTO refills (group_id, position, tokens) VALUES (?,?,?)"
            self._db.execute(sql, group_id, row[0], tokens)
            self._db.execute(
                "UPDATE groups SET id=?, born=? WHERE id=?", replacement, published_step, group_id
            )

    def refilled(self, positions: Sequence[int]) -> tuple[int, int]:
        """Number of groups that were replaced at these positions, and the tokens that they sampled."""
        placeholders = ",".join("?" * len(positions))
        sql = f"SELECT count(*), coalesce(sum(tokens), 0) FROM refills WHERE position IN ({placeholders})"
        number, tokens = self._db.fetch_one(sql, *positions)
        return number, tokens

    def pending_groups(self) -> list[PendingGroup]:
        """Groups that no step has taken yet, by position."""
        sql = "SELECT id, position, born, ready, dropped FROM groups WHERE step IS NULL ORDER BY position"
        return [
            PendingGroup(i, p, b, bool(ready), dropped) for i, p, b, ready, dropped in self._db.fetch_all(sql)
        ]

    def group_members(self, group_id: str) -> tuple[list[str], str | None]:
        """Rollout ids of a completed group, and the id of its baseline or None."""
        members = dict(
            self._db.fetch_all("SELECT n, rollout_id FROM members WHERE group_id=? ORDER BY n", group_id)
        )
        baseline = members.pop(BASELINE, None)
        return list(members.values()), baseline

    # --- steps -----------------------------------------------------------------------------------

    def finish_step(self, step: int, group_ids: Iterable[str], rollout_ids: Iterable[str]) -> None:
        """Record the groups that a step took and the rollouts that it trained.

        Raises ValueError for a group or rollout that another step has.
        """
        with self._db.transaction():
            for table, key, ids in (("groups", "id", group_ids), ("trained", "rollout_id", rollout_ids)):
                for item in ids:
                    row = self._db.fetch_one(f"SELECT step FROM {table} WHERE {key}=?", item)
                    if row and row[0] not in (None, step):
                        raise ValueError(f"{item} was taken by step {row[0]}, not {step}")
                    if table == "groups":
                        self._db.execute("UPDATE groups SET step=? WHERE id=?", step, item)
                    else:
                        self._db.execute("INSERT OR IGNORE INTO trained VALUES (?,?)", item, step)

    def rewind(self, step: int) -> None:
        """Forget the training of later steps, whose weights are lost."""
        with self._db.transaction():
            self._db.execute("DELETE FROM trained WHERE step > ?", step)
            self._db.execute("UPDATE groups SET step=NULL WHERE step > ?", step)

    def trained_rollouts(self) -> dict[str, int]:
        """Rollout ids with the step that trained them."""
        return dict(self._db.fetch_all("SELECT rollout_id, step FROM trained"))

    @property
    def published_step(self) -> int:
        """Last step whose weights were published to the gateway; 0 before the first."""
        return self._fact("done")

    @published_step.setter
    def published_step(self, step: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('done', ?)", step)

    @property
    def base_version(self) -> int | None:
        """Policy version that the run began with; None before the training loop chose it."""
        row = self._db.fetch_one("SELECT value FROM facts WHERE key='base'")
        return row[0] if row else None

    @base_version.setter
    def base_version(self, version: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('base', ?)", version)

    def add_renumbering(self, served: int, shift: int) -> None:
        """Record that versions up to `served` have gone up by `shift`: steps after the last checkpoint are
        trained again under new numbers."""
        self._db.execute("INSERT OR REPLACE INTO renumberings VALUES (?,?)", served, shift)

    def renumberings(self) -> list[tuple[int, int]]:
        """Highest version and shift of each renumbering."""
        return self._db.fetch_all("SELECT served, shift FROM renumberings")

    @property
    def late_outcomes(self) -> int:
        """Number of outcomes that arrived after their attempt was fenced, and were refused."""
        return self._fact("late")

    @late_outcomes.setter
    def late_outcomes(self, number: int) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('late', ?)", number)

    def _fact(self, key: str) -> int:
        row = self._db.fetch_one("SELECT value FROM facts WHERE key=?", key)
        return row[0] if row else 0


class RolloutStore:
    """Finished rollouts on disk, one file each, until the checkpoint of their step is written.

    Files are written atomically, and writing a rollout again is harmless.
    """

    def __init__(self, root: Path, *, durable: bool = False, index: RunIndex | None = None) -> None:
        """`durable` makes files survive a power cut, with an fsync each. `index` lists the rollouts."""
        self._root = root
        self._durable = durable
        self._index = index

    def put(self, result: RolloutResult) -> None:
        path = self._path(result.rollout.id)
        partial = path.with_name(f"{path.name}.partial")
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = _ENCODER.encode(result)
            write_whole(path, data, durable=self._durable)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            message = f"cannot write rollout {result.rollout.id} to {self._root}: {error}"
            raise Unavailable(f"{message}; free disk space, it is tried again") from error
        if self._index is not None:
            self._index.put([(result, FilePosition(f"{self._root.name}/{path.name}", 0, len(data)))])

    def get(self, rollout_id: str) -> RolloutResult:
        path = self._path(rollout_id)
        try:
            return _DECODER.decode(path.read_bytes())
        except FileNotFoundError:
            raise NotFound(f"rollout {rollout_id} is not in {self._root}") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise Unavailable(f"cannot read {path}: {error}") from error

    def holds(self, rollout_id: str) -> bool:
        return self._path(rollout_id).exists()

    def remove(self, rollout_id: str) -> None:
        path = self._path(rollout_id)
        path.unlink(missing_ok=True)
        if self._index is not None:
            self._index.mark_removed(f"{self._root.name}/{path.name}")

    def __len__(self) -> int:
        if not self._root.exists():
            return 0
        with os.scandir(self._root) as entries:
            return sum(entry.name.endswith(".rollout") for entry in entries)

    def _path(self, rollout_id: str) -> Path:
        return self._root / f"{rollout_id}.rollout"


class StepState(Struct, frozen=True):
    """State of a run in a checkpoint, next to the trainer's own files."""

    step: int
    """The step that the checkpoint ends, from 1."""
    version: int
    """Policy version of its weights."""
    trained_rollouts: tuple[str, ...]
    """Ids of the rollouts that the step trained."""
    metrics: dict[str, Any]
    """The step's line of metrics.jsonl."""
    groups: tuple[str, ...] = ()
    """Ids of the groups that the step took."""


RunKind = Literal["train", "demo", "eval", "client", "verl", "trl", "gateway"]
"""Program that made a run."""


class RunInfo(Struct, frozen=True, kw_only=True):
    """Description of a run, which every program writes to info.json when it starts one."""

    kind: RunKind
    """Program that made the run."""
    agent: str = ""
    """Agent, as FILE.py:NAME; empty if the runtime runs an image or a served agent."""
    model: str = ""
    """Model directory or name."""
    tasks: str = ""
    """File of tasks; empty if the program gives them."""
    steps: int | None = None
    """Training steps; None if the run has no steps."""
    attempts: int | None = None
    """Rollouts of each task; None if it varies."""
    sampling: dict[str, Any] = {}
    """Sampling parameters."""
    endpoint: str = ""
    """Address of a model that records nothing; empty with a gateway."""
    created: float = 0.0
    """Wall-clock time at which the run was created, in seconds."""


class RunDirectory:
    """Paths and records of one run.

        runs/<id>/
          info.json         RunInfo: kind, agent, model
          run.json          settings of the run, for --resume
          tasks.jsonl       tasks, each with its id and input
          metrics.jsonl     one line per step
          rollouts/         step-0001.jsonl: one line per rollout, with outcome, turns and trajectories;
                            step-0001.tokens: training record, with `record_training`
          checkpoints/      step-0001/: weights, optimizer and random state; the newest few are kept
          weights/          v1/: weights as engines load them
          validation/       step-0010.jsonl: rollouts of a validation; validation.jsonl has a line for each
          run_state.sqlite  RunState: attempts, ended rollouts, groups, rollouts that each step trained
          rollout_store/    RolloutStore: finished rollouts until a step has taken them
          sessions.sqlite   sessions that run now, and where
          gateway/ outcomes/ logs/ verifiers/
          index.sqlite      RunIndex: one row per rollout and event
          events.jsonl      times at which steps were trained and weights published
          summary.json rewards.png

    A step is done when its checkpoint directory has its final name.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """`durable` makes files survive a power cut, with an fsync each."""
        self.path = path.absolute()
        self.durable = durable
        self.index = RunIndex(self.path)
        self._identity: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "run.json"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks.jsonl"

    def write_info(self, info: RunInfo) -> None:
        """Describe the run; a run that is resumed keeps the time of its creation."""
        created = self.info.created if self.is_run else time.time()
        text = msgspec.json.format(msgspec.json.encode(structs.replace(info, created=created)))
        self._write(self._info_file, text)

    @property
    def info(self) -> RunInfo:
        """Description of the run; that of a training run without one comes from its settings."""
        path = self._info_file if self._info_file.exists() else self.config
        try:
            if path == self._info_file:
                return msgspec.json.decode(path.read_bytes(), type=RunInfo)
            settings = json.loads(path.read_bytes())
            names = {
                name: settings[name] for name in ("agent", "model", "tasks", "steps") if name in settings
            }
            return RunInfo(kind="train", created=path.stat().st_mtime, **names)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise UsageError(f"cannot read {path}: {error}; restore it from a copy") from error

    @property
    def is_run(self) -> bool:
        """Whether a program has started a run in this directory."""
        return self._info_file.exists() or self.config.exists()

    @property
    def touched(self) -> float:
        """Time at which a program last started or resumed the run."""
        times = [0.0]  # another process may remove the run meanwhile
        for path in (self._info_file, self.config):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    @property
    def _info_file(self) -> Path:
        return self.path / INFO_FILE

    @property
    def status(self) -> Literal["running", "finished", "stopped"]:
        """Whether a process works on the run now, has finished it, or has stopped before its end."""
        for part in ("collect", "learn"):
            with suppress(OSError), (self.path / f"{part}.lock").open("r") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "running"
        return "finished" if self.summary.exists() else "stopped"

    @property
    def run_state(self) -> Path:
        return self.path / "run_state.sqlite"

    @property
    def rollout_store(self) -> Path:
        return self.path / "rollout_store"

    @property
    def limiter(self) -> Path:
        return self.path / "limiter.sqlite"

    @property
    def sessions(self) -> Path:
        """Registry of the sessions that run now."""
        return self.path / "sessions.sqlite"

    @property
    def gateway(self) -> Path:
        return self.path / "gateway"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def has_begun(self) -> bool:
        """Whether training wrote its first metrics or collection its first rollout."""
        return self.metrics.exists() or self.rollout_store.exists()

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "rewards.png"

    @contextmanager
    def locked(self, *parts: str, wait: bool = False) -> Generator[None]:
        """Hold the locks of these parts of a run; raises UsageError while another process has one."""
        with ExitStack() as locks:
            for part in parts:
                try:
                    private_directory(self.path, (self.config.name, self.run_state.name))
                    lock = locks.enter_context((self.path / f"{part}.lock").open("w"))
                except OSError as error:
                    message = f"run directory {self.path} cannot be used: {error}"
                    raise UsageError(f"{message}; set AFIELD_RUNS to another directory") from error
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError as error:
                    raise UsageError(
                        f"another process is working on run {self.id}: wait for it or stop it"
                    ) from error
            self._identity = _identity_of(self.path)
            yield

    def check_present(self) -> None:
        """Raise UsageError if the directory is no longer the one that was locked."""
        if self._identity is not None and _identity_of(self.path) != self._identity:
            raise UsageError(
                f"the run's directory {self.path} was removed or replaced while the run was going on:"
                " checkpoints, rollouts and weights in it are lost; start the run again"
            )

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:04d}"

    def weights(self, version: int) -> Path:
        return self.path / "weights" / f"v{version}"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:04d}.jsonl"

    # --- checkpoints -----------------------------------------------------------------------------

    def last_state(self) -> StepState | None:
        """State of the newest readable checkpoint; a damaged one is quarantined."""
        while steps := self._checkpoints():
            path = self.checkpoint(steps[-1]) / STEP_STATE_FILE
            try:
                return msgspec.json.decode(path.read_bytes(), type=StepState)
            except (OSError, msgspec.MsgspecError) as error:
                self.quarantine(steps[-1], f"{path} cannot be read: {error}")
        return None

    def quarantine(self, step: int, reason: str) -> None:
        """Rename a damaged checkpoint, so that the one before it is the newest."""
        older = [number for number in self._checkpoints() if number < step]
        if not older:
            raise DamagedFile(
                f"checkpoint {self.checkpoint(step)} is damaged ({reason}) and there is no older one;"
                " restore it from a copy, or start a new run"
            )
        damaged = self.checkpoint(step).with_name(f"step-{step:04d}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        self.checkpoint(step).rename(damaged)
        log.warning(
            "checkpoint of step %d is damaged: %s; it is kept as %s, and the run goes on from step %d",
            *(step, reason, damaged.name, older[-1]),
        )

    def _checkpoints(self) -> list[int]:
        names = (path.name for path in (self.path / "checkpoints").glob("step-*"))
        matches = [re.fullmatch(r"step-(\d+)", name) for name in names]
        return sorted(int(match[1]) for match in matches if match)

    def prune(self, *, keep_checkpoints: int, keep_weights: int | None) -> None:
        for step in self._checkpoints()[:-keep_checkpoints]:
            _remove(self.checkpoint(step))
        if keep_weights is not None:
            paths = (self.path / "weights").iterdir()
            versions = sorted(int(p.name[1:]) for p in paths if re.fullmatch(r"v\d+", p.name))
            for version in versions[:-keep_weights]:
                _remove(self.weights(version))

    def prune_rollouts(self, max_bytes: int, *, keep_steps: int) -> list[int]:
        """Remove the oldest steps' rollouts until `max_bytes` are left; the newest `keep_steps` stay."""
        sizes = {step: self._size(step) for step in self.steps()}
        total, removed = sum(sizes.values()), []
        for step in list(sizes)[: max(0, len(sizes) - keep_steps)]:
            if total <= max_bytes:
                break
            self._remove_step(step)
            self.index.mark_removed(f"rollouts/{self.rollouts(step).name}")
            total -= sizes[step]
            removed.append(step)
        return removed

    def _size(self, step: int) -> int:
        files = (self.rollouts(step), record_file(self.rollouts(step)))
        return sum(file.stat().st_size for file in files if file.exists())

    def _remove_step(self, step: int) -> None:
        """Remove the rollouts of a step and their training records, records first."""
        record_file(self.rollouts(step)).unlink(missing_ok=True)
        self.rollouts(step).unlink()

    # --- records ---------------------------------------------------------------------------------

    def _write(self, path: Path, data: bytes) -> None:
        write_whole(path, data, durable=self.durable)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        self.index.put_line(self.metrics)

    def append_event(self, kind: str, *, value: int, seconds: float = 0.0) -> None:
        """Record an event of the run that ends now: `trained` a step, or `published` a version."""
        path = self.path / "events.jsonl"
        line = {
            "t": round(time.time() - seconds, 6),
            "seconds": round(seconds, 6),
            "kind": kind,
            "value": value,
        }
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        self.index.put_line(path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read complete lines, the last one of each step; `rewind` restores a line that a crash cut short."""
        return list({line["step"]: line for line in _whole_lines(self.metrics)}.values())

    def rewind(self, state: StepState | None) -> None:
        """Remove records of steps after the checkpoint, and restore its own line of metrics."""
        steps_done = state.step if state else 0
        kept = [line for line in self.read_metrics() if line["step"] < steps_done]
        lines = [*kept, *([state.metrics] if state else [])]
        self._write(self.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
        for step in self.steps():
            if step > steps_done:
                self._remove_step(step)
        self.index.start()

    def write_tasks(self, tasks: Iterable[Task]) -> None:
        self._write(self.tasks, b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))

    def read_tasks(self) -> list[Task]:
        return _read_lines(self.tasks, Task)

    def write_rollouts(
        self, step: int, finished: Iterable[RolloutResult], records: Mapping[str, bytes] | None = None
    ) -> None:
        """Write the rollouts of a step, and their training records, encoded, by rollout id."""
        path = self.rollouts(step)
        path.parent.mkdir(exist_ok=True)
        record_file(path).unlink(missing_ok=True)  # left by a crash in this step
        if records:
            self._write(record_file(path), encode_file(records))
        self._write_lines(path, finished, step)

    def append_rollouts(self, step: int | None, finished: Iterable[RolloutResult]) -> None:
        """Add rollouts to those of a step, for trainers that take them group by group; None has no step."""
        path = self.path / "rollouts" / "sessions.jsonl" if step is None else self.rollouts(step)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("ab") as out:
            out.write(b"".join(msgspec.json.encode(result) + b"\n" for result in finished))
        self.index.put_line(path)

    def _write_lines(self, path: Path, finished: Iterable[RolloutResult], step: int) -> None:
        path.parent.mkdir(exist_ok=True)
        lines: list[bytes] = []
        placed: list[tuple[RolloutResult, int, int]] = []
        offset = 0
        for result in finished:
            lines.append(msgspec.json.encode(result) + b"\n")
            placed.append((result, offset, len(lines[-1]) - 1))
            offset += len(lines[-1])
        self._write(path, b"".join(lines))
        self.index.put_file(path, placed, step)

    def write_validation(self, line: dict[str, Any], finished: Iterable[RolloutResult]) -> None:
        """Write one validation; a step that has one already keeps it."""
        if line["step"] in {written["step"] for written in self.read_validation()}:
            return
        self._write_lines(self.path / "validation" / f"step-{line['step']:04d}.jsonl", finished, line["step"])
        self.append_validation(line)

    def append_validation(self, line: dict[str, Any]) -> None:
        """Write the result of a validation whose rollouts are written already."""
        path = self.path / "validation.jsonl"
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        self.index.put_line(path)

    def read_validation(self) -> list[dict[str, Any]]:
        return list({line["step"]: line for line in _whole_lines(self.path / "validation.jsonl")}.values())

    def read_rollouts(self, step: int) -> list[RolloutResult]:
        return _read_lines(self.rollouts(step), RolloutResult)

    def steps(self) -> list[int]:
        """Steps with rollouts on disk."""
        paths = (self.path / "rollouts").glob("step-*.jsonl")
        return sorted(int(path.stem.removeprefix("step-")) for path in paths)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read_lines(path: Path, kind: type[T]) -> list[T]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DamagedFile(f"cannot read {path}: {error}; restore a copy or start a new run") from error
    records: list[T] = []
    for number, line in enumerate(lines, 1):
        try:
            records += [msgspec.json.decode(line, type=kind)] if line else []
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problem = f"{path} is damaged in line {number}: {error}"
            raise DamagedFile(f"{problem}; restore the file from a copy or start a new run") from error
    return records


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(step_line(line))
    return lines


def _remove(directory: Path) -> None:
    """Rename, then remove, so that readers never see a partial directory."""
    removed = directory.with_name(directory.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    directory.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def list_runs(runs: Path, kind: RunKind | None = None) -> list[RunDirectory]:
    """Runs under a directory, oldest first; with `kind`, those that this program made."""
    directories = [run for path in runs.glob("*") if (run := RunDirectory(path)).is_run]
    if kind is not None:
        directories = [run for run in directories if _made_by(run, kind)]
    return sorted(directories, key=lambda run: run.touched)


def _made_by(run: RunDirectory, kind: RunKind) -> bool:
    try:
        return run.info.kind == kind
    except UsageError:  # a damaged run must not hide the others
        return False


def find_run(runs: Path, name: str, kind: RunKind | None = None) -> RunDirectory:
    """Find a run by id or path; `latest` is the newest, with `kind` the newest that this program made."""
    if name == "latest":
        if candidates := list_runs(runs, kind):
            return candidates[-1]
        if kind is not None and list_runs(runs):
            raise UsageError(f"no run under {runs} is of `afield {kind}`: name a run, or start one")
        raise UsageError(f"there is no run under {runs} yet: start one with `afield demo`")
    for path in (Path(name), runs / name):
        if (run := RunDirectory(path)).is_run:
            return run
    names = [run.id for run in reversed(list_runs(runs))]
    if near := difflib.get_close_matches(name, names, SHOWN_NAMES):
        raise UsageError(
            f"unknown run {name!r}; did you mean {', '.join(near)}? `afield runs` lists all runs"
        )
    listing = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    choices = f"the newest runs under {runs} are: {listing}" if names else f"there are none under {runs}"
    raise UsageError(f"unknown run {name!r}; {choices}")
