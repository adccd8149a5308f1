"""Turn trees of random sessions, checked against a model of the agents and the recorded engine calls.

bench/oracle.py runs the same oracle on thousands of sessions.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield import turn_tree
from afield.engines.scripted import ScriptedEngine
from afield.gateway import echoed_turns, prompts, repeats, request_cache, side_calls
from afield.gateway.calls import Calls
from afield.gateway.sessions import SessionManager
from support.dialect_clients import Answer
from support.gateways import running
from support.random_agents import Wild
from support.random_sessions import World, world

pytestmark = pytest.mark.anyio
EACH = 60
HAPPENED: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="afield.gateway")


@pytest.mark.parametrize("batch", range(3))
async def test_random_sessions_match_the_oracle_and_survive_a_restart(tmp_path: Path, batch: int) -> None:
    seeds = range(batch * EACH, (batch + 1) * EACH)
    async with world(tmp_path) as w:
        seen = await w.populate(seeds)
    assert w.counts["sessions"] == EACH
    HAPPENED.update(w.counts)
    async with world(tmp_path) as after:
        for session_id in list(seen)[:10]:
            assert await after.get(f"/sessions/{session_id}/turns?prompt_ids=1") == {
                "turns": seen[session_id].turns
            }
            assert await after.get(f"/sessions/{session_id}/trajectories") == seen[session_id].linear


def test_random_sessions_cover_every_outcome_and_link() -> None:
    """Covers the batches that ran in this process."""
    if not HAPPENED:
        pytest.skip("no batch was run")
    kinds = ["committed", "aborted", "replayed", "split", "tier append", "tier splice", "tier full"]
    kinds += [f"excluded {reason}" for reason in ("aborted", "undelivered", "superseded", "abandoned")]
    kinds += ["excluded side:declared"]
    kinds += [f"link {link}" for link in ("retry", "edit", "fork", "compaction", "sub-agent")]
    assert [kind for kind in kinds if HAPPENED[kind] < HAPPENED["sessions"] / 50] == []
    assert HAPPENED["calls"] > 5 * HAPPENED["sessions"]


async def test_random_sessions_over_http_match_the_oracle(tmp_path: Path) -> None:
    wild = Wild()
    engine = ScriptedEngine(wild)
    async with running(engine, tmp_path) as up, aiohttp.ClientSession() as http:

        async def door(
            method: str,
            path: str,
            body: bytes = b"",
            key: str = "",
            headers: Any = None,
            leaves_at: Any = None,
        ) -> Answer:
            assert leaves_at is None
            named = {"authorization": f"Bearer {key}", **(headers or {})}
            async with http.request(method, up.url + path, data=body, headers=named) as response:
                return Answer(response.status, await response.read(), True)

        w = World(up.gateway, engine, wild, door)
        await w.populate(range(10_000, 10_020))
        assert w.counts["sessions"] == 20


def retries_are_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def again(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Calls, "_repeat_answer", again)


def echoes_are_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cache, "recognise_replies", lambda _, messages: tuple(messages))


def nothing_is_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_cut_off", lambda *_: False)


def abandoned_answers_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = repeats.excluded
    monkeypatch.setattr(repeats, "excluded", lambda forest, *_: excluded(forest, "train"))


def all_repeated_answers_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_quoted", lambda *_: False)
    monkeypatch.setattr(turn_tree.TurnTree, "has_children", lambda *_: False)


def disconnects_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exclude_turn(*_: Any) -> None: ...

    monkeypatch.setattr(SessionManager, "exclude_turn", exclude_turn)


def side_calls_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_calls, "excluded_turns", lambda *_: {})


def the_oldest_match_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    find = turn_tree.TurnTree.find
    monkeypatch.setattr(
        turn_tree.TurnTree, "find", lambda self, digests, *rest: find(self, digests[:2], *rest)
    )


def arguments_are_compared_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turn_tree, echoed_turns):
        monkeypatch.setattr(module, "arguments_value", lambda text: text)


def links_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_links", lambda *_: ())


@pytest.mark.parametrize(
    "broken",
    [
        retries_are_sampled_again,
        echoes_are_not_recognised,
        nothing_is_superseded,
        abandoned_answers_are_trained,
        all_repeated_answers_are_excluded,
        disconnects_are_not_recorded,
        side_calls_are_trained,
        the_oldest_match_is_taken,
        arguments_are_compared_as_text,
        links_are_dropped,
    ],
)
async def test_oracle_detects_a_broken_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    broken(monkeypatch)
    async with world(tmp_path) as w:
        with pytest.raises(AssertionError, match="seed "):
            await w.populate(range(60))
