"""Token recorder: collects per-token values of a step for its training record."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from afield.batches.rows import Row
from afield.runs.exclusions import UntrainedReason
from afield.runs.training_record import VALUES, MaskReason, RecordedTurn, TokenRecord
from afield.trainers.batch import TrainingBatch
from afield.trainers.losses import Objective
from afield.trainers.micro_batches import MicroBatch
from afield.types import Group

RowKey = tuple[str, int]
RowValues = dict[str, dict[RowKey, Tensor]]
"""Values of the tokens that a row owns, by name and `Row.key`."""


class TokenRecorder:
    """Values of the tokens of one step. A later update replaces the values of an earlier one."""

    def __init__(self) -> None:
        self.values: RowValues = {}
        self.skipped: set[str] = set()
        """Rollouts whose last update was skipped."""

    def add(self, batch: MicroBatch, **values: Tensor) -> None:
        lengths = [row.owned for row in batch.rows]
        for name, tensor in values.items():
            parts = tensor.detach().float().cpu().split(lengths)
            self.values.setdefault(name, {}).update(zip((row.key for row in batch.rows), parts, strict=True))

    def merge(self, values: RowValues) -> None:
        """Add the values of another rank."""
        for name, rows in values.items():
            self.values.setdefault(name, {}).update(rows)

    def updated(self, rollouts: Iterable[str], *, skipped: bool) -> None:
        """Note whether the last update of these rollouts was skipped."""
        self.skipped = self.skipped | set(rollouts) if skipped else self.skipped - set(rollouts)

    def records(
        self, groups: Sequence[Group], batch: TrainingBatch, objective: Objective, *, regularised: bool
    ) -> dict[str, bytes]:
        """Encoded records of the batch's rollouts, by rollout id."""
        rows: dict[str, list[Row]] = {rollout_id: [] for rollout_id in batch.rollout_ids}
        for row in (*batch.rows, *batch.too_long):
            rows[row.rollout_id].append(row)
        excluded = {
            result.rollout.id: result.excluded
            for group in groups
            for result in group.finished
            if result.rollout.id in rows
        }
        return {
            rollout_id: self._record(
                sorted(own, key=lambda row: row.index),
                [RecordedTurn(e.turn, e.tokens, reason=e.reason) for e in excluded[rollout_id]],
                objective,
                regularised,
            ).encode()
            for rollout_id, own in rows.items()
        }

    def _record(
        self, rows: Sequence[Row], excluded: Sequence[RecordedTurn], objective: Objective, regularised: bool
    ) -> TokenRecord:
        turns: list[RecordedTurn] = []
        columns: dict[str, list[np.ndarray]] = {name: [] for name in (*VALUES, "mask")}
        reasons: dict[str, int] = {"": 0}
        start = 0
        for row in rows:
            values = self._row_values(row)
            for name in VALUES:
                columns[name].append(values[name])
            columns["mask"].append(self._mask(row, values, objective, regularised, reasons))
            for turn in row.trajectory.turns:
                turns.append(RecordedTurn(turn.id, turn.end - turn.start, start))
                start += turn.end - turn.start
        joined = {name: np.concatenate([*parts, ()]) for name, parts in columns.items()}
        return TokenRecord(
            (*turns, *excluded),
            {
                name: array("B" if name == "mask" else "f", values.astype("u1" if name == "mask" else "f4"))
                for name, values in joined.items()
            },
            tuple(reasons),
        )

    def _row_values(self, row: Row) -> dict[str, np.ndarray]:
        values = {name: self._tensor(name, row).numpy() for name in (*VALUES, "clipped")}
        lengths = [turn.end - turn.start for turn in row.trajectory.turns]
        return {**values, "advantage": np.repeat(np.array(row.advantages, "f4"), lengths)}

    def _tensor(self, name: str, row: Row) -> Tensor:
        values: Mapping[RowKey, Tensor] = self.values.get(name, {})
        return values[row.key] if row.key in values else torch.full((row.owned,), float("nan"))

    def _mask(
        self,
        row: Row,
        values: Mapping[str, np.ndarray],
        objective: Objective,
        regularised: bool,
        reasons: dict[str, int],
    ) -> np.ndarray:
        def code(reason: str) -> int:
            return reasons.setdefault(str(reason), len(reasons))

        mask = np.zeros(row.owned)
        whole = row.excluded
        if not whole and not regularised and not any(row.advantages):
            whole = UntrainedReason.NO_ADVANTAGE
        if not whole and row.rollout_id in self.skipped:
            whole = MaskReason.SKIPPED
        if whole:
            mask[:] = code(whole)
            return mask
        # CISPO bounds the weight of a token and keeps its gradient.
        for reason, where in (
            (MaskReason.CLIPPED, (values["clipped"] == 1) & (objective.loss != "cispo")),
            (MaskReason.IMPORTANCE, values["importance"] == 0),
        ):
            if where.any():
                mask[where] = code(reason)
        return mask
