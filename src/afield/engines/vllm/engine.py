"""vLLM engine: token ids, log-probabilities and weight versions from a vLLM server.

1. Calls go to `/inference/v1/generate` if the server has it (`--enable-scale-out`), else to
   `/v1/completions`, where weight versions are intervals. Each network read is one chunk; exact versions
   come with the last one.
2. Loading weights and pausing need VLLM_SERVER_DEV_MODE=1 on the server.
3. Running calls continue with new full weights; an adapter serves only the calls that begin after it, see
   `vllm.lora`. Weights that a trainer shares in GPU memory are copied from there by vLLM's `ipc` backend.
4. A seed reproduces tokens only on one server under the same load: batching changes the last bits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from afield.engines.http import SseParser
from afield.engines.lora import AdapterLease
from afield.engines.probe import measure_logprob_mode, mode_call
from afield.engines.remote import MODELS, RemoteEngine, as_version, exact_spans, gauge
from afield.engines.vllm import wire
from afield.engines.vllm.lora import VllmAdapters, adapter_name, is_tied
from afield.engines.vllm.weight_transfer import KEEPS, RESET, RESET_PAUSES_S, was_reset
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest, TopLogprobs
from afield.interfaces.shared_weights import SharedWeights, read_shared_weights
from afield.types import VersionSpan

log = logging.getLogger(__name__)
SHOWN = 300  # characters of a server's answer in an error
TRANSFER_FLAGS = (
    'start it with --weight-transfer-config \'{"backend": "ipc"}\', VLLM_SERVER_DEV_MODE=1 and'
    " VLLM_ALLOW_INSECURE_SERIALIZATION=1"
)
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 to update weights and pause"
NO_SPANS = "weight versions are intervals; start vLLM with --enable-scale-out to have them per token"
NO_LABELS = (
    "the server does not name its weights (older vLLM, such as 0.26): versions are those loaded from"
    " here, calls that meet an update have an interval, and a server that was started again is not noticed"
)


CANDIDATES = (20, 10, 5, 1)  # values of top_logprobs to try, largest first


class _WeightInfo(Struct):
    weight_version: str


class _Paused(Struct):
    is_paused: bool


PAUSED = msgspec.json.Decoder(_Paused)
WEIGHT_INFO = msgspec.json.Decoder(_WeightInfo)


class VllmEngine(RemoteEngine):
    """Engine for a vLLM server."""

    remedy = "start vLLM with --logprobs-mode processed_logprobs"

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        images: bool = False,
        shared_weights: bool = False,
        **options: Any,
    ) -> None:
        """Create an engine.

        Args:
            url: base URL of the server.
            model: served model name; None takes the first one.
            images: whether the model accepts images, which vLLM does not report.
            shared_weights: load weights that a trainer on this machine shares in GPU memory from there.
            options: options of `RemoteEngine`.
        """
        super().__init__(url, **options)
        self._model, self._images = model, images
        self._shared_weights = shared_weights
        self._exact, self._manageable = True, False
        self._labelled = True  # whether the server labels its weights; older releases (0.26) do not
        self._own = self._initial  # version loaded by this engine, for servers without labels
        self._encoded = wire.PromptEncoder()
        self._mixes = False  # whether an adapter may affect calls on the base weights in the same batch
        self._adapters = VllmAdapters(self._http, self._leases)

    async def _learn(self) -> EngineInfo:
        models = self._http.decode(await self._http.ask("GET", "/v1/models"), MODELS).data
        served = [model for model in models if model.parent is None]
        chosen = next((m for m in served if self._model in (None, m.id)), None)
        if chosen is None or chosen.max_model_len is None:
            names = ", ".join(m.id for m in served)
            raise UsageError(f"{self.url} does not serve {self._model!r}; choose one of: {names}")
        self._model = chosen.id
        await self._refresh()
        if self._manageable and await self._is_paused():
            raise Unavailable(f"{self.url} is paused; POST /resume there to continue it")
        if self._shared_weights:
            await self._check_transfer()
        status, _ = await self._http.status("POST", wire.GENERATE, {})
        self._exact = status not in {403, 404, 405}
        # Claims constraints until they are measured, so that `check_call` accepts the measuring calls.
        self._known = info = EngineInfo(
            kind="vllm",
            version=self._version,
            constraints=True,
            max_context=chosen.max_model_len,
            vocab_size=self._vocab_size,
            images=self._images and self._exact,
            exact_versions=self._exact and self._labelled,
            dtype=await self._adapters.dtype() if self._manageable else "",
        )
        mode, holds = await measure_logprob_mode(self._draw), await self._holds()
        notes = () if mode == "processed" else (f"log-probabilities are {mode}; {self.remedy}",)
        notes += () if self._exact else (NO_SPANS,)
        notes += () if self._labelled or not self._manageable else (NO_LABELS,)
        self._known = info = structs.replace(info, logprobs=mode, notes=notes, prompt_logprobs=True)
        return structs.replace(info, max_top_logprobs=await self._most_candidates(), constraints=holds)

    async def _most_candidates(self) -> int:
        """Largest top_logprobs that the server accepts (`--max-logprobs`, which it does not report)."""
        info = self._entered()
        for count in CANDIDATES:
            self._known = structs.replace(info, max_top_logprobs=count)
            try:
                await self._draw(structs.replace(mode_call((1,), temperature=0.0), top_logprobs=count))
            except ValueError:
                continue
            return count
        return 0

    async def _refresh(self) -> None:
        status, data = await self._http.status("GET", "/weight_info")
        if status == 404:
            self._labelled = False
            paused, _ = await self._http.status("GET", "/is_paused")
            self._manageable = paused == 200
        else:
            self._manageable = status == 200
        if self._manageable:
            base = self._own
            if self._labelled:
                base = as_version(self._http.decode(data, WEIGHT_INFO).weight_version, self._initial)
            adapter = await self._adapters.look(self._model or "")
            newest = self._leases.newest = adapter if (adapter or 0) > base else None
            self._version = newest or base
        elif status != 404:
            raise Unavailable(f"{self.url} answers {status} to /weight_info: {data[:200]!r}")

    async def _check_transfer(self) -> None:
        """Raise UsageError unless the server takes weights from GPU memory."""
        status, data = await self._http.status("POST", wire.INIT_TRANSFER, {"init_info": {}})
        if status != 200:
            reply = data[:SHOWN].decode(errors="replace")
            raise UsageError(
                f"{self.url} takes no weights from memory (it answers {status} to {wire.INIT_TRANSFER}:"
                f" {reply}); {TRANSFER_FLAGS}, or leave vllm_shared_weights out"
            )

    async def _is_paused(self) -> bool:
        status, data = await self._http.status("GET", "/is_paused")
        return status == 200 and self._http.decode(data, PAUSED).is_paused

    async def waiting(self) -> int | None:
        """Number of calls in the server's queue; None if it reports no metrics."""
        status, data = await self._http.status("GET", "/metrics")
        return gauge(data, "vllm:num_requests_waiting") if status == 200 else None

    # --- calls ------------------------------------------------------------------------------------

    def _request(
        self, call: GenerateRequest, lease: AdapterLease | None
    ) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Path, body and headers of a request."""
        limit = self._limit(call)
        make = wire.generate_body if self._exact else wire.completions_body
        path = wire.GENERATE if self._exact else wire.COMPLETIONS
        if call.top_logprobs:  # vLLM counts the sampled token in, even if it is not among the likeliest
            most = self._entered().max_top_logprobs
            call = structs.replace(call, top_logprobs=min(call.top_logprobs + 1, most))
        model = self._model or ""
        # A router uses the session id to pick the server that has the session's prefix cached.
        headers = {"x-session-id": call.session_id}
        if lease is not None:
            model, headers["x-request-id"] = adapter_name(model, lease.version), lease.id
        return path, make(model, call, limit, self._encoded.ids(call)), headers

    async def _whole(self, call: GenerateRequest, lease: AdapterLease | None = None) -> AsyncGenerator[Chunk]:
        path, body, headers = self._request(call, lease)
        low = self._version
        data = await self._http.ask("POST", path, body, headers=headers, idle_s=self._answer_s, still=True)
        decoder = wire.FULL_REPLY if call.top_logprobs else wire.REPLY
        sampled = wire.VllmSample([self._http.decode(data, decoder)], self.url, call.top_logprobs)
        low = await self._lowest(low, lease)
        for chunk in self._cut(call, sampled, low, lease):
            yield chunk

    async def _lowest(self, low: int, lease: AdapterLease | None) -> int:
        """Lowest version of a reply without version spans; detects a restart during the call."""
        if self._exact or lease is not None or not (self._manageable and self._labelled):
            return low
        label = self._http.decode(await self._http.ask("GET", "/weight_info"), WEIGHT_INFO).weight_version
        now = as_version(label, self._initial)
        self._check_kept(now, low)
        return min(low, now)

    @property
    def _mixed(self) -> bool:
        """Whether calls without an adapter get version intervals, because adapters share their batches."""
        return self._mixes and self._leases.newest is not None

    def _cut(
        self, call: GenerateRequest, sampled: wire.VllmSample, low: int, lease: AdapterLease | None
    ) -> list[Chunk]:
        """Split a reply into one chunk per version span."""
        if sampled.finish is None:
            raise Unavailable(f"{self.url} sent a reply without a finish reason")
        length = len(sampled.token_ids)
        cuts = [(0, length, low, max(low, self._version))]
        if lease is not None:
            cuts = [(0, length, lease.version, lease.version)]
        elif sampled.spans and not self._mixed:
            spans = exact_spans(sampled.spans, length, self._initial, self.url)
            self._check_kept(spans[-1].high if spans else low, low)
            cuts = [(s.start, s.end, s.low, s.high) for s in spans] or cuts
        return [
            Chunk(
                token_ids=tuple(sampled.token_ids[start:end]),
                logprobs=tuple(sampled.logprobs[start:end]),
                low=first,
                high=last,
                finish=sampled.finish if end == length else None,
                prompt_ids=self._expanded(call, sampled.prompt_ids) if start == 0 else None,
                top_logprobs=tuple(sampled.tops[start:end]),
                prompt_logprobs=self._scored(call, sampled) if start == 0 else None,
            )
            for start, end, first, last in cuts
        ]

    def _scored(self, call: GenerateRequest, sampled: wire.VllmSample) -> tuple[TopLogprobs, ...] | None:
        if call.prompt_logprobs is None:
            return None
        length = len(sampled.prompt_ids or call.prompt_ids)
        if sampled.prompt_tops is None or len(sampled.prompt_tops) != length:
            count = len(sampled.prompt_tops or ())
            raise Unavailable(f"{self.url} gave log-probabilities of {count} ids for a prompt of {length}")
        return sampled.prompt_tops

    async def _streamed(
        self, call: GenerateRequest, lease: AdapterLease | None = None
    ) -> AsyncGenerator[Chunk]:
        path, body, headers = self._request(call, lease)
        events, low, length = SseParser(), self._version, 0
        last: Chunk | None = None
        async with aclosing(self._http.reads(path, body, headers)) as reads:
            async for data in reads:
                data_events = events.feed(data)
                if last is not None or not data_events:
                    continue  # read to the end, so that the connection can be reused
                chunk = self._merge(call, data_events, low, length, lease)
                length += len(chunk.token_ids)
                if chunk.finish is not None:
                    last = chunk
                elif chunk.token_ids:
                    yield chunk
        if last is None:
            raise Unavailable(f"{self.url} ended a stream without a finish reason after {length} tokens")
        if (lowest := await self._lowest(low, lease)) < low:
            last = structs.replace(last, versions=(VersionSpan(0, length, lowest, lowest),), low=lowest)
        yield last

    def _merge(
        self,
        call: GenerateRequest,
        data_events: list[bytes],
        low: int,
        before: int,
        lease: AdapterLease | None,
    ) -> Chunk:
        if data_events[-1] == wire.DONE:
            data_events.pop()
        decoder = wire.FULL_REPLIES if call.top_logprobs else wire.REPLIES
        replies = self._http.decode(b"[" + b",".join(data_events) + b"]", decoder)
        sampled = wire.VllmSample(replies, self.url, call.top_logprobs)
        versions, high = None, max(low, self._version)
        if lease is not None:  # the server's spans are those of the base weights
            low = high = lease.version
        elif sampled.spans and not self._mixed:
            length = before + len(sampled.token_ids)
            versions = exact_spans(sampled.spans, length, self._initial, self.url)
            self._check_kept(versions[-1].high if versions else low, low)
        return Chunk(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            low=low,
            high=high,
            finish=sampled.finish,
            prompt_ids=self._expanded(call, sampled.prompt_ids),
            versions=versions,
            top_logprobs=tuple(sampled.tops),
        )

    # --- weights ----------------------------------------------------------------------------------

    def _check_manageable(self, what: str) -> None:
        if not self._manageable:
            raise UsageError(f"{self.url} cannot {what}; {DEV_MODE}")

    async def _freeze(self) -> None:
        await self._order("/pause?mode=keep")

    async def _thaw(self) -> None:
        await self._order("/resume")

    async def _name(self, version: int) -> None:
        if self._labelled:
            await self._order("/update_weight_version", {"new_version": str(version)})
        self._own = version

    async def _check_weights(self, version: int, path: str) -> None:
        if is_tied(path) and await self._adapters.device() == "cpu":
            raise UsageError(
                f"version {version}: {path!r} ties its embeddings, and vLLM on a CPU keeps the old output"
                " layer when it reloads them; save it untied (tie_word_embeddings false, both tensors)"
            )

    async def _make_room(self) -> None:
        if self._leases.newest is not None:
            await self._adapters.make_room(self._call_names)

    async def _adopt(self, version: int, path: str) -> None:
        self._mixes = await self._adapters.mixes()
        await self._adapters.load(self._model or "", version, path, self._call_names)

    @property
    def _call_names(self) -> str:
        return wire.GENERATE_ID if self._exact else wire.COMPLETIONS_ID

    async def _readable(self, directory: Path) -> SharedWeights | None:
        """Description of weights that the server can take from memory now; None if there are none."""
        if not self._shared_weights:
            return None
        shared = await asyncio.to_thread(read_shared_weights, directory)
        return shared if shared is not None and shared.vllm_handles and shared.is_alive else None

    async def _wait_for_weights(self, directory: Path) -> None:
        if await self._readable(directory) is None:
            await super()._wait_for_weights(directory)

    async def _receive(self, directory: Path) -> bool:
        """Have the server copy weights from the trainer's memory; False if it has to read their file."""
        if (shared := await self._readable(directory)) is None:
            return False
        try:
            for path, body in wire.transfer(shared):
                await self._order(path, body)
        except Unavailable as error:
            log.warning("%s: version %d is loaded from its file: %s", self.url, shared.version, error)
            return False
        # The description is removed before the memory is overwritten.
        after = await self._readable(directory)
        if after is None or after.token != shared.token:
            log.warning("%s: version %d was overwritten while it was copied", self.url, shared.version)
            return False
        return True

    async def _swap(self, version: int, path: str) -> None:
        # Calls on adapters of the old weights continue with the new full weights.
        await self._adapters.end_calls(0, self._call_names)
        self._leases.newest = None
        if not await self._receive(Path(path)):
            await super()._wait_for_weights(Path(path))
            await self._order(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}
            )
        await self._name(version)
        # Running calls recompute their context, so that no token depends on the caches of two versions.
        for pause_s in RESET_PAUSES_S:
            await asyncio.sleep(pause_s)
            if was_reset(await self._order(RESET)):
                return
        raise Unavailable(f"{self.url} {KEEPS}")
