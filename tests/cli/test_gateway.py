"""`afield gateway`: startup, announced address, limits and termination."""

from __future__ import annotations

import io
import json
import shlex
import signal
import socket
import sqlite3
import subprocess
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.cli.conftest import RunCommand

from afield.errors import UsageError
from afield.interfaces import SessionSpec
from afield.jobs.training import gateway_child
from afield.orchestrator.state import RunDirectory
from afield.sdk.listen import listen
from afield.settings.train import train_config
from support.gateways import POLICY
from support.processes import command, finish, start, unlearned


def test_a_port_in_use_is_refused_before_the_model_is_loaded(run_command: RunCommand) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run_command("gateway", "--model", POLICY, "--port", port)
    assert code == 2
    assert f"port {port}" in err and "--port" in err


def test_the_listener_allows_tcp_nodelay_and_refuses_invalid_ports() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # asyncio's condition for TCP_NODELAY
    with pytest.raises(UsageError, match="99999"):
        listen("127.0.0.1", 99999)


def test_partial_replies_are_stored_as_aborted_on_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"token_ids": [5, 6, 7], "fail": "hang"}) + "\n")
    options = ("--model", POLICY, "--engine", f"scripted={script}", "--port", 0, "--store", "store")
    process = start(tmp_path, "gateway", "--json", *options)
    assert process.stdout
    address = json.loads(process.stdout.readline())

    def post(path: str, body: object, key: str) -> urllib.request.Request:
        headers = {"authorization": f"Bearer {key}"}
        return urllib.request.Request(address["url"] + path, json.dumps(body).encode(), headers)

    with urllib.request.urlopen(post("/sessions", {"id": "r.1"}, address["admin_key"]), timeout=30) as reply:
        key = json.loads(reply.read())["api_key"]
    chat = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    with urllib.request.urlopen(post("/s/r.1/v1/chat/completions", chat, key), timeout=30) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process, 60)
    assert code == 0, err
    assert "Traceback" not in err
    assert not out and "curl" not in err  # --json prints one line
    with closing(sqlite3.connect(tmp_path / "store" / "gateway.sqlite")) as store:
        assert store.execute("SELECT status FROM turns").fetchall() == [("aborted",)]


def test_a_gateway_that_is_loading_its_model_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    words = command("gateway", "--model", POLICY, "--port", 0)
    words[1:1] = ["-X", "importtime"]
    loading = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert loading.stderr
    while "torch" not in (line := loading.stderr.readline()):
        assert line, "it ended before it loaded torch"
    loading.terminate()
    assert finish(loading, 60)[0] == -signal.SIGTERM


@pytest.mark.parametrize("key", ["generated", "configured"])
def test_the_printed_curl_command_opens_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    if key == "configured":
        monkeypatch.setenv("AFIELD_ADMIN_KEY", "a word of my own")
    _, script, _ = unlearned(tmp_path)
    serving = start(tmp_path, "gateway", "--model", POLICY, "--port", 0, "--engine", script)
    assert serving.stderr
    try:
        while "curl" not in (line := serving.stderr.readline()):
            assert line, "it ended without a curl command"
        assert ("$AFIELD_ADMIN_KEY" in line) == (key == "configured") and "my own" not in line
        reply = subprocess.run(["sh", "-c", line.strip()], capture_output=True, text=True, timeout=60)
    finally:
        serving.terminate()
        finish(serving, 60)
    session = json.loads(reply.stdout)
    assert session["base_url"].startswith("http://127.0.0.1:") and session["api_key"]
    assert shlex.split(line)[:4] == ["curl", "-s", "-X", "POST"]


@pytest.mark.anyio
async def test_the_gateway_of_a_run_has_the_limits_of_the_run(tmp_path: Path) -> None:
    script = str(unlearned(tmp_path)[1])
    settings: dict[str, Any] = {"agent": "a.py:agent", "model": str(POLICY), "engine": script}
    config = train_config(None, settings | {"max_submission_mb": 1, "max_rewards": 2, "path_keys": True})
    async with gateway_child(config, RunDirectory(tmp_path / "run")) as child:
        async with await child.client() as gateway:
            session = await gateway.open(SessionSpec(id="r.1"))
        bodies = [{"reward": 1.0, "name": name} for name in "abc"]
        bodies.append({"reward": 1.0, "name": "a", "metadata": {"large": "x" * 2_000_000}})
        replies: list[str] = []
        assert session.base_url.endswith(f"/k/{session.api_key}")
        async with aiohttp.ClientSession() as http:
            for body in map(json.dumps, bodies):
                data = io.BytesIO(body.encode())
                async with http.post(f"{session.base_url}/reward", data=data) as response:
                    replies.append(await response.text())
    assert "error" not in replies[0] + replies[1]
    assert "too_many_rewards" in replies[2]
    assert str(1024 * 1024) in replies[3]
