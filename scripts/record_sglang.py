"""Record what a running SGLang server answers to our client, for `tests/engines/test_sglang.py` to replay.

    python scripts/record_sglang.py http://127.0.0.1:30000 other-weights tests/fixtures/sglang/cumulative.json

The server has the demo policy, with --context-length 256; `other-weights` are the same with noise, a path
that it knows from its own working directory too. The client is driven through a proxy that writes down every
exchange byte for byte; of `/server_info` and `/model_info`, which describe the machine, only a few fields.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from msgspec import structs

from afield.engines.probe import probe
from afield.engines.sglang.engine import SglangEngine
from afield.interfaces.engine import GenerateRequest
from afield.types import Sampling

TOLD = {"version", "max_req_input_len", "incremental_streaming_output", "weight_version"}
TOLD |= {"has_image_understanding", "model_type", "architectures"}


class Recorder:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.exchanges: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        exchange: dict[str, Any] = {"path": request.path, "body": json.loads(data) if data else None}
        self.exchanges.append(exchange)
        headers = {"content-type": "application/json"}
        async with self.session.request(
            request.method, self.url + request.path, data=data, headers=headers
        ) as response:
            passed = web.StreamResponse(
                status=response.status, headers={"content-type": response.content_type}
            )
            await passed.prepare(request)
            reply = b""
            async for piece in response.content.iter_any():
                reply += piece
                await passed.write(piece)
        if request.path.endswith("_info"):
            reply = json.dumps({k: v for k, v in json.loads(reply).items() if k in TOLD}).encode()
        exchange |= {
            "status": response.status,
            "content_type": response.content_type,
            "reply": reply.decode(),
        }
        return passed


def a_call(*, stream: bool, **changes: Any) -> GenerateRequest:
    call = GenerateRequest(
        id="recorded",
        session_id="recorded",
        prompt_ids=(1,),
        sampling=Sampling(temperature=0.0),
        max_tokens=12,
        stop_ids=(),
        stream=stream,
    )
    return structs.replace(call, **changes)


async def ids(engine: SglangEngine, call: GenerateRequest) -> list[int]:
    return [token async for chunk in engine.generate(call) for token in chunk.token_ids]


async def scene(engine: SglangEngine, other: str) -> None:
    await probe(engine)
    for stream in (False, True):
        for stops in ((), (4,), (650,)):
            token_ids = await ids(engine, a_call(stream=stream, stop_ids=stops))
            print(f"stream {stream}, stop ids {stops}: {token_ids}")
        await ids(engine, a_call(stream=stream, sampling=Sampling(temperature=0.7)))
    await engine.pause()
    await engine.resume()
    crossing = engine.generate(a_call(stream=True, prompt_ids=(3, 3), max_tokens=30))
    await anext(crossing)
    await engine.load(1, other)
    print("across a load:", [chunk.versions async for chunk in crossing][-1])
    await ids(engine, a_call(stream=False))


async def record(url: str, other: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session:
        recorder = Recorder(url, session)
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", recorder.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}") as engine:
                await scene(engine, other)
        finally:
            await runner.cleanup()
    return recorder.exchanges


def main(url: str, other: str, into: Path) -> None:
    exchanges = asyncio.run(record(url, other))
    into.write_text("[\n" + ",\n".join(json.dumps(exchange) for exchange in exchanges) + "\n]\n")
    print(f"{into}: {len(exchanges)} exchanges, {into.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2], Path(sys.argv[3]))
