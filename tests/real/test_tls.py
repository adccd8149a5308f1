"""Relay and gateway behind nginx as documented: TLS, streams, long pauses, large bodies."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from tokenizers import Tokenizer

from support.certificates import Certificate, certificate
from support.gateways import POLICY
from support.paths import ROOT
from support.ports import free_ports

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]
DOCUMENTED = (ROOT / "deploy" / "nginx" / "afield.conf").read_text()
ADMIN = "admin-key-of-the-test"
SECRET = "0123456789abcdef0123456789abcdef"
MAIN = """daemon off;
user root;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/afield.conf;
}}
"""
PAUSE_S = 65.0
"""Time until the first token; longer than nginx's default timeout of 60 s."""


def documented(port: int, upstream: int, tls: Certificate) -> str:
    """The documented configuration with this test's ports and files."""
    text = DOCUMENTED
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("server 127.0.0.1:8500;", f"server 127.0.0.1:{upstream};"),
        ("relay.example", "localhost"),
        ("/etc/ssl/afield/fullchain.pem", str(tls.chain)),
        ("/etc/ssl/afield/privkey.pem", str(tls.key)),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def write_config(folder: Path, site: str) -> list[str]:
    """Write nginx's files and test them; returns nginx's command."""
    folder.mkdir()
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    (folder / "afield.conf").write_text(site)
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    return command


@asynccontextmanager
async def nginx(folder: Path, site: str) -> AsyncIterator[None]:
    if shutil.which("nginx") is None or os.getuid() != 0:
        reason = "needs root and nginx (on Debian: apt-get install nginx)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    command = write_config(folder, site)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def program(*words: object, **environment: str) -> AsyncIterator[dict[str, Any]]:
    """Run `afield WORDS --json` and yield its first line."""
    command = [sys.executable, "-m", "afield", *map(str, words), "--json"]
    env = {**os.environ, "AFIELD_RELAY_SECRET": SECRET, "AFIELD_ADMIN_KEY": ADMIN, **environment}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
    assert process.stdout is not None
    try:
        with anyio.fail_after(120):
            yield json.loads(await process.stdout.readline())
    finally:
        process.terminate()
        await process.wait()


def gateway_words(folder: Path, *more: object) -> list[object]:
    script = folder / "script.jsonl"
    rows = [
        {"match": "Hang", "token_ids": tokens("It is so"), "fail": "hang"},
        {"match": "Pause", "text": "After the pause.", "chunks": [999], "delay_s": PAUSE_S},
        {"match": "", "text": "Yes."},
    ]
    script.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["gateway", "--model", POLICY, "--port", 0, "--engine", f"scripted={script}"]
    return [*words, "--store", folder / "store", *more]


def tokens(text: str) -> list[int]:
    return Tokenizer.from_file(str(POLICY / "tokenizer.json")).encode(text).ids


class Agent:
    """HTTP client of one session that trusts the test's certificate authority."""

    def __init__(self, http: aiohttp.ClientSession, session: dict[str, Any]) -> None:
        self.http, self.session = http, session

    def post(self, base_url: str, text: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {self.session['api_key']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **body}
        data = io.BytesIO(json.dumps(body).encode())
        return self.http.post(f"{base_url}/chat/completions", data=data, headers=headers)

    async def stream(self, base_url: str, text: str) -> AsyncIterator[dict[str, Any]]:
        async with self.post(base_url, text, stream=True) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    async def whole(self, base_url: str, text: str) -> tuple[int, str]:
        async with self.post(base_url, text) as response:
            return response.status, await response.text()

    async def text(self, base_url: str, text: str) -> str:
        events = [event async for event in self.stream(base_url, text)]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@asynccontextmanager
async def agent(local_url: str, tls: Certificate) -> AsyncIterator[Agent]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=tls.authority))
    async with aiohttp.ClientSession(connector=connector) as http:
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with http.post(f"{local_url}/sessions", json={"id": "s.1"}, headers=headers) as response:
            assert response.status in (200, 201), await response.text()
            yield Agent(http, await response.json())


async def check_proxied(client: Agent) -> None:
    """Answers, events before the end of a stream, and bodies above nginx's default limit."""
    url = client.session["openai_base_url"]
    assert url.startswith("https://localhost:")
    assert await client.text(url, "Is it so?") == "Yes."
    text = ""
    with anyio.fail_after(60):
        async for event in client.stream(url, "Hang"):  # this stream never ends
            text += event["choices"][0]["delta"].get("content") or ""
            if text.startswith("It is"):
                break
    async with client.post(url, "long " * 600_000) as response:
        error = await response.json()
        assert (response.status, error["error"]["code"]) == (400, "context_length_exceeded"), error
    async with client.http.get(f"{url}/models", headers={"authorization": "Bearer wrong"}) as response:
        assert response.status == 401


async def test_agents_and_gateways_reach_a_relay_behind_nginx(tmp_path: Path) -> None:
    tls = certificate(tmp_path / "tls")
    public, upstream = free_ports(2)
    relay = ("relay", "--port", upstream, "--cluster", "lab", "--max-connections-per-address", 32768)
    dial_out = ("--relay", f"https://localhost:{public}", "--relay-cluster", "lab", "--relay-name", "g1")
    async with (
        nginx(tmp_path / "nginx", documented(public, upstream, tls)),
        program(*relay),
        program(*gateway_words(tmp_path, *dial_out), SSL_CERT_FILE=str(tls.authority)) as gateway,
        agent(gateway["local_url"], tls) as client,
    ):
        assert "/c/lab/g/g1/" in client.session["base_url"]
        await check_proxied(client)


async def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    tls = certificate(tmp_path / "tls")
    public, upstream = free_ports(2)
    words = gateway_words(tmp_path, "--relay", f"https://localhost:{public}", "--relay-cluster", "lab")
    async with (
        nginx(tmp_path / "nginx", documented(public, upstream, tls)),
        program("relay", "--port", upstream, "--cluster", "lab"),
    ):
        command = [sys.executable, "-m", "afield", *map(str, words)]
        env = {**os.environ, "AFIELD_RELAY_SECRET": SECRET, "AFIELD_ADMIN_KEY": ADMIN}
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=env)
        assert process.stderr is not None
        with anyio.fail_after(60):
            while b"CERTIFICATE_VERIFY_FAILED" not in (line := await process.stderr.readline()):
                assert line, "the gateway ended without naming the certificate"
        process.terminate()
        await process.wait()


async def test_a_gateway_behind_nginx_and_a_call_of_more_than_a_minute(tmp_path: Path) -> None:
    """The call is cut without the documented timeout, by nginx's default of 60 s."""
    tls = certificate(tmp_path / "tls")
    public, default, upstream = free_ports(3)
    unset = re.sub(r" *proxy_read_timeout .*\n", "", documented(default, upstream, tls))
    assert "proxy_read_timeout" not in unset
    words = gateway_words(tmp_path, "--public-url", f"https://localhost:{public}")
    words[words.index("--port") + 1] = upstream
    async with (
        nginx(tmp_path / "nginx", documented(public, upstream, tls)),
        nginx(tmp_path / "default", unset),
        program(*words) as gateway,
        agent(gateway["local_url"], tls) as client,
    ):
        await check_proxied(client)
        url = client.session["openai_base_url"]
        cut, whole, streamed = await asyncio.gather(
            client.whole(url.replace(str(public), str(default)), "Pause a"),
            client.whole(url, "Pause b"),
            client.text(url, "Pause c"),
        )
        assert (cut[0], whole[0], streamed) == (504, 200, "After the pause.")
        assert json.loads(whole[1])["choices"][0]["message"]["content"] == "After the pause."
