"""Strands: the rollout's model, and a hook that records conversations.

Training uses the tokens that the gateway sampled, never a recorded conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afield.errors import UsageError
from afield.sdk.frameworks.endpoint import Rollout, async_http, endpoint

if TYPE_CHECKING:
    from strands.hooks import HookRegistry, MessageAddedEvent
    from strands.models.openai import OpenAIModel

NEEDS = "afield.sdk.frameworks.strands needs strands: pip install 'strands-agents[openai]'"


def create_openai_compatible_model(
    rollout: Rollout = None,
    *,
    model_id: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    **params: Any,
) -> OpenAIModel:
    """A Strands model at the gateway of a rollout, from its Context or payload.

    Without a rollout it is a production model at `base_url`, or at the OpenAI SDK's default. `params` go into
    every request; in a rollout the session's sampling parameters override them.
    """
    try:
        import openai
        from strands.models.openai import OpenAIModel
    except ImportError as error:
        raise UsageError(NEEDS) from error
    model = endpoint(rollout, base_url, api_key, model_id)
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=async_http())
    return OpenAIModel(client, model_id=model.model_id, params=params or None)


class ConversationHook:
    """`Agent(..., hooks=[hook])`, then `return {"reward": x, "conversation": hook.conversation}`.

    Several agents may share one hook; messages are in the order in which they were added.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Messages so far, as JSON values; bytes become a text with their length."""
        return list(self._messages)

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        from strands.hooks import MessageAddedEvent

        registry.add_callback(MessageAddedEvent, self._added)

    def _added(self, event: MessageAddedEvent) -> None:
        message = event.message
        entry = {"role": message["role"], "content": _readable(message["content"])}
        self._messages.append({"agent": event.agent.name, **entry})


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    return value if isinstance(value, str | int | float | bool | None) else str(value)
