"""Unusual and hostile clients over HTTP; each case is a fixed defect."""

from __future__ import annotations

import asyncio
import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.gateway.test_shards import gateway, hello

from afield.cli.main import main
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.gateway.dialects import Dialects, RawRequest
from afield.gateway.http import ByteStream
from afield.gateway.model_request import CallStarted
from afield.gateway.responder import send_keepalives
from afield.gateway.server import ConnectionLimits
from afield.interfaces import SessionSpec
from afield.types import Budget
from support import virtual_time
from support.fake_vllm import FakeVllm, serving
from support.gateways import ADMIN, POLICY, Running, running, vocabulary
from support.processes import command
from support.tokenizers import load_tokenizer
from support.turns import read_events

pytestmark = pytest.mark.anyio
VOCAB = vocabulary()
STOP = VOCAB.encode("<|im_end|>")[0]
CALL = '<tool_call>\n{"name": "get_price", "arguments": {"item": "mug"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_price", "parameters": {"type": "object"}}}]
HI: dict[str, Any] = {"role": "user", "content": "Hi"}


def said(text: str, **rest: Any) -> ScriptedReply:
    return ScriptedReply(token_ids=(*VOCAB.encode(text), STOP), **rest)


async def opened(up: Running, session_id: str = "r.1") -> str:
    return (await up.client.open(SessionSpec(id=session_id))).api_key


async def chat(up: Running, key: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "tools": TOOLS, **more}
    status, answer = await up.ask("POST", "/v1/chat/completions", body, key)
    assert status == 200, answer
    return answer["choices"][0]


async def streamed(up: Running, key: str, messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    body = {"model": "m", "messages": messages, "tools": TOOLS, "stream": True, **more}
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        return [event["choices"][0] for event in read_events(await response.read())]


@pytest.mark.parametrize("size", [1, 100])
async def test_text_after_a_stop_string_is_never_sent(tmp_path: Path, size: int) -> None:
    answer = said(f"It costs  END {CALL}", chunks=(size,))
    async with running(ScriptedEngine([answer, answer]), tmp_path) as up:
        key = await opened(up)
        whole = await chat(up, key, [HI], stop=["END"])
        pieces = await streamed(up, key, [HI], stop=["END"])
        (first, second) = (await up.client.finalize("r.1")).turns
    assert (whole["message"]["content"], whole["finish_reason"]) == ("It costs  ", "stop")
    assert "tool_calls" not in whole["message"]
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == "It costs  "
    assert pieces[-1]["finish_reason"] == "stop"
    assert first.messages == second.messages


@pytest.mark.parametrize("size", [1, 100])
async def test_token_budget_holds_for_large_chunks(tmp_path: Path, size: int) -> None:
    answer = said("One two three four five six.", chunks=(size,))
    budget = Budget(tokens=len(answer.token_ids) + 5)
    async with running(ScriptedEngine([answer] * 3), tmp_path) as up:
        key = (await up.client.open(SessionSpec(id="r.1", budget=budget))).api_key
        await chat(up, key, [HI])
        cut = await chat(up, key, [HI])
        status, refused = await up.ask("POST", "/v1/chat/completions", {"messages": [HI]}, key)
        state = await up.client.state("r.1")
    assert cut["finish_reason"] == "length"
    assert (status, refused["error"]["code"]) == (400, "budget_exhausted")
    assert state.tokens["sampled"] == budget.tokens


async def test_turn_echoed_as_two_messages_matches(tmp_path: Path) -> None:
    engine = ScriptedEngine([said(f"Let me see. {CALL}"), said("Four."), said("Bye.")])
    async with running(engine, tmp_path) as up:
        key = await opened(up)
        made = (await chat(up, key, [HI]))["message"]
        history = [
            HI,
            {"role": "assistant", "content": made["content"]},
            {"role": "assistant", "content": None, "tool_calls": made["tool_calls"]},
            {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "4"},
        ]
        reply = (await chat(up, key, history))["message"]
        await chat(up, key, [*history, reply, {"role": "user", "content": "Thanks"}])
        record = await up.client.finalize("r.1")
    assert [turn.parent for turn in record.turns] == [None, "t1", "t2"]
    assert len(record.trajectories) == 1


async def test_repeated_version_prefix_is_accepted(tmp_path: Path) -> None:
    gemini = {"contents": [{"parts": [{"text": "Hi"}]}]}
    messages = {"messages": [HI], "max_tokens": 9}
    bodies: dict[str, Any] = {
        "/s/r.1/v1/v1beta/models/m:generateContent": gemini,
        "/s/r.1/v1beta/v1beta/models/m:generateContent": gemini,
        "/v1/v1beta/models/m:generateContent": gemini,
        "/s/r.1/v1beta/v1/chat/completions": messages,
        "/s/r.1/v1/v1/v1/messages": messages,
        "/s/r.1/responses/input_tokens": {"input": "Hi"},
    }
    async with running(ScriptedEngine(lambda _: said("Hello.")), tmp_path) as up:
        key = await opened(up)
        statuses = {path: (await up.ask("POST", path, body, key))[0] for path, body in bodies.items()}
    assert statuses == dict.fromkeys(bodies, 200)


async def test_empty_request_gets_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine([said("Hello.")] * 2), tmp_path) as up:
        key = await opened(up)
        status, answer = await up.ask("POST", "/v1/responses", {"input": [{"type": "a_new_kind"}]}, key)
        assert (status, answer["error"]["code"]) == (400, "invalid_request_error")
        thought = {"input": [{"type": "reasoning", "summary": []}]}
        assert (await up.ask("POST", "/v1/responses", thought, key))[0] == 200
        await chat(up, key, [{"role": "assistant", "content": ""}])


async def test_invalid_session_filters_get_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path) as up:
        await opened(up)
        for asked, named in (("phase=done", "'done'"), ("limit=0", "limit=0"), ("limit=nan", "limit=nan")):
            status, answer = await up.ask("GET", f"/sessions?{asked}")
            assert status == 400 and named in answer["error"]["message"]
        status, answer = await up.ask("GET", "/sessions?phase=open&limit=5000")
        assert [state["id"] for state in answer["sessions"]] == ["r.1"]


async def test_reward_for_an_unknown_turn_gets_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine([said("Hello.")]), tmp_path) as up:
        key = await opened(up)
        await chat(up, key, [HI])
        status, answer = await up.ask("POST", "/s/r.1/reward", {"reward": 1, "turn": "t9"}, key)
        assert status == 400 and "'t9'" in answer["error"]["message"]
        status, answer = await up.ask("POST", "/s/r.1/reward", {"reward": 1, "turn": "t1"}, key)
        assert (status, answer["rewards"]) == (200, [{"reward": 1.0, "turn": "t1"}])


async def test_all_forms_list_dangling_calls(tmp_path: Path) -> None:
    process, told = start(tmp_path, [{"token_ids": [5, 6], "fail": "hang"}])
    try:
        _, writer = await half_an_answer(told)
    finally:
        process.kill()
        process.communicate()
    writer.close()
    process, told = start(tmp_path, [{"text": "Hello."}])
    try:
        headers = {"authorization": f"Bearer {told['admin_key']}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for form in ("linear", "turns", "tree"):
                async with http.get(f"{told['url']}/sessions/r.1/trajectories?form={form}") as response:
                    excluded = (await response.json())["excluded"]
                assert excluded == [{"turn": "t1", "tokens": 0, "reason": "dangling"}], form
            async with http.get(f"{told['url']}/sessions/nobody") as response:
                assert response.status == 404
    finally:
        process.kill()
        _, log = process.communicate()
    assert "nobody" in json.loads(log.splitlines()[-1])["message"]


async def test_stopping_gateway_answers_503(tmp_path: Path) -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=(5, 6), fail="hang")])
    async with running(engine, tmp_path, connections=ConnectionLimits(shutdown_s=0)) as up:
        reader, writer = await half_an_answer({"url": up.url, "admin_key": ADMIN})
    rest = (await reader.read()).decode()
    writer.close()
    assert '"code":"engine_unavailable"' in rest and "is being stopped" in rest


def test_keepalives_bound_the_silence_of_a_stream() -> None:
    sent_at: list[float] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            sent_at.append(asyncio.get_running_loop().time())

    async def stream() -> None:
        match = Dialects(load_tokenizer()).match("/v1/messages")
        assert match
        body = json.dumps({"messages": [HI], "max_tokens": 9, "stream": True}).encode()
        _, options = match.dialect.decode(RawRequest("/v1/messages", body, {}, {}, {}))
        encoder, out = match.dialect.stream(CallStarted("r.1", "t1", (), 0.0), options), ByteStream(send)
        pinging = asyncio.create_task(send_keepalives(encoder, out, 10.0))
        for pause in (3.0, 4.9, 60.0, 7.5):
            await out.emit(encoder.keepalive())
            await asyncio.sleep(pause)
        pinging.cancel()

    virtual_time.run(stream())
    assert 9 < len(sent_at) < 20
    assert all(later - earlier <= 10 for earlier, later in pairwise(sent_at))


async def test_web_socket_gets_404(tmp_path: Path) -> None:
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with running(ScriptedEngine([]), tmp_path) as up:
        key = {"authorization": f"Bearer {await opened(up)}", "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg=="}
        status, answer = await up.ask("GET", "/v1/responses", headers=upgrade | key)
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_shards_return_the_same_errors(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with (
        serving(FakeVllm(ScriptedEngine(hello))) as engine,
        gateway(tmp_path, engine) as (url, _),
        aiohttp.ClientSession(headers=headers) as http,
    ):

        async def told(method: str, path: str, body: Any = None) -> tuple[int, str]:
            async with http.request(method, url + path, json=body) as response:
                answer = await response.json()
                return response.status, answer.get("error", {}).get("type", "")

        assert await told("POST", "/policy", {"version": 5, "path": str(POLICY)}) == (200, "")
        assert await told("POST", "/policy", {"version": 4}) == (409, "conflict")
        assert await told("POST", "/policy", {"version": "x"}) == (400, "invalid_request_error")
        assert await told("DELETE", "/engines/nobody") == (404, "not_found")


def start(cwd: Path, rows: list[dict[str, Any]]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A gateway process in front of a script, and what it says of itself."""
    (cwd / "script.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", POLICY, "--engine", "scripted=script.jsonl", "--port", 0, "--store", "store"]
    words += ["--json", "--log-format", "json"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command("gateway", *words), cwd=cwd, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout
    return process, json.loads(process.stdout.readline())


async def half_an_answer(told: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A streaming call of a new session, of which the first event has come."""
    headers = {"authorization": f"Bearer {told['admin_key']}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{told['url']}/sessions", json={"id": "r.1"}, headers=headers) as response,
    ):
        key = (await response.json())["api_key"]
    reader, writer = await asyncio.open_connection(*told["url"].removeprefix("http://").split(":"))
    body = json.dumps({"messages": [HI], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.wait_for(reader.readuntil(b"data: "), 60)
    return reader, writer


@pytest.mark.parametrize(
    "url", ["gateway.example:8400", "ftp://gateway.example", "https://", "http://x/?a=b"]
)
def test_invalid_public_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(POLICY), "--engine", "scripted=x", "--port", "0", "--public-url", url]
    assert main(["gateway", *options]) == 2
    assert "--public-url" in capsys.readouterr().err
