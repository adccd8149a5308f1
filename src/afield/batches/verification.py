"""Verification of trajectories against recorded turns.

Ids, masks, log-probabilities, versions, sampling parameters and context of a row must equal those of the
recorded turns, and no turn is trained twice. Errors name rollout and turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from afield.errors import UsageError
from afield.types import Group, RolloutResult, Trajectory, Turn, TurnRange


def check_against_turns(groups: Iterable[Group]) -> None:
    """Raise UsageError for rows that differ from recorded turns, or that train a turn twice."""
    for group in groups:
        for finished in group.finished:
            _check_once(finished)
            if finished.turns:
                turns = {turn.id: turn for turn in finished.turns}
                for trajectory in finished.trajectories:
                    _check_row(finished.rollout.id, trajectory, turns)


def _check_once(finished: RolloutResult) -> None:
    where = f"rollout {finished.rollout.id}"
    owned = Counter(turn.id for row in finished.trajectories for turn in row.turns)
    if twice := [turn for turn, times in owned.items() if times > 1]:
        raise UsageError(f"{where}, turn {twice[0]}: two rows train it; each sampled token is trained once")
    weight = math.fsum(row.weight for row in finished.trajectories)
    if weight > 1 + 1e-6:
        raise UsageError(f"{where}: the weights of its rows add up to {weight:g}, more than 1")
    for row in finished.trajectories:
        for one, other in pairwise(sorted(row.turns, key=lambda turn: turn.start)):
            if other.start < one.end:
                raise UsageError(f"{where}, turn {other.id}: its tokens overlap with those of turn {one.id}")
        for turn in row.turns:
            if positive := [p for p in row.logprobs[turn.start : turn.end] if p > 1e-3]:
                raise UsageError(
                    f"{where}, turn {turn.id}: the log-probability {positive[0]:g} is above 0; give natural"
                    " logarithms of probabilities"
                )


def _check_row(rollout_id: str, row: Trajectory, turns: dict[str, Turn]) -> None:
    if not row.turns:
        return
    starts = _starts(rollout_id, row.turns[-1].id, turns)
    for part in row.turns:
        where = f"rollout {rollout_id}, turn {part.id}"
        turn = turns.get(part.id)
        if turn is None or part.id not in starts:
            raise UsageError(f"{where}: the row trains it, but it is not on the path the row ends with")
        if starts[part.id] != part.start or part.end - part.start != len(turn.token_ids):
            raise UsageError(
                f"{where}: recorded at tokens {starts[part.id]} to {starts[part.id] + len(turn.token_ids)},"
                f" but the row has it at {part.start} to {part.end}"
            )
        if wrong := _difference(row, part, turn):
            raise UsageError(f"{where}: the {wrong} in the row differ from the recorded ones")
    _check_context(rollout_id, row, starts, turns)
    _check_images(rollout_id, row, starts, turns)


def _starts(rollout_id: str, last: str, turns: dict[str, Turn]) -> dict[str, int]:
    """Start of the sampled tokens of each turn on the path to `last`, from the root."""
    path: list[Turn] = []
    name: str | None = last
    while name is not None:
        if name not in turns or len(path) > len(turns):
            raise UsageError(f"rollout {rollout_id}, turn {last}: turn {name}, before it, was not recorded")
        path.append(turns[name])
        name = turns[name].parent
    starts: dict[str, int] = {}
    length = 0
    for turn in reversed(path):
        starts[turn.id] = length + len(turn.delta_ids)
        length = starts[turn.id] + len(turn.token_ids)
    return starts


def _difference(row: Trajectory, part: TurnRange, turn: Turn) -> str | None:
    start, end = part.start, part.end
    versions = [
        (s.start - start, s.end - start, s.low, s.high) for s in row.versions if start <= s.start < end
    ]
    same = {
        "ids": row.token_ids[start:end] == turn.token_ids,
        "log-probabilities": row.logprobs[start:end] == turn.logprobs,
        "mask entries": all(row.loss_mask[start:end]),
        "versions": versions == [(s.start, s.end, s.low, s.high) for s in turn.versions],
        "sampling parameters": part.temperature == turn.sampling.temperature
        and part.truncated == turn.sampling.truncated
        and part.constraint == turn.constraint,
    }
    return next((name for name, equal in same.items() if not equal), None)


def _check_context(rollout_id: str, row: Trajectory, starts: dict[str, int], turns: dict[str, Turn]) -> None:
    """Check that all tokens of the row's path equal the recorded prompts and replies."""
    for name, start in starts.items():
        turn = turns[name]
        before, after = start - len(turn.delta_ids), start + len(turn.token_ids)
        if row.token_ids[before:after] != (*turn.delta_ids, *turn.token_ids):
            raise UsageError(
                f"rollout {rollout_id}, turn {name}: tokens {before} to {after} of the row are not the prompt"
                " and the reply that were recorded"
            )


def _check_images(rollout_id: str, row: Trajectory, starts: dict[str, int], turns: dict[str, Turn]) -> None:
    """Check that the row has the images of its turns, at the same positions."""
    seen: list[tuple[str, int, int]] = []
    for name, start in starts.items():
        turn = turns[name]
        before = start - len(turn.delta_ids)
        seen += [(image.digest, before + image.start, image.length) for image in turn.images]
        in_messages = [image.digest for message in turn.messages for image in message.images]
        if in_messages != [image.digest for image in turn.images]:
            raise UsageError(
                f"rollout {rollout_id}, turn {name}: it was sampled with {len(in_messages)} images; the"
                f" record says where {len(turn.images)} of them stand; name the image token in the model's"
                " config.json (image_token_id), and collect it again"
            )
    if seen != [(image.digest, image.start, image.length) for image in row.images]:
        raise UsageError(f"rollout {rollout_id}: the images of a row are not those that its turns have")
