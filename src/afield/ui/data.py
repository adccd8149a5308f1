"""Runs as the UI reads them: index rows, rollouts and their tokens.

The only module of the UI that knows how runs are stored. It reads run directories and their index, of runs
that go on, have finished or have crashed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from array import array
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afield.errors import DamagedFile, NotFound
from afield.orchestrator.state import RunDirectory
from afield.runs.index import RolloutRow
from afield.runs.training_record import VALUES, TokenRecord
from afield.types import Exclusion, FinishReason, Link, Message, Outcome, RefusedCalls, Rollout, Sampling

KEPT_ROLLOUTS = 16
"""Rollouts whose tokens stay in memory."""
STATE_FIELDS = ("kind", "agent", "model", "tasks", "steps", "mode", "runtime", "trainer", "advantage", "seed")
"""Settings that the UI shows; others may hold keys."""
NUMBER_FIELDS = ("steps", "seed")
NAN = float("nan")


class TurnRecord(Struct, frozen=True, gc=False):
    """Fields of `types.Turn`, without its checks: they take seconds for a million tokens."""

    id: str
    """Id in its session: t1, t2, ..."""
    status: str
    """Status: a value of `TurnStatus`."""
    sampling: Sampling
    """Sampling parameters that the engine applied."""
    parent: str | None = None
    """Id of the turn that this one continues; None for the first of a conversation."""
    delta_ids: list[int] = []
    """Token ids of the prompt after the parent's tokens; empty by default."""
    token_ids: list[int] = []
    """Sampled token ids; empty by default."""
    logprobs: list[float] = []
    """Log-probability of each sampled token, natural logarithm; empty by default."""
    versions: list[tuple[int, int, int, int]] = []
    """Spans of sampled tokens, each with its oldest and newest policy version; empty by default."""
    finish_reason: FinishReason | None = None
    """Reason for the end of the reply; None while it runs."""
    tier: str = ""
    """How the prompt was built: bridge, append, splice or full; empty if unknown."""
    dialect: str = ""
    """Dialect of the request; empty if unknown."""
    messages: list[Message] = []
    """New messages of the request, then the reply; empty by default."""
    tags: list[str] = []
    """Labels from the gateway or the client's request; none by default."""
    links: list[Link] = []
    """Relations to turns other than the parent; none by default."""
    started: float = 0.0
    """Unix time of the request, in seconds."""
    first_token: float | None = None
    """Unix time of the first sampled token, in seconds; None before it."""
    ended: float | None = None
    """Unix time of the end, in seconds; None while the call runs."""


class StoredRollout(Struct, frozen=True):
    """Fields of `types.RolloutResult`, without trajectories, which repeat the tokens of the turns."""

    rollout: Rollout
    """Task, group and sampling of the rollout."""
    outcome: Outcome
    """Reward and metrics, or a failure."""
    excluded: list[Exclusion] = []
    """Turns that are not trained, with reasons; none by default."""
    turns: list[TurnRecord] = []
    """All model calls; none by default."""
    attempts: int = 1
    """Number of attempts; 1 by default."""
    refused: list[RefusedCalls] = []
    """Model calls that the gateway refused, by class of error; none by default."""
    returned: dict[str, Any] = {}
    """Values that the agent returned besides those of the outcome; empty by default."""
    returned_left_out: dict[str, int] = {}
    """Size in bytes of returned values that were left out; none by default."""


_LINE = msgspec.json.Decoder(StoredRollout)
_STORED = msgspec.msgpack.Decoder(StoredRollout)


class TurnTokens(Struct, frozen=True):
    """Tokens of one turn in a rollout's token arrays: prompt, then reply."""

    turn: TurnRecord
    """Turn, without its token ids and log-probabilities."""
    start: int
    """Index of the first prompt token."""
    prompt: int
    """Number of prompt tokens that the turn adds to its parent's."""
    sampled: int
    """Number of sampled tokens."""

    @property
    def end(self) -> int:
        return self.start + self.prompt + self.sampled


class TokenTable(Struct, frozen=True):
    """Training record of a rollout, aligned with its token arrays."""

    columns: dict[str, array[Any]]
    """Values by name (`training_record.COLUMNS`); NaN, or mask 0, for tokens without one."""
    reasons: tuple[str, ...]
    """Reasons that the column `mask` refers to; the first is empty."""


class LoadedRollout(Struct, frozen=True):
    """A rollout with its tokens in arrays, turn after turn, each token once."""

    row: RolloutRow
    """Row of the index."""
    record: StoredRollout
    """Rollout, without tokens."""
    segments: tuple[TurnTokens, ...]
    """Turns in the order of the calls."""
    ids: array[int]
    """Token ids."""
    logprobs: array[float]
    """Log-probabilities of sampled tokens; NaN for prompt tokens."""
    training: TokenTable | None = None
    """Training record of the tokens; None without one."""
    training_error: str = ""
    """Why a training record cannot be read; empty without a problem."""

    def path(self, turn_id: str | None = None) -> list[TurnTokens]:
        """Turns from the root to a turn; without one, the path with the most tokens."""
        by_id = {segment.turn.id: segment for segment in self.segments}
        if turn_id is not None and turn_id not in by_id:
            raise NotFound(f"rollout {self.row.id} has no turn {turn_id!r}")
        paths: dict[str, list[TurnTokens]] = {}
        for segment in self.segments:
            paths[segment.turn.id] = [*paths.get(segment.turn.parent or "", ()), segment]
        if turn_id is not None:
            return paths[turn_id]
        return max(paths.values(), key=lambda path: sum(s.end - s.start for s in path), default=[])

    def path_ids(self, path: Sequence[TurnTokens]) -> array[int]:
        ids = array("I")
        for segment in path:
            ids.extend(self.ids[segment.start : segment.end])
        return ids


class RunData:
    """Run directory, read through its index. Thread-safe."""

    def __init__(self, directory: RunDirectory, key: str) -> None:
        self.directory = directory
        self.key = key
        self._index = directory.index
        self._refreshing, self._loading = threading.Lock(), threading.Lock()
        self._refreshed: tuple[Any, ...] = ()
        self._load = lru_cache(KEPT_ROLLOUTS)(self._load_rollout)

    def close(self) -> None:
        self._index.close()

    def refresh(self) -> None:
        """Read rollouts and metrics that were written since."""
        files = self.files()
        with self._refreshing:
            if files != self._refreshed:
                self._index.refresh()
                self._refreshed = files

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        self.refresh()
        return self._index.query(sql, *values)

    def tuples(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a SELECT as tuples, for many rows."""
        self.refresh()
        return self._index.fetch(sql, *values)

    def rows(self, where: str = "1", *values: Any) -> list[RolloutRow]:
        self.refresh()
        return self._index.rollouts(where, *values)

    def rollout(self, rollout_id: str) -> LoadedRollout:
        self.refresh()
        row = self._index.find(rollout_id)
        with self._loading:  # a page asks for turns and tokens at the same time
            return self._load(row.id, row.file, row.offset, row.length, row.record_offset)

    def _load_rollout(
        self, rollout_id: str, file: str, offset: int, length: int, _record: int | None
    ) -> LoadedRollout:
        row = self._index.find(rollout_id)
        path = self.directory.path / file
        try:
            with path.open("rb") as opened:
                opened.seek(offset)
                record = (_STORED if path.suffix == ".rollout" else _LINE).decode(opened.read(length))
        except FileNotFoundError:
            raise NotFound(
                f"rollout {rollout_id} was in {path}, which was removed (keep_rollouts_gb);"
                " only its row is left"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise DamagedFile(f"rollout {rollout_id} cannot be read from {path}: {error}") from error
        rollout = loaded(row, record)
        try:
            training = self._index.read_record(row)
        except DamagedFile as error:
            return msgspec.structs.replace(rollout, training_error=str(error))
        return msgspec.structs.replace(rollout, training=aligned(training, rollout)) if training else rollout

    def retried_tokens(self) -> dict[str, int]:
        """Tokens of the attempts that were retried, by rollout id; empty for runs that do not record them."""
        path = self.directory.run_state
        if not path.is_file():
            return {}
        sql = "SELECT rollout_id, sum(tokens) FROM attempts GROUP BY 1 HAVING sum(tokens) > 0"
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as state:
                return dict(state.execute(sql).fetchall())
        except sqlite3.Error:  # damaged, or locked while the run starts
            return {}

    # --- the run itself ----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Settings from run.json and info.json that are safe to show."""
        saved = self._described()
        settings = {name: saved.get(name) for name in STATE_FIELDS}
        return {
            name: value
            for name, value in settings.items()
            if value != "" and isinstance(value, int if name in NUMBER_FIELDS else str)
        }

    def state(self) -> str:
        """`running` while a process works on the run, else `finished` or `stopped`; `ended` where only the
        program that used afield knows whether it was done."""
        if is_locked(self.directory.path):
            return "running"
        if self.directory.summary.exists():
            return "finished"
        return "stopped" if self.settings().get("kind", "train") in ("train", "demo", "eval") else "ended"

    def files(self) -> tuple[Any, ...]:
        """Files of the run with their sizes and times; changes when anything is written."""
        folder = self.directory.path
        paths = (*folder.glob("*.json*"), folder / "rollout_store", *folder.glob("*/*.jsonl"))
        return tuple((p, s.st_mtime_ns, s.st_size) for p in paths if (s := _status(p)))

    def signature(self) -> tuple[Any, ...]:
        """Changes when the run has new rollouts, metrics or another state."""
        return (hash(self.files()), self.state())

    def tokenizer(self) -> Any:
        """Tokenizer of the run's model; None if it is not on this machine."""
        return _tokenizer(str(self._described().get("model", "")))

    def _described(self) -> dict[str, Any]:
        return read_json(self.directory.config) | read_json(self.directory.path / "info.json")


def loaded(row: RolloutRow, record: StoredRollout) -> LoadedRollout:
    """Move the tokens of a record into arrays."""
    ids, logprobs = array("I"), array("f")
    segments: list[TurnTokens] = []
    for turn in record.turns:
        start = len(ids)
        ids.extend(turn.delta_ids)
        ids.extend(turn.token_ids)
        logprobs.extend([NAN] * len(turn.delta_ids))
        logprobs.extend(turn.logprobs)
        light = msgspec.structs.replace(turn, delta_ids=[], token_ids=[], logprobs=[])
        segments.append(TurnTokens(light, start, len(turn.delta_ids), len(turn.token_ids)))
    record = msgspec.structs.replace(record, turns=[])
    return LoadedRollout(row, record, tuple(segments), ids, logprobs)


def aligned(record: TokenRecord, rollout: LoadedRollout) -> TokenTable:
    """A training record in the order of the rollout's token arrays."""
    total = len(rollout.ids)
    columns = {name: array("f", [NAN]) * total for name in VALUES} | {"mask": array("B", bytes(total))}
    places = {segment.turn.id: segment.start + segment.prompt for segment in rollout.segments}
    for turn in record.turns:
        if turn.start >= 0 and turn.id in places:
            at = places[turn.id]
            for name, column in columns.items():
                column[at : at + turn.tokens] = record.columns[name][turn.start : turn.start + turn.tokens]
    return TokenTable(columns, record.reasons)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def is_locked(directory: Path) -> bool:
    """Whether a process holds a lock of the run. Read from /proc/locks: taking a lock could stop a start."""
    try:
        inodes = {str(path.stat().st_ino) for path in directory.glob("*.lock")}
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[5].rpartition(":")[2] in inodes for line in lines if "->" not in line)


@lru_cache(8)
def _tokenizer(model: str) -> Any:
    path = Path(model) / "tokenizer.json"
    if not model or not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    return Tokenizer.from_file(str(path))
