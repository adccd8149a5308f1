"""`GET models`, in one answer that OpenAI's and Anthropic's clients both read, and Gemini's own.

Gemini's clients are told by their path (`/v1beta`) or, under `/v1`, by how they send their key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def models(
    name: str, path: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> dict[str, Any] | None:
    """The answer for a path; None for a path that asks for something else."""
    kind, _, asked = path.removeprefix("/v1").removeprefix("beta").removeprefix("/").partition("/")
    if kind != "models":
        return None
    if path.startswith("/v1beta/") or _from_google(headers, query):
        return _gemini(asked or name) if asked else {"models": [_gemini(name)]}
    if asked:
        return _model(asked)
    listed = [_model(name)]
    return {"object": "list", "data": listed, "has_more": False, "first_id": name, "last_id": name}


def _from_google(headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
    return "x-goog-api-key" in headers or "x-goog-api-client" in headers or "key" in query


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "display_name": name,
        "owned_by": "afield",
    }


def _gemini(name: str) -> dict[str, Any]:
    methods = ["generateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
