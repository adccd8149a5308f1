"""Forest to trajectories (pure).

`linear` gives rows from a root to a last trained turn, in the order those were committed: what was cut
off or set aside behind it makes no row. Every sampled turn is owned by the first row that holds it and
is context in the others, so each sampled token is trained exactly once, or named in `excluded` with a
reason. `per_turn` gives a row for each turn, `tree` the nodes themselves. Whatever the form, the weights
of a rollout's rows add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from afield.exclusions import check_reason
from afield.turn_tree import TurnTree
from afield.types import Exclusion, ImageSpan, Trajectory, Turn, TurnRange, TurnStatus, VersionSpan

Withheld = Mapping[str, str]  # turn id to the reason it is kept out of the loss
NOTHING: Withheld = {}


class Assembled(Struct, frozen=True):
    trajectories: tuple[Trajectory, ...]
    excluded: tuple[Exclusion, ...]


def why_excluded(turn: Turn, withheld: Withheld) -> str | None:
    if turn.status is not TurnStatus.COMMITTED:
        return str(turn.status)
    return withheld.get(turn.id)


def exclusions(forest: TurnTree, withheld: Withheld = NOTHING) -> tuple[Exclusion, ...]:
    reasons = ((turn, why_excluded(turn, withheld)) for turn in forest.turns)
    return tuple(
        Exclusion(turn.id, len(turn.token_ids), check_reason(reason)) for turn, reason in reasons if reason
    )


def linear(forest: TurnTree, withheld: Withheld = NOTHING) -> Assembled:
    trained = [turn for turn in forest.turns if turn.token_ids and not why_excluded(turn, withheld)]
    inner: set[str] = set()
    for turn in trained:
        above = turn.parent
        while above is not None and above not in inner:
            inner.add(above)
            above = forest[above].parent
    left = {turn.id for turn in trained}
    rows: list[tuple[list[Turn], set[str]]] = []
    for turn in trained:
        if turn.id not in inner:
            path = forest.path(turn.id)
            mine = {step.id for step in path} & left
            rows.append((path, mine))
            left -= mine
    return _assemble(rows, exclusions(forest, withheld))


def per_turn(forest: TurnTree, withheld: Withheld = NOTHING) -> Assembled:
    """Each turn with its whole prompt as context: what an engine saw, call by call."""
    trained = [turn for turn in forest.turns if turn.token_ids and not why_excluded(turn, withheld)]
    rows = [(forest.path(turn.id), {turn.id}) for turn in trained]
    return _assemble(rows, exclusions(forest, withheld))


def _assemble(rows: list[tuple[list[Turn], set[str]]], excluded: tuple[Exclusion, ...]) -> Assembled:
    total = sum(len(turn.token_ids) for path, mine in rows for turn in path if turn.id in mine)
    return Assembled(tuple(_row(path, mine, total) for path, mine in rows), excluded)


def _row(path: list[Turn], mine: set[str], total: int) -> Trajectory:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    ranges: list[TurnRange] = []
    images: list[ImageSpan] = []
    for turn in path:
        own = turn.id in mine
        images.extend(ImageSpan(i.digest, len(ids) + i.start, i.length) for i in turn.images)
        ids.extend(turn.delta_ids)
        start = len(ids)
        ids.extend(turn.token_ids)
        mask.extend([0] * len(turn.delta_ids) + [int(own)] * len(turn.token_ids))
        logprobs.extend([0.0] * len(turn.delta_ids))
        logprobs.extend(turn.logprobs if own else [0.0] * len(turn.token_ids))
        if own:
            how = turn.sampling
            ranges.append(
                TurnRange(
                    turn.id,
                    start,
                    len(ids),
                    how.temperature,
                    how.truncated,
                    turn.tier,
                    turn.constraint,
                )
            )
            versions.extend(VersionSpan(start + s.start, start + s.end, s.low, s.high) for s in turn.versions)
    return Trajectory(
        token_ids=tuple(ids),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        turns=tuple(ranges),
        weight=sum(mask) / total,
        images=tuple(images),
    )


def tree(forest: TurnTree, withheld: Withheld = NOTHING) -> list[dict[str, Any]]:
    """The nodes, each with the ids it adds to its parent's. `versions` counts from the node's own start."""
    nodes: list[dict[str, Any]] = []
    for turn in forest.turns:
        before = len(turn.delta_ids)
        own = why_excluded(turn, withheld) is None
        nodes.append(
            {
                "id": turn.id,
                "parent": turn.parent,
                "token_ids": [*turn.delta_ids, *turn.token_ids],
                "loss_mask": [0] * before + [int(own)] * len(turn.token_ids),
                "logprobs": [0.0] * before + (list(turn.logprobs) if own else [0.0] * len(turn.logprobs)),
                "versions": [[before + s.start, before + s.end, s.low, s.high] for s in turn.versions if own],
            }
        )
    return nodes
