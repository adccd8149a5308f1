"""Dialect registry: routes, and the list of models.

The model list has one shape for OpenAI and Anthropic clients, and one for Gemini clients, which are
recognised by path (`/v1beta`) or by how they send their key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from afield.chat import ChatTokenizer
from afield.gateway.dialects.anthropic import Anthropic
from afield.gateway.dialects.base import Dialect, RawRequest, ResponseOptions, StreamEncoder
from afield.gateway.dialects.chat import Chat
from afield.gateway.dialects.completions import Completions
from afield.gateway.dialects.gemini import Gemini
from afield.gateway.dialects.responses import Responses

__all__ = ["Dialect", "Dialects", "RawRequest", "ResponseOptions", "StreamEncoder", "models"]

GEMINI = "/v1beta/models/(?P<model>[^:]+)"
Route = tuple[str, re.Pattern[str], str]
ROUTES: list[Route] = [
    (verb, re.compile(pattern), name)
    for verb, pattern, name in (
        ("generate", "/v1/chat/completions", "chat"),
        ("generate", "/v1/completions", "completions"),
        ("generate", "/v1/responses", "responses"),
        ("count", "/v1/responses/input_tokens", "responses"),
        ("compact", "/v1/responses/compact", "responses"),
        ("generate", "/v1/messages", "anthropic"),
        ("count", "/v1/messages/count_tokens", "anthropic"),
        ("generate", GEMINI + ":(?P<method>generateContent|streamGenerateContent)", "gemini"),
        ("count", GEMINI + ":countTokens", "gemini"),
    )
]


class RouteMatch(Struct, frozen=True):
    """Route of a request path."""

    verb: str
    """Operation: `generate`, `count` or `compact`."""
    dialect: Dialect
    """Dialect of the route."""
    parts: Mapping[str, str]
    """Named parts of the path."""


class Dialects:
    """All dialects, for one model."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        dialects = (
            Chat(tokenizer),
            Completions(tokenizer),
            Responses(tokenizer),
            Anthropic(),
            Gemini(tokenizer),
        )
        self._by_name: dict[str, Dialect] = {dialect.name: dialect for dialect in dialects}

    def match(self, path: str) -> RouteMatch | None:
        for verb, pattern, name in ROUTES:
            if match := pattern.fullmatch(path):
                return RouteMatch(verb, self._by_name[name], match.groupdict())
        return None

    def of_path(self, path: str) -> Dialect:
        """Returns the dialect whose error shape fits a path; Chat by default."""
        if path.startswith("/v1/messages"):
            return self._by_name.get("anthropic", self._by_name["chat"])
        if path.startswith("/v1beta/"):
            return self._by_name.get("gemini", self._by_name["chat"])
        return self._by_name["chat"]


# --- model list ---


def models(
    name: str, path: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> dict[str, Any] | None:
    """Returns the model list for a path; None for other paths."""
    kind, _, requested = path.removeprefix("/v1").removeprefix("beta").removeprefix("/").partition("/")
    if kind != "models":
        return None
    if path.startswith("/v1beta/") or _from_google(headers, query):
        return _gemini(requested or name) if requested else {"models": [_gemini(name)]}
    if requested:
        return _model(requested)
    entries = [_model(name)]
    return {"object": "list", "data": entries, "has_more": False, "first_id": name, "last_id": name}


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
