"""LangChain's standard tests of chat models; $SUITE_VARIANT selects provider and reasoning."""

from __future__ import annotations

import base64
import os
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

BASE, KEY, MODEL = (os.environ[f"SUITE_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
PROVIDER, _, THINKING = os.environ["SUITE_VARIANT"].partition(".")
ON = THINKING == "thinking"
IMAGE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJRU5ErkJggg=="
)


def _chat() -> tuple[type, dict[str, Any]]:
    from langchain_openai import ChatOpenAI

    parameters = {"model": MODEL, "base_url": f"{BASE}/v1", "api_key": KEY}
    if PROVIDER == "openai-responses":
        effort = {"effort": "medium", "summary": "auto"} if ON else {"effort": "none"}
        return ChatOpenAI, {**parameters, "use_responses_api": True, "reasoning": effort}
    return ChatOpenAI, {**parameters, "reasoning_effort": "medium" if ON else "none", "stream_usage": True}


def _anthropic() -> tuple[type, dict[str, Any]]:
    from langchain_anthropic import ChatAnthropic

    thinking = {"type": "enabled", "budget_tokens": 1024} if ON else {"type": "disabled"}
    parameters = {"model": MODEL, "base_url": BASE, "api_key": KEY, "max_tokens": 4096}
    return ChatAnthropic, {**parameters, "thinking": thinking}


def _google() -> tuple[type, dict[str, Any]]:
    from langchain_google_genai import ChatGoogleGenerativeAI

    thinking = {"include_thoughts": True, "thinking_budget": 1024} if ON else {"thinking_budget": 0}
    return ChatGoogleGenerativeAI, {"model": MODEL, "base_url": BASE, "api_key": KEY, **thinking}


CLASS, PARAMS = {"anthropic": _anthropic, "google": _google}.get(PROVIDER, _chat)()


@pytest.fixture(autouse=True)
def local_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the image that the tests download by a local one."""
    monkeypatch.setattr(httpx, "get", lambda url, **_: SimpleNamespace(content=IMAGE))


class TestChatModel(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type:
        return CLASS

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PARAMS

    @property
    def supports_model_override(self) -> bool:
        return PROVIDER != "google"  # its chat model has no override

    @property
    def model_override_value(self) -> str:
        return "other-model"

    @property
    def has_tool_choice(self) -> bool:
        """False for Anthropic with thinking, which does not allow a forced tool."""
        return not (PROVIDER == "anthropic" and ON)

    @property
    def supports_json_mode(self) -> bool:
        return PROVIDER.startswith("openai")

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return PROVIDER in ("anthropic", "openai-responses", "google")

    @property
    def supports_anthropic_inputs(self) -> bool:
        return PROVIDER == "anthropic"

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["reasoning_output"] if ON and PROVIDER != "anthropic" else []
        return {"invoke": details, "stream": details}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        if not stream:
            return model.invoke("What is 3 + 4? Think first.")
        full = None
        for chunk in model.stream("What is 3 + 4? Think first."):
            full = chunk if full is None else full + chunk
        assert full is not None
        return full

    def test_thinking_is_shown_when_it_is_asked_for_and_only_then(self, model: Any) -> None:
        """Not part of LangChain's standard tests."""
        for answer in (model.invoke("What is 3 + 4?"), self._streamed(model, "What is 3 + 4?")):
            thoughts = [block for block in answer.content_blocks if block["type"] == "reasoning"]
            if PROVIDER != "openai-chat":  # LangChain ignores the reasoning of Chat Completions
                assert bool(thoughts) == ON, answer.content_blocks
            assert answer.text == "3 + 4 = 7"

    def _streamed(self, model: Any, question: str) -> Any:
        full = None
        for chunk in model.stream(question):
            full = chunk if full is None else full + chunk
        return full
