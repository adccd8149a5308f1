"""veRL integration: `agent_loop_manager_class=afield.integrations.verl.Manager`.

`Manager` and `AgentLoop` import veRL and torch on first use; importing this package needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {"Manager": "manager", "AgentLoop": "agent_loop"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
