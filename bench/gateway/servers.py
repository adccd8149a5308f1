"""Servers of the gateway benchmark: start, address, measure and stop them.

Each runs in its own process on loopback, with one worker and its defaults, in front of the same upstream. CPU
time is that of the process and its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from afield.utils.installations import python_environment
from bench.gateway.http_client import connect, post

HERE = Path(__file__).parent
AFIELD = Path(sys.executable).parent / "afield"
RLLM = ("rllm-model-gateway==0.1.0",)
LITELLM = ("litellm[proxy]==1.104.5",)
PINS = {"rllm": RLLM[0], "litellm": LITELLM[0]}
ADMIN = f"sk-{secrets.token_hex(32)}"  # made up for each run; afield and LiteLLM want one
NAMES = ("afield", "rllm", "litellm", "capture")


class Server:
    """A running server. `target` says where a session's calls go and with which key."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], url: str) -> None:
        self.name, self.process, self.url = name, process, url
        self.asks_ids = name in ("litellm", "capture", "upstream")  # the others ask the engine themselves
        self._targets: list[tuple[str, str]] = []

    async def prepare(self, sessions: int) -> None:
        """Open sessions, where the server knows such a thing."""
        if self.name == "rllm":
            self._targets = [(f"/sessions/s{n}/v1/chat/completions", "none") for n in range(sessions)]
        elif self.name == "afield":
            self._targets += await self._open(sessions - len(self._targets))
        else:
            self._targets = [("/v1/chat/completions", ADMIN)] * sessions

    async def _open(self, sessions: int) -> list[tuple[str, str]]:
        connection, targets = await connect(self.url), []
        for _ in range(sessions):
            reply = await connection.ask(post("/sessions", b"{}", ADMIN))
            assert reply.status == 201, reply.body
            session = json.loads(reply.body)
            targets.append((f"/s/{session['id']}/v1/chat/completions", session["api_key"]))
        connection.close()
        return targets

    async def fresh(self, sessions: int) -> list[tuple[str, str]]:
        """Sessions that nothing else uses."""
        if self.name == "afield":
            return await self._open(sessions)
        return [self.target(n) for n in range(sessions)]

    def target(self, n: int) -> tuple[str, str]:
        return self._targets[n % len(self._targets)]

    def cpu_s(self) -> float:
        return sum(process_cpu(pid) for pid in tree(self.process.pid))

    async def quiet_cpu_s(self) -> float:
        """The same, once work that was put off has been done."""
        seen = self.cpu_s()
        for _ in range(30):
            await asyncio.sleep(0.1)
            last, seen = seen, self.cpu_s()
            if seen - last < 0.003:
                break
        return seen

    def rss_mib(self) -> float:
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in tree(self.process.pid))
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def process_cpu(pid: int) -> float:
    """User and system time of a process, threads that ended included, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)


def tree(pid: int) -> list[int]:
    """A process and its descendants. Threads and processes that end meanwhile are skipped."""
    pids = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children = (task / "children").read_text().split()
                pids += [below for child in children for below in tree(int(child))]
    return pids


def upstream(answer: dict[str, Any], scratch: Path) -> AbstractAsyncContextManager[Server]:
    file = scratch / "answer.json"
    file.write_text(json.dumps(answer))
    port = free_port()
    command = [sys.executable, str(HERE / "upstream.py"), str(file), "--port", str(port)]
    return running("upstream", command, port, scratch, "/health")


def serving(
    name: str, model: Path, engine: str, cache: Path, scratch: Path
) -> AbstractAsyncContextManager[Server]:
    scratch.mkdir()
    port = free_port()
    command, health, environment = COMMANDS[name](port, model, engine, cache, scratch)
    return running(name, command, port, scratch, health, environment)


def afield_command(port: int, model: Path, engine: str, cache: Path, scratch: Path) -> Any:
    command = [str(AFIELD), "gateway", "--model", str(model), "--engine", f"vllm={engine}"]
    command += ["--port", str(port), "--store", str(scratch / "afield"), "--admin-key", ADMIN]
    return command, "/health", {}


def rllm_command(port: int, model: Path, engine: str, cache: Path, scratch: Path) -> Any:
    python = python_environment(cache, "rllm-model-gateway", RLLM)
    command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker", f"{engine}/v1", "--db-path", str(scratch / "rllm.db"), "--log-level", "warning"]
    return command, "/health", {}


def litellm_command(port: int, model: Path, engine: str, cache: Path, scratch: Path) -> Any:
    python = python_environment(cache, "litellm", LITELLM)
    parameters = {"model": "openai/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "policy", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False, "turn_off_message_logging": True, "num_retries": 0},
    }
    file = scratch / "litellm.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [str(python.parent / "litellm"), "--config", str(file), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1"]
    settings = {"LITELLM_MASTER_KEY": ADMIN, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    settings |= {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    return command, "/health/liveliness", settings


def capture_command(port: int, model: Path, engine: str, cache: Path, scratch: Path) -> Any:
    command = [sys.executable, str(HERE / "capture_proxy.py"), "--upstream", engine, "--port", str(port)]
    return [*command, "--file", str(scratch / "captured")], "/health", {}


COMMANDS = {
    "afield": afield_command,
    "rllm": rllm_command,
    "litellm": litellm_command,
    "capture": capture_command,
}


@asynccontextmanager
async def running(
    name: str,
    command: list[str],
    port: int,
    scratch: Path,
    health: str,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Server]:
    """In a process group of its own, so that whatever it starts is stopped with it."""
    log = scratch / f"{name}.log"
    process = start(command, log, environment or {})
    try:
        server = Server(name, process, f"http://127.0.0.1:{port}")
        await until_up(server, health, log)
        yield server
    finally:
        stop(process)


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
            cwd=log.parent,
        )


async def until_up(server: Server, health: str, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise SystemExit(f"{server.name} ended with {server.process.returncode}:\n{tail(log)}")
        try:
            connection = await connect(server.url)
            reply = await connection.ask(f"GET {health} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            connection.close()
            if reply.status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"{server.name} did not come up:\n{tail(log)}")


def stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
    process.wait(10)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
