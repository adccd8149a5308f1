"""Data types: tasks, rollouts, outcomes, turns, trajectories and groups.

All types are frozen and validated when built, so code that receives one does not check it again.
`wire` encodes and decodes them; `interfaces` has the components that exchange them.
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
    """Raise ValueError unless `value` is 1 to 128 characters of A-Z a-z 0-9 . _ -"""
    if not ID_PATTERN.fullmatch(value) or value in {".", ".."}:
        raise ValueError(f"{what} {value!r} must be 1 to 128 characters of A-Z a-z 0-9 . _ -")


# --- policy and sampling -------------------------------------------------------------------------


class Policy(Struct, frozen=True):
    """The model being trained."""

    name: str
    """Name of the model."""
    version: int = 0
    """Number of the published weights; it only grows."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a policy needs a name")
        if self.version < 0:
            raise ValueError(f"policy version {self.version} is negative")


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Range of temperatures above 0. Below it, float32 logits overflow; above it, sampling is uniform."""
MAX_COUNT = 2**31 - 1
"""Largest `top_k` and `max_tokens`; engines store both in 32 bits."""


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Sampling parameters. The trainer sets them, not the agent."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: smallest set of tokens with this probability; 1 is off."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 is off."""
    max_tokens: int | None = None
    """Largest number of tokens per call; None is the rest of the context."""
    seed: int | None = None
    """Seed of the random numbers, 64 bits; None draws one."""

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
        """Whether top_p, top_k or greedy decoding gives some tokens probability 0."""
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one session. None is no limit."""

    calls: int | None = None
    """Number of model calls."""
    tokens: int | None = None
    """Number of sampled tokens over all calls."""
    context: int | None = None
    """Tokens of prompt and reply of one call."""
    wall_s: float | None = None
    """Seconds since the session was opened."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"budget {name}={value} must be positive")


# --- tasks, rollouts, outcomes -------------------------------------------------------------------


class Split(StrEnum):
    """Part of a data set."""

    TRAIN = "train"
    VAL = "val"


HIDDEN_FIELD = "hidden"


class Task(Struct, frozen=True):
    """Row of a data set: an id and a JSON object."""

    id: str
    """Name of the task, unique in its data set."""
    input: dict[str, Any]
    """Input of the agent; its object `hidden` goes to the verifier alone."""

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
    """Run of an agent on one task, with all its retries."""

    id: str
    """Unique id, up to 128 characters of A-Z a-z 0-9 . _ -"""
    exp_id: str
    """Experiment id, the prefix of stored outcomes."""
    group_id: str
    """Id of the group: rollouts of the same task whose rewards are compared."""
    task: Task
    """Input of the agent and its verifier."""
    split: Split = Split.TRAIN
    """Training or validation; validation rollouts are never trained."""
    sampling: Sampling | None = None
    """Sampling parameters of this rollout; None uses those of the run."""

    def __post_init__(self) -> None:
        check_id(self.id, "rollout id")
        check_id(self.exp_id, "experiment id")
        check_id(self.group_id, "group id")


class Attempt(Struct, frozen=True):
    """Attempt of a rollout. Its session id is `ROLLOUT_ID.N`."""

    rollout_id: str
    """Rollout id."""
    n: int
    """Number of the attempt, from 1."""

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
    """Component that caused a failure; `errors.RETRIED` has the kinds that are retried."""

    POLICY = "policy"
    TASK = "task"
    VERIFIER = "verifier"
    INFRASTRUCTURE = "infrastructure"


class Reason(StrEnum):
    """Event that ended an attempt, within a failure kind."""

    RAISED = "raised"
    """Code raised an exception."""
    REWARD = "reward"
    """The reward is missing or not a finite number."""
    TIMEOUT = "timeout"
    """A deadline passed."""
    BUDGET = "budget"
    """The session's budget is spent."""
    CONTEXT = "context"
    """The conversation exceeds the model's context."""
    LAUNCH = "launch"
    """The runtime could not start the agent."""
    NO_AGENT = "no_agent"
    """The launched program does not run rollouts; it is not retried."""
    DIED = "died"
    """The agent's process, container or machine ended without an outcome."""
    ENGINE = "engine"
    """No engine answered a model call."""
    UPLOAD = "upload"
    """A file or an outcome could not be written or read."""
    CANCELLED = "cancelled"
    """The caller cancelled the rollout."""


class Failure(Struct, frozen=True):
    """Failure of an attempt."""

    kind: FailureKind
    """Component that caused the failure; decides whether the rollout is retried."""
    reason: Reason
    """Event that caused the failure."""
    message: str
    """Message of one line for the user: failed operation, value and remedy."""
    traceback: str = ""
    """Python traceback of the agent's or verifier's code; empty without one."""


RewardSource = Literal["agent", "caller"]
"""Source of the rewards of rollouts: the agent with its result, or the caller after their end."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Result of an attempt: a reward, a failure, or success whose reward is given later.

    A policy failure may have a reward too.
    """

    rollout_id: str
    """Rollout id."""
    attempt: int
    """Number of the attempt, from 1."""
    reward: float | None = None
    """Reward to train with; None for a failure without one, and while `reward_pending`."""
    reward_pending: bool = False
    """Whether the attempt succeeded and its reward is still to be given by the caller."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards, combined by the trainer's reward weights."""
    turn_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of single turns, by turn id, response id, or number of the call from 0."""
    named_turn_rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """Rewards with a name and a turn: by name, then by turn as in `turn_rewards`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the agent reports besides rewards; they are averaged in metrics.jsonl."""
    failure: Failure | None = None
    """Failure of the attempt; None if it succeeded."""
    stop_reason: str = ""
    """Why the agent stopped, in its own words or as the failure's reason."""

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
        if self.reward_pending and (self.reward is not None or self.failure is not None):
            raise ValueError(
                f"{self.session_id}: an outcome with reward_pending can have neither a reward nor a failure"
            )
        if self.reward is None and self.failure is None and not self.reward_pending:
            raise ValueError(f"the outcome of {self.session_id} has neither a reward nor a failure")
        if self.reward is not None and self.failure and self.failure.kind is not FailureKind.POLICY:
            raise ValueError(f"{self.session_id}: a {self.failure.kind} failure never carries a reward")

    @property
    def session_id(self) -> str:
        return f"{self.rollout_id}.{self.attempt}"

    def reward_or_floor(self, floor: float) -> float | None:
        """Return the reward, `floor` for a policy failure without one, or None if there is none."""
        if self.reward is not None:
            return self.reward
        return floor if self.failure and self.failure.kind is FailureKind.POLICY else None


# --- turns and trajectories ----------------------------------------------------------------------


class ToolCall(Struct, frozen=True, gc=False):
    """A tool call of the model."""

    id: str
    """Call id, which the tool's result repeats."""
    name: str
    """Name of the tool."""
    arguments: str
    """Arguments as sampled, JSON or not."""


Role = Literal["system", "developer", "user", "assistant", "tool"]


class ImageRef(Struct, frozen=True, gc=False):
    """Position of an image in a message."""

    digest: str
    """Digest of the image, see `Image.digest`."""
    offset: int = field(name="at")
    """Index of the character of `Message.content` that follows the image."""


class Image(Struct, frozen=True, kw_only=True):
    """An image in a prompt: its bytes, or a URL that the engine reads."""

    digest: str
    """SHA-256 of the bytes that the client sent, or of the URL."""
    media_type: str
    """MIME type, such as image/png."""
    data: bytes | None = None
    """Encoded bytes of the image; None if `url` is set."""
    url: str | None = None
    """Address that the engine fetches; None if `data` is set."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.url is None):
            raise ValueError(f"image {self.digest!r} needs either its bytes or a url")


class ImageSpan(Struct, frozen=True, gc=False):
    """Position of an image in token ids."""

    digest: str
    """Digest of the image, see `Image.digest`."""
    start: int
    """Index of the first placeholder token."""
    length: int
    """Number of placeholder tokens."""


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Message of a conversation, for reading; token ids for training come from `Turn`."""

    role: Role
    """Author of the message."""
    content: str = ""
    """Text, without images; empty if there is none."""
    reasoning: str = ""
    """Reasoning text of the model; empty if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant message, in order."""
    tool_call_id: str = ""
    """Id of the tool call that a tool message answers; empty for other roles."""
    name: str = ""
    """Name of the tool or participant; empty if the client sent none."""
    images: tuple[ImageRef, ...] = ()
    """Images in `content`, in order."""


class VersionSpan(Struct, frozen=True, array_like=True, gc=False):
    """Tokens [start, end) were sampled by a policy version in [low, high]."""

    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""
    low: int
    """Oldest policy version that may have sampled these tokens."""
    high: int
    """Newest policy version that may have sampled these tokens."""

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.end and 0 <= self.low <= self.high):
            raise ValueError(f"version span {[self.start, self.end, self.low, self.high]} is not a range")


class FinishReason(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """The model sampled a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context was reached."""
    ABORTED = "aborted"
    """The call was cancelled."""


class TurnStatus(StrEnum):
    """Completeness of a recorded turn."""

    COMMITTED = "committed"
    """The call is complete."""
    ABORTED = "aborted"
    """The call ended early; the tokens sampled so far are recorded."""
    DANGLING = "dangling"
    """The gateway process died during the call; sampled tokens are unknown."""


class Link(Struct, frozen=True, gc=False):
    """Relation of a turn to another one that is not its parent."""

    type: Literal["edit", "retry", "fork", "compaction", "sub-agent"]
    """Relation of this turn to the other one."""
    to: str
    """Id of the other turn."""


class Constraint(Struct, frozen=True, kw_only=True, gc=False):
    """Grammar of a reply: tokens that cannot lead to a match have probability 0."""

    grammar: str
    """Structural tag of xgrammar, as JSON; engines and trainer compile the same text."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that may end the reply; allowed only where the grammar is complete."""


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """Model call exactly as sampled: written once, never edited, never re-tokenized."""

    id: str
    """Id in its session: t1, t2, ..."""
    root: str
    """Digest of chat template and tools, which all turns of a tree share."""
    parent: str | None = None
    """Id of the turn that this one continues; None starts a new tree."""
    delta_ids: tuple[int, ...] = ()
    """Prompt ids after the parent's prompt and reply; the whole prompt without a parent."""
    sent_ids: tuple[int, ...] = ()
    """`delta_ids` before the engine expanded its images; empty without images."""
    images: tuple[ImageSpan, ...] = ()
    """Images in `delta_ids`."""
    token_ids: tuple[int, ...] = ()
    """Sampled ids, with the stop token."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each sampled id under the distribution it was drawn from."""
    versions: tuple[VersionSpan, ...] = ()
    """Policy versions of the sampled ids, counted from the first of them."""
    finish_reason: FinishReason | None = None
    """Why sampling ended; None for a turn without an end."""
    status: TurnStatus
    """Whether the turn is complete; only committed turns are trained."""
    sampling: Sampling
    """Sampling parameters of the call."""
    tier: str = ""
    """How the prompt was built: bridge, append, splice or full."""
    dialect: str = ""
    """API of the call: chat, completions, responses, anthropic or gemini."""
    messages: tuple[Message, ...] = ()
    """New messages of the request, then the reply."""
    request_digest: str = field(default="", name="asked")
    """Digest of the conversation up to the request; `asked` in JSON."""
    digest: str = ""
    """Digest of the conversation with the reply."""
    tools_digest: str = ""
    """Digest of the tool definitions."""
    tags: tuple[str, ...] = ()
    """Labels from the gateway or the client's request."""
    links: tuple[Link, ...] = ()
    """Relations to turns other than the parent."""
    constraint: Constraint | None = None
    """Grammar of the reply; None if sampling was unconstrained."""
    started: float = 0.0
    """Wall-clock time of the request, in seconds."""
    first_token: float | None = None
    """Wall-clock time of the first token, in seconds."""
    ended: float | None = None
    """Wall-clock time of the end, in seconds."""

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
    """Position of a turn's sampled tokens in a trajectory, and how they were sampled."""

    id: str
    """Id of the turn."""
    start: int
    """Index of the first sampled token."""
    end: int
    """Index after the last sampled token."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    truncated: bool = False
    """Whether top_p, top_k or greedy decoding removed tokens from the distribution."""
    tier: str = ""
    """How the prompt was built: bridge, append, splice or full."""
    constraint: Constraint | None = None
    """Grammar of the reply; None if sampling was unconstrained."""


class Trajectory(Struct, frozen=True, kw_only=True):
    """Training sequence: token ids with their log-probabilities and owned positions."""

    token_ids: tuple[int, ...]
    """Prompts and replies from the first token to the last trained one."""
    loss_mask: tuple[int, ...]
    """1 for tokens that this sequence trains, else 0."""
    logprobs: tuple[float, ...]
    """Log-probabilities when sampled; 0.0 where `loss_mask` is 0 or a constraint left one choice."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the trained tokens."""
    turns: tuple[TurnRange, ...]
    """Turns whose tokens this sequence trains; other turns in it are context."""
    weight: float
    """Share of the rollout's trained tokens, above 0 and at most 1; the shares of a rollout add up to 1."""
    images: tuple[ImageSpan, ...] = ()
    """Images in `token_ids`."""

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
        """Number of tokens that this sequence trains."""
        return sum(self.loss_mask)


def check_images(images: tuple[ImageSpan, ...], length: int, what: str) -> None:
    """Check that images are in order, do not overlap and lie inside `length` ids."""
    end = 0
    for image in images:
        if not end <= image.start < image.start + image.length <= length:
            span = f"{image.start} to {image.start + image.length}"
            raise ValueError(
                f"{what}: image {image.digest[:12]} at tokens {span} overlaps another one or is outside the"
                f" {length} tokens"
            )
        end = image.start + image.length


def check_cover(spans: tuple[VersionSpan, ...], ranges: list[tuple[int, int]], what: str) -> None:
    """Check that version spans cover exactly the tokens of the ranges."""
    if _joined(ranges) != _joined((span.start, span.end) for span in spans):
        raise ValueError(f"{what}: version spans {[list(_fields(s)) for s in spans]} do not cover {ranges}")


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges and drop empty ones."""
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
    """A sampled turn that is not trained."""

    turn: str
    """Id of the turn."""
    tokens: int
    """Number of its sampled tokens."""
    reason: str
    """Name of a reason in `exclusions.REASONS`."""


class RefusedCalls(Struct, frozen=True, gc=False):
    """Model calls of a session that the gateway refused with the same error."""

    code: str
    """Class of the error, such as `context_length_exceeded`."""
    status: int
    """HTTP status of the response."""
    count: int
    """Number of calls."""
    message: str
    """Message of the last refusal, as the client received it."""
    first: float
    """Wall-clock time of the first refusal, in seconds."""
    last: float
    """Wall-clock time of the last refusal, in seconds."""


class RolloutTimes(Struct, frozen=True, kw_only=True, gc=False):
    """Wall-clock times of a rollout in seconds, by the collector's clock; None where it did not get there.

    `attempted` and the times after it are of the attempt that counts.
    """

    submitted: float | None = None
    """Request to run the rollout."""
    started: float | None = None
    """Start of the first attempt, after the wait for a concurrency slot."""
    attempted: float | None = None
    """Start of the attempt that counts."""
    launched: float | None = None
    """The agent accepted its payload."""
    grading: float | None = None
    """The agent submitted its work to a separate verifier."""
    outcome: float | None = None
    """The outcome was decided."""
    ended: float | None = None
    """The record of the session was read."""


# --- groups --------------------------------------------------------------------------------------


class RolloutResult(Struct, frozen=True, kw_only=True):
    """A finished rollout: outcome, training sequences and turns of the attempt that counts."""

    rollout: Rollout
    """Rollout that finished."""
    outcome: Outcome
    """Outcome of the attempt that counts."""
    trajectories: tuple[Trajectory, ...] = ()
    """Training sequences; empty if nothing can be trained."""
    excluded: tuple[Exclusion, ...] = ()
    """Sampled turns that are not trained, with reasons."""
    turns: tuple[Turn, ...] = ()
    """All model calls, for reading."""
    attempts: int = 1
    """Number of attempts, including the one that counts."""
    images: tuple[Image, ...] = ()
    """Images of the trajectories, each once."""
    refused: tuple[RefusedCalls, ...] = ()
    """Model calls that the gateway refused, by class of error."""
    times: RolloutTimes = RolloutTimes()
    """Wall-clock times of the rollout's stages."""
    advantage: float | None = None
    """Advantage in the step that trained it; None before that, or without one."""
    returned: dict[str, Any] = field(default_factory=dict)
    """Values that the agent returned besides those of the outcome, such as a conversation, as JSON."""
    returned_left_out: dict[str, int] = field(default_factory=dict)
    """Size in bytes of returned values that were left out: all together may have 4 MiB."""


class Group(Struct, frozen=True, kw_only=True):
    """Finished rollouts of one task, whose rewards are compared with each other."""

    id: str
    """Group id, the `group_id` of its rollouts."""
    task_id: str
    """Id of the task that all rollouts share."""
    epoch: int
    """Epoch of the data set, from 0."""
    split: Split
    """Training or validation."""
    finished: tuple[RolloutResult, ...]
    """Every rollout of the group, including failed ones."""
    baseline: RolloutResult | None = None
    """Greedy rollout to compare with (ReMax); never trained. None without one."""

    def __post_init__(self) -> None:
        ids = [f.rollout.id for f in self.finished]
        if len(set(ids)) != len(ids):
            raise ValueError(f"group {self.id} holds a rollout twice: {sorted(ids)}")
        everyone = (*self.finished, *([self.baseline] if self.baseline else []))
        if stray := [f.rollout.id for f in everyone if f.rollout.group_id != self.id]:
            raise ValueError(f"group {self.id} holds rollouts of other groups: {stray}")

    def unusable_because(self, quorum: int) -> str | None:
        """Return why this group has too few rewards to train on; None if it has enough."""
        return too_few_rewards([f.outcome for f in self.finished], quorum)


def too_few_rewards(outcomes: Sequence[Outcome], quorum: int) -> str | None:
    """Return why a group with fewer than `quorum` rewards is dropped; None if it has enough."""
    carrying = sum(outcome.reward_or_floor(0.0) is not None for outcome in outcomes)
    if carrying >= quorum:
        return None
    kinds = sorted({str(outcome.failure.kind) for outcome in outcomes if outcome.failure})
    reasons = [f"{', '.join(kinds)} failures"] if kinds else []
    if pending := sum(outcome.reward_pending for outcome in outcomes):
        reasons.append(f"{pending} still to be given")
    return f"{carrying} of {len(outcomes)} rollouts carry a reward ({'; '.join(reasons)})"
