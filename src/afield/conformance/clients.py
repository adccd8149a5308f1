"""Registry of conformance clients, by name."""

from __future__ import annotations

from afield.conformance import frameworks, terminals, terminus
from afield.conformance.client import Client
from afield.errors import UsageError

_ALL = (
    terminals.CLAUDE_CODE,
    terminals.CODEX,
    terminals.OPENCODE,
    frameworks.MINI,
    frameworks.STRANDS,
    frameworks.LANGGRAPH,
    frameworks.AGENTS,
    frameworks.AGENTS_CHAT,
    terminus.TERMINUS,
    frameworks.PYDANTIC,
    frameworks.SMOLAGENTS,
    frameworks.LITELLM,
    frameworks.LITELLM_GEMINI,
    frameworks.ADK,
    terminals.QWEN_CODE,
    terminals.GEMINI_CLI,
)
CLIENTS: dict[str, Client] = {client.name: client for client in _ALL}


def chosen(names: list[str]) -> list[Client]:
    """Clients with these names; all for an empty list."""
    for name in names:
        if name not in CLIENTS:
            raise UsageError(f"unknown client {name!r}; choose from: {', '.join(CLIENTS)}")
    return [CLIENTS[name] for name in names] if names else list(CLIENTS.values())
