"""What was sampled: model calls, and the training sequences that are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from afield.types.policy import Sampling


class ToolCall(Struct, frozen=True, gc=False):
    """A call the model made; `arguments` is the text as sampled, parsable or not."""

    id: str
    name: str
    arguments: str


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ImageRef(Struct, frozen=True, gc=False):
    """An image in a message: the digest of its content, and before which character of the text it stands."""

    digest: str
    at: int


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message as people read it. Never turned back into training ids."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    images: tuple[ImageRef, ...] = ()


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) were sampled by a policy version in [low, high]."""

    start: int
    end: int
    low: int
    high: int

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.end and 0 <= self.low <= self.high):
            raise ValueError(f"version span {[self.start, self.end, self.low, self.high]} is not a range")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class TurnStatus(StrEnum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    DANGLING = "dangling"


class Link(Struct, frozen=True, gc=False):
    """How a turn relates to another besides descending from it."""

    type: Literal["edit", "retry", "fork", "compaction", "sub-agent"]
    to: str


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One model call exactly as sampled: written once, never edited, never re-tokenised.

    The prompt is the parent's whole path followed by `delta_ids`; without a parent, `delta_ids` is
    the whole prompt. Where the engine put more ids in the place of an image, `delta_ids` has them and
    `sent_ids` is the delta as it was sent. `versions` counts from the first sampled token. `asked` is
    the digest of the conversation up to the request, `digest` with the reply.
    """

    id: str
    root: str
    parent: str | None = None
    delta_ids: tuple[int, ...] = ()
    sent_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    status: TurnStatus
    sampling: Sampling
    tier: str = ""
    dialect: str = ""
    messages: tuple[Message, ...] = ()
    asked: str = ""
    digest: str = ""
    tools_digest: str = ""
    tags: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    started: float = 0.0
    first_token: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"turn {self.id}: {len(self.token_ids)} sampled ids, {len(self.logprobs)} log-probabilities"
            )
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError(f"turn {self.id}: a log-probability is not a finite number")
        if self.parent is None and not self.delta_ids:
            raise ValueError(f"turn {self.id}: a turn without a parent needs a prompt")
        check_cover(self.versions, [(0, len(self.token_ids))], f"turn {self.id}")
        if self.status is TurnStatus.COMMITTED and self.finish_reason is None:
            raise ValueError(f"turn {self.id}: a committed turn needs a finish reason")


class TurnRange(Struct, frozen=True):
    """Where a turn's sampled tokens lie in a trajectory, how they were drawn, and how exact they are."""

    id: str
    start: int
    end: int
    temperature: float
    truncated: bool = False
    tier: str = ""


class Trajectory(Struct, frozen=True, kw_only=True):
    """One training sequence. `logprobs` is 0.0 only where `loss_mask` is 0; `turns` lists what it owns."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    turns: tuple[TurnRange, ...]
    weight: float

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs)}
        if len(lengths) != 1:
            raise ValueError(
                f"trajectory of {len(self.token_ids)} ids has {len(self.loss_mask)} mask entries"
                f" and {len(self.logprobs)} log-probabilities"
            )
        if any(p and not m for p, m in zip(self.logprobs, self.loss_mask, strict=True)):
            raise ValueError("trajectory has a log-probability where its loss mask is 0")
        owned = [(t.start, t.end) for t in self.turns]
        if sum(self.loss_mask) != sum(end - start for start, end in owned):
            raise ValueError("trajectory's loss mask does not match the turns it owns")
        check_cover(self.versions, owned, "trajectory")
        if not 0 < self.weight <= 1:
            raise ValueError(f"trajectory weight {self.weight} must be above 0 and at most 1")

    @property
    def owned(self) -> int:
        return sum(self.loss_mask)


def check_cover(spans: tuple[VersionSpan, ...], ranges: list[tuple[int, int]], what: str) -> None:
    """Version spans cover each of the ranges token by token, and nothing else."""
    if _joined(ranges) != _joined((span.start, span.end) for span in spans):
        raise ValueError(f"{what}: version spans {[list(_fields(s)) for s in spans]} do not cover {ranges}")


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that follow each other as one; those of no length are nothing."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined


def _fields(span: VersionSpan) -> tuple[int, int, int, int]:
    return span.start, span.end, span.low, span.high


class Exclusion(Struct, frozen=True):
    """Sampled tokens that are not trained, and why."""

    turn: str
    tokens: int
    reason: str
