"""Rows to rollouts with ids that follow from what they are.

An input has the id it is given, or that its row carries as `id`, or one made of the row itself; its
rollouts are counted. So the same program gives the same ids each time it is run. Rows are copied: what
a caller does with them afterwards changes nothing. An input id stands for one row; another is a Conflict.
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
ROOM = 100  # of the 128 characters of an id; the rest is for counters
MARKS = {Split.TRAIN: "r", Split.VAL: "v"}


class RolloutRequest(Struct, frozen=True):
    """A rollout, the place of its row among the rows it came with, and which of its input it is."""

    index: int
    k: int
    rollout: Rollout


class IdAllocator:
    def __init__(self, exp_id: str) -> None:
        self._exp_id = exp_id
        self._rows: dict[str, bytes] = {}
        self._counts: dict[tuple[str, Split], int] = {}
        self._lock = threading.Lock()

    def requests(
        self, rows: Iterable[Row], count: int, *, sampling: Sampling | None, split: Split
    ) -> list[RolloutRequest]:
        """Each row, so many times."""
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
        """An input id is free text, and a rollout id is not."""
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
    return hashlib.sha256(msgspec.json.encode(task.input, order="sorted")).digest()


def _task(row: Row, input_id: str | None) -> Task:
    if isinstance(row, Task):
        return row if input_id in (None, row.id) else Task(input_id, row.input)
    if not isinstance(row, Mapping):
        raise UsageError(f"a row is a JSON object, such as a dict; got {type(row).__name__}: {row!r}")
    given = row.get("id") if input_id is None else input_id
    try:
        copied: dict[str, Any] = msgspec.json.decode(wire.encode(dict(row)))
        made = Task("row", copied)
        return Task(f"row-{digest(made).hex()[:12]}" if given is None else str(given), copied)
    except (WireError, ValueError) as error:
        raise UsageError(f"the row {given if given is not None else dict(row)!r}: {error}") from error
