"""Truncated replies: masking them, and DAPO's soft penalty for long ones.

A reply is truncated if `max_tokens` or the context ended it. Recorded turns say so; rollouts without recorded
turns are left as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from afield.runs.exclusions import ExclusionReason
from afield.settings.trainer import MaskTruncated
from afield.types import (
    Exclusion,
    FinishReason,
    Group,
    RolloutResult,
    Trajectory,
    TurnRange,
    TurnStatus,
    VersionSpan,
)


def mask_truncated(groups: Iterable[Group], mode: MaskTruncated) -> list[Group]:
    """Exclude truncated replies, or all replies of a rollout that has one. Rewards stay in every baseline."""
    if mode == "off":
        return list(groups)
    return [
        structs.replace(group, finished=tuple(_masked(finished, mode) for finished in group.finished))
        for group in groups
    ]


def truncated_turns(finished: RolloutResult) -> set[str]:
    """Ids of trained turns that `max_tokens` or the context ended."""
    owned = {turn.id for row in finished.trajectories for turn in row.turns}
    return {
        turn.id
        for turn in finished.turns
        if turn.id in owned
        and turn.status is TurnStatus.COMMITTED
        and turn.finish_reason is FinishReason.LENGTH
    }


def _masked(finished: RolloutResult, mode: MaskTruncated) -> RolloutResult:
    masked = truncated_turns(finished)
    if not masked:
        return finished
    turns = [turn for row in finished.trajectories for turn in row.turns]
    if mode == "rollout":
        masked = {turn.id for turn in turns}
    excluded = [
        Exclusion(turn.id, turn.end - turn.start, ExclusionReason.TRUNCATED)
        for turn in turns
        if turn.id in masked
    ]
    return structs.replace(
        finished,
        trajectories=without_turns(finished.trajectories, masked),
        excluded=(*finished.excluded, *excluded),
    )


def without_turns(rows: Sequence[Trajectory], turns: Collection[str]) -> tuple[Trajectory, ...]:
    """Rows in which these turns are context; weights are shares of the tokens that remain."""
    kept = [(row, [turn for turn in row.turns if turn.id not in turns]) for row in rows]
    total = sum(turn.end - turn.start for _, own in kept for turn in own)
    return tuple(_row(row, own, total) for row, own in kept if own)


def _row(row: Trajectory, own: Sequence[TurnRange], total: int) -> Trajectory:
    end = max(turn.end for turn in own)
    mask = [0] * end
    for turn in own:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    spans = [
        VersionSpan(max(span.start, turn.start), min(span.end, turn.end), span.low, span.high)
        for turn in own
        for span in row.versions
        if span.start < turn.end and turn.start < span.end
    ]
    return Trajectory(
        token_ids=row.token_ids[:end],
        loss_mask=tuple(mask),
        logprobs=tuple(p if m else 0.0 for p, m in zip(row.logprobs, mask, strict=False)),
        versions=tuple(spans),
        turns=tuple(own),
        weight=sum(mask) / total,
        images=tuple(image for image in row.images if image.start < end),
    )


def penalise_overlong(groups: Iterable[Group], *, limit: int, buffer: int, penalty: float) -> list[Group]:
    """Subtract a penalty from the reward of rollouts whose longest reply ends in the last `buffer` tokens
    before `limit`: from 0 at its begin to `penalty` at its end."""

    def shaped(finished: RolloutResult) -> RolloutResult:
        outcome = finished.outcome
        over = longest_reply(finished) - (limit - buffer)
        if outcome.reward is None or over <= 0:
            return finished
        reward = outcome.reward - penalty * min(over / buffer, 1.0)
        return structs.replace(finished, outcome=structs.replace(outcome, reward=reward))

    return [
        structs.replace(
            group,
            finished=tuple(map(shaped, group.finished)),
            baseline=shaped(group.baseline) if group.baseline else None,
        )
        for group in groups
    ]


def longest_reply(finished: RolloutResult) -> int:
    """Tokens of the longest reply that is trained or masked as truncated."""
    trained = [turn.end - turn.start for row in finished.trajectories for turn in row.turns]
    masked = [e.tokens for e in finished.excluded if e.reason == ExclusionReason.TRUNCATED]
    return max((*trained, *masked), default=0)
