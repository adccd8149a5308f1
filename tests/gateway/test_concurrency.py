"""What many clients do at the same moment is counted, grouped and served, each of it."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import Conflict
from afield.gateway.front import Process
from afield.gateway.sessions import SessionManager
from afield.gateway.store import AT_ONCE, GatewayStore, TurnRow
from afield.interfaces import SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.types import Sampling, Turn, TurnStatus
from support.gateways import running, vocabulary

pytestmark = pytest.mark.anyio

# A process that leaves its link alone until a line comes after its settings, and then counts what is on it.
BUSY_SHARD = """
import socket, sys
link = socket.socket(fileno=int(sys.stdin.readline()))
print("{}", flush=True)
sys.stdin.readline()
received = 0
while True:
    _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    received += len(descriptors)
    for descriptor in descriptors:
        socket.close(descriptor)
    print(received, flush=True)
"""


@asynccontextmanager
async def busy_process() -> AsyncIterator[Process]:
    process = Process([sys.executable, "-c", BUSY_SHARD], 0, {}, settings=lambda index, link: b"%d" % link)
    assert await process.start() == {}
    try:
        yield process
    finally:
        await process.stop()


async def handing_over(process: Process, connection: socket.socket, wait: int) -> list[asyncio.Task[None]]:
    """As many connections as fill the link, and then `wait` more."""
    handed: list[asyncio.Task[None]] = []
    while sum(not task.done() for task in handed) < wait:
        handed.append(asyncio.create_task(process.hand_over(connection)))
        await asyncio.sleep(0)
    return handed


async def test_waiting_connections_are_passed_to_a_busy_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with busy_process() as process:
            handed = await handing_over(process, theirs, wait=5)
            busy = process.process._running
            assert busy.stdin and busy.stdout
            busy.stdin.write(b"go\n")
            await asyncio.wait_for(asyncio.gather(*handed), 60)
            while int(await asyncio.wait_for(busy.stdout.readline(), 60)) < len(handed):
                pass


async def test_waiting_connection_fails_when_its_process_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with busy_process() as process:
            handed = await handing_over(process, theirs, wait=3)
        results = await asyncio.wait_for(asyncio.gather(*handed, return_exceptions=True), 60)
    assert [isinstance(result, OSError) for result in results[-3:]] == [True] * 3


class CountingStore(GatewayStore):
    """A store that counts its transactions."""

    transactions = 0

    def _commit(self, connection: sqlite3.Connection, statements: list[Any]) -> Any:
        self.transactions += 1
        return super()._commit(connection, statements)


async def test_concurrent_opens_are_written_as_one_group(tmp_path: Path) -> None:
    async with CountingStore(tmp_path / "gateway.sqlite", durable=True) as store:
        sessions = SessionManager(store, lambda: 0.0)
        opened = await asyncio.gather(*(sessions.open(SessionSpec(id=f"r{n}.1")) for n in range(300)))
        assert [(session.id, new) for session, new in opened] == [(f"r{n}.1", True) for n in range(300)]
        assert store.transactions <= 30
        assert len(sessions) == len(store.session_ids(None, 1000, "")) == 300


async def test_turns_of_one_loop_turn_are_written_in_one_transaction(tmp_path: Path) -> None:
    turns = [turn(n, TurnStatus.DANGLING) for n in range(AT_ONCE + 9)]
    ended = [turn(n, TurnStatus.ABORTED) for n in range(5)]  # each replaces the intent of the same group
    rows = [TurnRow(n, 0, t) for n, t in [*enumerate(turns), *enumerate(ended)]]
    async with CountingStore(tmp_path / "gateway.sqlite") as store:
        await asyncio.gather(*(store.put_turn("r.1", row) for row in rows))
        assert store.transactions == 1
        assert [row.turn for row in store.turns("r.1")] == [*ended, *turns[5:]]


def turn(n: int, status: TurnStatus) -> Turn:
    return Turn(id=f"t{n}", root="", delta_ids=(n,), status=status, sampling=Sampling())


async def test_concurrent_opens_of_one_id_create_one_session(tmp_path: Path) -> None:
    async with GatewayStore(tmp_path / "gateway.sqlite") as store:
        sessions = SessionManager(store, lambda: 0.0)
        spec = SessionSpec(id="r.1")
        opened = await asyncio.gather(*(sessions.open(spec) for _ in range(20)))
        assert sorted(new for _, new in opened) == [False] * 19 + [True]
        assert len({id(session) for session, _ in opened}) == 1
        first, other = await asyncio.gather(
            sessions.open(SessionSpec(id="s.1")),
            sessions.open(SessionSpec(id="s.1", group_id="g")),
            return_exceptions=True,
        )
        assert isinstance(first, tuple) and isinstance(other, Conflict)


async def test_cancelled_open_still_creates_the_session(tmp_path: Path) -> None:
    async with GatewayStore(tmp_path / "gateway.sqlite") as store:
        sessions = SessionManager(store, lambda: 0.0)
        leaving = asyncio.create_task(sessions.open(SessionSpec(id="r.1")))
        await asyncio.sleep(0)
        leaving.cancel()
        session, new = await sessions.open(SessionSpec(id="r.1"))
        assert not new and session is sessions.get("r.1")
        with pytest.raises(asyncio.CancelledError):
            await leaving


def drifting(call: GenerateRequest) -> ScriptedReply:
    """The number 12 digit by digit: the tokenizer has an id of its own for it."""
    ids = [i for digit in "12" for i in vocabulary().encode(digit)]
    return ScriptedReply(token_ids=(*ids, *vocabulary().encode("<|im_end|>")))


async def test_drift_is_counted_for_concurrent_finalizes(tmp_path: Path) -> None:
    async with running(ScriptedEngine(drifting), tmp_path) as up:
        for n in range(20):
            agent = await up.agent(f"r{n}.1")
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        await asyncio.gather(*(up.gateway.finalize(f"r{n}.1") for n in range(20)))
        assert up.gateway.metrics.drift == 20
