"""Excludes unused answers to repeated requests (pure).

The rules apply to the whole record, independent of the order of calls. Of several answers to one request:

1. An unused answer that hit its token limit, before the request was repeated with a higher limit, is
   `superseded`.
2. If some answers were used, the unused ones are `abandoned`.
3. If none was used and all but the first are answers to retries, all but the last are `abandoned`.
4. If none was used otherwise, all are trained: the answer that the client took is unknown.

An answer is used if a later call continues it, a link names it, or a later message of a user or a tool quotes
it. A quotation of text that a continued or linked answer has too counts for that answer only.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from afield.runs.exclusions import AbandonedAnswers, ExclusionReason
from afield.turn_tree import TurnTree
from afield.types import Constraint, FinishReason, Turn, TurnStatus

QUOTED = 24
"""Characters of a quotation that identify an answer."""
RETRY = "retry"
"""Tag of a turn whose client marked the request as a retry."""


def excluded(
    tree: TurnTree, policy: AbandonedAnswers = "exclude", recorded: Container[str] = ()
) -> dict[str, str]:
    """Returns the turns to exclude and their reasons.

    With policy `train` only superseded ones. Turns in `recorded` are undelivered and not considered.
    """
    answers: dict[tuple[str, str | None, Constraint | None], list[Turn]] = {}
    for turn in tree.turns:
        if turn.status is TurnStatus.COMMITTED and turn.id not in recorded:
            answers.setdefault((turn.request_digest, turn.parent, turn.constraint), []).append(turn)
    repeated = [group for group in answers.values() if len(group) > 1]
    if not repeated:
        return {}
    linked = {link.to for turn in tree.turns for link in turn.links}
    reasons: dict[str, str] = {}
    for group in repeated:
        unused = _unused(tree, group, linked)
        for turn in unused:
            if _cut_off(turn, group):
                reasons[turn.id] = ExclusionReason.SUPERSEDED
            elif policy == "exclude" and (len(unused) < len(group) or _retried(turn, group)):
                reasons[turn.id] = ExclusionReason.ABANDONED
    return reasons


def _retried(turn: Turn, group: Sequence[Turn]) -> bool:
    """Returns whether all later answers are retries and this is not the last one."""
    return turn is not group[-1] and all(RETRY in later.tags for later in group[1:])


def _cut_off(turn: Turn, group: Sequence[Turn]) -> bool:
    """Returns whether a later answer had a higher token limit than this one, which hit its limit."""
    if turn.finish_reason is not FinishReason.LENGTH:
        return False
    room = turn.sampling.max_tokens or 0
    return any((later.sampling.max_tokens or 0) > room for later in group[group.index(turn) + 1 :])


def _unused(tree: TurnTree, group: Sequence[Turn], linked: set[str]) -> list[Turn]:
    used = [turn for turn in group if tree.has_children(turn.id) or turn.id in linked]
    texts = {_text(turn) for turn in used}
    return [turn for turn in group if turn not in used and (_text(turn) in texts or not _quoted(tree, turn))]


def _text(turn: Turn) -> str:
    return turn.messages[-1].content.strip() if turn.messages else ""


def _quoted(tree: TurnTree, turn: Turn) -> bool:
    text = _text(turn)
    if len(text) < QUOTED:
        return False
    turns = tree.turns
    later = turns[turns.index(turn) + 1 :]
    messages = (message for turn in later for message in turn.messages)
    return any(message.role != "assistant" and text in message.content for message in messages)
