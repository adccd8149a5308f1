"""LangChain and LangGraph: the rollout's chat model in one line."""

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
    """A `ChatOpenAI` at the gateway of a rollout, given its context or its whole payload.

    Without a rollout it is a production model, at `base_url` or where the OpenAI SDK's own variables say.
    `params` are ChatOpenAI's.
    """
    try:
        from langchain_openai import ChatOpenAI
    except ImportError as error:
        raise UsageError("this needs langchain-openai: pip install langchain-openai") from error
    where = endpoint(rollout, base_url, api_key, model_id)
    given: dict[str, Any] = {"base_url": where.base_url, "api_key": where.api_key}
    known = {key: value for key, value in given.items() if value is not None}
    pools = {"http_client": http(), "http_async_client": async_http()}
    return ChatOpenAI(model=where.model_id, **known, **(pools | params))
