"""Relay: routing, authentication, flow control, resumption after cuts, kills and restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from afield.errors import UsageError
from afield.gateway import shards
from afield.relay.auth import EVERY_PATH, LinkRequest, route_prefix, session_scope
from afield.relay.forward import HttpForwarder
from afield.relay.server import RelayLimits
from support.ports import free_ports
from support.relays import LINES, SECRET, App, RelayProcess, Setup, post, stream

pytestmark = pytest.mark.anyio


async def test_request_and_response_pass_unchanged():
    setup = Setup(App())
    async with setup.relay(), setup.client():
        body = bytes(range(256)) * 4096
        status, answer = await post(setup.url("echo?a=b%2Fc"), body)
        assert (status, answer) == (201, body)
        assert setup.app.requests == ["/s/s1/echo"]


@pytest.mark.parametrize("token", ["x", "s~s1~0", "all~00"])
async def test_wrong_route_token_gets_401_and_reaches_no_gateway(token: str):
    setup = Setup(App())
    async with setup.relay(), setup.client():
        status, answer = await post(f"http://127.0.0.1:{setup.port}/c/lab/g/g1/t/{token}/s/s1/echo")
        assert status == 401 and b"token" in answer
        good = setup.url("echo")
        assert (await post(good.replace("/s/s1/", "/s/other/")))[0] == 401
        assert (await post(good.replace("/s/s1/echo", "/sessions")))[0] == 401
        assert (await post(good.replace("/g/g1/", "/g/g2/")))[0] == 401
        for path in (
            "/s/s1/../../sessions",
            "/s/s1/%2e%2e/s2/echo",
            "/s/s1%2f..%2fs2/echo",
            "/v1/../sessions",
        ):
            url: Any = URL(good.replace("/s/s1/echo", path), encoded=True)
            assert (await post(url))[0] == 401, path
        assert setup.app.requests == []


async def test_wrong_cluster_secret_is_refused_by_name():
    setup = Setup(App())
    async with setup.relay():
        with pytest.raises(UsageError, match="refuses the secret of cluster 'lab'"):
            async with setup.other().client(secret=b"f" * 32):
                pass
        with pytest.raises(UsageError, match="does not serve cluster 'other'"):
            async with setup.other().client(cluster="other"):
                pass


async def test_second_process_with_the_same_name_is_refused():
    setup = Setup(App())
    async with setup.relay(), setup.client():
        with pytest.raises(UsageError, match="choose another relay name"):
            async with setup.other().client():
                pass
        assert (await post(setup.url("echo"), b"1"))[0] == 201


async def test_request_waits_for_a_gateway_that_connects_later():
    setup = Setup(App())
    async with setup.relay():
        early = asyncio.create_task(post(setup.url("echo"), b"early"))
        await asyncio.sleep(0.1)
        async with setup.client():
            assert await early == (201, b"early")


async def test_gateway_that_does_not_connect_gets_503_with_retry_after():
    setup = Setup(App(), RelayLimits(hold_s=0.05))
    async with setup.relay(), aiohttp.ClientSession() as http, http.post(setup.url("echo")) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"


async def test_request_during_a_restart_of_the_gateway_waits_for_the_new_process():
    setup, after = Setup(App("before")), App("after")
    async with setup.relay():
        async with setup.client():
            assert (await post(setup.url("echo")))[0] == 201
        early = asyncio.create_task(post(setup.url("echo"), b"early"))
        await asyncio.sleep(0.2)
        async with setup.other().client(after):
            assert await early == (201, b"early")
    assert after.requests == ["/s/s1/echo"]


async def test_request_to_a_gateway_that_left_gets_503_after_the_hold_timeout():
    setup = Setup(App(), RelayLimits(hold_s=0.1, resume_s=60.0))
    async with setup.relay():
        async with setup.client():
            assert (await post(setup.url("echo")))[0] == 201
        status, answer = await asyncio.wait_for(post(setup.url("echo")), 20)
        assert status == 503 and b"gateway_not_connected" in answer


async def test_new_process_gets_the_name_of_one_that_vanished():
    setup, after = Setup(App("before")), App("after")
    async with setup.relay(), setup.client():
        setup.proxy.refuse = True
        setup.proxy.freeze()  # the machine is gone: no FIN reaches the relay
        async with setup.other().client(after) as client:
            assert client.connected.is_set()
            assert (await post(setup.url("echo")))[0] == 201
    assert after.requests == ["/s/s1/echo"]


@asynccontextmanager
async def dial(setup: Setup, instance: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Connect as gateway g1 and stop before the last step of the handshake."""
    base = f"http://127.0.0.1:{setup.port}/c/lab"
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{base}/challenge") as response:
            challenge = (await response.json())["challenge"]
        request = LinkRequest(gateway="g1", instance=instance, challenge=challenge, nonce="n")
        header = {"Authorization": request.signed("lab", SECRET).to_header()}
        async with http.ws_connect(f"{base}/connect", headers=header) as socket:
            await socket.receive_str()
            yield socket


async def test_handshake_that_breaks_off_leaves_the_name_free():
    setup = Setup(App())
    async with setup.relay():
        async with dial(setup, "a") as first:
            await first.send_str('{"streams": {}}')
            async with dial(setup, "a"):  # the same process, which dies before the end of its handshake
                pass
        async with setup.other().client() as client:
            assert client.connected.is_set()


async def test_of_two_processes_that_connect_at_once_one_gets_the_name():
    setup = Setup(App())
    async with setup.relay(), dial(setup, "a") as first, dial(setup, "b") as second:
        await first.send_str('{"streams": {}}')
        asking = asyncio.create_task(post(setup.url("echo")))
        assert (await first.receive(timeout=10)).type is aiohttp.WSMsgType.BINARY  # the first one serves
        await second.send_str('{"streams": {}}')
        assert (await second.receive(timeout=10)).type is aiohttp.WSMsgType.CLOSE
        assert not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_streams_outlive_a_second_cut_shortly_before_the_resume_timeout_of_the_first():
    setup = Setup(App())
    async with setup.relay(), setup.client(resume_s=4.0) as client, stream(setup) as response:
        first = await response.content.readline()
        setup.proxy.cut()
        await asyncio.sleep(3.0)
        assert client.connected.is_set()
        setup.proxy.refuse = True
        setup.proxy.cut()
        await asyncio.sleep(1.5)  # the timeout of the first cut is over, that of the second is not
        setup.proxy.refuse = False
        setup.app.go_on.set()
        assert first + await response.read() == LINES
    assert setup.app.disconnects == 0


async def test_link_comes_back_after_the_gateway_gave_up_its_streams():
    setup = Setup(App(), RelayLimits(hold_s=5.0, resume_s=60.0, heartbeat_s=0.5))
    async with setup.relay(), setup.client(resume_s=0.2) as client, stream(setup) as response:
        await response.content.readline()
        setup.proxy.refuse = True
        setup.proxy.cut()
        async with asyncio.timeout(10):
            while not setup.app.disconnects:
                await asyncio.sleep(0.02)
        setup.proxy.refuse = False
        await asyncio.wait_for(client.connected.wait(), 10)
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(response.read(), 10)
        assert await post(setup.url("echo"), b"1") == (201, b"1")


async def test_streams_continue_after_the_link_is_cut():
    setup = Setup(App())
    async with setup.relay(), setup.client(), stream(setup) as response:
        first = await response.content.readline()
        for _ in range(3):
            setup.proxy.cut()
            await asyncio.sleep(0.2)
        setup.app.go_on.set()
        assert first + await response.read() == LINES
    assert setup.app.requests == ["/s/s1/stream"]
    assert setup.app.disconnects == 0


async def test_request_body_continues_after_the_link_is_cut():
    setup = Setup(App())

    async def body() -> AsyncIterator[bytes]:
        for n in range(20):
            yield b"%05d" % n * 5000
            if n in (5, 12):
                setup.proxy.cut()
                await asyncio.sleep(0.1)

    async with setup.relay(), setup.client():
        status, answer = await post(setup.url("echo"), body())  # pyright: ignore[reportArgumentType]
        assert (status, answer) == (201, b"".join(b"%05d" % n * 5000 for n in range(20)))
    assert setup.app.requests == ["/s/s1/echo"]


async def test_link_that_falls_silent_is_replaced():
    setup = Setup(App())
    async with setup.relay(), setup.client(), stream(setup) as response:
        first = await response.content.readline()
        setup.proxy.freeze()  # no FIN, no RST: only the heartbeat notices
        setup.app.go_on.set()  # what is sent now is lost, and sent again over the next link
        assert first + await asyncio.wait_for(response.read(), 20) == LINES
    assert len(setup.app.requests) == 1


async def test_repeated_request_after_relay_kills_gets_the_same_response(tmp_path):
    app = App()
    async with RelayProcess(tmp_path) as relay, aiohttp.ClientSession() as http:
        setup = Setup(app, port=relay.port)
        async with setup.client():
            for _ in range(2):
                async with http.post(setup.url("stream"), data=b"q") as response:
                    assert await response.content.readline() == b"line 0\n"
                    await relay.kill()
                    with pytest.raises(aiohttp.ClientError):
                        await response.read()
                await relay.start()
            again = asyncio.create_task(post(setup.url("stream"), b"q"))
            assert await post(setup.url("echo"), b"z") == (201, b"z")
            app.go_on.set()
            assert await again == (201, LINES)
            assert app.requests.count("/s/s1/stream") == 1
            # A response that was delivered is not given a second time.
            assert await post(setup.url("stream"), b"q") == (201, LINES)
            assert app.requests.count("/s/s1/stream") == 2
    assert app.disconnects == 0


async def test_repeated_request_whose_body_was_not_read_gets_the_same_response():
    requests: list[str] = []
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Answer without reading the request's body, as many applications do after a GET."""
        requests.append(scope["method"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"last"})

    setup = Setup(App())
    async with setup.relay(), setup.client(app), aiohttp.ClientSession() as http:
        async with http.get(setup.url("models")) as response:
            assert await response.content.readany() == b"first "
            await setup.restart()
        go_on.set()
        async with http.get(setup.url("models")) as response:
            assert await asyncio.wait_for(response.read(), 20) == b"first last"
    assert requests == ["GET"]


async def test_request_that_is_not_repeated_after_a_restart_ends_as_a_disconnect():
    setup = Setup(App())
    async with setup.relay(), setup.client(claim_s=0.2), stream(setup) as response:
        await response.content.readline()
        await setup.restart()
        async with asyncio.timeout(10):
            while not setup.app.disconnects:
                await asyncio.sleep(0.02)
        assert await post(setup.url("echo"), b"z") == (201, b"z")


async def test_disconnect_of_the_agent_reaches_the_gateway():
    setup = Setup(App())
    async with setup.relay(), setup.client(), aiohttp.ClientSession() as http:
        response = await http.post(setup.url("stream"))
        await response.content.readline()
        response.close()
        async with asyncio.timeout(10):
            while not setup.app.disconnects:
                await asyncio.sleep(0.02)


async def test_slow_agent_stalls_its_own_stream_only():
    setup = Setup(App())
    async with setup.relay(), setup.client(), aiohttp.ClientSession(read_bufsize=1024) as http:
        slow = await http.post(setup.url("flood?400"))  # 25 MiB, not read
        async with asyncio.timeout(20):
            before = -1
            while before != setup.app.sent or not before:
                before = setup.app.sent
                await asyncio.sleep(0.1)
            for n in range(20):
                assert await post(setup.url("echo", "s2"), b"%d" % n) == (201, b"%d" % n)
        assert setup.app.sent < 16 * 2**20
        total = 0
        async for data in slow.content.iter_any():
            total += len(data)
        assert total == 400 * 65536


async def test_body_above_the_limit_gets_413():
    setup = Setup(App(), RelayLimits(body_bytes=1000, hold_s=5.0))

    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 500

    async with setup.relay(), setup.client():
        assert (await post(setup.url("echo"), b"x" * 1001))[0] == 413
        assert (await post(setup.url("echo"), chunked()))[0] == 413  # pyright: ignore[reportArgumentType]
        assert (await post(setup.url("echo"), b"x" * 1000))[0] == 201


async def test_client_that_waits_for_100_continue_gets_it():
    setup = Setup(App())
    async with setup.relay(), setup.client(), aiohttp.ClientSession() as http, asyncio.timeout(10):
        for n in range(2):  # also on a connection that is used again
            async with http.post(setup.url("echo"), data=b"%d" % n, expect100=True) as response:
                assert (response.status, await response.read()) == (201, b"%d" % n)


async def test_connection_without_a_request_is_closed():
    setup = Setup(App(), RelayLimits(head_s=0.2))
    async with setup.relay(), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.port)
        writer.write(b"POST /health HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_sessions_reach_the_process_that_owns_them():
    apps = [App("0"), App("1")]
    setup = Setup(apps[0])
    async with (
        setup.relay(),
        setup.client(process=0, processes=2),
        setup.other().client(apps[1], process=1, processes=2),
    ):
        for n in range(20):
            assert (await post(setup.url("echo", f"s{n}")))[0] == 201
    for index, app in enumerate(apps):
        assert app.requests
        assert all(shards.owner(path.split("/")[2], 2) == index for path in app.requests)


async def test_several_clusters_share_a_relay_and_not_their_secrets():
    setup, apps = Setup(App()), [App("lab"), App("home")]
    async with (
        setup.relay(clusters={"lab": SECRET, "home": b"h" * 32}),
        setup.client(apps[0]),
        setup.other().client(apps[1], cluster="home", secret=b"h" * 32),
    ):
        assert (await post(setup.url("echo")))[0] == 201
        assert (await post(setup.url("echo", cluster="home")))[0] == 401  # signed with lab's secret
        prefix = route_prefix(b"h" * 32, "home", "g1", session_scope("s1"))
        assert (await post(f"http://127.0.0.1:{setup.port}{prefix}/s/s1/echo"))[0] == 201
    assert [len(app.requests) for app in apps] == [1, 1]


async def test_engine_behind_a_forwarder_streams_through_the_relay():
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-query": request.query_string})
        await response.prepare(request)
        await response.write(b"got " + await request.read())
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    setup = Setup(App())
    prefix = route_prefix(SECRET, "lab", "g1", EVERY_PATH)
    async with HttpForwarder(f"http://127.0.0.1:{port}") as forwarder, setup.relay(), setup.client(forwarder):
        url = f"http://127.0.0.1:{setup.port}{prefix}/v1/completions"
        async with aiohttp.ClientSession() as http, http.post(f"{url}?a=1", data=b"x" * 200_000) as response:
            assert (response.status, response.headers["x-query"]) == (200, "a=1")
            assert await response.read() == b"got " + b"x" * 200_000
        await runner.cleanup()
        assert (await post(url))[0] == 503


async def test_get_that_an_agent_leaves_ends_at_the_server():
    ended = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return response

    application = web.Application()
    application.router.add_get("/events", handle)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    setup = Setup(App())
    prefix = route_prefix(SECRET, "lab", "g1", EVERY_PATH)
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with HttpForwarder(server) as forwarder, setup.relay(), setup.client(forwarder):
        async with aiohttp.ClientSession() as http:
            response = await http.get(f"http://127.0.0.1:{setup.port}{prefix}/events")
            assert await response.content.readany() == b"first"
            response.close()
        await asyncio.wait_for(ended.wait(), 20)
    await runner.cleanup()


async def test_forwarder_adds_nothing_to_requests_and_keeps_no_cookies():
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/old"):
            raise web.HTTPTemporaryRedirect("/new")
        seen = {"path": request.raw_path, "headers": sorted(name.lower() for name in request.headers)}
        response = web.json_response(seen)
        response.set_cookie("who", "first client")
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    setup = Setup(App())
    prefix = route_prefix(SECRET, "lab", "g1", EVERY_PATH)
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with HttpForwarder(server) as forwarder, setup.relay(), setup.client(forwarder):
        base = f"http://127.0.0.1:{setup.port}{prefix}"
        names = ("Accept", "Accept-Encoding", "User-Agent")
        async with aiohttp.ClientSession(skip_auto_headers=names) as http:
            for path in ("/a", "/b%2F..%2Fc"):
                async with http.get(URL(base + path, encoded=True)) as response:
                    assert json.loads(await response.read()) == {"path": path, "headers": ["host"]}
                http.cookie_jar.clear()
            async with http.get(f"{base}/old", allow_redirects=False) as response:
                assert (response.status, response.headers["location"]) == (307, "/new")
        await runner.cleanup()
