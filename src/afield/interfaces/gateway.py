"""Gateway interface for trainers and collectors: sessions, their records, and published weights.

Agents use the gateway through the dialects in `afield.gateway.dialects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self

from msgspec import Struct, field

from afield.settings.sessions import SessionPolicies
from afield.types import (
    Budget,
    Exclusion,
    Failure,
    Image,
    Policy,
    RefusedCalls,
    Sampling,
    Split,
    Trajectory,
    Turn,
)
from afield.wire import Submission


class SessionSpec(SessionPolicies, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a new session; the body of `POST /sessions`."""

    id: str | None = None
    """Session id; None lets the gateway choose one."""
    rollout_id: str | None = None
    """Rollout id; None outside a run."""
    attempt: int | None = None
    """Number of the attempt, from 1; None outside a run."""
    group_id: str | None = None
    """Group id; None outside a run."""
    exp_id: str | None = None
    """Experiment id; None outside a run."""
    input_id: str | None = None
    """Task id; None outside a run."""
    draw: str | None = None
    """Key of the random numbers: sessions with the same key sample the same tokens, where the engine
    supports it. None uses the session id.
    """
    split: Split = Split.TRAIN
    """Training or validation."""
    scope: tuple[Literal["infer", "reward", "read"], ...] = ("infer", "reward")
    """Operations that the agent's key permits."""
    reward_from: Literal["agent", "verifier", "caller"] = "agent"
    """Source of the reward. With "verifier" the agent's key may only call the model and submit; with "caller"
    an outcome needs no reward, because the collector gets it after the session."""
    verdicts: int = 1
    """Number of failed verdicts after which the failure counts."""
    sampling: Sampling = Sampling()
    """Sampling parameters of every call."""
    budget: Budget = Budget()
    """Limits of the session."""
    ttl_s: float | None = None
    """Seconds after which the gateway aborts the session; None is no limit."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON of the caller, stored and returned unchanged."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"ttl_s {self.ttl_s} must be positive")
        if self.verdicts < 1:
            raise ValueError(f"verdicts {self.verdicts} must be at least 1")


class SessionCredentials(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Address and keys of a session."""

    id: str
    """Session id."""
    api_key: str
    """The agent's key."""
    base_url: str
    """Base URL of the session."""
    openai_base_url: str
    """Base URL for OpenAI clients."""
    verifier_key: str | None = None
    """The verifier's key; None unless `reward_from` is "verifier"."""


class SessionState(Struct, frozen=True, kw_only=True):
    """State of a session; the response of `GET /sessions/ID`. Times are those of the gateway's clock."""

    id: str
    """Session id."""
    phase: str
    """Phase: open, completed, finalized or aborted."""
    rollout_id: str | None
    """Rollout id; None outside a run."""
    attempt: int | None
    """Number of the attempt, from 1; None outside a run."""
    group_id: str | None
    """Group id; None outside a run."""
    calls: int
    """Number of model calls, including those in flight."""
    turns: int
    """Number of recorded turns."""
    branches: int
    """Number of turns without children."""
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
    """Whether the reward has been given."""
    failed_verdicts: tuple[Failure, ...] = ()
    """Verifier failures before the verdict that counts."""
    created: float
    """Wall-clock time of creation, in seconds."""
    last_activity: float
    """Wall-clock time of the last request, in seconds."""
    in_flight: int = 0
    """Number of calls in flight."""
    idle_s: float = 0.0
    """Seconds since the last model call ended; 0 while one runs."""
    unseen_s: float | None = None
    """Seconds since the last heartbeat of the agent's SDK; None before the first one."""
    waited_s: float = 0.0
    """Seconds that calls waited for an engine, summed over calls."""
    unsupported: str = ""
    """Why the model cannot serve this agent's requests, independent of the task; empty if it can."""
    refused: tuple[RefusedCalls, ...] = ()
    """Model calls that were refused, by class of error."""


class SessionRecord(Struct, frozen=True, kw_only=True):
    """Record of a finalized session."""

    trajectories: tuple[Trajectory, ...]
    """Training sequences."""
    excluded: tuple[Exclusion, ...]
    """Sampled turns that are not trained, with reasons."""
    turns: tuple[Turn, ...] = ()
    """All model calls, in order."""
    images: tuple[Image, ...] = ()
    """Images of the trajectories, each once."""
    refused: tuple[RefusedCalls, ...] = ()
    """Model calls that the gateway refused, by class of error."""


class Gateway(Protocol):
    """Session management and weight publication."""

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        """Open a session. Repeating returns the same credentials; another spec raises Conflict."""
        ...

    async def state(self, session_id: str) -> SessionState: ...

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """Return the states of many sessions by id, without unknown ones."""
        ...

    async def version(self) -> int:
        """Return the policy version of the loaded weights."""
        ...

    async def abort(self, session_id: str, reason: str) -> None:
        """End a session and its calls in flight; their tokens are kept. Repeating is harmless."""
        ...

    async def finalize(self, session_id: str) -> SessionRecord:
        """Close a session and return its record. Repeating returns the same record."""
        ...

    async def submission(self, session_id: str) -> Submission | None:
        """Return the agent's submission for its verifier; None before it submits."""
        ...

    async def publish(self, policy: Policy, path: str) -> None:
        """Load the weights in `path` into all engines as this version. A lower version raises Conflict."""
        ...


class GatewayEndpoint(Struct, frozen=True, kw_only=True):
    """A started gateway of a pool."""

    url: str
    """URL by which the pool reaches it."""
    admin_key: str
    """Its admin key."""
    host: str
    """Host name of its machine."""
    pid: int
    """Its process id on that machine."""
    started: str
    """Start time of the process, see `process_tree.start_time`."""
    keeps_sessions: bool = True
    """Whether it has the store, and so the sessions, of the gateway that it replaces."""


class GatewayLauncher(Protocol):
    """Starts, watches and stops the gateways of a pool, which are numbered from 0."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None:
        """Stop all gateways."""
        ...

    async def start(self, number: int) -> GatewayEndpoint:
        """Start a gateway and wait until it serves; an earlier one of this number is killed first.

        Raises UsageError if its settings are wrong, otherwise Unavailable.
        """
        ...

    async def ended(self, number: int) -> str:
        """Wait until a started gateway has ended; returns why."""
        ...
