"""The ASGI server: start, graceful stop, signals."""

import asyncio
import signal
import subprocess
import sys
from typing import Any

import aiohttp
import pytest

from afield.sdk.listen import listen
from afield.utils.asgi_server import AsgiServer, server_config, serving

pytestmark = pytest.mark.anyio

SCRIPT = """
import sys
from afield.utils.asgi_server import AsgiServer, server_config
from afield.sdk.listen import listen
from tests.utils.test_asgi_server import App

listener = listen("127.0.0.1", 0)
started = lambda: print(listener.getsockname()[1], flush=True)
AsgiServer(server_config(App(), lifespan="off"), on_start=started).run(sockets=[listener])
"""


class App:
    """Answers `begun`, and the rest once `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await self.release.wait()
        await send({"type": "http.response.body", "body": b" and ended"})


async def test_stop_waits_for_the_open_response() -> None:
    app, listener = App(), listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    async with aiohttp.ClientSession() as http:
        async with serving(AsgiServer(server_config(app, lifespan="off")), listener) as running:
            response = await http.get(url)
            assert await response.content.readexactly(5) == b"begun"
            asyncio.get_running_loop().call_later(0.05, app.release.set)
        assert running.done()
        assert await response.read() == b" and ended"
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url)


async def test_stop_cancels_responses_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    listener = listen("127.0.0.1", 0)
    config = server_config(App(), lifespan="off", timeout_graceful_shutdown=0)
    async with aiohttp.ClientSession() as http:
        async with serving(AsgiServer(config), listener):
            response = await http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert "shutdown timed out responses=1" in caplog.text


def test_process_ends_with_the_signal_it_got() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
