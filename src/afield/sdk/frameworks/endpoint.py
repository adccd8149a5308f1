"""Where an agent's model is: at its rollout's gateway, or wherever production has it.

The same line of an agent serves both. A rollout's own address, key and model win over those given for
production; without a rollout, what is not given is left to the OpenAI SDK, which reads OPENAI_BASE_URL
and OPENAI_API_KEY. A payload whose `_rollout` is malformed is refused, never taken for production.
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


class Endpoint(Struct, frozen=True, kw_only=True):
    base_url: str | None
    api_key: str | None
    model_id: str

    def __repr__(self) -> str:
        return f"Endpoint(base_url={self.base_url!r}, api_key='***', model_id={self.model_id!r})"


def endpoint(rollout: Rollout, base_url: str | None, api_key: str | None, model_id: str | None) -> Endpoint:
    """The rollout's endpoint, or the given one where there is no rollout."""
    if isinstance(rollout, Mapping) and ROLLOUT_FIELD in rollout:
        rollout = Context.of(read_payload(dict(rollout)))
    if isinstance(rollout, Context):
        return Endpoint(base_url=rollout.openai_base_url, api_key=rollout.api_key, model_id=rollout.model_id)
    if rollout is not None and not isinstance(rollout, Mapping):
        raise UsageError(f"a model is made from a rollout's context or payload, not from {rollout!r}")
    if not model_id:
        raise UsageError("there is no rollout to take the model from: say model_id='NAME' for production")
    return Endpoint(base_url=base_url, api_key=api_key, model_id=model_id)


@functools.cache
def http() -> httpx.Client:
    """One pool of connections for all rollouts of this process; threads may share it."""
    import openai

    return openai.DefaultHttpxClient(verify=_certificates())


def async_http() -> httpx.AsyncClient:
    """A client that keeps no connection: these belong to one event loop, and frameworks make several."""
    import httpx
    import openai

    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=0)
    return openai.DefaultAsyncHttpxClient(verify=_certificates(), limits=limits)


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading them takes some 20 ms of processor time, more than the rest of a call.
    return ssl.create_default_context()
