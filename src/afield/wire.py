"""Wire format: JSON documents and object keys shared between processes.

Three documents cross process boundaries:

1. the payload of an agent: the task's input plus `_rollout` (`Invocation`);
2. the outcome of an attempt (`OutcomeRecord`);
3. the commit or fence that decides an attempt (`CommitRecord`).

Stored documents have a format version `v`; readers refuse unknown versions. Decoding errors name the field.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from afield.errors import WireError
from afield.types import (
    HIDDEN_FIELD,
    Attempt,
    Failure,
    Outcome,
    RewardSource,
    Rollout,
    Sampling,
    Task,
    check_id,
)

VERSION = 1
MAX_PART = 200
SPARE_DEPTH = 64
"""Levels of nesting that files of rollouts may add to a returned value."""
MAX_RETURNED_BYTES = 4 * 2**20
"""Bytes of JSON that a rollout keeps of what its agent returned."""
ROLLOUT_FIELD = "_rollout"
SUBMISSION_FIELD = "submission"
COMMITS, LATE, ADOPTED, FENCED = "commits", "late", "adopted", "fenced"
HINT_SCHEMES = ("nats://", "tls://", "redis://", "rediss://")
OWN_PARTS = frozenset({COMMITS, LATE, ADOPTED, FENCED})
T = TypeVar("T")
# A \\u escape of half a surrogate pair, after an even number of backslashes.
_LONE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<lone>\\u[dD](?:[89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)
_PAIR = re.compile(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class Invocation(Struct, frozen=True, kw_only=True):
    """The `_rollout` object of a payload: ids, address of the model, destination of the outcome.

    Unknown fields are ignored, so that a newer collector can invoke an older agent image.
    """

    exp_id: str
    """Experiment id, the prefix of stored outcomes."""
    input_id: str
    """Task id."""
    rollout_id: str
    """Rollout id."""
    attempt: int
    """Number of the attempt, from 1."""
    group_id: str
    """Group id."""
    session_id: str
    """Session id, `ROLLOUT_ID.ATTEMPT`."""
    base_url: str
    """Base URL of the session; OpenAI clients use `openai_base_url`."""
    api_key: str
    """Key of the session."""
    model_id: str
    """Model name to send in requests."""
    sampling: Sampling | None = None
    """Sampling parameters that the gateway applies; None if the collector sent none."""
    seed: int | None = None
    """Seed for the agent's own random numbers; retries after infrastructure failures repeat it."""
    outcome_url: str | None = None
    """http:, https: or file: URL that takes the outcome; None with `s3_bucket`."""
    s3_bucket: str | None = None
    """S3 bucket that takes the outcome; None with `outcome_url`."""
    sqs_url: str | None = None
    """SQS queue for the hint; None sends no hint there."""
    hint_url: str | None = None
    """NATS or Redis URL for the hint; None sends no hint there."""
    args: dict[str, Any] = {}
    """Arguments of the agent, the same for all tasks of a run."""
    traceparent: str = ""
    """W3C trace context of the attempt, for spans of the agent's own; empty without traces."""
    role: Literal["agent", "judged", "verifier"] = "agent"
    """Role of the invoked program: an `agent` gives its own reward, a `judged` agent submits work, and the
    `verifier` gives the reward for a submission.
    """

    reward_from: RewardSource = "agent"
    """Source of the reward: the `agent` returns it, or the `caller` gives it after the rollout's end."""

    def __post_init__(self) -> None:
        for name in ("exp_id", "rollout_id", "group_id", "session_id"):
            check_id(getattr(self, name), name)
        expected = Attempt(self.rollout_id, self.attempt).session_id
        if self.session_id != expected:
            raise ValueError(f"session_id {self.session_id!r} should be {expected!r}")
        for name in ("input_id", "api_key", "model_id"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} must start with http:// or https://")
        if self.outcome_url is None and self.s3_bucket is None:
            raise ValueError("one of outcome_url and s3_bucket must say where the outcome goes")
        if self.hint_url is not None and not self.hint_url.startswith(HINT_SCHEMES):
            raise ValueError(f"hint_url {self.hint_url!r} must start with one of: {', '.join(HINT_SCHEMES)}")
        if self.outcome_url is not None and not self.outcome_url.startswith(("http://", "https://", "file:")):
            raise ValueError(f"outcome_url {self.outcome_url!r} must be a http:, https: or file: URL")

    @property
    def openai_base_url(self) -> str:
        return f"{self.base_url.rstrip('/')}/v1"

    @property
    def data_key(self) -> str:
        return data_key(self.exp_id, self.input_id, self.session_id)

    @property
    def commit_key(self) -> str:
        return commit_key(self.exp_id, self.session_id)


def data_key(exp_id: str, input_id: str, session_id: str) -> str:
    """Key of an outcome. Task ids are free text: they are quoted, or hashed if too long or reserved."""
    part = quote(input_id, safe="")
    if part in {".", "..", *OWN_PARTS} or len(part) > MAX_PART:
        part = f"task-{hashlib.sha256(input_id.encode()).hexdigest()}"
    return f"{exp_id}/{part}/{session_id}.json"


def commit_key(exp_id: str, session_id: str) -> str:
    """Key of the commit that decides an attempt."""
    return f"{exp_id}/{COMMITS}/{session_id}.json"


def late_key(exp_id: str, session_id: str) -> str:
    """Key of an outcome that was refused because the attempt was already decided."""
    return f"{exp_id}/{LATE}/{session_id}.json"


def fenced_key(exp_id: str, session_id: str) -> str:
    """Key of an empty object that marks a fenced attempt in listings."""
    return f"{exp_id}/{FENCED}/{session_id}.json"


def adopted_key(exp_id: str, session_id: str) -> str:
    """Key of an outcome that the collector converted from another format."""
    return f"{exp_id}/{ADOPTED}/{session_id}.json"


def runtime_session_id(session_id: str) -> str:
    """Session id on AgentCore, which requires at least 33 characters."""
    return f"afield-{hashlib.sha256(session_id.encode()).hexdigest()}"


def is_runtime_session_id(name: str) -> bool:
    digest = name.removeprefix("afield-")
    return digest != name and len(digest) == 64 and not digest.strip("0123456789abcdef")


def read_key(key: str) -> tuple[str, str, str] | None:
    """Split an object key into (exp_id, middle part, session_id); None for other keys."""
    exp_id, slash, rest = key.partition("/")
    part, last, name = rest.rpartition("/")
    session_id = name.removesuffix(".json")
    if not (slash and last and part) or session_id == name:
        return None
    try:
        check_id(exp_id, "experiment id")
        Attempt.from_session_id(session_id)
    except ValueError:
        return None
    return exp_id, part, session_id


def build_payload(task: Task, invocation: Invocation, submission: Submission | None = None) -> dict[str, Any]:
    """Build a payload: a deep copy of the task's input, `_rollout` and, for verifiers, the submission.

    Only verifiers receive the task's `hidden` object.
    """
    payload = copy.deepcopy(task.input)
    if invocation.role != "verifier":
        payload.pop(HIDDEN_FIELD, None)
    if submission is not None:
        if SUBMISSION_FIELD in payload:
            raise WireError(f"the task {task.id!r} has a field '{SUBMISSION_FIELD}', which is the verifier's")
        payload[SUBMISSION_FIELD] = submission.artifacts
    payload[ROLLOUT_FIELD] = to_builtins(invocation)
    return payload


def read_payload(payload: object) -> Invocation:
    """Validate a payload and return its `_rollout` object."""
    if not isinstance(payload, dict):
        raise WireError(f"the payload is a {type(payload).__name__}; it must be a JSON object")
    part = payload.get(ROLLOUT_FIELD)
    if part is None:
        raise WireError(
            f"the payload has no '{ROLLOUT_FIELD}': this entry point serves rollouts only;"
            " invoke it through afield, or serve production traffic with another entry point"
        )
    return convert(part, Invocation, f"'{ROLLOUT_FIELD}'")


class OutcomeRecord(Struct, frozen=True, kw_only=True):
    """Stored data object of an attempt: ids, outcome and payload."""

    v: int = VERSION
    """Format version."""
    exp_id: str
    """Experiment id."""
    input_id: str
    """Task id."""
    group_id: str
    """Group id."""
    session_id: str
    """Session id of the attempt."""
    outcome: Outcome
    """Reward or failure of the attempt."""
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    """Payload that the agent received, for debugging; may be empty."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Additional JSON from the agent."""
    started: float = 0.0
    """Wall-clock time of the agent's start, in seconds; 0 if unknown."""
    ended: float = 0.0
    """Wall-clock time of the agent's end, in seconds; 0 if unknown."""

    @classmethod
    def of(cls, invocation: Invocation, outcome: Outcome, **rest: Any) -> Self:
        return cls(
            exp_id=invocation.exp_id,
            input_id=invocation.input_id,
            group_id=invocation.group_id,
            session_id=invocation.session_id,
            outcome=outcome,
            **rest,
        )


class Submission(Struct, frozen=True, kw_only=True):
    """Submission of a judged agent, the only part of its work that the verifier receives."""

    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Metrics of the agent."""
    stop_reason: str = ""
    """Why the agent stopped."""
    artifacts: dict[str, Any] = msgspec.field(default_factory=dict)
    """JSON for the verifier, its payload's `submission`."""


class CommitRecord(Struct, frozen=True, kw_only=True):
    """Decision of an attempt: committed with its data, or fenced. The first write wins."""

    v: int = VERSION
    """Format version."""
    session_id: str
    """Session id of the attempt."""
    data_key: str = ""
    """Key of the data object; empty for a fence."""
    fenced: str = ""
    """Reason of the fence; empty for a commit."""

    def __post_init__(self) -> None:
        if bool(self.data_key) == bool(self.fenced):
            raise ValueError("a commit names its data object or the reason it is fenced, never both")


class Hint(Struct, frozen=True, kw_only=True):
    """Queue message: this attempt may have been decided; readers check the store."""

    exp_id: str
    """Experiment id."""
    session_id: str
    """Session id of the attempt."""


def invocation_for(rollout: Rollout, attempt: Attempt, **where: Any) -> Invocation:
    """Build the invocation of an attempt; `where` has the fields that are not ids."""
    return Invocation(
        exp_id=rollout.exp_id,
        input_id=rollout.task.id,
        rollout_id=rollout.id,
        attempt=attempt.n,
        group_id=rollout.group_id,
        session_id=attempt.session_id,
        **where,
    )


# --- bytes ---------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """Encode as JSON. Raises WireError for values that JSON cannot represent, such as NaN and infinity."""
    try:
        _refuse_non_finite(msgspec.to_builtins(value))
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"cannot be written as JSON: {error}") from error


def _refuse_non_finite(value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise WireError(f"{value} is not a JSON number")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_non_finite(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_non_finite(item)


def bounded(
    values: Mapping[str, Any], limit: int = MAX_RETURNED_BYTES
) -> tuple[dict[str, Any], dict[str, int]]:
    """Values that fit into `limit` bytes of JSON together, smallest first, and the sizes of the others.

    A value that cannot be stored has the size 0.
    """
    sizes: dict[str, int] = {}
    left_out: dict[str, int] = {}
    total = 0
    for name, value in values.items():
        try:
            data = encode({name: value})
            sizes[name] = len(data)
            msgspec.msgpack.encode(value)
            msgspec.json.decode(b"[" * SPARE_DEPTH + data + b"]" * SPARE_DEPTH)
        except (WireError, OverflowError, RecursionError):  # what a file of rollouts cannot hold
            sizes.pop(name, None)
            left_out[name] = 0
    for name in sorted(sizes, key=lambda name: sizes[name]):
        total += sizes[name]
        if total > limit:
            left_out[name] = sizes[name]
    return {name: value for name, value in values.items() if name not in left_out}, left_out


def decode(data: bytes | str, into: type[T], what: str) -> T:
    """Decode JSON. Raises WireError, which begins with `what`, for malformed data."""
    try:
        return _known_version(msgspec.json.decode(data, type=into), what)
    except msgspec.MsgspecError as error:
        raise WireError(f"{what}: {error}") from error


def convert(value: object, into: type[T], what: str) -> T:
    """Convert decoded JSON. Raises WireError, which begins with `what`, for malformed data."""
    try:
        return _known_version(msgspec.convert(value, into), what)
    except msgspec.MsgspecError as error:
        raise WireError(f"{what}: {error}") from error


def to_builtins(value: object) -> Any:
    return msgspec.to_builtins(value)


def _known_version(value: T, what: str) -> T:
    version = getattr(value, "v", VERSION)
    if version != VERSION:
        raise WireError(f"{what} has format version {version}; this afield reads {VERSION}: upgrade it")
    return value


def failed(rollout_id: str, attempt: int, failure: Failure) -> Outcome:
    """Build the outcome of a failed attempt."""
    return Outcome(rollout_id=rollout_id, attempt=attempt, failure=failure, stop_reason=str(failure.reason))


def json_problem(body: bytes, error: Exception) -> str:
    """Explain why a body is not valid JSON; points at lone surrogate escapes by byte offset."""
    unpaired = _PAIR.sub(lambda pair: b" " * len(pair[0]), body)
    if isinstance(error, msgspec.DecodeError) and (match := _LONE.search(unpaired)):
        lone = match["lone"].decode()
        return (
            f"byte {match.start('lone')} has {lone}, half of a surrogate pair and no character;"
            " send both halves, or \\ufffd in its place"
        )
    return str(error)
