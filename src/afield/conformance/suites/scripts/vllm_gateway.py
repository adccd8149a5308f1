"""pytest plugin: runs vLLM's server tests against the gateway.

Tests that use no server are deselected: they test vLLM's own classes. Adapters exist only as model names.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import anthropic
import openai
import pytest

BASE, KEY = os.environ["SUITE_BASE_URL"], os.environ["SUITE_API_KEY"]


class RemoteOpenAIServer:
    """Replacement of vLLM's test server: uses the running gateway."""

    DUMMY_API_KEY = KEY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        return BASE

    def url_for(self, *parts: str) -> str:
        return "/".join((BASE, *parts))

    def get_client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, **kwargs)

    def get_async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, **kwargs)

    def get_client_anthropic(self, **kwargs: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0, **kwargs)

    def get_async_client_anthropic(self, **kwargs: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=BASE, api_key=KEY, max_retries=0, **kwargs)


utils: Any = ModuleType("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
utils.ROCM_EXTRA_ARGS, utils.ROCM_ENV_OVERRIDES = [], {}
sys.modules["tests.utils"] = utils


class _Hub:
    def snapshot_download(self, repo_id: str, **kwargs: Any) -> str:
        return repo_id


def pytest_configure() -> None:
    from vllm.transformers_utils import repo_utils

    repo_utils.hf_api = _Hub


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    asking = [item for item in items if {"server", "client"} & set(item.fixturenames)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking
