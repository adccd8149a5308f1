"""The forest oracle: thousands of random sessions, judged by what their agents did and by the ledger."""

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
EACH = 250
HAPPENED: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="afield.gateway")


@pytest.mark.parametrize("batch", range(8))
async def test_random_sessions_are_what_their_agents_made_of_them(tmp_path: Path, batch: int) -> None:
    seeds = range(batch * EACH, (batch + 1) * EACH)
    async with world(tmp_path) as w:
        seen = await w.populate(seeds)
    assert w.counts["sessions"] == EACH
    HAPPENED.update(w.counts)
    # The same again from what was stored.
    async with world(tmp_path) as after:
        for session_id in list(seen)[:10]:
            assert await after.get(f"/sessions/{session_id}/turns?prompt_ids=1") == {
                "turns": seen[session_id].turns
            }
            assert await after.get(f"/sessions/{session_id}/trajectories") == seen[session_id].linear


def test_everything_that_can_happen_did() -> None:
    """Of the batches that ran here: an oracle that never sees a case cannot judge it."""
    if not HAPPENED:
        pytest.skip("no batch was run")
    kinds = ["committed", "aborted", "replayed", "split", "tier append", "tier splice", "tier full"]
    kinds += [f"excluded {reason}" for reason in ("aborted", "undelivered", "superseded", "abandoned")]
    kinds += ["excluded side:declared"]
    kinds += [f"link {link}" for link in ("retry", "edit", "fork", "compaction", "sub-agent")]
    assert [kind for kind in kinds if HAPPENED[kind] < HAPPENED["sessions"] / 50] == []
    assert HAPPENED["calls"] > 5 * HAPPENED["sessions"]


async def test_random_sessions_over_http(tmp_path: Path) -> None:
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
        await w.populate(range(10_000, 10_050))
        assert w.counts["sessions"] == 50


def no_retry_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def again(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(Calls, "_repeat_answer", again)


def no_echo_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cache, "recognised", lambda _, messages: tuple(messages))


def nothing_is_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_cut_off", lambda *_: False)


def abandoned_answers_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    excluded = repeats.excluded
    monkeypatch.setattr(repeats, "excluded", lambda forest, *_: excluded(forest, "train"))


def every_repeated_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_quoted", lambda *_: False)
    monkeypatch.setattr(turn_tree.TurnTree, "has_children", lambda *_: False)


def leaving_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def no_link_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_links", lambda *_: ())


@pytest.mark.parametrize(
    "broken",
    [
        no_retry_is_known,
        no_echo_is_recognised,
        nothing_is_superseded,
        abandoned_answers_are_trained,
        every_repeated_answer_is_left_out,
        leaving_goes_unnoticed,
        side_calls_are_trained,
        the_oldest_match_is_taken,
        arguments_are_compared_as_text,
        no_link_is_kept,
    ],
)
async def test_the_oracle_notices_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    broken(monkeypatch)
    async with world(tmp_path) as w:
        with pytest.raises(AssertionError, match="seed "):
            await w.populate(range(60))
