"""What the scripted agents' tools do; for scripts that run in a client's own environment."""

from __future__ import annotations


def look(thread: str, step: int) -> str:
    return f"You are at [at {thread}-{step}]."
