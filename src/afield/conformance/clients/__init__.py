"""Conformance clients: coding agents and agent frameworks, by name."""

from __future__ import annotations

from afield.conformance.clients import coding_agents, frameworks
from afield.conformance.clients.base import Client
from afield.errors import UsageError

_ALL = (
    coding_agents.CLAUDE_CODE,
    coding_agents.CODEX,
    coding_agents.OPENCODE,
    frameworks.MINI,
    frameworks.STRANDS,
    frameworks.LANGGRAPH,
    frameworks.AGENTS,
    frameworks.AGENTS_CHAT,
    frameworks.TERMINUS,
    frameworks.PYDANTIC,
    frameworks.SMOLAGENTS,
    frameworks.LITELLM,
    frameworks.LITELLM_GEMINI,
    frameworks.ADK,
    coding_agents.QWEN_CODE,
    coding_agents.GEMINI_CLI,
)
CLIENTS: dict[str, Client] = {client.name: client for client in _ALL}


def select_clients(names: list[str]) -> list[Client]:
    """Clients with these names; all for an empty list."""
    for name in names:
        if name not in CLIENTS:
            raise UsageError(f"unknown client {name!r}; choose from: {', '.join(CLIENTS)}")
    return [CLIENTS[name] for name in names] if names else list(CLIENTS.values())
