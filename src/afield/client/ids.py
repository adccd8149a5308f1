"""Deterministic task, rollout and group ids for submitted rows.

1. A task id is given by the caller, or is the row's `id`, or a digest of the row.
2. Rollouts of a task are numbered. The same program assigns the same ids in every run.
3. Rows are copied. Two different rows with the same task id raise Conflict.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from afield import wire
from afield.errors import Conflict, UsageError, WireError
from afield.types import ID_PATTERN, Rollout, Sampling, Split, Task, check_id

Row = Mapping[str, Any] | Task
ROOM = 100  # characters of an id for experiment and task; 28 are left for counters
MARKS = {Split.TRAIN: "r", Split.VAL: "v"}


class RolloutRequest(Struct, frozen=True):
    """Rollout to submit, with its position in the batch."""

    index: int
    """Index of its row in the batch, from 0."""
    k: int
    """Number of the rollout within its task, from 0."""
    rollout: Rollout
    """Rollout to run."""


class IdAllocator:
    """Creates rollout requests with deterministic ids. Thread-safe."""

    def __init__(self, exp_id: str) -> None:
        self._exp_id = exp_id
        self._rows: dict[str, bytes] = {}
        self._counts: dict[tuple[str, Split], int] = {}
        self._lock = threading.Lock()

    def requests(
        self, rows: Iterable[Row], count: int, *, sampling: Sampling | None, split: Split
    ) -> list[RolloutRequest]:
        """Create `count` requests per row."""
        return [
            self.request(task, index=index, sampling=sampling, split=split)
            for index, row in enumerate(rows)
            for task in [_task(row, None)] * count
        ]

    def request(
        self,
        row: Row,
        input_id: str | None = None,
        rollout_id: str | None = None,
        *,
        index: int = 0,
        sampling: Sampling | None = None,
        split: Split = Split.TRAIN,
    ) -> RolloutRequest:
        task = _task(row, input_id)
        split = _checked(rollout_id, sampling, split)
        group_id = f"{self._exp_id}-{self._slug(task.id)}"
        with self._lock:
            if self._rows.setdefault(task.id, digest(task)) != digest(task):
                raise Conflict(
                    f"two different rows are called {task.id!r}; give one of them another input id"
                )
            k = self._counts.get((task.id, split), 0)
            if rollout_id is None:
                self._counts[task.id, split] = k + 1
        rollout = Rollout(
            id=rollout_id or f"{group_id}-{MARKS[split]}{k}",
            exp_id=self._exp_id,
            group_id=group_id if split is Split.TRAIN else f"{group_id}-{split}",
            task=task,
            split=split,
            sampling=sampling,
        )
        return RolloutRequest(index, k, rollout)

    def _slug(self, input_id: str) -> str:
        """Part of a rollout id for a task id, which is free text: the same text, or a digest."""
        if ID_PATTERN.fullmatch(input_id) and len(self._exp_id) + len(input_id) < ROOM:
            return input_id
        return f"task-{hashlib.sha256(input_id.encode()).hexdigest()[:24]}"


def _checked(rollout_id: str | None, sampling: Sampling | None, split: Split) -> Split:
    if split not in MARKS:
        raise UsageError(f"split {split!r} must be one of: {', '.join(MARKS)}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise UsageError(
            f"sampling {sampling!r} must be an afield.types.Sampling, such as Sampling(top_p=0.9)"
        )
    try:
        if rollout_id is not None:
            check_id(rollout_id, "rollout id")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Split(split)


def digest(task: Task) -> bytes:
    """SHA-256 of a task's input, independent of key order."""
    return hashlib.sha256(msgspec.json.encode(task.input, order="sorted")).digest()


def _task(row: Row, input_id: str | None) -> Task:
    if isinstance(row, Task):
        return row if input_id in (None, row.id) else Task(input_id, row.input)
    if not isinstance(row, Mapping):
        raise UsageError(f"a row is a JSON object, such as a dict; got {type(row).__name__}: {row!r}")
    task_id = row.get("id") if input_id is None else input_id
    try:
        copied: dict[str, Any] = msgspec.json.decode(wire.encode(dict(row)))
        task = Task("row", copied)
        return Task(f"row-{digest(task).hex()[:12]}" if task_id is None else str(task_id), copied)
    except (WireError, ValueError) as error:
        raise UsageError(f"the row {task_id if task_id is not None else dict(row)!r}: {error}") from error
