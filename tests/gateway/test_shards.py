"""Several gateway processes on one port: each session belongs to one process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Unavailable
from afield.gateway.client import HttpGateway
from afield.gateway.shards import owner, route
from afield.interfaces import PendingAttempt, SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Rollout, Task
from support.fake_vllm import FakeVllm, serving
from support.gateways import ADMIN, POLICY, vocabulary

pytestmark = pytest.mark.anyio
PAUSE, RESUME = ("/policy/pause", {"in_flight": "keep"}), ("/policy/resume", {})
SESSIONS = [f"r{n}.1" for n in range(8)]


def hello(call: GenerateRequest) -> ScriptedReply:
    """A word and its end; what the probe of a new worker asks gets as many ids as it wants."""
    reply = vocabulary().encode("hello<|im_end|>")
    wanted = reply if reply[-1] in call.stop_ids else range(5, 5 + call.max_tokens)
    return ScriptedReply(token_ids=tuple(wanted))


@asynccontextmanager
async def gateway(store: Path, engine_url: str, *more: str) -> AsyncIterator[tuple[str, int]]:
    """Its address and the id of its front process."""
    arguments = ["gateway", "--model", str(POLICY), "--engine", f"vllm={engine_url}", "--port", "0"]
    arguments += ["--processes", "2", "--store", str(store), "--json", "--exit-with-parent", *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "afield",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "AFIELD_ADMIN_KEY": ADMIN, "AFIELD_OUTCOMES": f"files://{store / 'outcomes'}"},
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 100)
        yield json.loads(line)["url"], process.pid
    finally:
        process.terminate()
        await process.wait()


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


async def test_session_requests_reach_the_owning_process(tmp_path: Path) -> None:
    assert {owner(session, 2) for session in SESSIONS} == {0, 1}
    fake = FakeVllm(ScriptedEngine(hello))
    async with (
        serving(fake) as engine,
        gateway(tmp_path, engine) as (url, pid),
        HttpGateway(url, ADMIN) as admin,
    ):
        tickets = [await admin.open(spec_of(session)) for session in SESSIONS]
        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(talk(ticket.openai_base_url, ticket.api_key) for ticket in tickets))
            # One connection, all sessions: requests are passed on to where they belong.
            for ticket in tickets:
                said = {"role": "user", "content": "Another."}
                body = gzip.compress(json.dumps({"model": "m", "messages": [said], "stream": True}).encode())
                key = {"authorization": f"Bearer {ticket.api_key}", "content-encoding": "gzip"}
                async with http.post(f"{url}/v1/chat/completions", data=body, headers=key) as answer:
                    assert (await answer.text()).endswith("data: [DONE]\n\n")
            states = [await admin.state(session) for session in SESSIONS]
            assert [(s.calls, s.turns, s.branches, s.dangling) for s in states] == [(3, 3, 2, 0)] * 8
            at_once = await admin.states([*SESSIONS, "unknown"])
            assert sorted(at_once) == SESSIONS
            assert [(s.calls, s.turns) for s in at_once.values()] == [(3, 3)] * 8
            for ticket in tickets:
                key = {"authorization": f"Bearer {ticket.api_key}"}
                async with http.post(f"{url}/s/{ticket.id}/alive", headers=key) as answer:
                    assert await answer.json() == {"phase": "open"}
            assert all(s.unseen_s is not None for s in (await admin.states(SESSIONS)).values())
            key = {"authorization": f"Bearer {ADMIN}"}
            for path, said in [("/sessions", {"id": s}) for s in ("x1.1", "x2.1", "x3.1")] + [PAUSE, RESUME]:
                body = gzip.compress(json.dumps(said).encode())
                packed = key | {"content-encoding": "gzip"}
                async with http.post(url + path, data=body, headers=packed) as answer:
                    assert answer.status < 300, await answer.text()
            for session in ("x1.1", "x2.1", "x3.1"):
                async with http.delete(f"{url}/sessions/{session}", headers=key) as answer:
                    assert answer.status < 300
            async with http.get(f"{url}/metrics", headers=key) as page:
                numbers = await page.text()
            assert 'afield_calls_total{dialect="chat",finish="stop"} 24' in numbers
            async with http.get(f"{url}/sessions", headers=key) as listed:
                assert [s["id"] for s in (await listed.json())["sessions"]] == sorted(SESSIONS)
            responses = [await respond(http, url, ticket.api_key) for ticket in tickets]
            await kill_one(pid)
            await asyncio.gather(*(until_there(admin, session) for session in SESSIONS))
            for ticket, response in zip(tickets, responses, strict=True):
                key = {"authorization": f"Bearer {ticket.api_key}"}
                async with http.get(f"{url}/v1/responses/{response['id']}", headers=key) as stored:
                    assert await stored.json() == response  # also of the process that was killed
                async with http.post(
                    f"{url}/s/{ticket.id}/outcome", json={"reward": 1}, headers=key
                ) as answer:
                    assert answer.status == 200
        async with FilesTransport(tmp_path / "outcomes") as outcomes:
            waiting = [
                PendingAttempt(rollout_of(session), Attempt.from_session_id(session)) for session in SESSIONS
            ]
            assert len(await outcomes.sweep(waiting)) == 8
        records = [await admin.finalize(session) for session in SESSIONS]
        assert [len(record.turns) for record in records] == [4] * 8


def rollout_of(session: str) -> Rollout:
    return Rollout(id=session.partition(".")[0], exp_id="exp", group_id="g", task=Task("t", {}))


def spec_of(session: str) -> SessionSpec:
    rollout = rollout_of(session)
    return SessionSpec(
        id=session, rollout_id=rollout.id, attempt=1, group_id="g", exp_id=rollout.exp_id, input_id="t"
    )


async def talk(base_url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        messages: list = [{"role": "user", "content": "Hi"}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]


async def respond(http: aiohttp.ClientSession, url: str, key: str) -> dict[str, Any]:
    """A response, over the one connection of all sessions."""
    body, headers = {"model": "m", "input": "Hi"}, {"authorization": f"Bearer {key}"}
    async with http.post(f"{url}/v1/responses", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def kill_one(pid: int) -> None:
    before = children(pid)
    os.kill(before[0], signal.SIGKILL)
    async with asyncio.timeout(60):
        while len(set(children(pid)) - set(before[:1])) < 2:
            await asyncio.sleep(0.1)


async def until_there(admin: HttpGateway, session: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with suppress(Unavailable):
                assert (await admin.state(session)).calls == 4
                return
            await asyncio.sleep(0.2)


def test_connection_is_routed_by_path_or_key() -> None:
    by_path = route(b"POST /s/r1.1/v1/messages HTTP/1.1\r\nHost: x\r\n\r\n", 7)
    by_key = route(b"POST /v1/messages HTTP/1.1\r\nX-Api-Key: afk-r1.1~infer~00\r\n\r\n", 7)
    assert by_path == by_key == owner("r1.1", 7)
    assert 0 <= route(b"\x16\x03\x01 no http at all", 7) < 7


async def test_output_after_the_ready_line_goes_to_stderr() -> None:
    script = (
        "from afield.cli.gateway import print_ready\n"
        "print_ready({'model': 'm'})\n"
        "print('x' * 1_000_000, flush=True)\n"
        "print_ready({})"
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=pipe, stderr=pipe)
    assert process.stdout and process.stderr
    assert json.loads(await process.stdout.readline()) == {"model": "m"}
    assert len(await process.stderr.read()) > 1_000_000
    assert (await process.wait(), await process.stdout.read()) == (0, b"")
