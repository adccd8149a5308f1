"""Gateway interface for trainers and collectors: sessions, their records, and published weights.

Agents use the gateway through the dialects in `afield.gateway.dialects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from afield.settings.sessions import SessionPolicies
from afield.types import Budget, Exclusion, Failure, Image, Policy, Sampling, Split, Trajectory, Turn
from afield.wire import Submission


class SessionSpec(SessionPolicies, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a new session; the body of `POST /sessions`."""

    id: str | None = None
    """Session id; None lets the gateway choose one."""
    rollout_id: str | None = None
    attempt: int | None = None
    """Number of the attempt, from 1."""
    group_id: str | None = None
    exp_id: str | None = None
    """Experiment id."""
    input_id: str | None = None
    """Task id."""
    draw: str | None = None
    """Name of the random numbers: sessions with the same name sample the same tokens, engine permitting."""
    split: Split = Split.TRAIN
    scope: tuple[Literal["infer", "reward", "read"], ...] = ("infer", "reward")
    """What the agent's key may do."""
    reward_from: Literal["agent", "verifier"] = "agent"
    """Whose key may give the reward. With "verifier" the agent's key may only call the model and submit."""
    verdicts: int = 1
    """Number of verdicts that may fail before the failure stands."""
    sampling: Sampling = Sampling()
    budget: Budget = Budget()
    ttl_s: float | None = None
    """Seconds until the gateway aborts the session; None never does."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Free JSON, returned as it is."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"ttl_s {self.ttl_s} must be positive")
        if self.verdicts < 1:
            raise ValueError(f"verdicts {self.verdicts} must be at least 1")


class SessionCredentials(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Address and keys of a session."""

    id: str
    api_key: str
    """The agent's key."""
    base_url: str
    """Base URL of the session."""
    openai_base_url: str
    """Base URL for OpenAI clients."""
    verifier_key: str | None = None
    """The verifier's key, with `reward_from` "verifier"."""


class SessionState(Struct, frozen=True, kw_only=True):
    """State of a session, as `GET /sessions/ID` returns it. Durations are by the gateway's clock."""

    id: str
    phase: str
    """open, completed, finalized or aborted."""
    rollout_id: str | None
    attempt: int | None
    group_id: str | None
    calls: int
    """Number of model calls, with those in flight."""
    turns: int
    """Number of recorded turns."""
    branches: int
    """Number of turns that no other turn continues."""
    tokens: dict[str, int]
    """Numbers of tokens: `sampled` and `prompt`."""
    excluded: dict[str, int] = {}
    """Sampled tokens that are currently excluded from the loss, by reason."""
    dangling: int
    """Calls that were in flight when an earlier gateway process died."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version that sampled; None before the first token."""
    rewards: list[dict[str, Any]]
    """Rewards received so far, in order."""
    graded: bool = False
    """Whether the agent, or its verifier, gave the reward."""
    failed_verdicts: tuple[Failure, ...] = ()
    """Failures of verifiers before the verdict that counts."""
    created: float
    """Wall-clock time of creation, in seconds."""
    last_activity: float
    """Wall-clock time of the last request, in seconds."""
    in_flight: int = 0
    """Number of calls that run now."""
    idle_s: float = 0.0
    """Seconds since the last model call ended; 0 while one runs."""
    unseen_s: float | None = None
    """Seconds since the last heartbeat of the agent's SDK; None before the first one."""
    waited_s: float = 0.0
    """Seconds that calls waited for an engine, in sum."""
    unsupported: str = ""
    """Why the model cannot serve this agent's requests, whatever the task; empty if it can."""


class SessionRecord(Struct, frozen=True, kw_only=True):
    """Everything that a session sampled: training sequences, exclusions, turns and images."""

    trajectories: tuple[Trajectory, ...]
    excluded: tuple[Exclusion, ...]
    turns: tuple[Turn, ...] = ()
    images: tuple[Image, ...] = ()


class Gateway(Protocol):
    async def open(self, spec: SessionSpec) -> SessionCredentials:
        """Open a session. Repeating returns the same credentials; another spec raises Conflict."""
        ...

    async def state(self, session_id: str) -> SessionState: ...

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """States of many sessions; unknown ones are left out."""
        ...

    async def version(self) -> int:
        """The policy version that engines sample with now."""
        ...

    async def abort(self, session_id: str, reason: str) -> None:
        """End a session and its calls in flight; their tokens are kept. Repeating is harmless."""
        ...

    async def finalize(self, session_id: str) -> SessionRecord:
        """Close a session and return its record. Repeating returns the same record."""
        ...

    async def submission(self, session_id: str) -> Submission | None:
        """The agent's submission for its verifier; None before it submits."""
        ...

    async def publish(self, policy: Policy, path: str) -> None:
        """Load the weights in `path` into all engines as this version. A lower version raises Conflict."""
        ...
