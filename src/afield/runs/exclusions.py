"""Exclusion reasons: why sampled turns are kept out of the loss.

A sampled turn is excluded only for a reason that is registered here, on one of three grounds:

1. fingerprint: the request is an exact, known side request of a harness (`FINGERPRINTS`), such as a title;
2. session: a session setting, or the request header `x-afield-side-call: 1`;
3. record: a recorded fact, such as a call that was cut off.

A turn with a trained descendant is never a side call. `UntrainedReason` counts whole rollouts that
contribute no gradient.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Literal

from msgspec import Struct

SideCalls = Literal["exclude", "declared", "train"]
"""Handling of side calls: `exclude` declared and fingerprinted ones, exclude only `declared` ones, or `train`
all of them.
"""

AbandonedAnswers = Literal["exclude", "train"]
"""Handling of abandoned replies, which the client sampled again and continued from another reply: `exclude`
them, or `train` them for agents that sample a request several times on purpose.
"""

SIDE = "side:"
SIDE_CALL_HEADER = "x-afield-side-call"
Version = tuple[int, ...]


class Ground(StrEnum):
    """Evidence on which a turn is excluded."""

    FINGERPRINT = "fingerprint"
    """The request equals a known side request of a harness, character by character."""
    SESSION = "session"
    """A session setting or a request header excludes it."""
    RECORD = "record"
    """The recorded call shows it, for example because it was cut off."""


class ExclusionReason(StrEnum):
    """Reason why a sampled turn is not trained. Fingerprints add reasons `side:HARNESS/REQUEST`."""

    ABORTED = "aborted"
    """The call ended early: the client disconnected, or the engine or session ended."""
    DANGLING = "dangling"
    """The gateway process died during the call; sampled tokens are unknown and count as 0."""
    UNDELIVERED = "undelivered"
    """The reply was complete, but the client disconnected before it received all of it."""
    SUPERSEDED = "superseded"
    """The reply was cut off by `max_tokens`, and the client repeated the request with a larger limit."""
    ABANDONED = "abandoned"
    """The client repeated the request and continued from another reply."""
    TOO_LONG = "too_long"
    """The sequence is longer than the trainer's context."""
    TRUNCATED = "truncated"
    """`max_tokens` or the context cut off the reply, and `learn.mask_truncated` leaves it out."""
    CONSTRAINED = "constrained"
    """The reply was sampled with a grammar, and the trainer does not train such turns."""
    SIDE_DECLARED = "side:declared"
    """The request has the header `x-afield-side-call: 1`."""


class UntrainedReason(StrEnum):
    """Reason why a whole rollout is not trained although its turns are not excluded."""

    TASK_FAILURE = "task_failure"
    """The task or the agent's code failed, so there is no reward."""
    VERIFIER_FAILURE = "verifier_failure"
    """The verifier failed, so there is no reward."""
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    """Infrastructure failed, so there is no reward."""
    REWARD_PENDING = "reward_pending"
    """Its reward is still to be given by the caller."""
    NO_ADVANTAGE = "no_advantage"
    """Its reward equals the baseline, or there is no baseline."""
    DROPPED_GROUP = "dropped_group"
    """Its group has too few rewards or is too stale."""
    OTHER_BRANCH = "other_branch"
    """`branches = "main"` trains one sequence per session; this is another one."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """Exact description of one side request of one harness, recorded from its pinned releases.

    All fields must match. Texts are compared by SHA-256 of their UTF-8 bytes.
    """

    harness: str
    """Name of the harness, as in `afield conformance`."""
    request: str
    """Purpose of the request, such as `title`."""
    dialect: str
    """API of the request: chat, anthropic, responses or gemini."""
    agent: str
    """Product name in the User-Agent header, before the slash."""
    first: str
    """Oldest version that was observed to send this request."""
    last: str
    """Newest version that was observed to send this request."""
    system: str
    """SHA-256 of the whole system text."""
    roles: tuple[str, ...]
    """Roles of all messages, in order, without system messages."""
    texts: tuple[str, ...] = ()
    """SHA-256 of the leading user messages that never change."""

    @property
    def reason(self) -> str:
        return f"{SIDE}{self.harness}/{self.request}"

    def made_by(self, user_agent: str) -> bool:
        """Whether a User-Agent header names the harness in a version between `first` and `last`."""
        product, slash, rest = user_agent.partition("/")
        version = _version(rest) if slash and product == self.agent else None
        return version is not None and version_of(self.first) <= version <= version_of(self.last)


class RegisteredReason(Struct, frozen=True, kw_only=True):
    """Exclusion reason with its ground and remedy, for docs and warnings."""

    name: str
    """Value of `Exclusion.reason`."""
    ground: Ground
    """Evidence for the exclusion."""
    remedy: str
    """How to train these tokens instead."""


def digest(text: str) -> str:
    """SHA-256 of a text, as in `Fingerprint`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def version_of(text: str) -> Version:
    """Parse a version such as `1.18.33` into numbers."""
    version = _version(text)
    if version is None:
        raise ValueError(f"version {text!r} must be numbers with dots between them, such as 1.18.33")
    return version


def _version(text: str) -> Version | None:
    match = re.match(r"\d+(\.\d+)*(?![\w.+-])", text)
    return tuple(map(int, match[0].split("."))) if match else None


FINGERPRINTS: tuple[Fingerprint, ...] = (
    # Title for the list of sessions; sent in interactive mode, not by `claude -p`.
    Fingerprint(
        harness="claude-code",
        request="title",
        dialect="anthropic",
        agent="claude-cli",
        first="2.1.300",
        last="2.1.325",
        system="0d3b9b8dec55d8b91a504dff4f2d5c2728239a7c8fa19fe8b50c2bdd5476ac27",
        roles=("user",),
    ),
    # Title, requested together with the first turn of every session.
    Fingerprint(
        harness="opencode",
        request="title",
        dialect="chat",
        agent="opencode",
        first="1.18.3",
        last="1.18.33",
        system="e7a6848eba328f28c7e870874cf0591e4edbaf90d7602ad8fdfe90601c6e656f",
        roles=("user", "user"),
        texts=("343ad246dc9ed907e2c13991cdf17f7818c651ed05f9ba6679bc7e584298e07a",),
    ),
)
"""Known side requests of harnesses, recorded with `afield conformance`."""

_TRAIN_THEM = 'side_calls = "train" trains them'
_RECORD = {
    ExclusionReason.ABORTED: "raise the deadlines of agents and clients that leave before an answer ends",
    ExclusionReason.DANGLING: "find out from its log why the gateway ended",
    ExclusionReason.UNDELIVERED: "raise the timeout of the agent's client",
    ExclusionReason.SUPERSEDED: "let the agent ask with a larger max_tokens at once",
    ExclusionReason.ABANDONED: "raise the timeout of the agent's client, or find out why it asks again",
    ExclusionReason.TOO_LONG: "lower max_context to what the trainer takes",
}
_SESSION = {
    ExclusionReason.TRUNCATED: 'raise max_tokens; learn.mask_truncated = "off" trains them',
    ExclusionReason.CONSTRAINED: (
        'constrained_turns = "train" trains them with the embedded trainer; "ignore" samples them without the'
        " constraint, for veRL and TRL too"
    ),
    ExclusionReason.SIDE_DECLARED: f"{_TRAIN_THEM}; or leave {SIDE_CALL_HEADER} out of the request",
}
REASONS: dict[str, RegisteredReason] = {
    reason.name: reason
    for reason in (
        *(RegisteredReason(name=str(n), ground=Ground.RECORD, remedy=r) for n, r in _RECORD.items()),
        *(RegisteredReason(name=str(n), ground=Ground.SESSION, remedy=r) for n, r in _SESSION.items()),
        *(
            RegisteredReason(name=f.reason, ground=Ground.FINGERPRINT, remedy=_TRAIN_THEM)
            for f in FINGERPRINTS
        ),
    )
}
"""All exclusion reasons, by name."""


def check_reason(name: str) -> str:
    """Return `name` if it is registered; raises ValueError otherwise."""
    if name not in REASONS:
        raise ValueError(f"{name!r} is not a reason to exclude a turn; known reasons: {', '.join(REASONS)}")
    return name
