"""LangChain and LangGraph: the rollout's chat model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afield.errors import UsageError
from afield.sdk.frameworks.endpoint import Rollout, async_http, endpoint, http

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


def create_openai_compatible_model(
    rollout: Rollout = None,
    *,
    model_id: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    **params: Any,
) -> ChatOpenAI:
    """A `ChatOpenAI` at the gateway of a rollout, from its Context or payload.

    Without a rollout it is a production model at `base_url`, or at the OpenAI SDK's default. `params` are
    passed to ChatOpenAI.
    """
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise UsageError(
            "afield.sdk.frameworks.langchain needs langchain-openai: pip install langchain-openai"
        ) from error
    model = endpoint(rollout, base_url, api_key, model_id)
    settings: dict[str, Any] = {"base_url": model.base_url, "api_key": model.api_key}
    settings = {key: value for key, value in settings.items() if value is not None}
    pools = {"http_client": http(), "http_async_client": async_http()}
    return ChatOpenAI(model=model.model_id, **settings, **(pools | params))
