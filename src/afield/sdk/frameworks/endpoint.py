"""Address of an agent's model: its rollout's gateway, or the production endpoint.

The same code serves both. A rollout's address, key and model take precedence over those for production.
Without a rollout, missing values are left to the OpenAI SDK, which reads OPENAI_BASE_URL and OPENAI_API_KEY.
A payload with a malformed `_rollout` raises WireError instead of using production.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from afield.errors import UsageError
from afield.sdk.agent import Context
from afield.wire import ROLLOUT_FIELD, read_payload

if TYPE_CHECKING:
    import httpx

Rollout = Context | Mapping[str, Any] | None


class ModelEndpoint(Struct, frozen=True, kw_only=True):
    """Where and how to call the model."""

    base_url: str | None
    """Base URL for OpenAI clients; None leaves it to the SDK."""
    api_key: str | None
    """API key; None leaves it to the SDK."""
    model_id: str
    """Model name to send with requests."""

    def __repr__(self) -> str:
        return f"ModelEndpoint(base_url={self.base_url!r}, api_key='***', model_id={self.model_id!r})"


def endpoint(
    rollout: Rollout, base_url: str | None, api_key: str | None, model_id: str | None
) -> ModelEndpoint:
    """The rollout's endpoint, or the production endpoint without a rollout."""
    if isinstance(rollout, Mapping) and ROLLOUT_FIELD in rollout:
        rollout = Context.of(read_payload(dict(rollout)))
    if isinstance(rollout, Context):
        return ModelEndpoint(
            base_url=rollout.openai_base_url, api_key=rollout.api_key, model_id=rollout.model_id
        )
    if rollout is not None and not isinstance(rollout, Mapping):
        raise UsageError(f"rollout must be the agent's Context or payload, not {rollout!r}")
    if not model_id:
        raise UsageError("outside a rollout a model needs model_id='NAME'")
    return ModelEndpoint(base_url=base_url, api_key=api_key, model_id=model_id)


@functools.cache
def http() -> httpx.Client:
    """The connection pool of this process; threads share it."""
    import openai

    return openai.DefaultHttpxClient(verify=_certificates())


def async_http() -> httpx.AsyncClient:
    """A client without keep-alive: connections belong to one event loop, and frameworks create several."""
    import httpx
    import openai

    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=0)
    return openai.DefaultAsyncHttpxClient(verify=_certificates(), limits=limits)


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Loading certificates takes about 20 ms of CPU, more than the rest of a call.
    return ssl.create_default_context()
