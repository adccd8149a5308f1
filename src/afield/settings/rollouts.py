"""Rollout settings: where agents run, timeouts, retries and launch rates.

`afield train` and veRL share these groups; RolloutClient takes the timeouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field

from afield.settings.fields import (
    PATH,
    RESUMABLE,
    Count,
    CountOrZero,
    FilePath,
    Metavar,
    NotNegative,
    Positive,
    SettingsGroup,
    Target,
    Url,
)
from afield.types import FailureKind

ACTIVE_S = 60.0


class AgentSettings(SettingsGroup, frozen=True, kw_only=True):
    """Where agents and verifiers run, and how outcomes come back."""

    title: ClassVar[str] = "Agents"

    agent: Target = ""
    """Agent to run: FILE.py:NAME, package.module:NAME, or a harness such as claude-code. Not needed if the
    runtime runs an image, or agents that are served elsewhere."""
    agent_args: Annotated[Mapping[str, Any], Metavar("KEY=VALUE")] = field(default_factory=dict)
    """Arguments of the agent, the same for all tasks; the agent reads them from `Context.args`."""
    runtime: Annotated[str, Metavar("NAME[=WHERE]"), RESUMABLE] = "process"
    """Runtime in which agents run: process, sandbox, container=IMAGE, agentcore=ARN, kubernetes=IMAGE, ray,
    inline, or served=URL,URL."""
    verifier: Target = ""
    """Function FILE.py:NAME that computes the rewards; without it, agents return them."""
    verifier_runtime: Literal["process", "sandbox", "ray"] = "sandbox"
    """Runtime in which verifiers run."""
    transport: Annotated[str, Metavar("SPEC")] = "files"
    """Store through which outcomes of agents reach the run: files, memory, or an address such as
    s3://BUCKET?sqs=URL."""
    python: Annotated[str, Metavar("PATH"), PATH, RESUMABLE] = ""
    """Python interpreter of the agent's own virtualenv, in which afield must be installed; if empty, agents
    use the interpreter that runs afield. For the runtimes process and sandbox."""
    workers: Annotated[Count, RESUMABLE] = 2
    """Agent processes that the runtime `process` starts; the rollouts share them."""
    process_per_rollout: bool = False
    """With the runtime `process`: start a new process for every rollout."""
    concurrency: Annotated[Count, RESUMABLE] = 64
    """Largest number of concurrent rollouts."""
    poll_interval_s: Positive = 5.0
    """Seconds between two polls of the outcome store."""
    unavailable_timeout_s: Annotated[Positive, RESUMABLE] = 600.0
    """Seconds that a gateway, store or runtime may be unavailable before the run ends."""


class Deadlines(SettingsGroup, frozen=True, kw_only=True):
    """Timeouts of one attempt, and of the rollout with all its attempts; None sets no limit."""

    title: ClassVar[str] = "Timeouts"

    queue_timeout_s: Positive | None = None
    """Seconds that a rollout may wait to be launched."""
    launch_timeout_s: Positive = 120.0
    """Seconds from launch until the agent must have accepted its payload."""
    first_call_timeout_s: Positive | None = None
    """Seconds from launch until the first model call."""
    idle_timeout_s: Positive | None = None
    """Largest number of seconds between two model calls."""
    attempt_timeout_s: Positive = 300.0
    """Seconds from launch to outcome of one attempt. Time that calls wait in a queue extends it, at most by
    as much again."""
    verifier_timeout_s: Positive | None = None
    """Seconds from the end of the agent's session to the verifier's reward. Also limits one call of a reward
    function."""
    upload_timeout_s: Positive = 5.0
    """Seconds from the end of the agent's process to the arrival of its outcome."""
    teardown_timeout_s: Positive = 30.0
    """Seconds that stopping an agent may take."""
    rollout_timeout_s: Positive | None = None
    """Seconds that a rollout may take, with all its attempts."""
    active_s: Positive | None = None
    """Seconds after a model call in which a timeout of the attempt counts as a policy failure, because the
    agent was still calling the model; later it is an infrastructure failure. Default: 60, at most half of
    attempt_timeout_s."""
    heartbeat_timeout_s: Positive = 15.0
    """Seconds without a heartbeat after which an agent counts as dead, unless its runtime reports it alive.
    Only for agents whose SDK sends heartbeats."""

    @property
    def active_window_s(self) -> float:
        """`active_s`, or its default."""
        return min(ACTIVE_S, self.attempt_timeout_s / 2) if self.active_s is None else self.active_s

    @property
    def shortest_s(self) -> float:
        """Shortest of all timeouts."""
        limits = (getattr(self, name) for name in self.__struct_fields__)
        return min(self.active_window_s, *(limit for limit in limits if limit is not None))


class RetrySettings(SettingsGroup, frozen=True, kw_only=True):
    """Attempts after a failure, by kind of failure."""

    title: ClassVar[str] = "Retries"

    retries_task: CountOrZero = 1
    """Further attempts after a task failure."""
    retries_verifier: CountOrZero = 1
    """Further attempts after a verifier failure."""
    retries_infrastructure: CountOrZero = 3
    """Further attempts after an infrastructure failure."""


def retries_of(settings: RetrySettings) -> dict[FailureKind, int]:
    """Further attempts by kind of failure."""
    return {
        FailureKind.TASK: settings.retries_task,
        FailureKind.VERIFIER: settings.retries_verifier,
        FailureKind.INFRASTRUCTURE: settings.retries_infrastructure,
    }


def deadlines_of(settings: Any) -> Deadlines:
    """The timeouts among the fields of a combined struct."""
    return Deadlines(**{name: getattr(settings, name) for name in Deadlines.__struct_fields__})


class LaunchSettings(SettingsGroup, frozen=True, kw_only=True):
    """Rate limits of launching and stopping agents."""

    title: ClassVar[str] = "Launching"

    launch_rate: Annotated[Positive | None, RESUMABLE] = None
    """Launches and stops per second; by default a rate is learned from throttling errors."""
    cold_start_s: Annotated[NotNegative, RESUMABLE] = 0.0
    """Seconds that an agent takes to start; with launch_rate it bounds the concurrent launches."""
    launching: Annotated[Count | None, RESUMABLE] = None
    """Largest number of concurrent launches; None sets no limit, apart from launch_rate."""
    limiter_file: FilePath = ""
    """File through which runs on this machine share one launch rate."""
    limiter_url: Url = ""
    """Redis server through which runs on several machines share one launch rate:
    redis://HOST:PORT/DB?name=NAME."""


class GatewayAddress(SettingsGroup, frozen=True, kw_only=True):
    """A running gateway, or the address of the one that is started."""

    title: ClassVar[str] = "Gateway"

    gateway: Annotated[Url, RESUMABLE] = ""
    """Address of a running gateway (set AFIELD_ADMIN_KEY to its admin key); if empty, the run starts a
    gateway."""
    gateway_host: Annotated[str, Metavar("HOST")] = "127.0.0.1"
    """Address that the started gateway listens on; 0.0.0.0 for agents on other machines."""
    gateway_port: CountOrZero = 0
    """Port of the started gateway; 0 selects a free port."""
    gateway_url: Url = ""
    """Address by which agents reach the started gateway, if it differs from the one it listens on."""


def check_gateway_address(settings: GatewayAddress) -> None:
    for name in ("gateway", "gateway_url"):
        value = getattr(settings, name)
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"{name} {value!r} must be an address, such as http://127.0.0.1:8400")


Delivery = Literal["auto", "store", "gateway"]
