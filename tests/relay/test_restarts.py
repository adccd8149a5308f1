"""Restarts of the relay, and of gateways behind it, while several sessions are under way."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.vllm.engine import VllmEngine
from afield.errors import UsageError
from afield.gateway.app import GatewayApp
from afield.interfaces import SessionSpec
from afield.relay.auth import EVERY_PATH, route_prefix
from afield.relay.forward import HttpForwarder
from afield.relay.server import RelayLimits
from support.fake_vllm import FakeVllm, serving
from support.gateways import openai_client, running
from support.relays import SECRET, App, RelayProcess, Setup, post
from support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.anyio
BLOCK = b"0123456789abcdef" * 4096


class GatedApp:
    """Sends the first line of a response, and the rest when the gate of its session opens.

    It looks for no disconnect while it sends. The rest has `blocks` blocks. Session "crash" fails instead.
    """

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.requests: Counter[str] = Counter()
        self.running = 0
        self.disconnects = 0
        self.sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        session = scope["path"].split("/")[2]
        self.requests[session] += 1
        self.running += 1
        try:
            await self._answer(session, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, session: str, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.disconnects += 1
            await self.gates[session].wait()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self._send(send, f"first {session}\n".encode())
        await self.gates[session].wait()
        if session == "crash":
            raise RuntimeError("the application failed")
        for _ in range(self.blocks):
            await self._send(send, BLOCK)
        await self._send(send, f"last {session}\n".encode())
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Callable[..., Any], data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self.sent += len(data)

    def whole(self, session: str) -> bytes:
        return f"first {session}\n".encode() + BLOCK * self.blocks + f"last {session}\n".encode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class Agent:
    """A request whose first line has arrived."""

    def __init__(self, setup: Setup, session: str) -> None:
        self._url = setup.url("answer", session)

    async def __aenter__(self) -> Agent:
        self._http = aiohttp.ClientSession()
        self._response = await self._http.post(self._url)
        self._first = await self._response.content.readline()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def rest(self) -> bytes:
        async with asyncio.timeout(20):
            return self._first + await self._response.read()


async def test_failed_request_of_a_dead_relay_ends_no_other_request():
    app = GatedApp()
    setup = Setup(App())
    async with setup.relay(), setup.client(app):
        async with Agent(setup, "crash"):
            await setup.restart()
        async with Agent(setup, "s2") as agent:  # the first request of this relay, as the other one was
            app.gates["crash"].set()
            await until(lambda: app.running == 1)
            assert await post(setup.url("answer", "crash")) != (200, b"")
            app.gates["s2"].set()
            assert await agent.rest() == app.whole("s2")
    assert app.requests == {"crash": 2, "s2": 1}


async def test_half_uploaded_request_of_a_dead_relay_ends_no_other_request():
    app = GatedApp()
    setup = Setup(App())

    async def upload() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await asyncio.Event().wait()

    async with setup.relay(), setup.client(app):
        uploading = asyncio.create_task(post(setup.url("answer", "half"), upload()))  # pyright: ignore[reportArgumentType]
        await until(lambda: app.running == 1)
        await setup.restart()
        await asyncio.gather(uploading, return_exceptions=True)
        async with Agent(setup, "s2") as agent:
            assert app.disconnects == 1
            app.gates["half"].set()
            await until(lambda: app.running == 1)
            app.gates["s2"].set()
            assert await agent.rest() == app.whole("s2")
    assert app.requests == {"half": 1, "s2": 1}


async def test_response_that_goes_on_after_a_restart_reaches_no_other_request():
    app = GatedApp(blocks=1)
    setup = Setup(App())
    async with setup.relay(), setup.client(app):
        async with Agent(setup, "s1"):
            await setup.restart()
        async with Agent(setup, "s2") as agent:
            app.gates["s1"].set()
            await until(lambda: app.running == 1)
            app.gates["s2"].set()
            assert await agent.rest() == app.whole("s2")
        assert await post(setup.url("answer", "s1")) == (200, app.whole("s1"))
    assert app.requests == {"s1": 1, "s2": 1}


@pytest.mark.parametrize("restarts", [1, 2])
async def test_response_of_several_mb_is_repeated_after_restarts(restarts: int):
    app = GatedApp(blocks=80)
    setup = Setup(App())
    async with setup.relay(), setup.client(app):
        for _ in range(restarts):
            async with Agent(setup, "s1"):
                await setup.restart()
        app.gates["s1"].set()
        await until(lambda: app.sent > len(BLOCK))  # and soon waits: nobody acknowledges
        async with asyncio.timeout(20):
            assert await post(setup.url("answer", "s1")) == (200, app.whole("s1"))
    assert app.requests == {"s1": 1}


async def test_application_that_waits_to_send_ends_if_nobody_repeats_its_request():
    app = GatedApp(blocks=80)
    setup = Setup(App())
    async with setup.relay(), setup.client(app, claim_s=0.1):
        async with Agent(setup, "s1"):
            await setup.restart()
        app.gates["s1"].set()
        await until(lambda: not app.running)


async def test_responses_are_kept_up_to_a_total_size():
    app = GatedApp(blocks=3)
    setup = Setup(App())
    async with setup.relay(), setup.client(app, replays_limit=2 * len(BLOCK)):
        async with Agent(setup, "s1"):
            await setup.restart()
        app.gates["s1"].set()
        await until(lambda: app.sent > len(BLOCK))  # and the next block is too much
        for _ in range(4):  # responses that were delivered take nothing of the total
            assert await post(setup.url("answer", "s1")) == (200, app.whole("s1"))
        await until(lambda: not app.running)
        assert app.requests == {"s1": 5}
        app.blocks = 1
        async with Agent(setup, "s2"):
            await setup.restart()
        app.gates["s2"].set()
        assert await post(setup.url("answer", "s2")) == (200, app.whole("s2"))
        assert app.requests["s2"] == 1


async def test_request_that_fails_during_its_upload_leaves_the_link_up():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["path"].endswith("bad"):
            raise RuntimeError("the application failed")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    setup = Setup(App())
    async with setup.relay(), setup.client(app):
        assert (await post(setup.url("bad"), b"x" * 1_000_000))[0] == 502
        assert await post(setup.url("good")) == (200, b"fine")
        assert await metric(setup, "links_total") == 1


async def test_complete_response_survives_a_failure_behind_it():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": BLOCK * 20})
        raise RuntimeError("the application failed")

    setup = Setup(App())
    async with setup.relay(), setup.client(app):
        assert await post(setup.url("answer")) == (200, BLOCK * 20)


# --- memory of the relay ---------------------------------------------------------------------------------


async def metric(setup: Setup, name: str) -> int:
    token = route_prefix(SECRET, "lab", "metrics", EVERY_PATH).rpartition("/")[2]
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"http://127.0.0.1:{setup.port}/c/lab/metrics") as response,
    ):
        return int((await response.text()).partition(f'{name}{{cluster="lab"}} ')[2].split()[0])


@pytest.mark.parametrize("limit", ["held_bytes", "held_bytes_per_cluster"])
async def test_new_requests_get_503_while_the_memory_of_the_relay_is_full(limit: str):
    gate = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if "slow" in scope["path"]:
            await gate.wait()
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % size})

    setup = Setup(App(), RelayLimits(hold_s=5.0, **{limit: 100_000}))
    async with setup.relay(), setup.client(app):
        slow = asyncio.create_task(post(setup.url("slow"), b"x" * 1_000_000))
        while await metric(setup, "held_bytes") < 100_000:
            await asyncio.sleep(0.005)
        async with aiohttp.ClientSession() as http, http.post(setup.url("quick")) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "relay_full" in await response.text()
        gate.set()
        assert await slow == (200, b"1000000")
        assert await post(setup.url("quick"), b"x") == (200, b"1")
        assert await metric(setup, "held_bytes") == 0


async def test_response_that_is_not_read_ends_when_the_memory_of_the_relay_is_full():
    app = GatedApp(blocks=400)
    app.gates["s1"].set()
    app.gates["s2"].set()
    setup = Setup(App(), RelayLimits(hold_s=5.0, held_bytes=100_000))
    async with setup.relay(), setup.client(app), aiohttp.ClientSession(read_bufsize=1024) as http:
        response = await http.post(setup.url("answer", "s1"))  # 25 MiB, not read
        while await metric(setup, "reset_total") == 0:
            await asyncio.sleep(0.005)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
        await until(lambda: not app.running)
        app.blocks = 1
        assert await post(setup.url("answer", "s2")) == (200, app.whole("s2"))
        assert await metric(setup, "held_bytes") == 0


# --- gateways --------------------------------------------------------------------------------------------


async def test_gateways_of_two_names_answer_their_own_sessions():
    setup, apps = Setup(App()), [App("g1"), App("g2")]
    async with setup.relay(), setup.client(apps[0]), setup.other().client(apps[1], gateway="g2"):
        asked = [post(setup.url("echo", f"s{n}", f"g{n % 2 + 1}"), b"%d" % n) for n in range(20)]
        assert await asyncio.gather(*asked) == [(201, b"%d" % n) for n in range(20)]
        await setup.restart()
        asked = [post(setup.url("echo", f"s{n}", f"g{n % 2 + 1}"), b"%d" % n) for n in range(20)]
        assert await asyncio.gather(*asked) == [(201, b"%d" % n) for n in range(20)]
    for n, app in enumerate(apps):
        assert Counter(app.requests) == {f"/s/s{m}/echo": 2 for m in range(20) if m % 2 == n}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
async def test_gateway_comes_back_with_another_number_of_processes(before: int, after: int):
    setup = Setup(App(), RelayLimits(hold_s=0.5, resume_s=60.0))

    async def gateway(count: int) -> list[tuple[int, bytes]]:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            for process in reversed(range(count)):
                await stack.enter_async_context(setup.other().client(process=process, processes=count))
            asked = [tasks.create_task(post(setup.url("echo", f"s{n}"))) for n in range(12)]
            return [await task for task in asked]

    async with setup.relay():
        assert {status for status, _ in await gateway(before)} == {201}
        assert {status for status, _ in await gateway(after)} == {201}


async def test_gateway_with_another_number_of_processes_takes_no_name_that_is_connected():
    setup = Setup(App())
    async with setup.relay(), setup.client():
        with pytest.raises(UsageError, match="choose another relay name"):
            async with setup.other().client(process=1, processes=2, heartbeat_s=0.1):
                pass
        assert (await post(setup.url("echo")))[0] == 201


# --- whole stacks ----------------------------------------------------------------------------------------


IDS = tuple(range(40, 52))


async def test_openai_client_that_retries_over_a_relay_kill_gets_one_generation(tmp_path: Path):
    """A request without streaming, with the retries of the SDK itself."""
    asked = asyncio.Event()

    def script(call: Any) -> ScriptedReply:
        if call.session_id == "s1":
            asked.set()
        return ScriptedReply(token_ids=IDS, delay_s=0.05)

    engine = ScriptedEngine(script)
    relay, successor = RelayProcess(tmp_path), Setup(App())
    async with (
        running(engine, tmp_path / "store") as up,
        relay,
        successor.relay(),
        TcpProxy(relay.port) as public,
    ):
        setup = Setup(App(), port=public.port)
        opened = await up.client.open(SessionSpec(id="s1"))
        async with (
            setup.client(GatewayApp(up.gateway)),
            openai_client(setup.url("v1"), opened.api_key, 20) as client,
        ):
            messages: Any = [{"role": "user", "content": "Is it so?"}]
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=messages))
            await asked.wait()
            public.target = successor.port
            await relay.kill()
            answer = await asking
        _, shown = await up.ask("GET", "/sessions/s1/turns")
    assert answer.choices[0].message.content
    assert [turn["token_ids"] for turn in shown["turns"]] == [list(IDS)]
    assert [call.token_ids for call in engine.recorded if call.session_id == "s1"] == [IDS]


async def test_engine_behind_a_restarted_relay_stops_the_call_that_continues_elsewhere(tmp_path: Path):
    """The gateway continues with the tokens that it has, and the engine's first call ends at once."""
    lengths: list[int] = []

    def script(call: Any) -> ScriptedReply:
        lengths.append(len(call.prompt_ids))
        return ScriptedReply(token_ids=IDS[len(call.prompt_ids) - lengths[0] :] if lengths[0] > 3 else IDS)

    engine = ScriptedEngine(script)
    vllm = FakeVllm(engine)
    setup = Setup(App())
    url = f"http://127.0.0.1:{setup.port}{route_prefix(SECRET, 'lab', 'g1', EVERY_PATH)}"
    async with (
        serving(vllm) as server,
        HttpForwarder(server) as forwarder,
        setup.relay(),
        setup.client(forwarder, claim_s=0.0),
        running(VllmEngine(url), tmp_path / "store", tries=5) as up,
    ):
        agent = await up.agent("s1")
        lengths.clear()
        engine.recorded.clear()
        vllm.gate.closed = True
        messages: Any = [{"role": "user", "content": "Is it so?"}]
        answer = await agent.chat.completions.create(model="m", messages=messages, stream=True)
        await until(lambda: vllm.gate.arrivals == 1)
        await setup.restart()
        await until(lambda: vllm.gate.arrivals == 2 and len(engine.recorded) > 0)
        [first] = [call for call in engine.recorded if len(call.prompt_ids) > 3]
        assert first.finish is None
        vllm.gate.closed = False
        async for _ in answer:
            pass
        _, shown = await up.ask("GET", "/sessions/s1/turns")
    assert [turn["token_ids"] for turn in shown["turns"]] == [list(IDS)]
