"""Session states at the gateway, heartbeats of agents, and what a restart of the gateway keeps."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec import structs

import afield
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Unavailable, UsageError
from afield.gateway.app import GatewayApp
from afield.gateway.engine_pool import EnginePool
from afield.gateway.service import LocalGateway
from afield.gateway.store import GatewayStore
from afield.interfaces import Chunk, GenerateRequest, SessionSpec, SessionState
from afield.sdk.agent import entry_of
from afield.sdk.heartbeat import Heartbeat
from afield.sdk.listen import listen
from afield.sdk.runner import Runner
from afield.types import Policy
from agents.invoking import invocation, payload
from support.dialect_clients import knock
from support.dialect_session import Client, answering, said, user
from support.gateways import ADMIN, POLICY, Running, running
from support.tokenizers import load_tokenizer

pytestmark = pytest.mark.anyio
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def yes() -> ScriptedEngine:
    return ScriptedEngine(lambda _: said("Yes."))


async def state_of(up: Running, session_id: str = "r.1") -> SessionState:
    return (await up.client.states([session_id]))[session_id]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


# --- states ---------------------------------------------------------------------------------------


async def test_one_request_reads_many_states_and_leaves_out_unknown_sessions(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        for n in range(5):
            agent = await up.agent(f"r{n}.1", rollout_id=f"r{n}", attempt=1)
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        await up.client.finalize("r0.1")
        await up.client.abort("r1.1", "enough")
        asked = [f"r{n}.1" for n in range(5)]
        states = await up.client.states([*asked, "unknown"])
        assert list(states) == asked
        assert [states[i].phase for i in asked] == ["finalized", "aborted", "open", "open", "open"]
        for session_id, state in states.items():
            alone = await up.client.state(session_id)
            assert structs.replace(state, idle_s=0.0) == structs.replace(alone, idle_s=0.0)
            assert (state.turns, state.branches, state.tokens["sampled"] > 0) == (1, 1, True)
        assert await up.client.states([]) == {}
        assert len(await up.client.states(["unknown"] * 6000)) == 0
        status, answer = await up.ask("POST", "/sessions/states", {"ids": ["x"] * 5001})
        assert (status, "5001" in answer["error"]["message"]) == (400, True)
        assert await up.client.version() == 0


async def test_a_running_call_is_in_flight_and_neither_dangling_nor_idle(tmp_path: Path) -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=(40, 41), fail="hang"), said("Yes.")])
    async with running(engine, tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        await asyncio.sleep(0.1)
        assert (await state_of(up)).idle_s >= 0.1
        calling = asyncio.create_task(up.ask("POST", "/s/r.1/v1/chat/completions", CHAT, ticket.api_key))
        session = up.gateway.sessions.get("r.1")
        while session.sampled_tokens < 2:
            await asyncio.sleep(0.01)
        state = await state_of(up)
        assert (state.in_flight, state.dangling, state.idle_s, state.calls) == (1, 0, 0.0, 1)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)

        async def over() -> bool:
            return (await state_of(up)).in_flight == 0

        await until(over)
        await asyncio.sleep(0.05)
        state = await state_of(up)
        assert (state.dangling, state.turns) == (0, 1)
        assert 0.05 <= state.idle_s < 10


async def test_a_call_in_flight_when_the_gateway_died_is_dangling(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        agent = await up.agent()
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        row = structs.replace(up.gateway.sessions.get("r.1").rows[1], n=2, seq=1 << 62)
        turn = structs.replace(row.turn, id="t2", status="dangling", token_ids=(), logprobs=(), versions=())
        left = structs.replace(row, turn=turn)
    async with GatewayStore(tmp_path / "gateway.sqlite") as store:
        await store.put_turn("r.1", left)  # as a kill leaves it
    async with running(yes(), tmp_path) as up:
        state = await state_of(up)
        assert (state.dangling, state.in_flight, state.calls, state.unseen_s) == (1, 0, 2, None)
        assert state.idle_s < 10
        await up.client.finalize("r.1")
    async with running(yes(), tmp_path) as up:
        assert (await state_of(up)).dangling == 1


async def test_the_state_of_an_ended_session_is_read_without_its_turns(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        for session_id in ("r.1", "r.2", "r.3"):
            agent = await up.agent(session_id)
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        await up.ask("POST", "/sessions/r.1/complete", {"reward": 1.0})
        await up.client.abort("r.2", "enough")
        before = await up.client.states(["r.1", "r.2"])
    with sqlite3.connect(tmp_path / "gateway.sqlite") as db:
        db.execute("UPDATE turns SET body = x'00'")
    db.close()
    async with running(yes(), tmp_path) as up:
        after = await up.client.states(["r.1", "r.2"])
        for session_id, state in after.items():
            assert structs.replace(state, idle_s=0.0) == structs.replace(before[session_id], idle_s=0.0)
        with pytest.raises(Unavailable):
            up.gateway.sessions.get("r.3")


async def test_the_cost_of_a_state_does_not_grow_with_the_conversation(tmp_path: Path) -> None:
    async with answering(tmp_path, *[said(f"Yes {n}.") for n in range(41)]) as there:
        short, long = await there.client("short.1"), await there.client("long.1")
        await short.say(user("Hi"), toolset=0)
        for n in range(40):
            await long.say(user(f"Hi {n}"), toolset=0)

        def cost(session_id: str) -> float:
            def once() -> float:
                began = time.process_time()
                there.gateway.sessions.states([session_id] * 2000)
                return time.process_time() - began

            return min(once() for _ in range(5))

        assert cost("long.1") < 2 * cost("short.1")


# --- heartbeats -----------------------------------------------------------------------------------


async def test_heartbeats_count_from_the_first(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1", reward_from="verifier"))
        await up.ask("POST", "/s/r.1/v1/chat/completions", CHAT, ticket.api_key)
        assert (await state_of(up)).unseen_s is None
        assert await up.ask("POST", "/s/r.1/alive", {}, ticket.api_key) == (200, {"phase": "open"})
        await asyncio.sleep(0.1)
        first = (await state_of(up)).unseen_s
        assert first and first >= 0.1
        await up.ask("POST", "/s/r.1/v1/chat/completions", CHAT, ticket.api_key)
        second = (await state_of(up)).unseen_s
        assert second is not None and second < first
        assert (await up.ask("POST", "/s/r.1/alive", {}, ticket.verifier_key or ""))[0] == 403
        assert (await up.ask("POST", "/s/r.1/alive", {}, "wrong"))[0] == 401
    async with running(yes(), tmp_path) as up:
        assert (await state_of(up)).unseen_s is None
        await up.client.abort("r.1", "enough")
        assert await up.ask("POST", "/s/r.1/alive", {}, ticket.api_key) == (200, {"phase": "aborted"})


async def test_the_sdk_sends_heartbeats_until_the_outcome_is_delivered(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        go_on, posted = threading.Event(), threading.Event()

        @afield.agent
        def agent(task: dict) -> float:
            go_on.wait(60)
            return 1.0

        def bring(*_: object) -> bool:
            posted.set()
            return True

        runner = Runner(entry_of(agent), deliver=bring, heartbeat=Heartbeat(first_s=0.0, every_s=0.05))
        made = structs.replace(invocation(), base_url=ticket.base_url, api_key=ticket.api_key)
        runner.accept(payload({}, made))

        async def seen() -> bool:
            return (await state_of(up)).unseen_s is not None

        await until(seen)
        loop = asyncio.get_running_loop()
        for _ in range(4):  # and again, and again
            since = loop.time()

            async def seen_later(since: float = since) -> bool:
                now, unseen = loop.time(), (await state_of(up)).unseen_s
                return unseen is not None and now - unseen > since

            await until(seen_later)
        go_on.set()
        assert await asyncio.to_thread(posted.wait, 60)
        while runner.active:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        before = await state_of(up)
        await asyncio.sleep(0.3)
        after = await state_of(up)
        assert after.unseen_s and before.unseen_s and after.unseen_s > before.unseen_s + 0.25


async def test_an_agent_with_an_aborted_session_logs_that_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(yes(), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        await up.client.abort("r.1", "enough")
        alive = Heartbeat(first_s=0.0, every_s=0.05)
        with caplog.at_level(logging.WARNING, logger="afield.sdk"):
            alive.keep(structs.replace(invocation(), base_url=ticket.base_url, api_key=ticket.api_key))

            async def told() -> bool:
                return any("aborted by the gateway" in record.getMessage() for record in caplog.records)

            await until(told)
            await asyncio.sleep(0.5)  # in which it would be told again
        assert [r.getMessage() for r in caplog.records if "aborted by the gateway" in r.getMessage()] == [
            "heartbeat: r.1 aborted by the gateway, its outcome comes too late"
        ]


@pytest.mark.parametrize(
    ("status", "again"), [(404, False), (405, False), (401, False), (503, True), (200, False)]
)
async def test_heartbeats_stop_at_a_server_without_the_route(status: int, again: bool) -> None:
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    alive = Heartbeat(first_s=0.0, every_s=0.05)
    try:
        base = f"http://127.0.0.1:{server.server_port}/llm"
        alive.keep(structs.replace(invocation(), base_url=base))

        async def enough() -> bool:
            return len(asked) > again

        await until(enough)
        await asyncio.sleep(0 if again else 0.5)  # in which it would be asked again
        assert set(asked) == {"/llm/alive"}
        assert (len(asked) > 1) is again
    finally:
        alive.drop("r.1")
        await asyncio.to_thread(server.shutdown)
        server.server_close()


async def test_heartbeats_continue_after_an_outage_of_the_gateway(tmp_path: Path) -> None:
    alive = Heartbeat(first_s=0.0, every_s=0.05)
    listener = listen("127.0.0.1", 0)
    try:
        async with running(yes(), tmp_path, listener=listener) as up:
            for n in range(40):
                ticket = await up.client.open(SessionSpec(id=f"r{n}.1"))
                made = structs.replace(invocation(f"r{n}"), base_url=ticket.base_url, api_key=ticket.api_key)
                alive.keep(made)

            async def all_seen() -> bool:
                states = await up.client.states([f"r{n}.1" for n in range(40)])
                return all(s.unseen_s is not None and s.unseen_s < 0.5 for s in states.values())

            await until(all_seen)
            port = listener.getsockname()[1]
        await asyncio.sleep(0.2)
        async with running(yes(), tmp_path, listener=listen("127.0.0.1", port)) as up:
            await until(all_seen)
    finally:
        for n in range(40):
            alive.drop(f"r{n}.1")


# --- weights, failures, memory --------------------------------------------------------------------


async def test_the_published_policy_is_served_again_after_a_restart(tmp_path: Path) -> None:
    async with running(yes(), tmp_path) as up:
        await up.client.publish(Policy("p", 7), "weights/7")
        assert await up.client.version() == 7
    engine = yes()
    async with running(engine, tmp_path) as up:
        assert engine.loaded == [(7, "weights/7")]
        assert await up.client.version() == 7
        agent = await up.agent()
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert (await state_of(up)).versions == (7, 7)


async def test_weights_of_another_model_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "another-model"
    await asyncio.to_thread(shutil.copytree, POLICY, other)
    async with running(yes(), tmp_path) as up:
        await up.client.publish(Policy("p", 7), "weights/7")
    engine = yes()
    async with running(engine, tmp_path, other) as up:
        assert engine.loaded == []
        assert await up.client.version() == 0
    assert any("weights are of another model" in r.getMessage() for r in caplog.records)


class DiskEngine(ScriptedEngine):
    """Engine whose weights must exist on disk."""

    async def load(self, version: int, path: str) -> None:
        if not await asyncio.to_thread(Path(path).is_dir):
            raise UsageError(f"there are no weights in {path}")
        await super().load(version, path)


async def test_missing_weights_are_logged_and_the_gateway_serves_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    async with running(DiskEngine(lambda _: said("Yes.")), tmp_path) as up:
        await up.client.publish(Policy("p", 7), str(weights))
    weights.rmdir()
    with caplog.at_level(logging.ERROR, logger="afield.gateway"):
        async with running(DiskEngine(lambda _: said("Yes.")), tmp_path) as up:
            assert await up.client.version() == 0
    assert any(str(weights) in r.getMessage() and "serving=0" in r.getMessage() for r in caplog.records)


class BrokenEngine(ScriptedEngine):
    """Engine that raises an unexpected error."""

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        raise RuntimeError("an unexpected error")
        yield  # pyright: ignore[reportUnreachable]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("v1/chat/completions", ("error", "type")), ("v1/messages", ("error", "type"))],
)
async def test_an_unexpected_error_is_answered_in_the_dialect_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, kind: tuple[str, str]
) -> None:
    async with running(BrokenEngine(lambda _: said("Yes.")), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="r.1"))
        with caplog.at_level(logging.ERROR, logger="afield.gateway"):
            status, answer = await up.ask("POST", f"/s/r.1/{path}", {**CHAT, "max_tokens": 9}, ticket.api_key)
        assert status == 500
        assert answer[kind[0]][kind[1]]
        assert "an unexpected error" not in json.dumps(answer)
        assert any(
            "Traceback" in r.getMessage() and "an unexpected error" in r.getMessage() for r in caplog.records
        )


async def test_ended_sessions_leave_nothing_in_memory(tmp_path: Path) -> None:
    engine = yes()
    pool = EnginePool({"engine": engine}, tries=1)
    gateway = LocalGateway(
        tokenizer=load_tokenizer(),
        engine=pool,
        store=tmp_path,
        admin_key=ADMIN,
        public_url="http://gateway",
    )
    async with pool, gateway:
        app = GatewayApp(gateway)

        async def use(first: int, count: int) -> None:
            for n in range(first, first + count):
                ticket = await gateway.open(SessionSpec(id=f"r{n}.1", exp_id="e"))
                await Client(app, ticket.api_key, "chat", False).say(user("Hi"), toolset=0)
                await knock(app, "POST", f"/s/r{n}.1/alive", b"{}", ticket.api_key)
                await knock(app, "POST", f"/s/r{n}.1/outcome", b'{"reward": 1}', ticket.api_key)
                await gateway.finalize(f"r{n}.1")
                if n % 2:
                    await knock(app, "DELETE", f"/sessions/r{n}.1", key=ADMIN)

        def held() -> tuple[int, int]:
            engine.recorded.clear()  # the script's own notes
            gc.collect()
            return len(gc.get_objects()), sys.getallocatedblocks()

        await use(0, 100)
        before = held()
        await use(100, 900)
        after = held()
        assert len(gateway.sessions) == 0
        assert after[0] - before[0] < 400
        assert after[1] - before[1] < 800
