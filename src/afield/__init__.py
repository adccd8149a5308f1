"""Rollouts from any agent, anywhere.

1. For code inside agents: `agent`, `App`, `Context`, `Reward`, `Task`, `Outcome` and the failures that
   an agent may raise.
2. For programs that collect rollouts: `RolloutClient`.
3. For commands in isolation: `sandbox`.

Each name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afield.client import RolloutClient, RolloutFuture
    from afield.errors import (
        InfrastructureFailure,
        PolicyFailure,
        RolloutFailure,
        TaskFailure,
        VerifierFailure,
    )
    from afield.factory.sandboxes import sandbox
    from afield.sdk.agent import Context, agent
    from afield.sdk.app import App
    from afield.sdk.results import Reward
    from afield.types import Outcome, Task

__version__ = "0.1.0"

_HOMES = {
    "App": "afield.sdk.app",
    "Context": "afield.sdk.agent",
    "InfrastructureFailure": "afield.errors",
    "Outcome": "afield.types",
    "PolicyFailure": "afield.errors",
    "Reward": "afield.sdk.results",
    "RolloutClient": "afield.client",
    "RolloutFailure": "afield.errors",
    "RolloutFuture": "afield.client",
    "Task": "afield.types",
    "TaskFailure": "afield.errors",
    "VerifierFailure": "afield.errors",
    "agent": "afield.sdk.agent",
    "sandbox": "afield.factory.sandboxes",
}

__all__ = [
    "App",
    "Context",
    "InfrastructureFailure",
    "Outcome",
    "PolicyFailure",
    "Reward",
    "RolloutClient",
    "RolloutFailure",
    "RolloutFuture",
    "Task",
    "TaskFailure",
    "VerifierFailure",
    "agent",
    "sandbox",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"afield has no {name!r}; it has: {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
