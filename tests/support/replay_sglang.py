"""A server that answers what a real SGLang did, as `scripts/record_sglang.py` wrote it down.

Asked the same twice, it gives the recorded answers in turn, then the last again. Anything that was not asked
when it was recorded is answered with 500; but for `/flush_cache`, which came later, and for whether the cache
is flushed as weights are loaded, which was true then.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from support.paths import TESTS

RECORDED = TESTS / "fixtures" / "sglang"


class Replay:
    def __init__(self, path: Path) -> None:
        self.answers: dict[str, list[dict[str, Any]]] = {}
        for exchange in json.loads(path.read_text()):
            self.answers.setdefault(_key(exchange["path"], exchange["body"]), []).append(exchange)

    async def answer(self, request: web.Request) -> web.Response:
        data = await request.read()
        asked = _key(request.path, json.loads(data) if data else None)
        if request.path == "/flush_cache":
            return web.Response(text="Cache flushed.")
        answers = self.answers.get(asked)
        if not answers:
            return web.Response(status=500, text=f"never recorded (see scripts/record_sglang.py): {asked}")
        told = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(status=told["status"], text=told["reply"], content_type=told["content_type"])


def _key(path: str, body: Any) -> str:
    if isinstance(body, dict) and "flush_cache" in body:
        body = {**body, "flush_cache": None}
    return f"{path} {json.dumps(body, sort_keys=True)}"


@asynccontextmanager
async def replaying(name: str) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", Replay(RECORDED / f"{name}.json").answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
