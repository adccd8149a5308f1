"""A vLLM server as an engine: ids in, ids, log-probabilities and weight versions out.

It asks `/inference/v1/generate` where the server offers it (`--enable-scale-out`), else `/v1/completions`,
whose versions are intervals. A server whose log-probabilities are those before temperature and truncation
is found out on entering; calls they would be wrong for are refused. What one network read brings is one
chunk. Loading and pausing need VLLM_SERVER_DEV_MODE=1 there and are refused with that remedy otherwise.
A seed only repeats on one server with the same load: batches change the last bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from afield.engines import vllm_wire as wire
from afield.engines.checks import check_call, is_newer
from afield.engines.http import Http
from afield.engines.sse import Events
from afield.errors import Unavailable, UsageError
from afield.seams.engine import Call, Chunk, EngineInfo
from afield.types import Sampling

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 to update weights and pause"
RAW = (
    "log-probabilities are those before temperature and truncation;"
    " start vLLM with --logprobs-mode processed_logprobs to sample with either"
)
NO_SPANS = "weight versions are intervals; start vLLM with --enable-scale-out to have them per token"
CERTAIN = -0.02
UNKNOWN_VOCABULARY = 1 << 31  # the server refuses ids it does not have


class _Model(Struct):
    id: str
    max_model_len: int


class _Models(Struct):
    data: list[_Model]


class _WeightInfo(Struct):
    weight_version: str


MODELS = msgspec.json.Decoder(_Models)
WEIGHT_INFO = msgspec.json.Decoder(_WeightInfo)


class VllmEngine:
    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        version: int = 0,
        vocab_size: int | None = None,
        images: bool = False,
        api_key: str | None = None,
        idle_s: float = 120.0,
        answer_s: float = 900.0,
    ) -> None:
        """`version` is what weights that were never named count as; `idle_s` bounds silence within a
        stream, `answer_s` the wait for an answer in one piece."""
        self._http = Http(url, api_key=api_key, idle_s=idle_s, held=lambda: self._held)
        self.url = self._http.url
        self._model, self._initial, self._version = model, version, version
        self._vocab_size, self._images, self._answer_s = vocab_size or UNKNOWN_VOCABULARY, images, answer_s
        self._exact, self._dev, self._held = True, False, False
        self._spoiled: str | None = None
        self._loading = asyncio.Lock()
        self._known: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        try:
            self._known = await self._learn()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._known = None
        await self._http.__aexit__(*exc)

    async def info(self) -> EngineInfo:
        """Asks the server, so that one that is gone is Unavailable."""
        known = self._entered()
        await self._refresh()
        return structs.replace(known, version=self._version)

    def generate(self, call: Call) -> AsyncGenerator[Chunk]:
        return self._streamed(call) if call.stream else self._whole(call)

    async def load(self, version: int, path: str) -> None:
        self._entered()
        async with self._loading:
            await self._refresh()
            if not is_newer(version, self._version):
                return
            self._check_loadable(version, path)
            await self._ask("/pause?mode=keep")
            try:
                await self._swap(version, path)
            finally:
                if not self._held:
                    await self._ask("/resume")

    async def pause(self) -> None:
        """Freeze the calls in flight, and those that come, until `resume`."""
        self._entered()
        if not self._dev:
            raise UsageError(f"{self.url} cannot be paused; {DEV_MODE}")
        await self._ask("/pause?mode=keep")
        self._held = True

    async def resume(self) -> None:
        self._entered()
        await self._ask("/resume")
        self._held = False

    # --- starting ---------------------------------------------------------------------------------

    async def _learn(self) -> EngineInfo:
        served = self._http.decode(await self._http.ask("GET", "/v1/models"), MODELS).data
        chosen = next((m for m in served if self._model in (None, m.id)), None)
        if chosen is None:
            names = ", ".join(m.id for m in served)
            raise UsageError(f"{self.url} does not serve {self._model!r}; choose one of: {names}")
        self._model = chosen.id
        await self._refresh()
        status, _ = await self._http.status("POST", wire.GENERATE, {})
        self._exact = status not in {403, 404, 405}
        info = EngineInfo(
            kind="vllm",
            version=self._version,
            max_context=chosen.max_model_len,
            vocab_size=self._vocab_size,
            images=self._images and self._exact,
            exact_versions=self._exact,
        )
        self._known = info
        raw = await self._is_raw()
        notes = ((RAW,) if raw else ()) + (() if self._exact else (NO_SPANS,))
        return structs.replace(info, logprobs="raw" if raw else "processed", notes=notes)

    async def _refresh(self) -> None:
        """The version the server says it has; also whether it can be managed at all."""
        status, data = await self._http.status("GET", "/weight_info")
        self._dev = status == 200
        if self._dev:
            label = self._http.decode(data, WEIGHT_INFO).weight_version
            self._version = wire.as_version(label, self._initial)
        elif status != 404:
            raise Unavailable(f"{self.url} answers {status} to /weight_info: {data[:200]!r}")

    async def _is_raw(self) -> bool:
        """Compares tokens that truncation leaves no choice about with the same tokens drawn greedily."""
        raw, processed = 0, 0
        for prompt in ((1, 2, 3), (3, 1), (5, 6, 7, 8)):
            free, bound = await self._drawn(prompt, temperature=0.0), await self._drawn(prompt, top_k=1)
            for (token, p), (other, q) in zip(free, bound, strict=True):
                if token != other:
                    break
                raw += p < CERTAIN and abs(p - q) < 1e-3
                processed += p < CERTAIN and q > -1e-3
        # A model that never hesitates tells nothing; refusing later is better than a wrong number.
        return raw >= processed

    async def _drawn(self, prompt: tuple[int, ...], **sampling: Any) -> list[tuple[int, float]]:
        call = Call(
            id="probe",
            session_id="probe",
            prompt_ids=prompt,
            sampling=Sampling(**sampling),
            max_tokens=8,
            stop_ids=(),
        )
        drawn = [chunk async for chunk in self._whole(call)]
        return [pair for chunk in drawn for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]

    def _entered(self) -> EngineInfo:
        if self._known is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        return self._known

    # --- calls ------------------------------------------------------------------------------------

    def _prepare(self, call: Call) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Path, body and headers; or why not."""
        info = self._entered()
        if self._spoiled:
            raise Unavailable(self._spoiled)
        check_call(call, info)
        sampling = call.sampling
        tempered = sampling.temperature not in (0.0, 1.0)
        if info.logprobs == "raw" and (tempered or (sampling.temperature and sampling.truncated)):
            drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
            raise ValueError(f"call {call.id!r} samples with {drawn}, but at {self.url} the {RAW}")
        if call.images and not info.images:
            raise ValueError(f"call {call.id!r} has images, which {self.url} does not take")
        limit = min(call.max_tokens, info.max_context - len(call.prompt_ids))
        make = wire.generate_body if self._exact else wire.completions_body
        path = wire.GENERATE if self._exact else wire.COMPLETIONS
        # Routers in front of several servers send a session where its prefix is cached.
        return path, make(self._model or "", call, limit), {"x-session-id": call.session_id}

    async def _whole(self, call: Call) -> AsyncGenerator[Chunk]:
        path, body, headers = self._prepare(call)
        low = self._version
        data = await self._http.ask("POST", path, body, headers=headers, idle_s=self._answer_s)
        sampled = wire.Sampled([self._http.decode(data, wire.REPLY)], self.url)
        for chunk in self._cut(call, sampled, low):
            yield chunk

    def _cut(self, call: Call, sampled: wire.Sampled, low: int) -> list[Chunk]:
        """One chunk for each version span."""
        if sampled.finish is None:
            raise Unavailable(f"{self.url} gave an answer without an end")
        length = len(sampled.token_ids)
        cuts = [(0, length, low, max(low, self._version))]
        if sampled.spans:
            spans = wire.exact_spans(sampled.spans, length, self._initial, self.url)
            cuts = [(s.start, s.end, s.low, s.high) for s in spans]
        return [
            Chunk(
                token_ids=tuple(sampled.token_ids[start:end]),
                logprobs=tuple(sampled.logprobs[start:end]),
                low=first,
                high=last,
                finish=sampled.finish if end == length else None,
                prompt_ids=self._expanded(call, sampled) if start == 0 else None,
            )
            for start, end, first, last in cuts
        ]

    async def _streamed(self, call: Call) -> AsyncGenerator[Chunk]:
        path, body, headers = self._prepare(call)
        events, low, length = Events(), self._version, 0
        last: Chunk | None = None
        async with aclosing(self._http.reads(path, body, headers)) as reads:
            async for data in reads:
                found = events.feed(data)
                if last is not None or not found:
                    continue  # to the end, so that the connection can be used again
                chunk = self._merge(call, found, low, length)
                length += len(chunk.token_ids)
                if chunk.finish is not None:
                    last = chunk
                elif chunk.token_ids:
                    yield chunk
        if last is None:
            raise Unavailable(f"{self.url} ended a stream without a finish, after {length} tokens")
        yield last

    def _merge(self, call: Call, found: list[bytes], low: int, before: int) -> Chunk:
        if found[-1] == wire.DONE:
            found.pop()
        replies = self._http.decode(b"[" + b",".join(found) + b"]", wire.REPLIES)
        sampled = wire.Sampled(replies, self.url)
        versions = None
        if sampled.spans:
            length = before + len(sampled.token_ids)
            versions = wire.exact_spans(sampled.spans, length, self._initial, self.url)
        return Chunk(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            low=low,
            high=max(low, self._version),
            finish=sampled.finish,
            prompt_ids=self._expanded(call, sampled),
            versions=versions,
        )

    def _expanded(self, call: Call, sampled: wire.Sampled) -> tuple[int, ...] | None:
        if sampled.prompt_ids is None or sampled.prompt_ids == call.prompt_ids:
            return None
        if not call.images:
            raise Unavailable(f"{self.url} changed the prompt of call {call.id!r}; ids must be taken as sent")
        return sampled.prompt_ids

    # --- weights ----------------------------------------------------------------------------------

    def _check_loadable(self, version: int, path: str) -> None:
        if not self._dev:
            raise UsageError(f"{self.url} cannot load version {version}; {DEV_MODE}")
        # A path that is wrong kills the server's core, so it is looked at first where that is possible.
        near = urlsplit(self.url).hostname in {"127.0.0.1", "localhost", "::1"}
        if near and not (Path(path) / "config.json").is_file():
            raise UsageError(f"version {version}: {path!r} is not a model directory (it has no config.json)")

    async def _swap(self, version: int, path: str) -> None:
        """Between a pause and a resume: nothing is sampled while this runs."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            await self._ask("/collective_rpc", reload)
            await self._ask("/update_weight_version", {"new_version": str(version)})
            # Calls in flight compute their context anew, so that no token depends on two versions' caches.
            await self._ask("/reset_prefix_cache?reset_running_requests=true")
        except BaseException as error:
            self._spoiled = f"{self.url} failed to load version {version} and may hold parts of it: {error}"
            raise
        self._spoiled = None
        self._version = version

    async def _ask(self, path: str, body: Any = None) -> None:
        try:
            await self._http.ask("POST", path, body, idle_s=self._answer_s)
        except ValueError as error:
            raise Unavailable(str(error)) from error
