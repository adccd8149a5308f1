"""Runtime: where agents run. It launches attempts and says when one has ended; it carries no results."""

from __future__ import annotations

from typing import Any, Protocol, Self

from msgspec import Struct

from afield.types import Attempt, Failure


class Exit(Struct, frozen=True):
    """An attempt no longer runs. `failure` is set when the place it ran in broke; `lingers` when that
    place is still there and costs something until it is stopped.
    """

    failure: Failure | None = None
    log: str = ""
    lingers: bool = False


class Runtime(Protocol):
    """`async with runtime:` owns everything it starts; nothing outlives it, not even after SIGKILL.

    What it did not start (agents that others serve) it leaves running.
    """

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
