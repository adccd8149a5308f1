"""Headless Chromium over the DevTools protocol, for tests and benchmarks of the UI."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from afield.errors import Unavailable

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
START_S = 30.0
WAIT_S = 60.0


def program() -> str:
    """Path of Chromium; raises Unavailable with the package to install."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    raise Unavailable("Chromium is not installed here; on Debian: apt-get install chromium-headless-shell")


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._n = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        """Uncaught exceptions, and errors in the console such as violations of the security policy."""
        self.requests: list[str] = []
        """Addresses that the page requested."""
        self.dialogs: list[str] = []

    async def read(self) -> None:
        async for message in self._socket:
            body = json.loads(message.data)
            if "id" in body:
                if not (future := self._waiting.pop(body["id"])).done():
                    future.set_result(body)
                continue
            params = body.get("params", {})
            match body["method"]:
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    self.errors.append(details.get("exception", {}).get("description") or details["text"])
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])
                case "Page.javascriptDialogOpening":
                    self.dialogs.append(params["message"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._n += 1
        future = self._waiting[self._n] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._n, "method": method, "params": params})
        answer = await asyncio.wait_for(future, WAIT_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, checked at each frame of the page; returns its value."""
        loop = (
            "new Promise((done, failed) => {{ const end = performance.now() + {0};"
            " const check = () => {{ let value; try {{ value = {1}; }} catch (error) {{ value = false; }}"
            " if (value) done(value); else if (performance.now() > end) failed(new Error('not true in time: '"
            " + {2} + '; the page has: ' + document.body.innerText.slice(0, 2000)));"
            " else setTimeout(check, 5); }}; check(); }})"
        )
        return await self.evaluate(loop.format(1000 * WAIT_S * 0.9, expression, json.dumps(expression)))

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        codes = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """Set the window and the preferred colours."""
        mobile = width < 600
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=scheme)

    async def screenshot(self, path: Path, quality: int = 80) -> None:
        """Write the window as PNG, or as WebP of a quality up to 100."""
        webp = {"quality": quality} if path.suffix == ".webp" else {}
        shot = await self.send("Page.captureScreenshot", format=path.suffix[1:], **webp)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def heap_mb(self) -> float:
        """Memory of JavaScript objects and buffers after garbage collection, in MB."""
        await self.send("HeapProfiler.collectGarbage")
        usage = await self.send("Runtime.getHeapUsage")
        return (usage["usedSize"] + usage.get("backingStorageSize", 0)) / 1e6


class Browser:
    """A Chromium process."""

    def __init__(
        self, http: aiohttp.ClientSession, address: str, process: asyncio.subprocess.Process
    ) -> None:
        self._http = http
        self._address = address
        self.process = process

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        async with self._http.put(f"http://{self._address}/json/new?about:blank") as response:
            target = json.loads(await response.text())
        async with self._http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            reader = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.send(f"{domain}.enable")
            try:
                yield page
            finally:
                await self._http.get(f"http://{self._address}/json/close/{target['id']}")
                reader.cancel()

    def renderer_mb(self) -> float:
        """Largest private memory of a renderer process, in MB."""
        sizes = [0.0]
        for status in Path("/proc").glob("[0-9]*/smaps_rollup"):
            try:
                command = (status.parent / "cmdline").read_bytes()
                if b"--type=renderer" not in command or str(self.process.pid) not in ancestors(status.parent):
                    continue
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines()[1:])
            except OSError:
                continue
            private = sum(int(lines[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty"))
            sizes.append(private / 1024)
        return max(sizes)


def debugging_port(profile: str) -> str:
    """Port that Chromium wrote into its profile; empty until it listens."""
    path = Path(profile, "DevToolsActivePort")
    return path.read_text().partition("\n")[0] if path.exists() else ""


def ancestors(process: Path) -> set[str]:
    found: set[str] = set()
    pid = process.name
    while pid not in ("0", "1"):
        found.add(pid)
        stat = Path("/proc", pid, "stat").read_text()
        pid = stat.rpartition(")")[2].split()[1]
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A Chromium process with a profile of its own."""
    with tempfile.TemporaryDirectory(prefix="afield-chromium-", ignore_cleanup_errors=True) as profile:
        options = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--remote-debugging-port=0", "--disable-dev-shm-usage", "--disable-extensions"),
        )
        process = await asyncio.create_subprocess_exec(
            *(program(), *options, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # the program may be a script that starts the browser
        )
        try:
            async with asyncio.timeout(START_S):
                while not (port := debugging_port(profile)):
                    await asyncio.sleep(0.02)
            async with aiohttp.ClientSession() as http:
                yield Browser(http, f"127.0.0.1:{port}", process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
