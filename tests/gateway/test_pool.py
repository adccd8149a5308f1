"""Gateway pool: placement, replacement of lost gateways, weights on all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.errors import AfieldError, Conflict, NotFound, Unavailable
from afield.factory import COMMAND
from afield.gateway.engine_pool import EnginePool
from afield.gateway.local_launcher import GatewayPlan, ProcessLauncher
from afield.gateway.pool import GatewayPool, PoolTimeouts
from afield.gateway.server import serve
from afield.gateway.service import LocalGateway
from afield.gateway.session_keys import SecretPlace
from afield.interfaces import GatewayEndpoint, SessionCredentials, SessionSpec
from afield.interfaces.engine import GenerateRequest
from afield.sdk.listen import listen
from afield.settings.gateway import GatewaySettings
from afield.types import Policy
from afield.utils.gateway_process import GatewayProcess
from support.gateways import ADMIN, POLICY, openai_client, vocabulary
from support.tokenizers import load_tokenizer

pytestmark = pytest.mark.anyio
TIMEOUTS = PoolTimeouts(unavailable_s=30.0, probe_interval_s=0.05, probe_s=0.5)


def hello(call: GenerateRequest) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(vocabulary().encode("hello<|im_end|>")))


class WeightsEngine(ScriptedEngine):
    """An engine that refuses weights while `broken`."""

    broken = False

    async def load(self, version: int, path: str) -> None:
        if self.broken:
            raise Unavailable("the disk with the weights is away")
        await super().load(version, path)


class InProcessLauncher:
    """Gateways in this event loop. `lose` ends one at once; `gate` holds back replacements."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listeners: dict[int, socket.socket] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self.engines: dict[int, WeightsEngine] = {}
        self.keeps_sessions = True
        self.starts: Counter[int] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for number in self._serving:
            await self.lose(number)
        for listener in self._listeners.values():
            listener.close()

    async def start(self, number: int) -> GatewayEndpoint:
        await self.gate.wait()
        self.starts[number] += 1
        kept = self.keeps_sessions or self.starts[number] == 1
        if number not in self._listeners:
            self._listeners[number] = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{self._listeners[number].getsockname()[1]}"
        ready = asyncio.Event()
        self._serving[number] = asyncio.create_task(self._serve(number, url, ready, kept))
        await asyncio.wait_for(ready.wait(), 60)
        return GatewayEndpoint(
            url=url, admin_key=ADMIN, host="here", pid=os.getpid(), started="", keeps_sessions=kept
        )

    async def _serve(self, number: int, url: str, ready: asyncio.Event, kept: bool) -> None:
        engine = self.engines[number] = WeightsEngine(hello)
        pool = EnginePool({"engine": engine}, tries=1)
        store = self._folder / (f"{number}" if kept else f"{number}-{self.starts[number]}")
        gateway = LocalGateway(
            tokenizer=load_tokenizer(POLICY),
            engine=pool,
            store=store,
            admin_key=ADMIN,
            public_url=url,
            secret=SecretPlace(directory=self._folder / "secrets"),
        )
        async with pool, gateway:
            await serve(gateway, self._listeners[number].dup(), ready.set)

    async def ended(self, number: int) -> str:
        await asyncio.wait([self._serving[number]])
        return "it was lost"

    async def lose(self, number: int) -> None:
        self._serving[number].cancel()
        await asyncio.gather(self._serving[number], return_exceptions=True)


@asynccontextmanager
async def pooled(launcher: Any, count: int = 2, **options: Any) -> AsyncIterator[GatewayPool]:
    async with GatewayPool(launcher, count, timeouts=TIMEOUTS, **options) as pool:
        await pool.client()
        yield pool


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.02)


async def chat(ticket: SessionCredentials, *said: str, max_retries: int = 5) -> list[dict[str, Any]]:
    async with openai_client(ticket.openai_base_url, ticket.api_key, max_retries) as client:
        messages: list[Any] = []
        for text in said:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return messages


def address(ticket: SessionCredentials) -> str:
    return ticket.base_url.partition("/s/")[0]


async def test_concurrent_sessions_are_spread_evenly_and_stay(tmp_path: Path) -> None:
    async with pooled(InProcessLauncher(tmp_path), 3) as pool:
        ids = [f"r{n}.1" for n in range(9)]
        tickets = await asyncio.gather(*(pool.open(SessionSpec(id=name)) for name in ids))
        homes = {ticket.id: address(ticket) for ticket in tickets}
        assert sorted(Counter(homes.values()).values()) == [3, 3, 3]
        assert [await pool.open(SessionSpec(id=name)) for name in ids] == list(tickets)
        emptied = homes["r0.1"]
        for name in (name for name, home in homes.items() if home == emptied):
            await pool.finalize(name)
        again = await asyncio.gather(*(pool.open(SessionSpec()) for _ in range(3)))
        assert {address(ticket) for ticket in again} == {emptied}
        assert len({ticket.id for ticket in again}) == 3
        with pytest.raises(Conflict):
            await pool.open(SessionSpec(id="r1.1", metadata={"other": 1}))
        assert sorted(await pool.states([*ids, "unknown"])) == ids
        assert (await pool.finalize("r0.1")).turns == ()
        with pytest.raises(NotFound, match="no gateway of the pool"):
            await pool.state("unknown")


async def test_refused_sessions_take_no_slot(tmp_path: Path) -> None:
    async with pooled(InProcessLauncher(tmp_path), 2) as pool:
        first = await pool.open(SessionSpec(id="first"))
        with pytest.raises(AfieldError):
            await pool.open(SessionSpec(id="no id"))
        assert address(await pool.open(SessionSpec(id="second"))) != address(first)


async def test_sessions_of_a_lost_gateway_continue_on_its_replacement(tmp_path: Path) -> None:
    launcher = InProcessLauncher(tmp_path)
    async with pooled(launcher) as pool:
        tickets = [await pool.open(SessionSpec(id=f"r{n}.1")) for n in range(4)]
        for ticket in tickets:
            await chat(ticket, "Hi")
        launcher.gate.clear()
        await launcher.lose(0)
        await until(lambda: pool.replacements == 1)
        states = await pool.states([ticket.id for ticket in tickets])
        assert len(states) == 2, "those of the other gateway"
        other = await pool.open(SessionSpec(id="new.1"))
        assert address(other) in {address(ticket) for ticket in tickets if ticket.id in states}
        waiting = [
            asyncio.create_task(chat(ticket, "Hi", "Go on.")) for ticket in tickets if ticket.id not in states
        ]
        launcher.gate.set()
        await asyncio.gather(*waiting)
        records = {ticket.id: await pool.finalize(ticket.id) for ticket in tickets}
        lost = [len(record.turns) for name, record in records.items() if name not in states]
        assert lost == [2, 2], "the repeated first call got the recorded turn"
        assert launcher.starts == {0: 2, 1: 1}


async def test_sessions_of_a_lost_store_are_forgotten(tmp_path: Path) -> None:
    launcher = InProcessLauncher(tmp_path)
    launcher.keeps_sessions = False
    async with pooled(launcher) as pool:
        tickets = [await pool.open(SessionSpec(id=f"r{n}.1")) for n in range(2)]
        for ticket in tickets:
            await chat(ticket, "Hi")
        await launcher.lose(0)
        await until(lambda: launcher.starts[0] == 2)
        turns = []
        async with asyncio.timeout(60):
            while tickets:
                try:
                    turns.append(len((await pool.finalize(tickets[0].id)).turns))
                except NotFound:
                    pass
                except Unavailable:  # the replacement is not there yet
                    await asyncio.sleep(0.02)
                    continue
                tickets.pop(0)
        assert turns == [1]


async def test_weights_reach_all_gateways_before_new_sessions_do(tmp_path: Path) -> None:
    launcher = InProcessLauncher(tmp_path)
    async with pooled(launcher) as pool:
        launcher.gate.clear()
        await launcher.lose(1)
        await until(lambda: pool.replacements == 1)
        await pool.publish(Policy("m", 1), "w1")
        assert await pool.version() == 1
        launcher.gate.set()
        await until(lambda: launcher.starts[1] == 2)
        tickets = await asyncio.gather(*(pool.open(SessionSpec(id=f"r{n}.1")) for n in range(4)))
        for ticket in tickets:
            await chat(ticket, "Hi")
            assert (await pool.state(ticket.id)).versions == (1, 1)
        launcher.engines[1].broken = True
        await pool.publish(Policy("m", 2), "w2")
        late = [await pool.open(SessionSpec(id=f"late{n}.1")) for n in range(3)]
        for ticket in late:
            await chat(ticket, "Hi")
            assert (await pool.state(ticket.id)).versions == (2, 2), "none on the gateway without version 2"
        launcher.engines[1].broken = False
        await until(lambda: launcher.engines[1].loaded[-1:] == [(2, "w2")])
        with pytest.raises(Conflict, match="version 1 is older"):
            await pool.publish(Policy("m", 1), "w1")


async def test_a_later_pool_finds_the_sessions_of_an_earlier_one(tmp_path: Path) -> None:
    async with pooled(InProcessLauncher(tmp_path)) as pool:
        tickets = [await pool.open(SessionSpec(id=f"r{n}.1")) for n in range(3)]
        for ticket in tickets:
            await chat(ticket, "Hi")
    async with pooled(InProcessLauncher(tmp_path), inherits=True) as pool:
        opened = await asyncio.gather(*(pool.open(SessionSpec(id=ticket.id)) for ticket in tickets))
        assert [ticket.api_key for ticket in opened] == [ticket.api_key for ticket in tickets]
        assert [len((await pool.finalize(ticket.id)).turns) for ticket in tickets] == [1, 1, 1]
        await pool.abort((await pool.open(SessionSpec(id="new.1"))).id, "over")


async def test_a_replaced_gateway_that_still_runs_can_write_nothing(tmp_path: Path) -> None:
    first, second = InProcessLauncher(tmp_path), InProcessLauncher(tmp_path)
    async with pooled(first, 1) as old:
        ticket = await old.open(SessionSpec(id="r.1"))
        await chat(ticket, "Hi")
        async with pooled(second, 1, inherits=True) as new:
            with pytest.raises(Exception, match="taken over"):
                await chat(ticket, "Hello?", max_retries=0)
            calls = [call for call in first.engines[0].recorded if call.session_id == "r.1"]
            assert len(calls) == 1, "the engine was not asked again"
            assert len((await new.finalize("r.1")).turns) == 1


# --- processes ------------------------------------------------------------------------------------


async def test_killed_and_suspended_processes_are_replaced(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"match": "", "text": "Yes."}\n')

    def plan(number: int) -> GatewayPlan:
        store, engine = str(tmp_path / f"store-{number}"), (f"scripted={script}",)
        settings = GatewaySettings(model=str(POLICY), engine=engine, store=store)
        return GatewayPlan(settings=settings.to_json(), host="127.0.0.1", port=0)

    def process(number: int, listener: socket.socket) -> GatewayProcess:
        log = tmp_path / f"{number}.log"
        return GatewayProcess(COMMAND, os.environ, log, start_timeout_s=100, listener=listener)

    pids: dict[int, int] = {}

    def record(number: int, endpoint: GatewayEndpoint | None) -> None:
        if endpoint is not None:
            pids[number] = endpoint.pid

    launcher = ProcessLauncher([plan(0), plan(1)], process)
    async with GatewayPool(launcher, 2, timeouts=TIMEOUTS, record=record) as pool:
        await pool.client()
        tickets = [await pool.open(SessionSpec(id=f"r{n}.1")) for n in range(4)]
        await asyncio.gather(*(chat(ticket, "Hi") for ticket in tickets))
        before = dict(pids)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        await asyncio.gather(*(chat(ticket, "Hi", "Sure?") for ticket in tickets))
        records = [await pool.finalize(ticket.id) for ticket in tickets]
        assert [len(record.turns) for record in records] == [2] * 4
        assert pids[0] != before[0] and pids[1] != before[1]
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
