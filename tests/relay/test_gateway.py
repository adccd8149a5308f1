"""A gateway behind a relay: base URLs, sessions on their process, engines that dial out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.gateways import POLICY
from support.ports import free_ports

pytestmark = pytest.mark.anyio
ADMIN = "admin-key-of-the-test"
SECRET = "0123456789abcdef0123456789abcdef"


@asynccontextmanager
async def program(*words: object) -> AsyncIterator[dict[str, Any]]:
    """Run `afield WORDS --json` and yield its first line."""
    command = [sys.executable, "-m", "afield", *map(str, words), "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def relay(folder: Path) -> AsyncIterator[list[object]]:
    """Run a relay and yield the flags of processes that dial out to it."""
    secret = folder / "lab.secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    async with program("relay", "--port", 0, "--cluster", f"lab={secret}") as started:
        yield ["--relay", started["url"], "--relay-cluster", "lab", "--relay-secret-file", secret]


def gateway(folder: Path, *flags: object) -> list[object]:
    script = folder / "script.jsonl"
    script.write_text(json.dumps({"match": "", "text": "Yes."}) + "\n")
    common = ["gateway", "--model", POLICY, "--port", 0, "--admin-key", ADMIN, "--store", folder / "store"]
    return [*common, "--engine", f"scripted={script}", *flags]


async def opened(url: str, session_id: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{url}/sessions", json={"id": session_id}) as response,
    ):
        assert response.status in (200, 201), await response.text()
        return await response.json()


async def ask(session: dict[str, Any], path: str = "chat/completions") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {session['api_key']}"}
    body = {"model": "m", "messages": [{"role": "user", "content": "Is it so?"}]}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{session['openai_base_url']}/{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def test_agents_reach_a_gateway_through_the_relay(tmp_path):
    async with relay(tmp_path) as flags, program(*gateway(tmp_path, *flags, "--relay-name", "g1")) as started:
        session = await opened(started["local_url"], "s.1")
        assert session["base_url"].startswith(f"{flags[1]}/c/lab/g/g1/t/")
        status, answer = await ask(session)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Yes.")
        assert (await ask({**session, "api_key": "wrong"}))[0] == 401
        other = await opened(started["local_url"], "s.2")
        assert (await ask({**session, "api_key": other["api_key"]}))[0] == 401


async def test_engine_that_dials_out_serves_a_gateway(tmp_path):
    """A gateway takes the place of a vLLM server here: it has the same chat endpoint."""
    (tmp_path / "engine").mkdir()
    async with (
        relay(tmp_path) as flags,
        program(*gateway(tmp_path / "engine")) as engine,
        program("dial", "--to", engine["local_url"], *flags, "--relay-name", "worker1") as dialled,
    ):
        session = await opened(dialled["url"], "e.1")  # the admin API of the engine, through the relay
        path = session["openai_base_url"].removeprefix(engine["url"])
        status, answer = await ask({**session, "openai_base_url": dialled["url"] + path})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Yes.")


AGENT = """
import openai
import afield

@afield.agent
def agent(task, rollout):
    client = openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages = [{"role": "user", "content": task["question"]}]
    reply = client.chat.completions.create(model=rollout.model_id, messages=messages)
    print(rollout.openai_base_url)
    return {"reward": float(reply.choices[0].message.content == "Yes.")}
"""


async def test_agents_of_a_training_run_reach_its_gateway_through_the_relay(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "Is it so?"}\n')
    (tmp_path / "script.jsonl").write_text('{"match": "", "text": "Yes."}\n')
    words = ["train", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", POLICY, "--run", "far.1"]
    words += ["--engine", "scripted=script.jsonl", "--deliver", "gateway", "--freeze-weights", "--steps", 1]
    words += ["--tasks-per-step", 1, "--rollouts", 2, "--json"]
    async with relay(tmp_path) as flags:
        command = [sys.executable, "-m", "afield", *map(str, [*words, *flags[:4]])]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=tmp_path,
            env=os.environ | {"AFIELD_RELAY_SECRET": SECRET},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0, out
    assert json.loads(out.splitlines()[-1])["last"] == 1.0
    logs = "".join(file.read_text() for file in (tmp_path / "runs/far.1/logs").rglob("*.log"))
    assert logs.count(f"{flags[1]}/c/lab/g/far-1/t/") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--relay", "relay.example"], "must be an address, such as"),
        (["--relay", "http://127.0.0.1:1"], "--relay-cluster NAME"),
        (["--relay", "http://127.0.0.1:1", "--relay-cluster", "lab"], "--relay-secret-file"),
        (["--engine", "relay=vllm:w"], "needs the address of the relay"),
    ],
)
async def test_wrong_relay_settings_are_named(tmp_path, flags: list[str], message: str):
    command = [sys.executable, "-m", "afield", *map(str, gateway(tmp_path, *flags))]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert message in err.decode()


async def test_relay_without_a_cluster_is_refused():
    command = [sys.executable, "-m", "afield", "relay", "--port", str(free_ports(1)[0])]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2 and b"--cluster NAME=FILE" in err


async def test_relay_and_gateway_take_the_secret_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("AFIELD_RELAY_SECRET", "0123456789abcdef0123456789abcdef")
    async with (
        program("relay", "--port", 0, "--cluster", "lab") as relay,
        program(*gateway(tmp_path, "--relay", relay["url"], "--relay-cluster", "lab")) as started,
    ):
        assert (await ask(await opened(started["local_url"], "s.1")))[0] == 200


@pytest.mark.parametrize(("secret", "message"), [("", b"NAME=FILE"), ("short", b"at least 16")])
async def test_cluster_without_a_usable_secret_is_refused(monkeypatch, secret: str, message: bytes):
    monkeypatch.setenv("AFIELD_RELAY_SECRET", secret)
    command = [sys.executable, "-m", "afield", "relay", "--port", "0", "--cluster", "lab"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 2 and message in err
