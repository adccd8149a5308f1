"""Runtime interface: launch, watch and stop attempts.

Runtimes report that a process, container or job ended; outcomes arrive through a transport.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Protocol, Self, runtime_checkable

from msgspec import Struct

from afield.types import Attempt, Failure, Task


class Exit(Struct, frozen=True):
    """End of an attempt's process, container or job."""

    failure: Failure | None = None
    """Failure of the process, container or job; None if it ended by itself."""
    log: str = ""
    """Last part of its output."""
    lingers: bool = False
    """Whether resources remain, and cost something, until `stop`."""


Limit = Literal["cpu", "memory", "pids", "disk", "network", "time"]


class Capabilities(Struct, frozen=True, kw_only=True):
    """Features of a runtime."""

    isolation: Literal["none", "process", "sandbox", "container", "machine"]
    """Boundary between two attempts."""
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
    """Lifecycle phase of a session in its runtime."""

    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The session was not launched here, or the runtime has no record of it."""


class SessionStatus(Struct, frozen=True, kw_only=True):
    """State of a session in its runtime."""

    session_id: str
    """Session id of the attempt."""
    phase: Phase
    """Lifecycle phase."""
    where: str = ""
    """Process id, container, job or address, for an operator."""
    pid: int | None = None
    """Process on this machine that runs the session; None if there is none."""
    log: str = ""
    """Name of the log file of that process, in the runtime's log directory; empty if it has none."""
    since: float | None = None
    """Wall-clock time of the launch, in seconds; None if unknown."""


class Runtime(Protocol):
    """Runs agents. Leaving `async with runtime:` ends every session that it started.

    Sessions also end when this process is killed, unless `capabilities.outlives`: then the next process or
    `afield cleanup` ends them. Agent servers that the runtime did not start keep running.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def check(self) -> None:
        """Raise UsageError if the agent cannot be started here at all; called before the first launch."""
        ...

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Start an attempt; returns once the agent has accepted the payload.

        Launching an attempt twice is one launch. Raises a RolloutFailure if the agent refuses the payload or
        cannot be started, and RateLimited while the runtime accepts no more sessions.
        """
        ...

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Take over an attempt that an earlier process launched; returns whether it still runs.

        If it runs, `wait` returns its end. None if the runtime cannot tell.
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


@runtime_checkable
class TaskPreparer(Protocol):
    """Runtime that builds the environments of tasks, such as the Dockerfiles of Harbor tasks."""

    async def prepare(self, task: Task) -> None:
        """Build the environment of a task before an attempt at it is launched; repeating is harmless.

        The task is whole: unlike the payload, it has its `hidden` object. Raises RolloutFailure.
        """
        ...
