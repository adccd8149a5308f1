"""Side calls: requests of a harness besides its task, such as titles.

A header or an exact fingerprint identifies them. They are answered and recorded, and their tag is the
exclusion reason (`exclusions.REASONS`). The session's `side_calls` policy decides whether they are
trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afield.gateway.api_error import bad_request
from afield.gateway.model_request import ModelRequest
from afield.runs.exclusions import (
    FINGERPRINTS,
    REASONS,
    SIDE,
    SIDE_CALL_HEADER,
    ExclusionReason,
    Fingerprint,
    SideCalls,
    digest,
)
from afield.types import Turn, TurnStatus

_YES, _NO = ("1", "true"), ("", "0", "false")


def tag_of(
    headers: Mapping[str, str],
    request: ModelRequest,
    fingerprints: Sequence[Fingerprint] = FINGERPRINTS,
) -> str | None:
    """Returns the reason if a request is a side call, else None. Header names are in lower case."""
    declared = headers.get(SIDE_CALL_HEADER, "").strip().lower()
    if declared in _YES:
        return ExclusionReason.SIDE_DECLARED
    if declared not in _NO:
        raise bad_request(
            f"{SIDE_CALL_HEADER}: {declared[:80]!r} is not understood",
            "send 1 for a call that is not part of the agent's work, or leave the header out",
        )
    user_agent = headers.get("user-agent", "")
    for fingerprint in fingerprints:
        if user_agent.startswith(fingerprint.agent) and _matches(fingerprint, user_agent, request):
            return fingerprint.reason
    return None


def _matches(fingerprint: Fingerprint, user_agent: str, request: ModelRequest) -> bool:
    messages = request.messages
    if request.dialect != fingerprint.dialect or request.tools or request.after is not None:
        return False
    if tuple(message.role for message in messages) != ("system", *fingerprint.roles):
        return False
    texts = [fingerprint.system, *fingerprint.texts]
    return (
        fingerprint.made_by(user_agent)
        and not any(message.images for message in messages)
        and all(digest(m.content) == text for m, text in zip(messages, texts, strict=False))
    )


def excluded_turns(turns: Sequence[Turn], recorded: Mapping[str, str], policy: SideCalls) -> dict[str, str]:
    """Returns side calls and their reasons, without ancestors of trained turns.

    `turns` are in commit order, so that parents precede children. `recorded` are turns that are excluded
    already.
    """
    excluded: dict[str, str] = {}
    above_trained: set[str] = set()
    for turn in reversed(turns):
        trained = turn.id in above_trained
        if turn.status is TurnStatus.COMMITTED and turn.id not in recorded:
            reason = None if trained else _reason(turn, policy)
            if reason is None:
                trained = True
            else:
                excluded[turn.id] = reason
        if trained and turn.parent is not None:
            above_trained.add(turn.parent)
    return excluded


def _reason(turn: Turn, policy: SideCalls) -> str | None:
    if policy == "train":
        return None
    tags = [tag for tag in turn.tags if tag.startswith(SIDE) and tag in REASONS]
    return next((t for t in tags if policy == "exclude" or t == ExclusionReason.SIDE_DECLARED), None)
