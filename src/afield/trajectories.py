"""Training sequences (trajectories) from a session's turn tree.

1. `linear`: one sequence per path from a root to a last trained turn. A turn on several paths is trained in
   the first sequence and is context in the others.
2. `per_turn`: one sequence per trained turn, with its whole prompt as context.
3. `tree`: one node per turn.

Each sampled token is trained exactly once or excluded with a reason. Weights of the sequences add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from afield.runs.exclusions import check_reason
from afield.turn_tree import TurnTree
from afield.types import Exclusion, ImageSpan, Trajectory, Turn, TurnRange, TurnStatus, VersionSpan

ExclusionReasons = Mapping[str, str]
"""Reasons of excluded turns, by turn id."""
NOTHING: ExclusionReasons = {}


class Assembled(Struct, frozen=True):
    """Training sequences and excluded turns of a session."""

    trajectories: tuple[Trajectory, ...]
    """Training sequences."""
    excluded: tuple[Exclusion, ...]
    """Sampled turns that are in no sequence's loss."""


def why_excluded(turn: Turn, excluded: ExclusionReasons) -> str | None:
    """Return the reason why a turn is not trained; None if it is trained."""
    if turn.status is not TurnStatus.COMMITTED:
        return str(turn.status)
    return excluded.get(turn.id)


def exclusions(tree: TurnTree, excluded: ExclusionReasons = NOTHING) -> tuple[Exclusion, ...]:
    """Turns that are not trained, with their reasons."""
    reasons = ((turn, why_excluded(turn, excluded)) for turn in tree.turns)
    return tuple(
        Exclusion(turn.id, len(turn.token_ids), check_reason(reason)) for turn, reason in reasons if reason
    )


def linear(tree: TurnTree, excluded: ExclusionReasons = NOTHING) -> Assembled:
    """Assemble one sequence per path from a root to a last trained turn."""
    trained = [turn for turn in tree.turns if turn.token_ids and not why_excluded(turn, excluded)]
    inner: set[str] = set()
    for turn in trained:
        above = turn.parent
        while above is not None and above not in inner:
            inner.add(above)
            above = tree[above].parent
    left = {turn.id for turn in trained}
    rows: list[tuple[list[Turn], set[str]]] = []
    for turn in trained:
        if turn.id not in inner:
            path = tree.path(turn.id)
            mine = {step.id for step in path} & left
            rows.append((path, mine))
            left -= mine
    return _assemble(rows, exclusions(tree, excluded))


def per_turn(tree: TurnTree, excluded: ExclusionReasons = NOTHING) -> Assembled:
    """Assemble one sequence per trained turn, with its whole prompt as context."""
    trained = [turn for turn in tree.turns if turn.token_ids and not why_excluded(turn, excluded)]
    rows = [(tree.path(turn.id), {turn.id}) for turn in trained]
    return _assemble(rows, exclusions(tree, excluded))


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


def tree(tree: TurnTree, excluded: ExclusionReasons = NOTHING) -> list[dict[str, Any]]:
    """Nodes, one per turn, with its token ids after those of its parent; offsets count from its first id."""
    nodes: list[dict[str, Any]] = []
    for turn in tree.turns:
        before = len(turn.delta_ids)
        own = why_excluded(turn, excluded) is None
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
