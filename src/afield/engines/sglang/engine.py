"""SGLang engine: token ids, log-probabilities and weight versions from an SGLang server.

1. Calls go to `/generate` with `input_ids`. Streams are cumulative or incremental; each network read is one
   chunk.
2. Versions are exact if the server reports `meta_info.weight_versions`, else an interval.
3. SGLang's log-probabilities are after temperature but before truncation: calls with top_p or top_k are
   refused unless the probe measures otherwise.
4. The model's own end ids also end a call that has stop ids. Ids outside the vocabulary are refused: they
   crash the server.
5. An adapter serves the calls that begin after it; calls of the oldest versions continue with the newest
   when the server has no adapter slot left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import structs

from afield.engines.checks import check_call
from afield.engines.http import SseParser
from afield.engines.lora import AdapterLease
from afield.engines.probe import measure_logprob_mode
from afield.engines.remote import MODELS, RemoteEngine, as_version, exact_spans, gauge
from afield.engines.sglang import wire
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.types import VersionSpan

FLUSH_PAUSES_S = (0.0, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0)  # flushing fails until aborted calls have ended
MAX_TOP_LOGPROBS = 20  # SGLang has no limit; OpenAI's API allows 20
LEAST = 2  # adapter slots: one for the newest version, one for running calls
ADAPTERS = (
    "start it with --enable-lora --max-loras-per-batch 2 (or more) --max-lora-rank and --lora-target-modules;"
    " or publish whole weights, with learn.lora.publish = 'merged'"
)


class SglangEngine(RemoteEngine):
    """Engine for an SGLang server."""

    remedy = "ask for top_p 1 and top_k off, and do not set SGLANG_RETURN_ORIGINAL_LOGPROB on the server"

    def __init__(self, url: str, **options: Any) -> None:
        """Create an engine; `options` are those of `RemoteEngine`."""
        super().__init__(url, **options)
        self._room = 0
        self._adapters: dict[int, str] = {}  # adapter names by version

    async def _learn(self) -> EngineInfo:
        served = self._http.decode(await self._http.ask("GET", "/server_info"), wire.SERVER_INFO)
        model_info = self._http.decode(await self._http.ask("GET", "/model_info"), wire.MODEL_INFO)
        self._version = as_version(model_info.weight_version, self._initial)
        self._room = served.max_loras_per_batch if served.enable_lora else 0
        # Claims constraints until they are measured, so that `check_call` accepts the measuring calls.
        self._known = info = EngineInfo(
            kind="sglang",
            version=self._version,
            constraints=True,
            max_context=served.max_req_input_len,
            vocab_size=self._vocab_size,
            images=model_info.has_image_understanding,
            dtype=served.dtype if served.dtype in ("float32", "bfloat16", "float16") else "",
            max_top_logprobs=MAX_TOP_LOGPROBS,
            prompt_logprobs=True,
        )
        mode, holds = await measure_logprob_mode(self._draw), await self._holds()
        notes = () if mode == "processed" else (f"log-probabilities are {mode}; {self.remedy}",)
        return structs.replace(info, logprobs=mode, notes=notes, constraints=holds)

    async def _refresh(self) -> None:
        model_info = self._http.decode(await self._http.ask("GET", "/model_info"), wire.MODEL_INFO)
        base = as_version(model_info.weight_version, self._initial)
        await self._refresh_adapters(base)
        self._version = self._leases.newest or base

    async def _refresh_adapters(self, base: int) -> None:
        """Forget adapters that a restarted server has lost, or that newer full weights have replaced.

        `base` is the version of the full weights; another process may have loaded them.
        """
        if self._leases.newest is None:
            return
        if base > self._leases.newest:
            self._leases.newest = None
            return
        there = await self._list()
        self._adapters = {version: name for version, name in self._adapters.items() if name in there}
        if self._leases.newest not in self._adapters:
            self._leases.newest = None

    async def waiting(self) -> int | None:
        """Number of calls in the server's queue, from /get_load or /metrics; None if it reports neither."""
        status, data = await self._http.status("GET", "/get_load")
        if status == 200:
            return sum(load.num_waiting_reqs for load in self._http.decode(data, wire.LOADS))
        status, data = await self._http.status("GET", "/metrics")
        return gauge(data, "sglang:num_queue_reqs") if status == 200 else None

    # --- calls ------------------------------------------------------------------------------------

    def _limit(self, call: GenerateRequest) -> int:
        check_call(call, self._entered())
        return super()._limit(call)

    def _body(self, call: GenerateRequest, lease: AdapterLease | None) -> dict[str, Any]:
        return wire.body(call, self._limit(call), lease, self._adapters[lease.version] if lease else "")

    async def _whole(self, call: GenerateRequest, lease: AdapterLease | None = None) -> AsyncGenerator[Chunk]:
        body, low = self._body(call, lease), self._version
        try:
            data = await self._http.ask("POST", wire.GENERATE, body, idle_s=self._answer_s, still=True)
        except ValueError:
            await self._check_listed(lease)
            raise
        reply = self._http.decode(data, wire.REPLY)
        chunk = self._chunk(call, [reply], low, 0, lease)
        if chunk.finish is None:
            raise Unavailable(f"{self.url} sent a reply without a finish reason")
        for piece in _split(chunk):
            yield piece

    async def _streamed(
        self, call: GenerateRequest, lease: AdapterLease | None = None
    ) -> AsyncGenerator[Chunk]:
        body, low, seen = self._body(call, lease), self._version, 0
        events, last = SseParser(), None
        async with aclosing(self._reads(body, lease)) as reads:
            async for data in reads:
                data_events = [event for event in events.feed(data) if event != wire.DONE]
                if last is not None or not data_events:
                    continue  # read to the end, so that the connection can be reused
                chunk = self._chunk(call, self._replies(data_events), low, seen, lease)
                seen += len(chunk.token_ids)
                if chunk.finish is not None:
                    last = chunk
                elif chunk.token_ids:
                    yield chunk
        if last is None:
            raise Unavailable(f"{self.url} ended a stream without a finish reason after {seen} tokens")
        yield last

    async def _reads(self, body: dict[str, Any], lease: AdapterLease | None) -> AsyncGenerator[bytes]:
        async with aclosing(self._http.reads(wire.GENERATE, body, {})) as reads:
            try:
                async for data in reads:
                    yield data
            except ValueError:
                await self._check_listed(lease)
                raise

    async def _check_listed(self, lease: AdapterLease | None) -> None:
        """Raise Unavailable if a restarted server lost the adapter; its own error blames the caller."""
        if lease is not None and self._adapters.get(lease.version) not in await self._list():
            raise Unavailable(
                f"{self.url} lost the adapter of version {lease.version}; was it started again?"
            )

    async def _list(self) -> set[str]:
        listed = self._http.decode(await self._http.ask("GET", "/v1/models"), MODELS).data
        return {model.id for model in listed}

    def _replies(self, data_events: list[bytes]) -> list[wire.SglangResponse]:
        """Decode events; only the last one if it is cumulative."""
        last = self._http.decode(data_events[-1], wire.REPLY)
        if last.error is not None or len(last.output_ids) >= last.meta_info.completion_tokens:
            return [last]
        return [self._http.decode(event, wire.REPLY) for event in data_events[:-1]] + [last]

    def _chunk(
        self,
        call: GenerateRequest,
        replies: list[wire.SglangResponse],
        low: int,
        seen: int,
        lease: AdapterLease | None,
    ) -> Chunk:
        sampled = wire.SglangSample(replies, seen, self.url, call.top_logprobs)
        now = as_version(sampled.version, self._initial)
        self._version = max(self._version, now)
        versions, high = None, max(low, self._version)
        if lease is not None:  # the server reports the version of the base weights
            low = high = lease.version
        elif now < low:
            self._check_kept(now, low)
            low = high = now
        elif sampled.finish is not None and sampled.spans:
            total = seen + len(sampled.token_ids)
            versions = exact_spans(sampled.spans, total, self._initial, self.url)
        return Chunk(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            low=low,
            high=high,
            finish=sampled.finish,
            prompt_ids=self._expanded(call, sampled.prompt_ids) if seen == 0 else None,
            versions=versions,
            top_logprobs=tuple(sampled.tops),
            prompt_logprobs=wire.prompt_tops(replies[0], call, self.url) if seen == 0 else None,
        )

    # --- weights ----------------------------------------------------------------------------------

    async def _freeze(self) -> None:
        # "retract" keeps the calls but drops their KV caches, which the old weights computed.
        await self._order("/pause_generation", {"mode": "retract"})

    async def _thaw(self) -> None:
        await self._order("/continue_generation", {})

    async def _name(self, version: int) -> None:
        raise UsageError(f"version {version} has no path; {self.url} needs the directory of its weights")

    async def _expect(self, version: int) -> None:
        """Trust the version without another request: the response to the load confirmed it."""
        self._version = version

    async def _adopt(self, version: int, path: str) -> None:
        if self._room < LEAST:
            raise UsageError(f"{self.url} serves {self._room} adapters at a time; {ADAPTERS}")
        await self._end_calls(self._room - 1)
        name = wire.adapter_name(version, path)
        status, data = await self._http.status(
            "POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}, idle_s=self._answer_s
        )
        result = self._http.decode(data, wire.UPDATED)
        # Another process, or this one before a restart, may have loaded it already.
        there = name in (result.loaded_adapters or ())
        if not there and (status != 200 or not result.success):
            why = result.error_message or result.message or f"it answers {status}"
            raise UsageError(f"{self.url} did not take the adapter {path!r}: {why}; {ADAPTERS}")
        self._leases.newest = version
        self._adapters[version] = name
        # Keeps the previous version too: another process may not know the newest one yet.
        for idle in [v for v in sorted(self._adapters)[:-2] if not self._leases.in_use(v)]:
            # The status is ignored: another process may have unloaded it already.
            await self._http.status("POST", "/unload_lora_adapter", {"lora_name": self._adapters.pop(idle)})

    async def _end_calls(self, room: int) -> None:
        for lease in self._leases.revoke(room):
            await self._order("/abort_request", {"rid": lease.id})

    async def _swap(self, version: int, path: str) -> None:
        await self._end_calls(0)
        self._leases.newest = None
        await self._flush()
        # flush_cache=True would crash the server if a call were waiting.
        order = {"model_path": path, "weight_version": str(version), "flush_cache": False}
        status, data = await self._http.status(
            "POST", "/update_weights_from_disk", order, idle_s=self._answer_s
        )
        result = self._http.decode(data, wire.UPDATED)
        if status != 200 or not result.success:
            raise Unavailable(f"{self.url} did not load {path!r}: {result.message}")

    async def _flush(self) -> None:
        """Flush the KV cache of the old weights.

        SGLang refuses while calls wait, including retracted ones; those are aborted and continue after the
        load.
        """
        if await self._flushed():
            return
        self._ends += 1
        await self._order("/pause_generation", {"mode": "abort"})
        for pause_s in FLUSH_PAUSES_S:
            await asyncio.sleep(pause_s)
            if await self._flushed():
                return
        raise Unavailable(
            f"{self.url} keeps its cache of the old weights: POST /flush_cache fails; start it again"
        )

    async def _flushed(self) -> bool:
        status, _ = await self._http.status("POST", "/flush_cache")
        return status == 200


def _split(chunk: Chunk) -> list[Chunk]:
    """Split a chunk into one per version span."""
    if not chunk.token_ids:  # the call ended before its first token
        return [structs.replace(chunk, versions=None)]
    spans = chunk.versions or (VersionSpan(0, len(chunk.token_ids), chunk.low, chunk.high),)
    return [
        structs.replace(
            chunk,
            token_ids=chunk.token_ids[span.start : span.end],
            logprobs=chunk.logprobs[span.start : span.end],
            top_logprobs=chunk.top_logprobs[span.start : span.end],
            prompt_logprobs=chunk.prompt_logprobs if span.start == 0 else None,
            low=span.low,
            high=span.high,
            finish=chunk.finish if span.end == len(chunk.token_ids) else None,
            prompt_ids=chunk.prompt_ids if span.start == 0 else None,
            versions=None,
        )
        for span in spans
    ]
