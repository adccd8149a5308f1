"""A runtime with a store beside it, as a collector has them; and servers that somebody else started."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from msgspec import Struct

from afield.interfaces.runtime import Exit, Runtime
from afield.interfaces.transport import Fence, PendingAttempt
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Rollout, Task
from afield.wire import OutcomeRecord
from agents.invoking import EXP, invocation, payload
from agents.sink import Sink

AGENTS = Path(__file__).parent
ACTING = f"{AGENTS / 'acting.py'}"
BOUND_S = 120.0


def waiting_for(attempt: Attempt) -> PendingAttempt:
    """What `agents.invoking.invocation` invokes."""
    rollout = Rollout(id=attempt.rollout_id, exp_id=EXP, group_id="g", task=Task("t", {}))
    return PendingAttempt(rollout, attempt)


class Spec(Struct, frozen=True):
    """How to build a runtime, in this process or another one."""

    maker: str
    """`package.module:function`, importable from the project's root."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, which are JSON."""

    @classmethod
    def of(cls, function: Callable[..., Runtime], options: dict[str, Any]) -> Spec:
        return cls(f"{function.__module__}:{function.__qualname__}", options)

    def build(self) -> Runtime:
        module, _, function = self.maker.partition(":")
        return getattr(importlib.import_module(module), function)(**self.options)


class Place:
    """With a sink, outcomes go there over HTTP and agents can tell; without, the store's files are shared."""

    def __init__(self, runtime: Runtime, transport: FilesTransport, sink: Sink | None = None) -> None:
        self.runtime = runtime
        self.transport = transport
        self.sink = sink

    def payload(self, row: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
        if self.sink is None:
            return payload(row, invocation(attempt.rollout_id, attempt.n, **self.transport.address(EXP)))
        return payload({"tell": f"{self.sink.url}/tell", **row}, self.sink.invocation(attempt))

    async def launch(self, row: dict[str, Any], rollout_id: str = "r", n: int = 1) -> Attempt:
        attempt = Attempt(rollout_id, n)
        with anyio.fail_after(BOUND_S):
            await self.runtime.launch(attempt, self.payload(row, attempt))
        return attempt

    async def wait(self, attempt: Attempt) -> Exit:
        with anyio.fail_after(BOUND_S):
            return await self.runtime.wait(attempt)

    async def decision(self, attempt: Attempt) -> OutcomeRecord | Fence | None:
        return await self.transport.decision(waiting_for(attempt))

    async def reward(self, attempt: Attempt) -> float | None:
        decision = await self.decision(attempt)
        assert isinstance(decision, OutcomeRecord), decision
        return decision.outcome.reward


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(BOUND_S):
        while not condition():
            await anyio.sleep(0.02)


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


class Server:
    """`python -m afield.sdk.serve`, as an operator runs it."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def serving(target: str = f"{ACTING}:act", port: int = 0) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "afield.sdk.serve", target, "--port", str(port), "--outcome-root", "/"]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(BOUND_S):
                served_at = int(await process.stdout.receive())
            yield Server(process, served_at)
        finally:
            if process.returncode is None:
                process.kill()
