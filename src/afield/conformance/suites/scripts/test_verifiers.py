"""Tests of verifiers: 20 rollouts over one base URL give 20 sessions."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import pytest
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig

GATEWAY, ADMIN, NAME = (os.environ[f"SUITE_{name}"] for name in ("GATEWAY_URL", "ADMIN_KEY", "MODEL"))
ROLLOUTS = 20


def admin(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{GATEWAY}{path}", data, {"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def key() -> dict[str, Any]:
    """API key that opens one session per value of verifiers' session header."""
    header_key = admin("/keys", {"id": "eval", "session": {"sampling": {"max_tokens": 2048}}})
    os.environ["SUITE_HEADER_KEY"] = header_key["api_key"]
    return header_key


@pytest.fixture(scope="module")
async def episodes(key: dict[str, Any]) -> list[Any]:
    config = EvalConfig.model_validate(
        {
            "env": {
                "taskset": {"id": "weather_environment"},
                "agent": {"harness": {"id": "weather_environment"}, "runtime": {"type": "subprocess"}},
                "interception": {"type": "server"},
            },
            "model": NAME,
            "client": {"base_url": key["openai_base_url"], "api_key_var": "SUITE_HEADER_KEY"},
            "num_rollouts": 4,
            "push": False,
            "rich": None,
        }
    )
    return await run_eval(config)


async def test_every_rollout_is_rewarded(episodes: list[Any]) -> None:
    traces = [trace for episode in episodes for trace in episode.traces]
    assert len(traces) == ROLLOUTS
    assert [trace.errors for trace in traces if trace.errors] == []
    assert [trace.reward for trace in traces] == [1.0] * ROLLOUTS


async def test_every_rollout_has_a_session_of_its_own(episodes: list[Any]) -> None:
    listed = admin("/sessions?key=eval&limit=100")["sessions"]
    assert len(listed) == ROLLOUTS
    assert {session["turns"] for session in listed} == {3}
    assert {session["branches"] for session in listed} == {1}


async def test_a_session_holds_the_turns_of_its_rollout(episodes: list[Any]) -> None:
    session = admin("/sessions?key=eval&limit=1")["sessions"][0]
    record = admin(f"/sessions/{session['id']}/finalize", {})
    [trajectory] = record["trajectories"]
    assert len(record["turns"]) == 3
    assert trajectory["token_ids"]


async def test_usage_is_told(episodes: list[Any]) -> None:
    for episode in episodes:
        for trace in episode.traces:
            assert trace.usage is None or trace.usage.completion_tokens > 0
