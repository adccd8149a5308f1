"""Gateway, as trainers and collectors see it: sessions, what they sampled, and the policy's version.

How agents see it (OpenAI, Anthropic and so on) is the gateway's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from afield.options import SessionPolicies
from afield.types import Budget, Exclusion, Failure, Image, Policy, Sampling, Split, Trajectory, Turn
from afield.wire import Submission


class SessionSpec(SessionPolicies, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a session is opened with; the body of `POST /sessions`.

    With `reward_from` "verifier" the agent's key infers and says when it is done; only the verifier's
    key, given out once with the ticket, speaks about rewards. Of so many `verdicts` that fail, all but the
    last are only noted, and another may follow. Sessions of the same `draw` are sampled with the same random
    numbers, call by call, where the engine can do that.
    """

    id: str | None = None
    rollout_id: str | None = None
    attempt: int | None = None
    group_id: str | None = None
    exp_id: str | None = None
    input_id: str | None = None
    draw: str | None = None
    split: Split = Split.TRAIN
    scope: tuple[Literal["infer", "reward", "read"], ...] = ("infer", "reward")
    reward_from: Literal["agent", "verifier"] = "agent"
    verdicts: int = 1
    sampling: Sampling = Sampling()
    budget: Budget = Budget()
    ttl_s: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"ttl_s {self.ttl_s} must be positive")
        if self.verdicts < 1:
            raise ValueError(f"verdicts {self.verdicts} must be at least 1")


class SessionCredentials(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent needs to use its session; and, apart from it, what its verifier needs."""

    id: str
    api_key: str
    base_url: str
    openai_base_url: str
    verifier_key: str | None = None


class SessionState(Struct, frozen=True, kw_only=True):
    """`idle_s` is how long no model call has run (0 while one does), `unseen_s` how long its agent's SDK has
    sent no sign of life (None if it never did), both by the gateway's clock. `dangling` calls are those
    a gateway before this one died under. `graded`: its verifier, or whoever gives the reward, has spoken;
    `failed_verdicts` came before that and do not count. `waited_s` is how long its calls have stood in line,
    as far as the gateway knows.
    """

    id: str
    phase: str
    rollout_id: str | None
    attempt: int | None
    group_id: str | None
    calls: int
    turns: int
    branches: int
    tokens: dict[str, int]
    excluded: dict[str, int] = {}
    """Sampled tokens that are kept out of the loss as things stand, by reason."""
    dangling: int
    versions: tuple[int, int] | None
    rewards: list[dict[str, Any]]
    graded: bool = False
    failed_verdicts: tuple[Failure, ...] = ()
    created: float
    last_activity: float
    in_flight: int = 0
    idle_s: float = 0.0
    unseen_s: float | None = None
    waited_s: float = 0.0
    unsupported: str = ""
    """Why the model cannot serve what the agent asks, whatever the task; empty where it can."""


class SessionRecord(Struct, frozen=True, kw_only=True):
    """All that a session sampled, as it trains, its turns for reading, and the images that it trains with."""

    trajectories: tuple[Trajectory, ...]
    excluded: tuple[Exclusion, ...]
    turns: tuple[Turn, ...] = ()
    images: tuple[Image, ...] = ()


class Gateway(Protocol):
    async def open(self, spec: SessionSpec) -> SessionCredentials:
        """The same id and spec again give the same ticket; another spec is a Conflict."""
        ...

    async def state(self, session_id: str) -> SessionState: ...

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        """Many at once; a session that is not known is left out."""
        ...

    async def version(self) -> int:
        """The policy version that samples now."""
        ...

    async def abort(self, session_id: str, reason: str) -> None:
        """Take no more calls and end those in flight; their partials are kept. Repeating is harmless."""
        ...

    async def finalize(self, session_id: str) -> SessionRecord:
        """Freeze the session and give what it sampled. Repeating gives the same record."""
        ...

    async def submission(self, session_id: str) -> Submission | None:
        """What the agent of a judged session has handed in; None while there is nothing."""
        ...

    async def publish(self, policy: Policy, path: str) -> None:
        """Every later token is sampled by this version of the policy. A lower version is a Conflict."""
        ...
