"""A gateway that is started before its engine waits for it, and says so."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces.engine import GenerateRequest
from support.fake_vllm import FakeVllm, serving
from support.gateways import POLICY
from support.ports import free_ports

pytestmark = pytest.mark.anyio


def counting(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(range(5, 5 + call.max_tokens)))


async def gateway(store: Path, port: int, timeout_s: float) -> asyncio.subprocess.Process:
    arguments = [
        "gateway",
        "--model",
        str(POLICY),
        "--engine",
        f"vllm=http://127.0.0.1:{port}",
        "--port",
        "0",
    ]
    arguments += ["--store", str(store), "--json", "--engine-start-timeout", f"{timeout_s:g}"]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "afield", *arguments, "--exit-with-parent", stdin=pipe, stdout=pipe, stderr=pipe
    )


async def test_gateway_waits_for_its_engine(tmp_path: Path) -> None:
    [port] = free_ports(1)
    process = await gateway(tmp_path, port, 300)
    assert process.stdout and process.stderr
    try:
        async with asyncio.timeout(120):
            while b"none ready waited_s" not in (line := await process.stderr.readline()):
                assert line, "it ended"
        assert f"cannot connect to http://127.0.0.1:{port}".encode() in line
        async with serving(FakeVllm(ScriptedEngine(counting)), port):
            line = await asyncio.wait_for(process.stdout.readline(), 120)
            assert json.loads(line)["url"]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def test_missing_engine_fails_with_a_remedy(tmp_path: Path) -> None:
    [port] = free_ports(1)
    process = await gateway(tmp_path, port, 1)
    _, stderr = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    last = stderr.decode().strip().splitlines()[-1]
    assert last.startswith("afield: no engine answered within 1 s: vllm-1: cannot connect to")
    assert "start the engine" in last and "ClientConnector" not in stderr.decode()
