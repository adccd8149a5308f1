"""Types to bytes and back; the only place that knows the formats.

Three documents cross process boundaries: the payload an agent is invoked with (a task's row plus
`_rollout`), the outcome it leaves behind, and the commit (or fence) that makes an attempt count.
Each stored document carries `"v": 1`; a reader refuses a version it does not know. Decoding names
the field that is wrong. Keys of stored objects are made here and nowhere else.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from afield.errors import WireError
from afield.types import HIDDEN_FIELD, Attempt, Failure, Outcome, Rollout, Sampling, Task, check_id

VERSION = 1
MAX_PART = 200
ROLLOUT_FIELD = "_rollout"
SUBMISSION_FIELD = "submission"
COMMITS, LATE, ADOPTED, FENCED = "commits", "late", "adopted", "fenced"
HINT_SCHEMES = ("nats://", "tls://", "redis://", "rediss://")
OWN_PARTS = frozenset({COMMITS, LATE, ADOPTED, FENCED})
T = TypeVar("T")
# Half of a pair of \\u escapes, after an even number of backslashes.
_LONE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?P<lone>\\u[dD](?:[89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))"
)
_PAIR = re.compile(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class Invocation(Struct, frozen=True, kw_only=True):
    """The `_rollout` part of a payload: who the attempt is, where the model is, where the outcome goes.

    `base_url` is the session's base; OpenAI clients use `openai_base_url`. Unknown fields are kept
    out of the way, so that a newer collector can talk to an older agent image. `seed` is for whatever the
    agent draws at random: what broke and is tried again has the same. Who is `judged` hands in its work
    and gives no reward; the `verifier` gives it afterwards, from a place of its own.
    """

    exp_id: str
    input_id: str
    rollout_id: str
    attempt: int
    group_id: str
    session_id: str
    base_url: str
    api_key: str
    model_id: str
    sampling: Sampling | None = None
    seed: int | None = None
    outcome_url: str | None = None
    s3_bucket: str | None = None
    sqs_url: str | None = None
    hint_url: str | None = None
    role: Literal["agent", "judged", "verifier"] = "agent"

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
    """A task's id is free text; as part of a key it must not climb, collide or outgrow a file name."""
    part = quote(input_id, safe="")
    if part in {".", "..", *OWN_PARTS} or len(part) > MAX_PART:
        part = f"task-{hashlib.sha256(input_id.encode()).hexdigest()}"
    return f"{exp_id}/{part}/{session_id}.json"


def commit_key(exp_id: str, session_id: str) -> str:
    return f"{exp_id}/{COMMITS}/{session_id}.json"


def late_key(exp_id: str, session_id: str) -> str:
    """Where an outcome is kept that was refused."""
    return f"{exp_id}/{LATE}/{session_id}.json"


def fenced_key(exp_id: str, session_id: str) -> str:
    """Says that the attempt's commit is a fence, to whoever lists keys."""
    return f"{exp_id}/{FENCED}/{session_id}.json"


def adopted_key(exp_id: str, session_id: str) -> str:
    """Where the collector puts what it made of a result that came in another format."""
    return f"{exp_id}/{ADOPTED}/{session_id}.json"


def runtime_session_id(session_id: str) -> str:
    """The name of a session on AgentCore, which asks for 33 characters or more."""
    return f"afield-{hashlib.sha256(session_id.encode()).hexdigest()}"


def is_runtime_session_id(name: str) -> bool:
    digest = name.removeprefix("afield-")
    return digest != name and len(digest) == 64 and not digest.strip("0123456789abcdef")


def read_key(key: str) -> tuple[str, str, str] | None:
    """(exp_id, the part between, session_id) of an object's key; None for a key of another make."""
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
    """The task's row, deep-copied for this attempt, plus `_rollout`; and what a verifier has to grade.

    The `hidden` object of a row goes to verifiers alone.
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
    """Check a payload before any work starts."""
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
    """The data object of an attempt: the outcome, who it belongs to, and what the agent was given."""

    v: int = VERSION
    exp_id: str
    input_id: str
    group_id: str
    session_id: str
    outcome: Outcome
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0

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
    """What a judged agent hands in: all that its verifier gets to see of it."""

    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    stop_reason: str = ""
    artifacts: dict[str, Any] = msgspec.field(default_factory=dict)


class CommitRecord(Struct, frozen=True, kw_only=True):
    """What decides an attempt: committed with its data, or fenced. The first writer wins."""

    v: int = VERSION
    session_id: str
    data_key: str = ""
    fenced: str = ""

    def __post_init__(self) -> None:
        if bool(self.data_key) == bool(self.fenced):
            raise ValueError("a commit names its data object or the reason it is fenced, never both")


class Hint(Struct, frozen=True, kw_only=True):
    """A queue message: something may have been committed. Never the truth."""

    exp_id: str
    session_id: str


def invocation_for(rollout: Rollout, attempt: Attempt, **where: Any) -> Invocation:
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
    """JSON. A value JSON cannot hold, NaN and infinity among them, is an error rather than a null."""
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


def decode(data: bytes | str, into: type[T], what: str) -> T:
    try:
        return _known_version(msgspec.json.decode(data, type=into), what)
    except msgspec.MsgspecError as error:
        raise WireError(f"{what}: {error}") from error


def convert(value: object, into: type[T], what: str) -> T:
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
    return Outcome(rollout_id=rollout_id, attempt=attempt, failure=failure, stop_reason=str(failure.reason))


def json_problem(body: bytes, error: Exception) -> str:
    """What is wrong with a body that is not JSON, in words that help its sender."""
    unpaired = _PAIR.sub(lambda pair: b" " * len(pair[0]), body)
    if isinstance(error, msgspec.DecodeError) and (match := _LONE.search(unpaired)):
        lone = match["lone"].decode()
        return (
            f"byte {match.start('lone')} has {lone}, half of a surrogate pair and no character;"
            " send both halves, or \\ufffd in its place"
        )
    return str(error)
