"""Who may speak of a session's rewards and outcome, what each key may do, and how long a session lives."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from afield.interfaces import SessionSpec
from support.dialect_clients import knock
from support.dialect_session import Client, Place, answering, said, user
from support.gateways import ADMIN

pytestmark = pytest.mark.anyio
HI = {"role": "user", "content": "Hi"}
CHAT = "/s/r.1/v1/chat/completions"


async def post(there: Place, path: str, key: str, **body: Any) -> int:
    return (await knock(there.app, "POST", path, json.dumps(body).encode(), key)).status


async def test_agent_reward_gets_403_with_a_verifier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        ticket = await there.gateway.open(SessionSpec(id="r.1", reward_from="verifier"))
        assert ticket.verifier_key
        with caplog.at_level(logging.WARNING, logger="afield.gateway"):
            assert await post(there, "/s/r.1/reward", ticket.api_key, reward=1.0) == 403
            assert await post(there, "/s/r.1/outcome", ticket.api_key, reward=1.0) == 403
            assert await post(there, "/s/r.1/complete", ticket.api_key, reward=1.0) == 403
        assert len([r for r in caplog.records if "r.1" in r.getMessage()]) >= 3
        assert all(ticket.api_key not in record.getMessage() for record in caplog.records)
        assert await post(there, "/s/r.1/outcome", ticket.api_key, status="done") == 200
        assert await post(there, "/s/r.1/reward", ticket.verifier_key, reward=0.5) == 200
        body = json.dumps({"model": "m", "messages": [HI]}).encode()
        used = await knock(there.app, "POST", CHAT, body, ticket.verifier_key)
        assert used.status == 403
        assert (await there.get("/sessions/r.1"))["rewards"] == [{"reward": 0.5}]


async def test_scopes_limit_a_key(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        ticket = await there.gateway.open(SessionSpec(id="r.1", scope=("infer",)))
        assert await post(there, "/s/r.1/reward", ticket.api_key, reward=1.0) == 403
        assert (await knock(there.app, "GET", "/s/r.1/turns", key=ticket.api_key)).status == 403
        reader = await there.gateway.open(SessionSpec(id="r.2", scope=("infer", "read")))
        for path in ("turns", "trajectories", "state"):
            assert (await knock(there.app, "GET", f"/s/r.2/{path}", key=reader.api_key)).status == 200
        assert (await knock(there.app, "GET", "/s/r.1/turns", key=reader.api_key)).status == 401


async def test_outcome_is_idempotent_and_cannot_change(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        ticket = await there.gateway.open(SessionSpec(id="r.1"))
        told = {"reward": 1.0, "metrics": {"steps": 3.0}, "status": "done", "stop_reason": "end"}
        for _ in range(2):
            assert await post(there, "/s/r.1/outcome", ticket.api_key, **told) == 200
        assert await post(there, "/s/r.1/outcome", ticket.api_key, **{**told, "reward": 0.0}) == 409
        assert await post(there, "/s/r.1/outcome", ticket.api_key, **{**told, "status": "odd"}) == 409
        state = await there.get("/sessions/r.1")
        assert (state["phase"], state["rewards"]) == ("completed", [{"reward": 1.0}])
        answer = await knock(there.app, "POST", CHAT, b'{"messages": []}', ticket.api_key)
        assert answer.status in (400, 409)


async def test_expired_session_is_aborted_and_keeps_its_turns(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Yes.")) as there:
        ticket = await there.gateway.open(SessionSpec(id="r.1", ttl_s=0.3))
        client = Client(there.app, ticket.api_key, "chat", False)
        await client.say(user("Hi"), toolset=0)
        await asyncio.sleep(0.35)
        assert (await client.send(user("More"), toolset=0)).status == 409
        await there.gateway.sessions.reap()
        assert (await there.get("/sessions/r.1"))["phase"] == "aborted"
        assert len((await there.look()).linear["trajectories"]) == 1
        gone = await knock(there.app, "GET", "/sessions/r.9", key=ADMIN)
        assert gone.status == 404
