"""Torch engine: a transformers model in this process, on its own thread.

1. Calls join and leave, and weights are swapped, between steps; each token is labelled with the weight
   version that sampled it.
2. Serves causal language models with full or sliding-window attention, up to the length of the window.
   Start-up fails for a model whose log-probabilities differ through the KV cache.
3. Default dtype: float32 on a CPU (one thread), bfloat16 on CUDA; log-probabilities are float32.
4. If the model raises, every call fails with Unavailable and the engine accepts no more calls.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

import torch
from msgspec import Struct, structs
from torch import Tensor
from transformers import PreTrainedModel

from afield.engines.checks import check_call, is_newer
from afield.engines.chunk_queue import ChunkQueue, Item
from afield.engines.lora import is_adapter
from afield.engines.torch.cuda_graphs import CudaGraphRunner
from afield.engines.torch.decode_kernels import SERVED, fit
from afield.engines.torch.decoder import (
    NO_PICTURES,
    Counters,
    DecodeCall,
    DecodeParams,
    Decoder,
    SampledTokens,
)
from afield.engines.torch.images import ImageEncoder, ImagePrompt
from afield.engines.torch.kv_cache import LENGTH_STEP, KVCache
from afield.engines.torch.weights import ModelParameter, longest_context, parameters, read_model, read_weights
from afield.errors import AfieldError, Unavailable, UsageError, boundary
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.models.masks import ConstraintMasks, ConstraintMatcher
from afield.models.rounding import Rounding
from afield.models.vision import Vision
from afield.types import Constraint, Failure, FailureKind, FinishReason, Reason

# Tokens per prefill step, by device type.
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
# A prefill step on a GPU takes about as long for one prompt as for many, and calls that decode wait for it.
PREFILL_PAUSE = {"cpu": 0.0, "cuda": 2.0}
PROBE = 12  # tokens of the start-up accuracy check
DEFAULT_SLOTS, MAX_SLOTS = 64, 512
CACHE_SHARE = 0.6  # of the memory that is free after the model is loaded
SLOT_TOKENS = 1024  # tokens of a call for which a slot is counted
MAX_TOP_LOGPROBS = 20
COMPILE_S = 30.0  # timeout for compiling one constraint
COMPILERS = 2  # threads that compile constraints
CLOSED = "the engine is not running; enter it with `async with`"


class _Drop(Struct, frozen=True):
    request: DecodeCall


class _Swap(Struct, frozen=True):
    version: int
    tensors: list[Tensor]
    done: Future[None]


class _Stop(Struct, frozen=True):
    pass


Message = DecodeCall | _Drop | _Swap | _Stop
Outbox = dict[asyncio.AbstractEventLoop, list[tuple["ChunkSink", Item]]]


class ChunkSink(ABC):
    """Receiver of one call's chunks; `receive` runs in the event loop that made it."""

    def __init__(self, outbox: Outbox) -> None:
        self.loop = asyncio.get_running_loop()
        self._outbox = outbox
        self.prompt_ids: tuple[int, ...] | None = None

    @abstractmethod
    def receive(self, item: Item) -> None: ...

    def put(self, sampled: SampledTokens) -> None:
        prompt_ids, self.prompt_ids = self.prompt_ids, None
        chunk = Chunk(
            prompt_ids=prompt_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            low=sampled.version,
            high=sampled.version,
            finish=None if sampled.finish is None else FinishReason(sampled.finish),
            queued_s=sampled.queued_s,
            top_logprobs=sampled.top_logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
        )
        self._outbox.setdefault(self.loop, []).append((self, chunk))

    def fail(self, reason: str) -> None:
        self._outbox.setdefault(self.loop, []).append((self, Unavailable(reason)))

    def refuse(self, reason: str) -> None:
        self._outbox.setdefault(self.loop, []).append((self, ValueError(reason)))


class Mailbox(ChunkSink):
    """Queue of one call's chunks in this process."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(outbox)
        self._chunks = ChunkQueue()
        self.take = self._chunks.take

    def receive(self, item: Item) -> None:
        self._chunks.receive(item)


def _deliver(batch: list[tuple[ChunkSink, Item]]) -> None:
    for sink, item in batch:
        sink.receive(item)


def to_ask(call: GenerateRequest, seed: int, pictured: ImagePrompt | None = None) -> DecodeParams:
    """Convert a call to `DecodeParams`.

    The random seed depends only on the engine's seed and the call's own seed, `draw` or id, not on load.
    """
    sampling = call.sampling
    own = (call.draw or call.id) if sampling.seed is None else sampling.seed
    return DecodeParams(
        call.prompt_ids if pictured is None else pictured.keys,
        mrope=None if pictured is None else pictured.mrope,
        pictures=NO_PICTURES if pictured is None else pictured.pictures,
        max_tokens=call.max_tokens,
        seed=int.from_bytes(blake2b(f"{seed}/{own!r}".encode(), digest_size=8).digest()),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_ids=call.stop_ids,
        stream=call.stream,
        top_logprobs=call.top_logprobs,
        prompt_logprobs=call.prompt_logprobs,
    )


def load_vision(path: Path) -> tuple[Vision | None, tuple[str, ...]]:
    """Load the model's vision tower; returns None and a note when the model has no usable one."""
    try:
        return Vision.load(path), ()
    except UsageError as error:
        return None, (f"images are refused: {error}",)


def cache_room(model: PreTrainedModel, context: int) -> tuple[int | None, tuple[str, ...]]:
    """Tokens that the KV cache may hold in the GPU's free memory, and a note if they limit the context.

    None on a CPU. Raises UsageError if the memory is too small for a useful cache.
    """
    if model.device.type != "cuda":
        return None, ()
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    room = int(CACHE_SHARE * free) // token_bytes // LENGTH_STEP * LENGTH_STEP
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free; a token takes {token_bytes:,} bytes"
    if room < min(context, SLOT_TOKENS):
        raise UsageError(
            f"the GPU has no room for a KV cache of {min(context, SLOT_TOKENS)} tokens: {memory}. Free"
            " memory, or use another device or a smaller model"
        )
    if room < context:
        return room, (f"the context is {room} tokens instead of {context}: {memory}",)
    return room, ()


class TorchEngine:
    """Embedded engine for a transformers model directory.

    Args:
        model_path: directory with config.json, safetensors weights and tokenizer.json.
        version: version of the weights in `model_path`.
        max_slots: calls that run at once; further calls queue. None is 64 on a CPU; on CUDA what free memory
            holds, at most 512.
        max_context: prompt plus reply length in tokens; None uses the model's limit.
        device: torch device; None picks CUDA if available.
        dtype: float32, bfloat16 or float16; None means float32 on a CPU and bfloat16 on CUDA.
        seed: seed of the engine; with a call's own seed, or its id, it determines the sampled tokens.
        cache_tokens: tokens of the KV cache; None is what free memory holds on CUDA, no limit on a CPU.
        prefill_tokens: tokens per prefill step; None chooses by device.
        fixed_steps: decode in steps of fixed shapes, as CUDA graphs where possible; None means on CUDA only.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        version: int = 0,
        max_slots: int | None = None,
        max_context: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        seed: int = 0,
        cache_tokens: int | None = None,
        prefill_tokens: int | None = None,
        fixed_steps: bool | None = None,
    ) -> None:
        if (max_slots is not None and max_slots < 1) or (prefill_tokens is not None and prefill_tokens < 1):
            raise UsageError(f"max_slots {max_slots} and prefill_tokens {prefill_tokens} must be at least 1")
        self._path, self._first_version = Path(model_path), version
        self._base = self._path  # last full weights; adapters are merged into them
        self._max_slots, self._max_context = max_slots, max_context
        self._cache_tokens = cache_tokens
        self._device, self._dtype = device, dtype
        self._served = ""
        self._seed, self._prefill_tokens = seed, prefill_tokens
        self._fixed_steps = fixed_steps
        self._parameters: list[ModelParameter] = []
        self._masks: ConstraintMasks | None = None
        self._compilers: ThreadPoolExecutor | None = None
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._outbox: Outbox = {}
        self._lock = threading.Lock()
        self._loading = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._down: str | None = CLOSED
        self._decoder: Decoder | None = None
        self._thread: threading.Thread | None = None

    # --- event loop -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(
                "this engine is already running; leave starting it to its gateway or engine pool"
            )
        self._inbox = SimpleQueue()
        # A separate pool: a compile that times out keeps its thread and must not block other executor work.
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="constraints")
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="afield-torch", daemon=True)
        self._thread.start()
        try:
            await asyncio.wrap_future(ready)
        except BaseException:
            self._inbox.put(_Stop())
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._inbox.put(_Stop())
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def counters(self) -> Counters:
        """Totals since the engine started."""
        return self._running().counters

    async def info(self) -> EngineInfo:
        decoder = self._running()
        return EngineInfo(
            kind="torch",
            version=decoder.version,
            max_context=decoder.max_context,
            vocab_size=decoder.vocab_size,
            images=decoder.images is not None,
            dtype=self._served,
            notes=decoder.notes,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            prompt_logprobs=True,
            constraints=self._masks is not None and not self._masks.missing,
        )

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        mailbox = Mailbox(self._outbox)
        request = await self.submit(call, mailbox)
        ended = False
        try:
            while not ended:
                chunk = await mailbox.take()
                ended = chunk.finish is not None
                yield chunk
        finally:
            if not ended:
                self.drop(request)

    async def submit(self, call: GenerateRequest, sink: ChunkSink) -> DecodeCall:
        """Queue a call whose chunks go to `sink`. Raises ValueError for a call that cannot be served."""
        info = await self.info()
        check_call(call, info)
        pictured = await self._pictured(call, info) if call.images else None
        walker = await self._walk(call.constraint) if call.constraint else None
        if pictured is not None:
            sink.prompt_ids = pictured.ids
        request = DecodeCall(to_ask(call, self._seed, pictured), sink, walker)
        self._send(request)
        return request

    def drop(self, request: DecodeCall) -> None:
        """Cancel a call; one that has ended is ignored."""
        if self._down is None:
            self._inbox.put(_Drop(request))

    @property
    def outbox(self) -> Outbox:
        """Chunks that wait for the end of the step, for a `ChunkSink`."""
        return self._outbox

    async def _pictured(self, call: GenerateRequest, info: EngineInfo) -> ImagePrompt:
        """Decode the call's images in a thread and expand the prompt; raises ValueError if it is too long."""
        images = self._running().images
        if images is None:
            raise ValueError(
                f"call {call.id!r} has images, but the served model is not a vision-language model; serve one"
            )
        if call.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available for a prompt with images; leave them out")
        async with self._looking:
            pictured = await asyncio.to_thread(images.prompt, call.prompt_ids, call.image_places, call.images)
        check_call(structs.replace(call, prompt_ids=pictured.ids), info)
        return pictured

    async def _walk(self, constraint: Constraint) -> ConstraintMatcher:
        assert self._masks is not None  # check_call refuses constraints otherwise
        try:
            async with asyncio.timeout(COMPILE_S):
                loop = asyncio.get_running_loop()
                walker = await loop.run_in_executor(self._compilers, self._masks.walk, constraint)
        except UsageError as error:
            raise ValueError(str(error)) from error
        except TimeoutError as error:
            raise ValueError(
                f"the constraint takes more than {COMPILE_S:g} s to compile; ask for a simpler one"
            ) from error
        if not walker.mask.any():
            raise ValueError("no reply can satisfy the constraint of the call; relax the constraint")
        return walker

    async def load(self, version: int, path: str) -> None:
        """Read weights or an adapter from `path` and swap them in between two steps."""
        async with self._loading:
            decoder = self._running()
            if not is_newer(version, decoder.version):
                return
            if not path:
                raise UsageError(
                    f"version {version} has no path; publish it with the directory of its weights"
                )
            rounding = Rounding(seed=self._seed, version=version)
            tensors = await asyncio.to_thread(
                read_weights, Path(path), self._parameters, self._base, rounding
            )
            done: Future[None] = Future()
            self._send(_Swap(version, tensors, done))
            await asyncio.wrap_future(done)
            self._base = self._base if is_adapter(path) else Path(path)

    def _running(self) -> Decoder:
        if self._down is not None or self._decoder is None:
            raise Unavailable(self._down or CLOSED)
        return self._decoder

    def _send(self, message: DecodeCall | _Swap) -> None:
        # Under the lock, a message is either queued before `_shut` drains the inbox, or refused.
        with self._lock:
            self._running()
            self._inbox.put(message)

    # --- model thread -----------------------------------------------------------------------------

    def _run(self, ready: Future[None]) -> None:
        ready.set_running_or_notify_cancel()
        broken: list[Failure] = []
        with boundary(FailureKind.INFRASTRUCTURE, Reason.ENGINE, broken.append):
            try:
                decoder = self._decoder = self._start()
            except AfieldError as error:
                ready.set_exception(error)
                return
            self._down = None
            ready.set_result(None)
            with torch.inference_mode():
                self._serve(decoder)
        reason = f"the engine broke: {broken[0].message}; start it again" if broken else CLOSED
        self._shut(reason)
        if not ready.done():
            ready.set_exception(Unavailable(reason))

    def _start(self) -> Decoder:
        device = torch.device(self._device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cpu":
            torch.set_num_threads(1)
        elif device.index is not None:
            torch.cuda.set_device(device)
        name = self._dtype or ("float32" if device.type == "cpu" else "bfloat16")
        self._served = name
        dtype = getattr(torch, name, None)
        if dtype not in SERVED:
            raise UsageError(f"unknown dtype {name!r}; choose one of: float32, bfloat16, float16")
        model = read_model(self._path, dtype, device)
        longest = longest_context(model.config.get_text_config())
        context = longest if self._max_context is None else self._max_context
        if not 2 <= context <= longest:
            raise UsageError(f"max_context {context} must be between 2 and the model's {longest}")
        room, memory_notes = self._cache_tokens, ()
        if room is None:
            room, memory_notes = cache_room(model, context)
        context = min(context, room or context)
        max_slots = self._max_slots or DEFAULT_SLOTS
        if room is not None and self._max_slots is None:
            max_slots = max(1, min(MAX_SLOTS, room // SLOT_TOKENS))
        layers = model.config.get_text_config().num_hidden_layers
        with torch.inference_mode():
            fitted = fit(model, min(PROBE, context), light=device.type == "cuda")
        if not fitted.exact:
            raise UsageError(
                f"model path {str(self._path)!r}: the embedded engine's log-probabilities differ"
                f" by {fitted.off:.2g} from the model's own, of which rounding to {name} explains only"
                f" {fitted.control:.2g}; {type(model).__name__} is not supported, or the weights are broken"
            )
        vision, notes = load_vision(self._path)
        mrope = vision is not None and vision.mrope
        slots = KVCache(
            layers,
            max_slots,
            context,
            dtype,
            device,
            fitted.ways,
            image_id=vision.image_id if vision else None,
            mrope=mrope,
            max_tokens=room,
        )
        fixed = device.type == "cuda" if self._fixed_steps is None else self._fixed_steps
        if fixed and mrope:
            fixed, notes = False, (*notes, "decode steps are slower: tokens have three positions (M-RoPE)")
        self._parameters = parameters(model)
        self._masks = ConstraintMasks(self._path, model.config.get_text_config().vocab_size)
        return Decoder(
            model,
            slots,
            version=self._first_version,
            max_context=context,
            prefill_tokens=self._prefill_tokens or PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cpu"]),
            weights=[parameter.tensor for parameter in self._parameters],
            steps=CudaGraphRunner(model, slots, max_slots) if fixed else None,
            notes=(*fitted.notes, *notes, *memory_notes),
            images=ImageEncoder(vision) if vision else None,
            prefill_pause=PREFILL_PAUSE.get(device.type, 0.0),
        )

    def _serve(self, decoder: Decoder) -> None:
        while True:
            wait = decoder.idle
            while (message := self._next_message(wait)) is not None:
                wait = False
                if isinstance(message, _Stop):
                    return
                self._handle(decoder, message)
            decoder.step()
            self._flush(decoder)

    def _next_message(self, wait: bool) -> Message | None:
        try:
            return self._inbox.get(block=wait)
        except Empty:
            return None

    def _handle(self, decoder: Decoder, message: DecodeCall | _Drop | _Swap) -> None:
        if isinstance(message, DecodeCall):
            decoder.add(message)
        elif isinstance(message, _Drop):
            decoder.drop(message.request)
        elif message.done.set_running_or_notify_cancel():
            decoder.swap(message.version, message.tensors)
            message.done.set_result(None)

    def _flush(self, decoder: Decoder) -> None:
        """Deliver the step's chunks with one wake-up per event loop."""
        for loop, batch in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                # The event loop is closed: drop its calls.
                gone = {mailbox for mailbox, _ in batch}
                for request in decoder.requests:
                    if request.sink in gone:
                        decoder.drop(request)
        self._outbox.clear()

    def _shut(self, reason: str) -> None:
        with self._lock:
            self._down = reason
        requests = self._decoder.requests if self._decoder else []
        while (message := self._next_message(wait=False)) is not None:
            if isinstance(message, DecodeCall):
                requests.append(message)
            elif isinstance(message, _Swap) and message.done.set_running_or_notify_cancel():
                message.done.set_exception(Unavailable(reason))
        for request in requests:
            request.sink.fail(reason)
        if self._decoder:
            self._flush(self._decoder)
