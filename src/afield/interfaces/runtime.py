"""Runtime: where agents run. It launches attempts and says when one has ended; it carries no results."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, Failure


class Exit(Struct, frozen=True):
    """An attempt no longer runs. `failure` is set when the place it ran in broke; `lingers` when that
    place is still there and costs something until it is stopped.
    """

    failure: Failure | None = None
    log: str = ""
    lingers: bool = False


Limit = Literal["cpu", "memory", "pids", "disk", "network", "time"]


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a runtime can do, so that nobody has to ask which one it is.

    `limits` are enforced on each attempt. `lists`: `list` tells every session of this run, whoever launched
    it. `reaches`: `status`, `logs` and `stop` work on sessions that another process launched. `outlives`:
    what it launched goes on when this process is killed, until somebody reaps it. `tells_end`: `wait` returns
    by itself when an agent has ended; else only outcomes and signs of life tell. `lingers`: a place stays,
    and costs something, until it is stopped.
    """

    isolation: Literal["none", "process", "sandbox", "container", "machine"]
    limits: frozenset[Limit] = frozenset()
    exec: bool = False
    lists: bool = False
    reaches: bool = False
    outlives: bool = False
    tells_end: bool = True
    lingers: bool = False


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"  # never heard of, forgotten, or the place cannot tell


class SessionStatus(Struct, frozen=True, kw_only=True):
    """One session as the place it runs in sees it. `where` is what an operator would look for: a process id,
    a container, a job, an address. `since` is wall-clock time.
    """

    session_id: str
    phase: Phase
    where: str = ""
    since: float | None = None


class Runtime(Protocol):
    """`async with runtime:` owns everything it starts; nothing of it is left when the runtime is closed.

    Where `capabilities.outlives`, a killed process leaves its sessions to the next one, or to a reaper;
    elsewhere nothing outlives it, not even after SIGKILL. What it did not start (agents that others serve)
    it leaves running.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def check(self) -> None:
        """Before the first launch: raises UsageError if the agent cannot be started here at all."""
        ...

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Start an attempt; returns once the agent has taken the payload.

        Launching an attempt twice is one launch. A payload the agent refuses, or a place that cannot
        be started, raises the fitting RolloutFailure at once; a place that takes no more for now raises
        Throttled.
        """
        ...

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Whether an attempt that an earlier process launched runs here; if so, `wait` tells its end.

        None where the runtime cannot know.
        """
        ...

    async def wait(self, attempt: Attempt) -> Exit:
        """Until the attempt no longer runs: it finished, or what it ran in died."""
        ...

    async def stop(self, attempt: Attempt) -> None:
        """End an attempt wherever it is. Repeating, or stopping what never ran, is harmless."""
        ...

    async def status(self, attempt: Attempt) -> SessionStatus:
        """Where an attempt is. Asking changes nothing; one that is not known here is UNKNOWN."""
        ...

    async def list(self) -> list[SessionStatus]:
        """The sessions of this run that are still there; where `capabilities.lists` is false, our own."""
        ...

    async def logs(self, attempt: Attempt) -> str:
        """What the place printed while the attempt ran, or its last part; empty where nothing is kept."""
        ...
