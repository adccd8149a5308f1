"""Ready harnesses: coding agents that train without a wrapper, by name.

A harness runs a published client headless on a task's instruction, in the task's workspace, and submits the
work to a verifier. `--agent NAME` selects it; `TARGETS` has the agent of each name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afield.errors import UsageError

if TYPE_CHECKING:
    from afield.harnesses.base import Harness

TARGETS = {
    "claude-code": "afield.harnesses.claude_code:agent",
    "codex": "afield.harnesses.codex:agent",
    "opencode": "afield.harnesses.opencode:agent",
    "mini-swe-agent": "afield.harnesses.mini_swe_agent:agent",
    "terminus-2": "afield.harnesses.terminus_2:agent",
    "openhands": "afield.harnesses.openhands:agent",
    "qwen-code": "afield.harnesses.qwen_code:agent",
    "pi": "afield.harnesses.pi:agent",
}
"""Target of each harness, as `afield.sdk.serve` takes it."""
CHECKS = {"oracle": "afield.harbor.agents:oracle", "nop": "afield.harbor.agents:nop"}
"""Targets of agents without a model, which check Harbor tasks."""
TRIALS = {"harbor-trial": "afield.harbor.trial:trial", "harbor-server": "afield.harbor.server_client:run"}
"""Targets of agents that run whole Harbor trials, with their rewards: in process, or by a Harbor server."""


def resolve(agent: str) -> str:
    """Target of an agent: that of a harness for a name without a colon, else the agent itself."""
    if not agent or ":" in agent:
        return agent
    targets = TARGETS | CHECKS | TRIALS
    if agent not in targets:
        raise UsageError(
            f"unknown agent {agent!r}; choose a harness ({', '.join(TARGETS)}), or name your own agent as"
            " path/to/file.py:name or package.module:name"
        )
    return targets[agent]


def find(agent: str) -> Harness | None:
    """Harness with this name or target; None for any other agent."""
    from afield.harnesses.base import Harness
    from afield.sdk.serve import load_object

    target = resolve(agent)
    if target not in TARGETS.values():
        return None
    harness = load_object(target)
    assert isinstance(harness, Harness)
    return harness
