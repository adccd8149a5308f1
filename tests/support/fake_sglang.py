"""A small server that speaks SGLang's wire format in front of any engine.

It does as SGLang 0.5.23 was seen to do: `ignore_eos` switches stop ids off too, the context advertised is
longer than the prompts taken, and a stop id is part of the answer. What a real one answered, byte for byte,
is replayed by `replay_sglang.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web
from msgspec import structs

from afield.errors import Unavailable
from afield.interfaces.engine import Chunk, Engine, GenerateRequest, Image, TopLogprobs
from afield.types import FinishReason, Sampling
from support.engine_calls import CallGate
from support.fake_vllm import held

TYPES = {"stop": "stop", "length": "length", "aborted": "abort"}


class FakeSglang:
    def __init__(
        self,
        engine: Engine,
        *,
        incremental: bool = False,
        spans: bool = True,
        original: bool = False,
        images: bool = False,
        faults: Iterable[str] = (),
        loras: int = 0,
        flushes_waiting: bool = True,
    ) -> None:
        """`original` log-probabilities are those before temperature; `loras` is how many adapters it has
        room for, which change nothing but the name a call asks for. Servers before 0.5.23 do not flush
        while calls wait (`flushes_waiting`), and die when they must as they load."""
        self.flushes_waiting = flushes_waiting
        self.in_flight = 0
        self.ended = asyncio.Event()
        self.dead = False
        self.loras, self.adapters = loras, dict[str, str]()
        self.aborts: dict[str, asyncio.Event] = {}
        self.busy: dict[str, str] = {}
        self.most_at_once = 0
        self.engine, self.incremental, self.spans = engine, incremental, spans
        self.original, self.images = original, images
        self.faults = list(faults)
        self.label = "default"
        self.asked: list[tuple[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.gate = CallGate()
        self.moving = asyncio.Event()
        self.moving.set()
        self.waiting: list[int] | None = None  # calls in the queue of each rank, where it tells that

    async def load(self, request: web.Request) -> web.Response:
        if self.waiting is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        ranks = enumerate(self.waiting)
        return web.json_response([{"dp_rank": n, "num_reqs": w + 1, "num_waiting_reqs": w} for n, w in ranks])

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/get_load", self.load)
        app.router.add_post("/generate", self.generate)
        for path in ("pause_generation", "continue_generation", "update_weights_from_disk", "flush_cache"):
            app.router.add_post(f"/{path}", self.manage)
        app.router.add_post("/load_lora_adapter", self.load_adapter)
        app.router.add_post("/unload_lora_adapter", self.unload_adapter)
        app.router.add_post("/abort_request", self.abort)
        return app

    def restart(self, engine: Engine) -> None:
        """As a server does that died and was started again: with its first weights, and nothing else."""
        self.label, self.adapters, self.engine = "default", {}, engine

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in ("policy", *self.adapters)]})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        wrong = ""
        if body["lora_path"].endswith("broken"):
            wrong = "LoRA adapter has rank 16, larger than max_lora_rank"
        elif body["lora_name"] in self.adapters:
            wrong = f"{body['lora_name']} is already loaded"
        else:
            self.adapters[body["lora_name"]] = body["lora_path"]
        reply = {"success": not wrong, "error_message": wrong or None, "loaded_adapters": self.adapters}
        return web.json_response(reply, status=400 if wrong else 200)

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        known = self.adapters.pop(name, None) is not None
        reply = {"success": known, "error_message": None if known else f"{name} does not exist"}
        return web.json_response(reply, status=200 if known else 400)

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        if (aborted := self.aborts.get(body["rid"])) is not None:
            aborted.set()
            self.busy.pop(body["rid"], None)
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        longest = (await self.engine.info()).max_context
        return web.json_response(
            {
                "context_length": longest + 6,
                "max_req_input_len": longest,
                "enable_lora": bool(self.loras),
                "max_loras_per_batch": self.loras or 8,
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "has_image_understanding": self.images})

    async def manage(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        flushable = self.flushes_waiting or not self.in_flight
        if request.path == "/flush_cache":
            return web.Response(text="Flush cache failed.", status=200 if flushable else 400)
        if request.path == "/pause_generation":
            self.moving.clear()
            if body["mode"] == "abort":
                self.ended.set()
                while self.in_flight:
                    await asyncio.sleep(0.01)
                self.ended = asyncio.Event()
        elif request.path == "/continue_generation":
            self.moving.set()
        else:
            if body["model_path"].endswith("broken"):
                reply = {"success": False, "message": "Failed to get model", "num_paused_requests": 0}
                return web.json_response(reply, status=400)
            if body["flush_cache"] and not flushable:
                self.dead = True
                return web.Response(status=500, text="Cache flush failed after updating weights")
            self.label = body["weight_version"]
            await self.engine.load(int(self.label), body["model_path"])
        return web.json_response({"success": True, "message": "Succeeded", "status": "ok"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await self.moving.wait()
        given = body["sampling_params"]
        call = GenerateRequest(
            id="c",
            session_id="s",
            prompt_ids=tuple(body["input_ids"]),
            sampling=Sampling(temperature=given["temperature"], top_k=max(given["top_k"], 0)),
            max_tokens=given["max_new_tokens"],
            stop_ids=() if given["ignore_eos"] else tuple(given["stop_token_ids"]),
            stream=True,
            images=tuple(Image(digest=d, media_type="?", url=d) for d in body.get("image_data", ())),
            constraint=held(given if "structural_tag" in given else None, given["stop_token_ids"]),
            top_logprobs=body.get("top_logprobs_num", 0),
            prompt_logprobs=body.get("top_logprobs_num", 0) if body.get("logprob_start_len") == 0 else None,
        )
        probing = given["max_new_tokens"] == 8 or "structural_tag" in given
        fault = self.faults.pop(0) if self.faults and not probing else ""
        adapter, rid = body.get("lora_path"), body.get("rid", "")
        if adapter is not None and adapter not in self.adapters:
            return web.json_response({"error": {"message": f"{adapter} is not loaded"}}, status=400)
        try:
            async with aclosing(self.chunks(call, rid, adapter or "")) as chunks:
                if body["stream"]:
                    return await self.stream(request, body, chunks, fault)
                seen = [chunk async for chunk in chunks]
                return web.json_response(self.reply(seen, seen, body, fault))
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except Unavailable as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)

    async def chunks(self, call: GenerateRequest, rid: str, adapter: str) -> AsyncGenerator[Chunk]:
        aborted, ended, sampled = asyncio.Event(), self.ended, 0
        self.aborts[rid] = aborted
        self.in_flight += 1
        self.busy[rid] = adapter
        self.most_at_once = max(self.most_at_once, len({*self.busy.values()} - {""}))
        try:
            async for chunk in self.engine.generate(call):
                await self.gate.wait(call, sampled, lambda: aborted.is_set() or ended.is_set())
                sampled += len(chunk.token_ids)
                while not (self.moving.is_set() or ended.is_set()):
                    await asyncio.sleep(0.005)
                if (rid and aborted.is_set()) or ended.is_set():
                    gone = structs.replace(chunk, token_ids=(), logprobs=(), top_logprobs=())
                    yield structs.replace(gone, finish=FinishReason.ABORTED)
                    return
                yield chunk
        finally:
            self.busy.pop(rid, None)
            self.in_flight -= 1

    async def stream(
        self, request: web.Request, body: dict[str, Any], chunks: AsyncIterator[Chunk], fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        seen: list[Chunk] = []
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            seen.append(chunk)
            now = fault if len(seen) >= 3 else ""
            shown = self.reply([chunk] if self.incremental else seen, seen, body, now)
            await response.write(b"data: " + json.dumps(shown).encode() + b"\n\n")
            if now == "die":
                assert request.transport
                request.transport.abort()
            if now == "error":
                await response.write(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    def reply(self, chunks: list[Chunk], seen: list[Chunk], body: dict[str, Any], fault: str) -> Any:
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        if 0 < body["sampling_params"]["temperature"] < 0.2 and not self.original:
            logprobs = [0.0] * len(logprobs)
        entries: list[Any] = [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)]
        if fault == "fewer":
            entries.pop()
        if fault == "other":
            entries[-1][1] += 1
        if fault == "lowest":
            entries[-1][0] = -3.4028234663852886e38
        finish = seen[-1].finish
        if finish is FinishReason.ABORTED and body["stream"]:  # the last id, and every log-probability
            every = [pair for c in seen for pair in zip(c.logprobs, c.token_ids, strict=True)]
            tokens, entries = tokens[-1:], [[p, t, None] for p, t in every]
        meta: dict[str, Any] = {
            "id": "r1",
            "finish_reason": {"type": TYPES[finish]} if finish else None,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": str(seen[-1].high) if seen[-1].high else self.label,
            "completion_tokens": sum(len(chunk.token_ids) for chunk in seen),
            "output_token_logprobs": entries,
        }
        meta |= _candidates(chunks, seen[0].prompt_logprobs, body)
        if fault == "refused":
            # As a real one does: the refusal has an id, and no log-probability.
            meta["finish_reason"] = {
                "type": "abort",
                "message": "Input length (9 tokens)",
                "status_code": 400,
            }
            meta["output_token_logprobs"] = []
        if self.spans:
            meta["weight_versions"] = _spans(seen)
        reply = {"text": "é" * len(tokens), "output_ids": tokens, "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            reply["prompt_token_ids"] = list(seen[0].prompt_ids or body["input_ids"])
        return reply


def _candidates(
    chunks: list[Chunk], scored: tuple[TopLogprobs, ...] | None, body: dict[str, Any]
) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if body.get("top_logprobs_num"):
        tops = [top for chunk in chunks for top in chunk.top_logprobs]
        told["output_top_logprobs"] = [_entries(top) for top in tops]
    if scored is not None:
        own = zip(body["input_ids"], scored, strict=True)
        told["input_token_logprobs"] = [[top[0][1] if top else None, t, None] for t, top in own]
        told["input_top_logprobs"] = [_entries(top) or None for top in scored]
    return told


def _entries(top: TopLogprobs) -> list[Any]:
    return [[logprob, token, None] for token, logprob in top]


def _spans(chunks: list[Chunk]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    start = 0
    for chunk in chunks:
        end, name = start + len(chunk.token_ids), str(chunk.low) if chunk.low else "default"
        if spans and spans[-1]["version"] == name:
            start = spans.pop()["start"]
        spans.append({"version": name, "start": start, "end": end})
        start = end
    return spans


@asynccontextmanager
async def serving_sglang(fake: FakeSglang) -> AsyncIterator[str]:
    async with fake.engine:
        runner = web.AppRunner(fake.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()
