"""Exclusions: which sampled tokens may be kept out of the loss.

Nothing is kept out by guessing. A sampled turn is excluded on one of three grounds, and for no other reason
than those registered here:

1. an exact fingerprint of a known harness's own side request (`FINGERPRINTS`), such as a title for its list
   of sessions;
2. the session's own word: `side_calls`, and a request that carries the header `x-afield-side-call: 1`;
3. a fact of the record, such as a call that was cut off.

A turn from which a trained turn descends is never a side call. Whole rollouts that train nothing (they
failed, or there is nothing to compare them with) are not excluded turns: see `UntrainedReason`.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Literal

from msgspec import Struct

SideCalls = Literal["exclude", "declared", "train"]
"""What a session does with side calls: `exclude` those that are declared and those whose fingerprint is
known; exclude only those that are `declared`; or `train` everything."""

AbandonedAnswers = Literal["exclude", "train"]
"""What a session does with answers to a repeated request that nothing continues, beside one that something
does: `exclude` them, or `train` them because its agent samples a request several times on purpose."""

SIDE = "side:"
SIDE_CALL_HEADER = "x-afield-side-call"
Version = tuple[int, ...]


class Ground(StrEnum):
    """On what ground tokens are kept out of the loss."""

    FINGERPRINT = "fingerprint"
    """The request is, character by character, one that a known harness makes for itself."""
    SESSION = "session"
    """The session, or the agent in a header of the request, said so."""
    RECORD = "record"
    """What was recorded shows it."""


class ExclusionReason(StrEnum):
    """Why a sampled turn is kept out of the loss. Fingerprints add their own, `side:HARNESS/REQUEST`."""

    ABORTED = "aborted"
    """The call ended before its answer did: its client left, or the engine or the session was ended."""
    DANGLING = "dangling"
    """The gateway died under the call; what was sampled is unknown and counts as 0 tokens."""
    UNDELIVERED = "undelivered"
    """The answer was complete and its client left before it got the end of it."""
    SUPERSEDED = "superseded"
    """The answer was cut off by `max_tokens`, and the client asked the same again with more room."""
    ABANDONED = "abandoned"
    """The client asked the same again and went on from another answer."""
    TOO_LONG = "too_long"
    """The row is longer than the trainer's context."""
    CONSTRAINED = "constrained"
    """The reply was held to a form while it was sampled, and what trains it does not train such turns."""
    SIDE_DECLARED = "side:declared"
    """The request carries the header `x-afield-side-call: 1`."""


class UntrainedReason(StrEnum):
    """Why the tokens of a whole rollout train nothing although none of its turns is excluded."""

    TASK_FAILURE = "task_failure"
    VERIFIER_FAILURE = "verifier_failure"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    """The rollout failed by no doing of the policy and carries no reward."""
    NO_ADVANTAGE = "no_advantage"
    """Its reward equals what it is measured against, or there is nothing to measure it against."""
    DROPPED_GROUP = "dropped_group"
    """Its group has too few rewards, or is staler than allowed."""
    OTHER_BRANCH = "other_branch"
    """`branches = "main"` trains one row of a session; this is another one."""


class Fingerprint(Struct, frozen=True, kw_only=True):
    """An exact description of one side request of one harness, as its pinned releases really send it.

    All of it has to hold. Texts are kept as SHA-256 of their UTF-8 bytes: one character more or less, and
    the request is trained like any other.
    """

    harness: str
    """Name of the harness, as in `afield conformance`."""
    request: str
    """What the harness asks for: `title`, for instance."""
    dialect: str
    """The API it is asked in: chat, anthropic, responses, gemini."""
    agent: str
    """Product name in the User-Agent header, before the slash."""
    first: str
    """The oldest version that was seen to send this."""
    last: str
    """The newest version that was seen to send this."""
    system: str
    """SHA-256 of the whole system text."""
    roles: tuple[str, ...]
    """Roles of all messages, in order, without those of the system text."""
    texts: tuple[str, ...] = ()
    """SHA-256 of the user messages that are always the same, from the first one on."""

    @property
    def reason(self) -> str:
        return f"{SIDE}{self.harness}/{self.request}"

    def made_by(self, user_agent: str) -> bool:
        """Whether a User-Agent header is that of the harness in a version that was looked at."""
        product, slash, rest = user_agent.partition("/")
        version = _version(rest) if slash and product == self.agent else None
        return version is not None and version_of(self.first) <= version <= version_of(self.last)


class RegisteredReason(Struct, frozen=True, kw_only=True):
    """One reason of an exclusion, as docs and warnings explain it."""

    name: str
    """As it stands in `Exclusion.reason`."""
    ground: Ground
    remedy: str
    """What changes it, for somebody who wants these tokens trained."""


def digest(text: str) -> str:
    """SHA-256 of a text, as fingerprints keep it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def version_of(text: str) -> Version:
    """`1.18.33` as numbers."""
    version = _version(text)
    if version is None:
        raise ValueError(f"version {text!r} must be numbers with dots between them, such as 1.18.33")
    return version


def _version(text: str) -> Version | None:
    found = re.match(r"\d+(\.\d+)*(?![\w.+-])", text)
    return tuple(map(int, found[0].split("."))) if found else None


FINGERPRINTS: tuple[Fingerprint, ...] = (
    # In a terminal, for the list of sessions; `claude -p` does not ask.
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
    # Beside the first turn of every session.
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
"""Side requests of harnesses, each seen on the wire in the versions it names (`afield conformance`)."""

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
"""Every reason there is, by name."""


def check_reason(name: str) -> str:
    """The reason, if it is a registered one."""
    if name not in REASONS:
        raise ValueError(f"{name!r} is no reason to exclude a turn; registered are: {', '.join(REASONS)}")
    return name
