"""An SGLang server as an engine, over `/generate` with `input_ids`.

Its stream repeats everything with every event unless the server was started to send increments; both are
read, and what one network read brings is one chunk. Versions are exact where `meta_info.weight_versions`
is there, otherwise the interval from the version at the start to the one now. SGLang applies temperature to
log-probabilities but not truncation: calls with top_p or top_k are refused unless measured otherwise.
The model's own end ids end a call that has stop ids. Ids outside the vocabulary, where that is known, are
refused here: a real server dies of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import structs

from afield.engines import sglang_wire as wire
from afield.engines.checks import check_call
from afield.engines.logprobs import measure
from afield.engines.remote import RemoteEngine
from afield.engines.spans import as_version, exact_spans
from afield.engines.sse import Events
from afield.errors import Unavailable, UsageError
from afield.seams.engine import Call, Chunk, EngineInfo
from afield.types import VersionSpan


class SglangEngine(RemoteEngine):
    remedy = "ask for top_p 1 and top_k off, and do not set SGLANG_RETURN_ORIGINAL_LOGPROB on the server"

    async def _learn(self) -> EngineInfo:
        served = self._http.decode(await self._http.ask("GET", "/server_info"), wire.SERVER_INFO)
        told = self._http.decode(await self._http.ask("GET", "/model_info"), wire.MODEL_INFO)
        self._version = as_version(told.weight_version, self._initial)
        # Taken at its word until it is measured, so that the measuring calls are let through.
        self._known = info = EngineInfo(
            kind="sglang",
            version=self._version,
            max_context=served.max_req_input_len,
            vocab_size=self._vocab_size,
            images=told.has_image_understanding,
        )
        mode = await measure(self._draw)
        notes = () if mode == "processed" else (f"log-probabilities are {mode}; {self.remedy}",)
        return structs.replace(info, logprobs=mode, notes=notes)

    async def _refresh(self) -> None:
        told = self._http.decode(await self._http.ask("GET", "/model_info"), wire.MODEL_INFO)
        self._version = as_version(told.weight_version, self._initial)

    # --- calls ------------------------------------------------------------------------------------

    def _limit(self, call: Call) -> int:
        check_call(call, self._entered())
        return super()._limit(call)

    async def _whole(self, call: Call) -> AsyncGenerator[Chunk]:
        body, low = wire.body(call, self._limit(call)), self._version
        data = await self._http.ask("POST", wire.GENERATE, body, idle_s=self._answer_s)
        reply = self._http.decode(data, wire.REPLY)
        chunk = self._chunk(call, [reply], low, 0)
        if chunk.finish is None:
            raise Unavailable(f"{self.url} gave an answer without an end")
        for piece in _split(chunk):
            yield piece

    async def _streamed(self, call: Call) -> AsyncGenerator[Chunk]:
        body, low, seen = wire.body(call, self._limit(call)), self._version, 0
        events, last = Events(), None
        async with aclosing(self._http.reads(wire.GENERATE, body, {})) as reads:
            async for data in reads:
                found = [event for event in events.feed(data) if event != wire.DONE]
                if last is not None or not found:
                    continue  # to the end, so that the connection can be used again
                chunk = self._chunk(call, self._replies(found), low, seen)
                seen += len(chunk.token_ids)
                if chunk.finish is not None:
                    last = chunk
                elif chunk.token_ids:
                    yield chunk
        if last is None:
            raise Unavailable(f"{self.url} ended a stream without a finish, after {seen} tokens")
        yield last

    def _replies(self, found: list[bytes]) -> list[wire.Reply]:
        """The last event alone where it repeats the others."""
        last = self._http.decode(found[-1], wire.REPLY)
        if last.error is not None or len(last.output_ids) >= last.meta_info.completion_tokens:
            return [last]
        return [self._http.decode(event, wire.REPLY) for event in found[:-1]] + [last]

    def _chunk(self, call: Call, replies: list[wire.Reply], low: int, seen: int) -> Chunk:
        sampled = wire.Sampled(replies, seen, self.url)
        now = as_version(sampled.version, self._initial)
        self._version = max(self._version, now)
        versions = None
        if sampled.finish is not None and sampled.spans:
            total = seen + len(sampled.token_ids)
            versions = exact_spans(sampled.spans, total, self._initial, self.url)
        return Chunk(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            low=low,
            high=max(low, self._version),
            finish=sampled.finish,
            prompt_ids=self._expanded(call, sampled.prompt_ids) if seen == 0 else None,
            versions=versions,
        )

    # --- weights ----------------------------------------------------------------------------------

    async def _freeze(self) -> None:
        # "retract" keeps the calls but not their caches, which old weights computed.
        await self._order("/pause_generation", {"mode": "retract"})

    async def _thaw(self) -> None:
        await self._order("/continue_generation", {})

    async def _name(self, version: int) -> None:
        raise UsageError(
            f"{self.url}: give the path of version {version}; SGLang names weights as it loads them"
        )

    async def _expect(self, version: int) -> None:
        """Its answer to the order said so, and so does every answer from now on."""
        self._version = version

    async def _swap(self, version: int, path: str) -> None:
        order = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        status, data = await self._http.status("POST", "/update_weights_from_disk", order)
        told = self._http.decode(data, wire.UPDATED)
        if status != 200 or not told.success:
            raise Unavailable(f"{self.url} did not load {path!r}: {told.message}")


def _split(chunk: Chunk) -> list[Chunk]:
    """One chunk for each version span."""
    spans = chunk.versions or (VersionSpan(0, len(chunk.token_ids), chunk.low, chunk.high),)
    return [
        structs.replace(
            chunk,
            token_ids=chunk.token_ids[span.start : span.end],
            logprobs=chunk.logprobs[span.start : span.end],
            low=span.low,
            high=span.high,
            finish=chunk.finish if span.end == len(chunk.token_ids) else None,
            prompt_ids=chunk.prompt_ids if span.start == 0 else None,
            versions=None,
        )
        for span in spans
    ]
