"""A small server that speaks vLLM's wire format in front of any engine, and misbehaves when told to.

What it sends has the shape vLLM 0.32 sends (see `tests/real/test_vllm.py` for the real one). `faults` are
used up in order, one for each call: it dies, hangs, drops log-probabilities, sends NaN or nonsense.
`loras` is how many adapters it has room for; they change nothing but the name a call asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web
from msgspec import structs

from afield.errors import Unavailable
from afield.interfaces.engine import Chunk, Engine, GenerateRequest, Image
from afield.types import Constraint, FinishReason, Sampling
from support.engine_calls import CallGate

REASONS = {"stop": "stop", "length": "length", "aborted": "abort", None: None}


class FakeVllm:
    def __init__(
        self,
        engine: Engine,
        *,
        raw: bool = False,
        scale_out: bool = True,
        dev: bool = True,
        faults: Iterable[str] = (),
        pieces: int | None = None,
        loras: int | None = None,
        device: str = "cuda",
        no_server_info: bool = False,
        labels: bool = True,
        max_logprobs: int = 20,
        ipc: bool = True,
    ) -> None:
        self.ipc = ipc  # whether it was started with a weight transfer engine
        self.handles: list[str] = []  # pickled handles of the memory that it was sent
        self.on_update: Callable[[], None] = lambda: None  # called while weights are copied
        self.weights = ""
        self.max_logprobs = max_logprobs
        self.labels = labels
        self.device, self.no_server_info = device, no_server_info
        self.loras, self.adapters = loras, dict[str, str]()
        self.transferring, self.received = "new", list[str]()
        self.aborts: dict[str, asyncio.Event] = {}
        self.served: list[str] = []  # the model each call asked for
        self.busy: dict[str, str] = {}  # those of the calls in flight, by the server's name of them
        self.most_at_once = 0  # different adapters
        self.engine, self.raw, self.scale_out, self.dev = engine, raw, scale_out, dev
        self.faults = list(faults)
        self.pieces = pieces
        self.label = "default"
        self.asked: list[str] = []
        self.lost_answers: list[str] = []
        self.stuck = 0  # how often the cache cannot be reset
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []
        self.gate = CallGate()
        self.moving = asyncio.Event()
        self.moving.set()
        self.url = ""
        self.waiting: list[int] = []  # calls in the queue of each engine

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.health)
        if self.scale_out:
            app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        if self.dev:
            if self.labels:
                app.router.add_get("/weight_info", self.weight_info)
                app.router.add_post("/update_weight_version", self.manage)
            app.router.add_get("/is_paused", self.is_paused)
            app.router.add_get("/server_info", self.server_info)
            app.router.add_post("/abort_requests", self.abort)
            for path in ("init_weight_transfer_engine", "start_weight_update", "update_weights"):
                app.router.add_post(f"/{path}", self.transfer)
            app.router.add_post("/finish_weight_update", self.transfer)
            for path in ("pause", "resume", "collective_rpc", "reset_prefix_cache"):
                app.router.add_post(f"/{path}", self.manage)
        if self.loras:
            app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        return app

    async def transfer(self, request: web.Request) -> web.Response:
        """As vLLM's own transfer: in order, or 500. What is sent are numbers in place of tensors."""
        body = await request.json() if request.can_read_body else {}
        self.asked.append(request.path)
        if not self.ipc:
            reply = {"message": "Weight transfer not configured. Please set weight_transfer_config"}
            return web.json_response({"error": reply}, status=500)
        before = {"/start_weight_update": "ready", "/update_weights": "open", "/finish_weight_update": "open"}
        if self.transferring != before.get(request.path, self.transferring):
            reply = {"message": f"{request.path} while it is {self.transferring}"}
            return web.json_response({"error": reply}, status=500)
        if request.path == "/update_weights":
            if body["update_info"].get("names") == ["strange"]:
                self.transferring = "ready"
                return web.json_response({"error": {"message": "no such tensor"}}, status=500)
            self.received += body["update_info"]["names"]
            self.handles.append(body["update_info"].get("ipc_handles_pickled", ""))
            self.on_update()
            return web.json_response({"message": "Weights updated"})
        if request.path == "/finish_weight_update":
            self.label, self.weights = body["weight_version"], "sent"
            await self.engine.load(int(self.label), "sent")
        self.transferring = "open" if request.path == "/start_weight_update" else "ready"
        return web.json_response({"message": "fine"})

    async def server_info(self, request: web.Request) -> web.Response:
        if self.no_server_info:
            return web.json_response({"detail": "No module named pip"}, status=500)
        found = {"max_loras": self.loras, "max_lora_rank": 8} if self.loras else None
        return web.json_response(
            {"vllm_config": {"lora_config": found, "device_config": {"device": self.device}}}
        )

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        queue = "".join(
            f'vllm:num_requests_waiting{{engine="{n}",model_name="policy"}} {waiting:.1f}\n'
            for n, waiting in enumerate(self.waiting)
        )
        labels = f'max_lora="{self.loras}",running_lora_adapters="",waiting_lora_adapters=""'
        adapters = f"# HELP x\nvllm:lora_requests_info{{{labels}}} 1.0\n" if self.loras else ""
        return web.Response(text=queue + adapters)

    async def abort(self, request: web.Request) -> web.Response:
        named = (await request.json())["request_ids"]
        self.asked.append(request.path)
        for name in named:
            if name in self.aborts:
                self.aborts[name].set()
                self.busy.pop(name, None)
        return web.json_response({"status": "aborted", "aborted": len(named)})

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(f"+{body['lora_name']}")
        if body["lora_path"].endswith("broken"):
            reply = {"message": "LoRA rank 16 is greater than max_lora_rank 8.", "code": 500}
            return web.json_response({"error": reply}, status=500)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success: added")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.asked.append(f"-{name}")
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": {"message": "cannot be found", "code": 404}}, status=404)
        return web.Response(text="Success: removed")

    async def models(self, request: web.Request) -> web.Response:
        if self.faults and self.faults[0] == "down":
            return web.json_response({"error": {"message": "EngineCore is dead"}}, status=500)
        info = await self.engine.info()
        base = {"id": "tiny", "max_model_len": info.max_context, "parent": None}
        adapters = [{"id": name, "max_model_len": None, "parent": "tiny"} for name in self.adapters]
        return web.json_response({"data": [base, *adapters]})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.moving.is_set()})

    async def manage(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/pause":
            self.moving.clear()
            if "/pause" in self.lost_answers and request.transport:
                request.transport.abort()
        elif request.path == "/resume":
            self.moving.set()
        elif request.path == "/reset_prefix_cache" and self.stuck:
            self.stuck -= 1
            return web.json_response({"success": False})
        elif request.path == "/collective_rpc":
            self.weights = body["kwargs"]["weights_path"]
            if self.weights.endswith("broken"):
                return web.json_response({"error": {"message": "no such tensor"}}, status=500)
        elif request.path == "/update_weight_version":
            self.label = body["new_version"]
            await self.engine.load(int(self.label), self.weights)
        return web.json_response({"success": True})

    def restart(self, engine: Engine) -> None:
        """As a server does that died and was started again: with its first weights, and nothing else."""
        self.label, self.adapters, self.engine = "default", {}, engine

    # --- calls ------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids" not in body:
            return web.json_response({"error": {"message": "token_ids: field required"}}, status=400)
        sampling = body["sampling_params"]
        return await self.answer(request, body, body["token_ids"], sampling, self.as_generate)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self.answer(request, body, body["prompt"], body, self.as_completion)

    async def answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], given: dict[str, Any], shape: Any
    ) -> web.StreamResponse:
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        if body["model"] not in ("tiny", *self.adapters):
            told = {"message": f"The model `{body['model']}` does not exist.", "code": 404}
            return web.json_response({"error": told}, status=404)
        self.served.append(body["model"])
        given_id = request.headers.get("x-request-id", "")
        known_as = f"generate-tokens-{given_id}" if "token_ids" in body else f"cmpl-{given_id}-0"
        self.aborts[known_as] = asyncio.Event()
        parts = body.get("content_parts") or []
        count = given["logprobs"]
        if max(count, given.get("prompt_logprobs") or 0) > self.max_logprobs:
            told = f"Requested sample logprobs of {count}, which is greater than max allowed"
            return web.json_response({"error": {"message": told, "code": 400}}, status=400)
        call = GenerateRequest(
            id="c",
            session_id="s",
            prompt_ids=tuple(prompt),
            sampling=Sampling(
                temperature=given["temperature"],
                top_p=given["top_p"],
                top_k=given["top_k"],
                seed=given["seed"],
            ),
            max_tokens=given["max_tokens"],
            stop_ids=tuple(given["stop_token_ids"]),
            stream=True,
            images=tuple(Image(digest=p["uuid"], media_type="?", url=p["url"]) for p in parts),
            top_logprobs=count,
            prompt_logprobs=given.get("prompt_logprobs"),
            constraint=held(given.get("structured_outputs"), given["stop_token_ids"]),
        )
        probing = self.sessions[-1] == "probe"
        fault = self.faults.pop(0) if self.faults and not probing else ""
        if fault == "500":
            return web.json_response({"error": {"message": "EngineCore encountered an issue"}}, status=500)
        try:
            async with aclosing(self.chunks(call, known_as, body["model"])) as chunks:
                if body["stream"]:
                    return await self.stream(request, body, chunks, fault, shape)
                return await self.whole(request, body, [c async for c in chunks], fault, shape)
        except ValueError as error:
            told = {"error": {"message": str(error), "code": 400}}
            if body["stream"]:  # the status was sent before the prompt was looked at
                return web.Response(text=f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n")
            return web.json_response(told, status=400)
        except Unavailable as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)

    async def chunks(self, call: GenerateRequest, known_as: str, model: str) -> AsyncGenerator[Chunk]:
        self.busy[known_as] = model
        self.most_at_once = max(self.most_at_once, len({*self.busy.values()} - {"tiny"}))
        try:
            async for chunk in self.until(call, self.aborts[known_as]):
                yield chunk
        finally:
            self.busy.pop(known_as, None)

    async def until(self, call: GenerateRequest, aborted: asyncio.Event) -> AsyncGenerator[Chunk]:
        sampled = 0
        async with aclosing(self.engine.generate(call)) as chunks:
            async for chunk in chunks:
                await self.gate.wait(call, sampled, aborted.is_set)
                await self.moving.wait()
                sampled += len(chunk.token_ids)
                if aborted.is_set():
                    ended = structs.replace(chunk, token_ids=(), logprobs=(), top_logprobs=())
                    yield structs.replace(ended, finish=FinishReason.ABORTED)
                    return
                yield chunk

    async def whole(
        self, request: web.Request, body: dict[str, Any], chunks: list[Chunk], fault: str, shape: Any
    ) -> web.StreamResponse:
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "die":
            assert request.transport
            request.transport.abort()
        reply = shape(chunks, chunks, body, fault)
        return web.Response(text=_spoilt(json.dumps(reply), fault), content_type="application/json")

    async def stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        chunks: AsyncIterator[Chunk],
        fault: str,
        shape: Any,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        seen: list[Chunk] = []
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            seen.append(chunk)
            event = json.dumps(shape([chunk], seen, body, fault if len(seen) == 3 else ""))
            await self.write(
                response, f"data: {_spoilt(event, fault if len(seen) == 3 else '')}\n\n".encode()
            )
            if len(seen) == 3 and fault == "die":
                assert request.transport
                await asyncio.sleep(0.01)
                request.transport.abort()
                return response
            if len(seen) == 3 and fault == "hang":
                await asyncio.sleep(60)
            if len(seen) == 3 and fault == "error":
                await self.write(response, b'data: {"error": {"message": "out of memory"}}\n\n')
                return response
            if len(seen) == 3 and fault == "no end":
                return response
        await self.write(response, b"data: [DONE]\n\n")
        return response

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        size = self.pieces or len(data)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])
            if self.pieces:
                await asyncio.sleep(0)

    def candidate(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        if self.labels:
            return {"token_id": token, "logprob": logprob, "rank": rank}
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}  # as in 0.26

    def as_generate(self, chunks: list[Chunk], seen: list[Chunk], body: dict[str, Any], fault: str) -> Any:
        tokens, logprobs, last = self.joined(chunks, body["sampling_params"], fault)
        tops = [top for chunk in chunks for top in chunk.top_logprobs] or [()] * len(tokens)
        entries = [
            {
                "token_id": t,
                "logprob": p,
                "rank": 1,
                "top_logprobs": [
                    self.candidate(token, logprob, rank)
                    for rank, (token, logprob) in enumerate(top or [(t, p)], 1)
                ],
            }
            for t, p, top in zip(tokens, logprobs, tops, strict=False)
        ]
        choice = {
            "index": 0,
            "finish_reason": REASONS[last.finish],
            "token_ids": tokens,
            "weight_versions": self.spans(seen) if last.finish and self.labels else None,
            "logprobs": {"content": entries},
        }
        expanded = seen[0].prompt_ids if body.get("return_token_ids") and chunks[0] is seen[0] else None
        reply = {"request_id": "generate-tokens-1", "choices": [choice], "prompt_token_ids": expanded}
        return reply | ({} if body["stream"] else {"prompt_logprobs": _prompt_logprobs(seen)})

    def as_completion(self, chunks: list[Chunk], seen: list[Chunk], body: dict[str, Any], fault: str) -> Any:
        tokens, logprobs, last = self.joined(chunks, body, fault)
        choice = {
            "index": 0,
            "text": "é" * len(tokens),
            "finish_reason": REASONS[last.finish],
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs, "tokens": ["é"] * len(tokens)},
            "prompt_token_ids": body["prompt"] if chunks[0] is seen[0] else None,
            "prompt_logprobs": None if body["stream"] else _prompt_logprobs(seen),
        }
        if body["logprobs"]:
            name = "token_id:{}" if body["return_tokens_as_token_ids"] else "{}"
            tops = [top for chunk in chunks for top in chunk.top_logprobs]
            choice["logprobs"]["top_logprobs"] = [{name.format(t): p for t, p in top} for top in tops]
        return {"id": "cmpl-1", "choices": [choice]}

    def joined(
        self, chunks: list[Chunk], sampling: dict[str, Any], fault: str
    ) -> tuple[list[int], list[float], Chunk]:
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        if not self.raw and (sampling["top_k"] == 1 or 0 < sampling["temperature"] < 0.2):
            logprobs = [0.0] * len(logprobs)
        if fault == "fewer":
            logprobs = logprobs[:-1]
        if fault == "clamped":
            logprobs[-1] = -9999.0
        return tokens, logprobs, chunks[-1]

    def spans(self, chunks: list[Chunk]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        start = 0
        for chunk in chunks:
            end, name = start + len(chunk.token_ids), str(chunk.low) if chunk.low else "default"
            if spans and spans[-1]["version"] == name:
                start = spans.pop()["start"]
            spans.append({"version": name, "start": start, "end": end})
            start = end
        return spans


def held(asked: dict[str, str] | None, stop_ids: Sequence[int]) -> Constraint | None:
    return Constraint(grammar=asked["structural_tag"], stop_ids=tuple(stop_ids)) if asked else None


def _prompt_logprobs(seen: list[Chunk]) -> Any:
    prompt_logprobs = seen[0].prompt_logprobs
    entries = [
        {str(t): {"logprob": p, "rank": 1, "decoded_token": "é"} for t, p in top}
        for top in prompt_logprobs or ()
    ]
    return None if prompt_logprobs is None else [entry or None for entry in entries]


def _spoilt(event: str, fault: str) -> str:
    if fault == "nan":
        return event.replace('"logprob": -', '"logprob": NaN, "was": -', 1).replace("[-", "[NaN, -", 1)
    if fault == "null":
        return event.replace('"logprob": -', '"logprob": null, "was": -', 1).replace("[-", "[null, -", 1)
    return "<html>502 Bad Gateway</html>" if fault == "garbage" else event


@asynccontextmanager
async def serving(fake: FakeVllm, port: int = 0) -> AsyncIterator[str]:
    """The server, with its engine, on a port of its own."""
    async with fake.engine:
        runner = web.AppRunner(fake.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}"
        try:
            yield fake.url
        finally:
            await runner.cleanup()
