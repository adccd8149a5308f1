"""Runtime interface: launches attempts and reports their end; outcomes come by a transport."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, Failure


class Exit(Struct, frozen=True):
    """The end of an attempt's process, container or job."""

    failure: Failure | None = None
    """Set if the process, container or job broke; None if it ended by itself."""
    log: str = ""
    """The last part of its output."""
    lingers: bool = False
    """Whether resources remain, and cost something, until `stop`."""


Limit = Literal["cpu", "memory", "pids", "disk", "network", "time"]


class Capabilities(Struct, frozen=True, kw_only=True):
    """Features of a runtime."""

    isolation: Literal["none", "process", "sandbox", "container", "machine"]
    """What separates two attempts."""
    limits: frozenset[Limit] = frozenset()
    """Resource limits that are enforced on each attempt."""
    exec: bool = False
    """Whether commands can be run in a session."""
    lists: bool = False
    """Whether `list` includes sessions of this run that another process launched."""
    reaches: bool = False
    """Whether `status`, `logs` and `stop` work on sessions that another process launched."""
    outlives: bool = False
    """Whether sessions continue when this process is killed, until `afield cleanup`."""
    tells_end: bool = True
    """Whether `wait` returns when an agent ends; else only outcomes and heartbeats show it."""
    lingers: bool = False
    """Whether resources remain, and cost something, until `stop`."""


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """Not launched here, already forgotten, or the runtime cannot say."""


class SessionStatus(Struct, frozen=True, kw_only=True):
    """State of a session in its runtime."""

    session_id: str
    phase: Phase
    where: str = ""
    """Process id, container, job or address, for an operator."""
    since: float | None = None
    """Wall-clock time of the launch, in seconds; None if unknown."""


class Runtime(Protocol):
    """Runs agents. Leaving `async with runtime:` ends every session that it started.

    After SIGKILL no session survives either, unless `capabilities.outlives`; then the next process or
    `afield cleanup` ends them. Agents that others serve are left running.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def check(self) -> None:
        """Raise UsageError if the agent cannot be started here at all; called before the first launch."""
        ...

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Start an attempt; returns once the agent has taken the payload.

        Launching an attempt twice is one launch. Raises a RolloutFailure if the agent refuses the payload or
        cannot be started, and RateLimited while the runtime accepts no more sessions.
        """
        ...

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Whether an attempt that an earlier process launched runs here; if so, `wait` returns its end.

        None where the runtime cannot know.
        """
        ...

    async def wait(self, attempt: Attempt) -> Exit:
        """Wait until the attempt no longer runs, because it finished or died."""
        ...

    async def stop(self, attempt: Attempt) -> None:
        """End an attempt. Repeating, or stopping an attempt that never ran, is harmless."""
        ...

    async def status(self, attempt: Attempt) -> SessionStatus:
        """State of an attempt; UNKNOWN if it was not launched here."""
        ...

    async def list(self) -> list[SessionStatus]:
        """Sessions of this run that still exist; without `capabilities.lists`, those of this process."""
        ...

    async def logs(self, attempt: Attempt) -> str:
        """Output of the attempt, or its last part; empty if none is kept."""
        ...
