"""Keyword arguments of `RolloutClient.open`, with types and docstrings."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from msgspec import NODEFAULT, structs

from afield.errors import UsageError
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.ratelimit import RateLimits
from afield.runs.exclusions import AbandonedAnswers, SideCalls
from afield.settings.rollouts import Deadlines
from afield.settings.sessions import (
    ClientSampling,
    ConstrainedTurns,
    Escape,
    Render,
    Thinking,
    Unsupported,
)
from afield.types import Budget, FailureKind, RewardSource, Sampling

F = TypeVar("F", bound=Callable[..., Any])
Agent = str | Callable[..., Any]
DEFAULTS: dict[str, Any] = {
    "model_id": "policy",
    "python": "",
    "workers": 2,
    "process_per_rollout": False,
    "verifier": "",
    "verifier_runtime": "sandbox",
}
"""Defaults of the arguments that are no fields of RolloutConfig or Deadlines; the others' are None."""


class OpenArguments(TypedDict, total=False):
    """Keyword arguments of `RolloutClient.open`: `gateway` or `endpoint`, usually `agent`, and settings."""

    gateway: str | None
    """Address of the gateway, such as http://127.0.0.1:8400; None with `endpoint`."""
    endpoint: str | None
    """OpenAI-compatible endpoint that agents call instead of a gateway, without capture; None with
    `gateway`."""
    endpoint_key: str | None
    """API key that agents send to the endpoint; None is AFIELD_ENDPOINT_KEY."""
    agent: Agent | None
    """Agent: a function, FILE.py:NAME, package.module:NAME, or a harness; None for agents in an image and for
    served agents."""
    admin_key: str | None
    """Admin key of the gateway; None is AFIELD_ADMIN_KEY."""
    runtime: str | None
    """Runtime of the agents, such as sandbox or container=IMAGE; None is inline for a function, else
    process."""
    transport: str | None
    """Transport of outcomes, such as s3://BUCKET; None is memory for the runtime inline, else files."""
    exp_id: str | None
    """Name of the experiment, and prefix of its rollout ids; None is a new name."""
    directory: str | Path | None
    """Run directory; None is EXP_ID below AFIELD_RUNS."""
    model_id: str
    """Model name that agents send with each call; by default policy. An endpoint needs the name of its
    model."""
    python: str | Path
    """Python interpreter of the agent's own virtualenv, in which afield is installed; by default this one.
    For the runtimes process and sandbox."""
    workers: int
    """Agent processes of the runtime process; by default 2."""
    process_per_rollout: bool
    """Start a new process for every rollout, with the runtime process; by default off."""
    verifier: str
    """Verifier that gives the rewards instead of the agent, FILE.py:NAME; by default none."""
    verifier_runtime: str
    """Runtime of the verifier; by default sandbox."""
    rate_limits: RateLimits | None
    """Launches per second and launches in flight; None is no limit, or the quotas of the runtime."""
    limiter_file: str | Path | None
    """File through which programs share the rate limits; None does not share them."""
    limiter_url: str | None
    """Redis address through which programs share the rate limits; None does not share them."""
    observer: RolloutObserver | None
    """Object that is notified of finished attempts and rollouts; None notifies nobody."""
    options: Mapping[str, Any] | None
    """Settings of the runtime, such as {"limits": {"memory_mb": 512}} for sandbox; None is its defaults."""

    rollouts: int
    """Rollouts per group; by default 8."""
    val_rollouts: int
    """Rollouts per task in a validation; by default 1."""
    quorum: int
    """Rewards that a group needs to be trained; by default 2."""
    extra: int
    """Rollouts started beyond `rollouts`, of which the slowest are cancelled; by default 0."""
    straggler_s: float | None
    """Seconds after `straggler_after` rewards until the rest of a group is cancelled; None never cancels."""
    straggler_after: int | None
    """Rewards that start the straggler timer; None is all rollouts but one."""
    baseline: bool
    """Whether each group has one more, greedy rollout to compare with (ReMax); by default not."""
    concurrency: int
    """Rollouts that run at the same time; by default 64."""
    retries: Mapping[FailureKind, int]
    """Further attempts per failure kind; by default task 1, verifier 1, infrastructure 3."""
    sampling: Sampling
    """Sampling parameters of rollouts that have none of their own."""
    budget: Budget
    """Limits of each session; by default none."""
    agent_args: Mapping[str, Any]
    """Arguments of the agent, the same for all tasks; its `Context.args`."""
    deliver: Literal["store", "gateway"]
    """Where agents deliver outcomes: to the store, or to the gateway; by default as the runtime needs it."""
    separate_verifier: bool
    """Whether a verifier in its own runtime grades submissions; follows from `verifier`."""
    reward_from: RewardSource
    """Source of the rewards: the `agent` (the default), or the `caller` with `RolloutClient.reward`."""
    no_turns: Literal["refuse", "flag", "accept"]
    """Rewards of sessions without a recorded model call: `refuse`, `flag` (the default) or `accept`."""
    rewards: tuple[str, ...]
    """Names of the rewards that an outcome must have, and no others; empty accepts any."""
    max_reward: float
    """Largest absolute reward; by default 1e6."""
    poll_interval_s: float
    """Seconds between two polls of the outcome store; by default 5."""
    watch_interval_s: float
    """Seconds between two reads of the sessions' state at the gateway; by default 1."""
    unavailable_timeout_s: float
    """Seconds for which a gateway or store that does not answer is retried; by default 600."""
    trace_seed: str
    """Name of the run in the ids of its traces; empty without traces."""
    call_timeout_s: float
    """Seconds until one call to the gateway or the store is abandoned and repeated; by default 120."""

    client_sampling: tuple[ClientSampling, ...]
    """Sampling parameters that requests may set for themselves; by default none."""
    thinking: Thinking
    """Earlier reasoning in later prompts; by default preserve."""
    escape: Escape
    """Control tokens in the text of messages; by default escape."""
    render: Render
    """Conversations that the chat template refuses; by default fold."""
    side_calls: SideCalls
    """Side calls that are kept out of the loss; by default exclude."""
    abandoned_answers: AbandonedAnswers
    """Unused answers to a repeated request; by default exclude."""
    unsupported: Unsupported
    """Requests with an unsupported parameter; by default refuse."""
    constrained_turns: ConstrainedTurns
    """Turns sampled under a constraint; by default train."""

    queue_timeout_s: float | None
    """Seconds that a rollout may wait to be launched; None is no limit."""
    launch_timeout_s: float
    """Seconds from launch until the agent must have accepted its payload; by default 120."""
    first_call_timeout_s: float | None
    """Seconds from launch until the first model call; None is no limit."""
    idle_timeout_s: float | None
    """Seconds between two model calls; None is no limit."""
    attempt_timeout_s: float
    """Seconds from launch to outcome of one attempt; by default 300."""
    verifier_timeout_s: float | None
    """Seconds from the end of the session to the outcome; None is no limit."""
    upload_timeout_s: float
    """Seconds from the end of the agent to its outcome; by default 5."""
    teardown_timeout_s: float
    """Seconds to stop an agent; by default 30."""
    rollout_timeout_s: float | None
    """Seconds for a rollout with all its attempts; None is no limit."""
    active_s: float | None
    """Seconds since the last model call within which a timeout is a policy failure; None is 60, at most half
    of `attempt_timeout_s`."""
    heartbeat_timeout_s: float
    """Seconds without a heartbeat after which an agent counts as dead; by default 15."""


NAMES = tuple(OpenArguments.__annotations__)


def check_names(names: Iterable[str]) -> None:
    """Raise UsageError for a name that is no argument of `RolloutClient.open`."""
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
            raise UsageError(f"unknown value {name!r}; {hint}")


def with_signature(function: F) -> F:
    """Decorator for a class method that takes OpenArguments: `help` and `inspect.signature` list them."""
    defaults = dict(DEFAULTS)
    for struct in (RolloutConfig, Deadlines):
        for item in structs.fields(struct):
            if item.default_factory is not NODEFAULT:
                defaults[item.name] = item.default_factory()
            elif item.default is not NODEFAULT:
                defaults[item.name] = item.default
    first, *_ = inspect.signature(function).parameters.values()
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=kind,
        )
        for name, kind in get_type_hints(OpenArguments).items()
    ]
    setattr(function, "__signature__", inspect.Signature([first, *keywords]))  # noqa: B010 - not declared
    return function
