"""veRL drives, afield collects: `agent_loop_manager_class=afield.integrations.verl.Manager`.

Importing this needs neither veRL nor torch; the names below bring them when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

WHERE = {"Manager": "manager", "AgentLoop": "agent_loop"}


def __getattr__(name: str) -> Any:
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{WHERE[name]}"), name)
