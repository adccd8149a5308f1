"""The data nouns of afield.

Everything that moves between parts is one of these: frozen, checked when it is built, free of I/O.
A value that exists is valid; code that receives one never checks it again. Reading and writing them
as bytes is `wire`'s business, and what is done with them belongs to the parts behind `seams`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, Self

from msgspec import Struct, field

ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_id(value: str, what: str) -> None:
    if not ID_PATTERN.fullmatch(value) or value in {".", ".."}:
        raise ValueError(f"{what} {value!r} must be 1 to 128 characters of A-Z a-z 0-9 . _ -")


# --- policy and sampling -------------------------------------------------------------------------


class Policy(Struct, frozen=True):
    """The model being trained: a name, and a version that only grows."""

    name: str
    version: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a policy needs a name")
        if self.version < 0:
            raise ValueError(f"policy version {self.version} is negative")


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Outside these, float32 logits divided by the temperature overflow, or all tokens are equally likely."""
MAX_COUNT = 2**31 - 1
"""The largest `top_k` and `max_tokens`; engines keep both in 32 bits."""


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How tokens are drawn. The trainer owns these; `top_k` 0 means off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature} must be 0 (greedy)"
                f" or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")
        if not 0 <= self.top_k <= MAX_COUNT:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or positive, at most {MAX_COUNT}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_COUNT:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1 and at most {MAX_COUNT}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} does not fit into 64 bits")

    @property
    def truncated(self) -> bool:
        """Whether some tokens could not be drawn at all; a trainer has to know."""
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one session may spend. None means no bound."""

    calls: int | None = None
    tokens: int | None = None
    context: int | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"budget {name}={value} must be positive")


# --- tasks, rollouts, outcomes -------------------------------------------------------------------


class Split(StrEnum):
    TRAIN = "train"
    VAL = "val"


HIDDEN_FIELD = "hidden"


class Task(Struct, frozen=True):
    """What an agent is asked: an id and a JSON object; attempted many times."""

    id: str
    """Name of the task, unique in its data set."""
    input: dict[str, Any]
    """What the agent gets, but for the object `hidden`, which only its verifier gets."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id")
        if "_rollout" in self.input:
            raise ValueError(f"task {self.id!r} has a field '_rollout', which is reserved; rename it")
        if not isinstance(self.input.get(HIDDEN_FIELD, {}), dict):
            raise ValueError(
                f"task {self.id!r}: its field 'hidden' is what only the verifier gets, and must be an object"
            )


class Rollout(Struct, frozen=True, kw_only=True):
    """The wish for one attempt at one task: the unit of work, retry and bookkeeping.

    `sampling` is set where it is not that of all others: greedy for validation and for a group's baseline.
    """

    id: str
    exp_id: str
    group_id: str
    task: Task
    split: Split = Split.TRAIN
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        check_id(self.id, "rollout id")
        check_id(self.exp_id, "experiment id")
        check_id(self.group_id, "group id")


class Attempt(Struct, frozen=True):
    """One try of a rollout, counted from 1. Its session has the same id."""

    rollout_id: str
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"attempt {self.n} of {self.rollout_id!r}: attempts count from 1")
        check_id(self.session_id, "session id")

    @property
    def session_id(self) -> str:
        return f"{self.rollout_id}.{self.n}"

    @classmethod
    def from_session_id(cls, session_id: str) -> Self:
        rollout_id, dot, n = session_id.rpartition(".")
        if not dot or not n.isdigit():
            raise ValueError(f"session id {session_id!r} is not of the form ROLLOUT.N")
        return cls(rollout_id, int(n))


class FailureKind(StrEnum):
    """Who a failure belongs to. It decides what happens next; see `errors.RETRIED`."""

    POLICY = "policy"
    TASK = "task"
    VERIFIER = "verifier"
    INFRASTRUCTURE = "infrastructure"


class Reason(StrEnum):
    """Why, within a kind."""

    RAISED = "raised"
    REWARD = "reward"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    CONTEXT = "context"
    LAUNCH = "launch"
    NO_AGENT = "no_agent"  # what was launched does not run rollouts; another try would say the same
    DIED = "died"
    ENGINE = "engine"
    UPLOAD = "upload"
    CANCELLED = "cancelled"


class Failure(Struct, frozen=True):
    kind: FailureKind
    reason: Reason
    message: str
    traceback: str = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of an attempt: a reward, or the typed failure in its place.

    A policy failure may carry a reward too (the agent gave one before it ran out of budget). `turn_rewards`
    are by turn: its id, the id of the response that the agent got for it, or the number of the call, from 0.
    """

    rollout_id: str
    attempt: int
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, float] = field(default_factory=dict)
    named_turn_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """Rewards with a name and a turn: by name, then by turn as in `turn_rewards`."""
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    stop_reason: str = ""

    def __post_init__(self) -> None:
        Attempt(self.rollout_id, self.attempt)
        of_turns = ((f"reward of turn {turn}", value) for turn, value in self.turn_rewards.items())
        of_both = (
            (f"reward {name} of turn {turn}", value)
            for name, turns in self.named_turn_rewards.items()
            for turn, value in turns.items()
        )
        named = (*self.rewards.items(), *self.metrics.items(), *of_turns, *of_both)
        for name, value in (("reward", self.reward), *named):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} {value} of {self.session_id} is not a finite number")
        if self.reward is None and self.failure is None:
            raise ValueError(f"the outcome of {self.session_id} has neither a reward nor a failure")
        if self.reward is not None and self.failure and self.failure.kind is not FailureKind.POLICY:
            raise ValueError(f"{self.session_id}: a {self.failure.kind} failure never carries a reward")

    @property
    def session_id(self) -> str:
        return f"{self.rollout_id}.{self.attempt}"

    def reward_or_floor(self, floor: float) -> float | None:
        """The number that trains, or None when this outcome stays out of the baseline."""
        if self.reward is not None:
            return self.reward
        return floor if self.failure and self.failure.kind is FailureKind.POLICY else None


# --- turns and trajectories ----------------------------------------------------------------------


class ToolCall(Struct, frozen=True, gc=False):
    """A call the model made; `arguments` is the text as sampled, parsable or not."""

    id: str
    name: str
    arguments: str


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ImageRef(Struct, frozen=True, gc=False):
    """An image in a message: the digest of its content, and before which character of the text it stands."""

    digest: str
    offset: int = field(name="at")


class Image(Struct, frozen=True, kw_only=True):
    """An image in a prompt: its bytes, or where the engine finds them. `digest` is sha256 of the bytes that
    the client sent, or of the URL where the bytes were never seen."""

    digest: str
    media_type: str
    data: bytes | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.url is None):
            raise ValueError(f"image {self.digest!r} needs either its bytes or a url")


class ImageSpan(Struct, frozen=True, gc=False):
    """Where an image stands in token ids: `length` placeholders from `start` on."""

    digest: str
    start: int
    length: int


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


class Constraint(Struct, frozen=True, kw_only=True, gc=False):
    """What a reply is held to while it is sampled: tokens that cannot lead to a match have no probability."""

    grammar: str
    """A structural tag of xgrammar, as JSON. Engines and trainer compile the same text, see `masks`."""
    stop_ids: tuple[int, ...] = ()
    """The tokens that may end the reply; allowed where the grammar is complete and nowhere else."""


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One model call exactly as sampled: written once, never edited, never re-tokenised.

    The prompt is the parent's whole path followed by `delta_ids`; without a parent, `delta_ids` is
    the whole prompt. Where the engine put more ids in the place of an image, `delta_ids` has them and
    `sent_ids` is the delta as it was sent; `images` are those in `delta_ids`, from whose start they count.
    `versions` counts from the first sampled token. `asked` is the digest of the conversation up to the
    request, `digest` with the reply.
    """

    id: str
    root: str
    parent: str | None = None
    delta_ids: tuple[int, ...] = ()
    sent_ids: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    status: TurnStatus
    sampling: Sampling
    tier: str = ""
    dialect: str = ""
    messages: tuple[Message, ...] = ()
    request_digest: str = field(default="", name="asked")
    digest: str = ""
    tools_digest: str = ""
    tags: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    constraint: Constraint | None = None
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
        if self.images:
            check_images(self.images, len(self.delta_ids), f"turn {self.id}")
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
    constraint: Constraint | None = None


class Trajectory(Struct, frozen=True, kw_only=True):
    """One training sequence; `turns` lists what it owns, `images` the places of images among its ids.

    `loss_mask` says which tokens it trains. `logprobs` is 0.0 where that is 0, and for sampled tokens about
    which a constraint left no choice.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    turns: tuple[TurnRange, ...]
    weight: float
    images: tuple[ImageSpan, ...] = ()

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
        if self.images:
            check_images(self.images, len(self.token_ids), "trajectory")

    @property
    def owned(self) -> int:
        return sum(self.loss_mask)


def check_images(images: tuple[ImageSpan, ...], length: int, what: str) -> None:
    """Images follow each other inside `length` ids."""
    end = 0
    for image in images:
        if not end <= image.start < image.start + image.length <= length:
            raise ValueError(f"{what}: image {image.digest[:12]} at {image.start} is not inside {length} ids")
        end = image.start + image.length


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


# --- groups --------------------------------------------------------------------------------------


class RolloutResult(Struct, frozen=True, kw_only=True):
    """A rollout with what came of it: its last attempt's outcome, what that trains, and the turns to read.

    `images` are those that its trajectories have, each once.
    """

    rollout: Rollout
    outcome: Outcome
    trajectories: tuple[Trajectory, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    turns: tuple[Turn, ...] = ()
    attempts: int = 1
    images: tuple[Image, ...] = ()


class Group(Struct, frozen=True, kw_only=True):
    """The finished rollouts of one task that are compared with each other.

    `baseline` is the greedy rollout they are measured against where the algorithm wants one (ReMax); it is
    never trained.
    """

    id: str
    task_id: str
    epoch: int
    split: Split
    finished: tuple[RolloutResult, ...]
    baseline: RolloutResult | None = None

    def __post_init__(self) -> None:
        ids = [f.rollout.id for f in self.finished]
        if len(set(ids)) != len(ids):
            raise ValueError(f"group {self.id} holds a rollout twice: {sorted(ids)}")
        everyone = (*self.finished, *([self.baseline] if self.baseline else []))
        if stray := [f.rollout.id for f in everyone if f.rollout.group_id != self.id]:
            raise ValueError(f"group {self.id} holds rollouts of other groups: {stray}")

    def unusable_because(self, quorum: int) -> str | None:
        """Why this group cannot be trained on; None when it can."""
        return too_few_rewards([f.outcome for f in self.finished], quorum)


def too_few_rewards(outcomes: Sequence[Outcome], quorum: int) -> str | None:
    """Says so when fewer than `quorum` of a group's outcomes carry a reward; None when enough do."""
    carrying = sum(outcome.reward_or_floor(0.0) is not None for outcome in outcomes)
    if carrying >= quorum:
        return None
    kinds = sorted({str(outcome.failure.kind) for outcome in outcomes if outcome.failure})
    return f"{carrying} of {len(outcomes)} rollouts carry a reward ({', '.join(kinds)} failures)"
