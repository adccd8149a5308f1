"""Conversion between groups and batches of rows.

1. `from_groups` makes one row per trajectory, or one per turn. Each sampled token of a rollout that trains is
   owned by exactly one row. Rows are checked against recorded turns.
2. `to_groups` restores rollouts, outcomes, rewards and linear rows. Messages, digests, tags, links, times,
   seeds and token limits of turns are lost, and so are excluded turns and the rows of baselines and of
   rollouts without a reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from afield import trajectories
from afield.advantages import check_given
from afield.batches.rewards import by_trained_turn
from afield.batches.rows import (
    Batch,
    Form,
    OwnedTurn,
    RolloutRecord,
    Row,
    row_images,
    shift_spans,
    usage_errors,
)
from afield.batches.tree import nodes_of, row_of, turns_of
from afield.batches.verification import check_against_turns
from afield.errors import UsageError
from afield.turn_tree import TurnTree
from afield.types import Group, RolloutResult, Trajectory, Turn, TurnRange, VersionSpan


def from_groups(
    groups: Iterable[Group], form: Form = "linear", *, floor: float = 0.0, images: bool = False
) -> Batch:
    """Build a batch: records of all rollouts, and rows of those with a reward.

    `floor` is the score of a policy failure without a reward. Baselines have a record and no rows. Rollouts
    with images raise UsageError, because file formats do not store pixels, unless `images` is set.
    """
    rows: list[Row] = []
    records: list[RolloutRecord] = []
    with usage_errors("these groups are no batch"):
        for group in groups:
            check_given(group)
            for finished in (*group.finished, *([group.baseline] if group.baseline else [])):
                record = record_of(finished, group, floor)
                records.append(record)
                if record.trains:
                    if not images:
                        refuse_images(finished)
                    rows.extend(rows_in_form(record, finished, form))
            check_against_turns([group])
        return Batch(form=form, rows=tuple(rows), rollouts=tuple(records))


def refuse_images(finished: RolloutResult) -> None:
    """Raise UsageError for a rollout with images, whose pixels files do not store."""
    for turn in finished.turns:
        if turn.images or any(message.images for message in turn.messages):
            where = f"rollout {finished.rollout.id}, turn {turn.id}"
            break
    else:
        if not any(row.images for row in finished.trajectories):
            return
        where = f"rollout {finished.rollout.id}"
    raise UsageError(
        f"{where}: it has images, whose pixels no batch format carries; train it with afield's own trainer or"
        " with veRL, which get them from the run's rollouts"
    )


def record_of(finished: RolloutResult, group: Group, floor: float = 0.0) -> RolloutRecord:
    """Build the record of a rollout, with per-turn rewards keyed by ids of trained turns."""
    outcome, baseline = finished.outcome, finished is group.baseline
    score = outcome.reward_or_floor(floor)
    if score is not None and not baseline:
        named = outcome.named_turn_rewards.items()
        outcome = structs.replace(
            outcome,
            turn_rewards=by_trained_turn(finished, outcome.turn_rewards),
            named_turn_rewards={name: by_trained_turn(finished, rewards) for name, rewards in named},
        )
    return RolloutRecord(
        rollout=finished.rollout,
        outcome=outcome,
        epoch=group.epoch,
        score=score,
        attempts=finished.attempts,
        excluded=finished.excluded,
        baseline=baseline,
    )


def rows_in_form(record: RolloutRecord, finished: RolloutResult, form: Form) -> list[Row]:
    """Build the rows of a rollout, one per trajectory or one per turn."""
    turns = owned_turns(finished)
    rows = finished.trajectories
    if form == "per_turn":
        rows = sorted(split(rows), key=lambda row: turns[row.turns[0].id].order)
    return [row_of(record, n, row, turns, row_images(finished, row)) for n, row in enumerate(rows)]


def split(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Split trajectories into one per owned turn, with the whole prompt as context."""
    total = sum(row.owned for row in rows)
    return [_turn_row(row, turn, total) for row in rows for turn in row.turns]


def _turn_row(row: Trajectory, turn: TurnRange, total: int) -> Trajectory:
    start, end = turn.start, turn.end
    spans = shift_spans(row.versions, start, end)
    return Trajectory(
        token_ids=row.token_ids[:end],
        loss_mask=(0,) * start + row.loss_mask[start:end],
        logprobs=(0.0,) * start + row.logprobs[start:end],
        versions=tuple(VersionSpan(start + s.start, start + s.end, s.low, s.high) for s in spans),
        turns=(turn,),
        weight=(end - start) / total,
        images=tuple(image for image in row.images if image.start < end),
    )


# --- turns ---------------------------------------------------------------------------------------


def owned_turns(finished: RolloutResult) -> dict[str, OwnedTurn]:
    """Owned turns with parent and order, from recorded turns or, without those, from the rows."""
    owned: dict[str, tuple[Trajectory, TurnRange]] = {}
    for row in finished.trajectories:
        for turn in row.turns:
            if turn.id in owned:
                raise ValueError(f"rollout {finished.rollout.id}, turn {turn.id}: more than one row owns it")
            owned[turn.id] = (row, turn)
    turns = {turn.id: turn for turn in finished.turns}
    if owned.keys() <= turns.keys():
        return _from_turns(finished, owned, turns)
    if turns:
        lost = next(turn_id for turn_id in owned if turn_id not in turns)
        raise ValueError(
            f"rollout {finished.rollout.id}, turn {lost}: a row has it, but the rollout does not"
        )
    return _from_rows(finished.trajectories)


Owned = Mapping[str, tuple[Trajectory, TurnRange]]


def _from_turns(finished: RolloutResult, owned: Owned, turns: Mapping[str, Turn]) -> dict[str, OwnedTurn]:
    result: dict[str, OwnedTurn] = {}
    for turn in finished.turns:
        if turn.id not in owned:
            continue
        row, place = owned[turn.id]
        mine = slice(place.start, place.end)
        if (row.token_ids[mine], row.logprobs[mine]) != (turn.token_ids, turn.logprobs):
            where = f"rollout {finished.rollout.id}, turn {turn.id}"
            raise ValueError(f"{where}: ids or log-probabilities of its row are not those that were sampled")
        parent = turn.parent
        while parent is not None and parent not in owned:
            parent = turns[parent].parent
        result[turn.id] = structs.replace(
            _owned(place, order=len(result), parent=parent or ""),
            top_p=turn.sampling.top_p,
            top_k=turn.sampling.top_k,
            finish_reason=str(turn.finish_reason or ""),
        )
    return result


def _from_rows(rows: Sequence[Trajectory]) -> dict[str, OwnedTurn]:
    """Derive parents from common prefixes: a row ends with a leaf and owns the turns after its branch."""
    result: dict[str, OwnedTurn] = {}
    inner: list[tuple[TurnRange, Trajectory]] = []  # non-leaf turns of earlier rows
    for row in rows:
        above = _deepest(row, inner)
        for turn in row.turns:
            result[turn.id] = _owned(turn, order=len(result), parent=above)
            above = turn.id
        inner += [(turn, row) for turn in row.turns[:-1]]
    return result


def _deepest(row: Trajectory, inner: Sequence[tuple[TurnRange, Trajectory]]) -> str:
    """Id of the deepest turn whose sequence the row begins with; "" for none."""
    best, end = "", 0
    for turn, other in inner:
        if end < turn.end <= row.turns[0].start and other.token_ids[: turn.end] == row.token_ids[: turn.end]:
            best, end = turn.id, turn.end
    return best


def _owned(turn: TurnRange, *, order: int, parent: str) -> OwnedTurn:
    return OwnedTurn(
        id=turn.id,
        order=order,
        start=turn.start,
        end=turn.end,
        temperature=turn.temperature,
        truncated=turn.truncated,
        tier=turn.tier,
        parent=parent,
        constraint=turn.constraint,
    )


# --- batch to groups -----------------------------------------------------------------------------


def to_groups(batch: Batch) -> list[Group]:
    """Restore the groups of a batch, in its order."""
    rows: dict[str, list[Row]] = {}
    for row in batch.rows:
        rows.setdefault(row.rollout_id, []).append(row)
    groups: dict[str, list[RolloutRecord]] = {}
    for record in batch.rollouts:
        groups.setdefault(record.rollout.group_id, []).append(record)
    with usage_errors("this batch has no groups"):
        return [_group(records, rows) for records in groups.values()]


def _group(records: Sequence[RolloutRecord], rows: Mapping[str, list[Row]]) -> Group:
    first = records[0]
    for record in records:
        key = (record.rollout.task.id, record.epoch, record.rollout.split)
        if key != (first.rollout.task.id, first.epoch, first.rollout.split):
            raise ValueError(
                f"rollout {record.rollout.id}: its task, epoch or split is not that of group"
                f" {record.rollout.group_id}"
            )
    finished = {record.rollout.id: _finished(record, rows.get(record.rollout.id, [])) for record in records}
    baselines = [record.rollout.id for record in records if record.baseline]
    if len(baselines) > 1:
        raise ValueError(f"group {first.rollout.group_id} has more than one baseline: {baselines}")
    return Group(
        id=first.rollout.group_id,
        task_id=first.rollout.task.id,
        epoch=first.epoch,
        split=first.rollout.split,
        finished=tuple(f for rollout_id, f in finished.items() if rollout_id not in baselines),
        baseline=finished[baselines[0]] if baselines else None,
    )


def _finished(record: RolloutRecord, rows: Sequence[Row]) -> RolloutResult:
    turns: tuple[Turn, ...] = ()
    rebuilt = tuple(row.assembled for row in rows)
    if all(turn.finish_reason for row in rows for turn in row.turns):
        turns = tuple(turns_of(nodes_of(rows)))
        rebuilt = trajectories.linear(TurnTree(turns)).trajectories
    return RolloutResult(
        rollout=record.rollout,
        outcome=record.outcome,
        trajectories=rebuilt,
        excluded=record.excluded,
        turns=turns,
        attempts=record.attempts,
    )
