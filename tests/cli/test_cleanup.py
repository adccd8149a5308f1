"""Old data of runs and gateways: expiry, disk usage and `afield cleanup`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import RunCommand

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import NotFound
from afield.gateway.sessions import SessionManager
from afield.gateway.store import GatewayStore, remove_ended
from afield.interfaces import SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.orchestrator.state import RunDirectory
from support.gateways import running, vocabulary

HOUR = 3600.0


def hello(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(vocabulary().encode("hello<|im_end|>")))


@pytest.mark.anyio
async def test_completed_sessions_expire_and_others_stay(tmp_path: Path) -> None:
    now = [0.0]
    async with GatewayStore(tmp_path / "gateway.sqlite") as store:
        sessions = SessionManager(store, lambda: now[0])
        for n in range(200):
            session, _ = await sessions.open(SessionSpec(id=f"old{n}.1"))
            if n < 198:
                await (sessions.finalize(session) if n % 2 else sessions.abort(session, "enough"))
            del session
        held, _ = await sessions.open(SessionSpec(id="held.1"))
        await sessions.finalize(held)
        now[0] = 100 * HOUR
        fresh, _ = await sessions.open(SessionSpec(id="new.1"))
        await sessions.finalize(fresh)
        assert await sessions.prune(72 * HOUR) == 198
        assert store.session_ids(None, 1000, "") == ["held.1", "new.1", "old198.1", "old199.1"]
        with pytest.raises(NotFound):
            sessions.get("old7.1")
        del held
        assert await sessions.prune(72 * HOUR) == 1


@pytest.mark.anyio
async def test_completed_sessions_are_removed_from_a_closed_store(tmp_path: Path) -> None:
    async with running(ScriptedEngine(hello), tmp_path) as up:
        for session in ("done.1", "open.1"):
            agent = await up.agent(session)
            messages = [{"role": "user", "content": "Hi " * 100}]
            for _ in range(3):
                await agent.chat.completions.create(model="m", messages=messages)  # pyright: ignore
        await up.gateway.finalize("done.1")
    path = tmp_path / "gateway.sqlite"
    assert remove_ended(path) == 1
    async with GatewayStore(path) as store:
        assert store.session_ids(None, 10, "") == ["open.1"]
        assert len(store.turns("open.1")) == 3 and store.turns("done.1") == []


def test_the_rollouts_of_the_oldest_steps_are_removed_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 9):
        run.rollouts(step).write_bytes(b"x" * 1000)
    assert run.prune_rollouts(10_000, keep_steps=3) == []
    assert run.prune_rollouts(6_500, keep_steps=3) == [1, 2]
    assert run.prune_rollouts(0, keep_steps=3) == [3, 4, 5]
    assert run.steps() == [6, 7, 8]


def test_cleanup_prints_sizes_and_removes_the_chosen_data(tmp_path: Path, run_command: RunCommand) -> None:
    run = RunDirectory(tmp_path / "runs" / "run")
    (run.path / "rollouts").mkdir(parents=True)
    run.config.write_text('{"model": "m", "agent": "a:b"}')
    for step in range(1, 6):
        run.rollouts(step).write_bytes(b"x" * 100_000)
    code, out, err = run_command("cleanup")
    assert code == 0, err
    assert "run  500.0 kB  (rollouts 500.0 kB)" in out and ", free " in out
    code, _, err = run_command("cleanup", "--rollouts")
    assert code == 2 and "name the run" in err
    with run.locked("learn"):
        code, _, err = run_command("cleanup", "run", "--rollouts")
        assert code == 2 and "another process is working on run run" in err
    code, out, err = run_command("cleanup", "run", "--rollouts", "--queues", "--json")
    assert code == 0, err
    [usage] = json.loads(out)["runs"]
    assert usage["removed"] == {"rollouts": [1, 2], "queues": []}
    assert usage["bytes"]["rollouts"] == 300_000 and run.steps() == [3, 4, 5]
