"""Continuous-batching decoder of the torch engine.

1. A call is a list of ids: computed ones in the KV cache, then pending ones. A step computes pending ids,
   at most `prefill_tokens` for calls with more than one, and samples a token for every call that has none
   left.
2. A new prompt, a reused prefix and new weights differ only in the number of pending ids. New weights make
   all ids pending, so each log-probability is that of the version that sampled the token.
3. With a `CudaGraphRunner`, the next step is launched before the host reads the tokens of the last one.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from afield.engines.torch.cuda_graphs import CudaGraphRunner, LaunchedStep, forward
from afield.engines.torch.kv_cache import KVCache
from afield.engines.torch.sampler import Top, distribution, draw, likeliest

if TYPE_CHECKING:
    from afield.engines.torch.images import ImageEncoder
    from afield.models.masks import ConstraintMatcher
    from afield.models.vision import PixelInputs

log = logging.getLogger(__name__)

Finish = Literal["stop", "length", "aborted"]
SCORED_AT_ONCE = 256  # prompt ids scored per step; bounds the memory of their logits
STREAM_INTERVAL_S = 2e-4
"""Least time between two chunks of a stream, per running call: about what a chunk costs its receivers."""
NO_PICTURES: Mapping[int, PixelInputs] = {}


class Counters(NamedTuple):
    """Totals since the engine started."""

    calls: int = 0
    """Calls admitted to a slot."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted calls."""
    reused_tokens: int = 0
    """Prompt tokens whose keys and values came from the KV cache."""
    sampled_tokens: int = 0
    """Tokens sampled."""
    steps: int = 0
    """Decoder steps."""


class DecodeParams(NamedTuple):
    """Prompt and sampling parameters of one call."""

    prompt_ids: Sequence[int]
    """Prompt token ids; `ImagePrompt.keys` for a prompt with images."""
    max_tokens: int
    """Maximum number of sampled tokens."""
    seed: int
    """Seed of the call's random numbers."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling threshold; 1 is off."""
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 is off."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the call."""
    stream: bool = False
    """Whether to hand over tokens as they are sampled; with many calls, several at a time."""
    top_logprobs: int = 0
    """Number of likeliest tokens to report per sampled token; 0 is off."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to report per prompt token, besides its own; None is off."""
    mrope: np.ndarray | None = None
    """M-RoPE positions of the prompt, `[3, length]`; None counts from 0."""
    pictures: Mapping[int, PixelInputs] = NO_PICTURES
    """Images of the prompt by image number."""

    @property
    def truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def needs_logits(self) -> bool:
        """Whether the host needs the logits of a step, not only the sampled token."""
        return self.truncated or self.top_logprobs > 0


class SampledTokens(NamedTuple):
    """Tokens of one call that one weight version sampled."""

    token_ids: tuple[int, ...]
    """Sampled tokens."""
    logprobs: tuple[float, ...]
    """Log-probability of each token."""
    version: int
    """Weight version that sampled the tokens."""
    finish: Finish | None
    """Finish reason; None while the call continues."""
    queued_s: float = 0.0
    """Seconds that the call waited for a slot; 0 except with its first tokens."""
    top_logprobs: tuple[Top, ...] = ()
    """Likeliest tokens at each position; empty if not requested."""
    prompt_logprobs: tuple[Top, ...] | None = None
    """Log-probabilities of the prompt tokens, with the call's first tokens; None if not requested."""


class TokenSink(Protocol):
    """Receiver of one call's tokens or of its error."""

    def put(self, sampled: SampledTokens) -> None: ...

    def fail(self, reason: str) -> None:
        """End the call with Unavailable: the engine broke."""
        ...

    def refuse(self, reason: str) -> None:
        """End the call with ValueError: the request cannot be served."""
        ...


class DecodeCall:
    """Running or queued call. Its ids are in its KV-cache slot; `tokens` are those not yet handed over."""

    def __init__(self, ask: DecodeParams, sink: TokenSink, walker: ConstraintMatcher | None = None) -> None:
        self.ask, self.sink = ask, sink
        self.walker = walker
        # CUDA graph steps sample without truncation and masks; these calls are sampled again from the logits.
        self.redrawn = ask.truncated or walker is not None
        self.slot = -1
        self.length = len(ask.prompt_ids)
        self.room = ask.max_tokens
        self.version = -1
        self.ended = False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Top] = []
        self.next_top: Top = ()
        self.prompt_tops: list[Top] | None = None if ask.prompt_logprobs is None else []
        self.stop_ids = frozenset(ask.stop_ids)
        self.uniform = random.Random(ask.seed).random
        self.queued_at = time.monotonic()
        self.queued_s = 0.0
        self.next_chunk = 0.0

    def hand_over(self, finish: Finish | None) -> None:
        """Send the collected tokens to the sink."""
        sampled = SampledTokens(tuple(self.tokens), tuple(self.logprobs), self.version, finish, self.queued_s)
        if self.tops:
            sampled = sampled._replace(top_logprobs=tuple(self.tops))
            self.tops = []
        if self.prompt_tops is not None:
            sampled = sampled._replace(prompt_logprobs=((), *self.prompt_tops))
            self.prompt_tops = None
        self.tokens, self.logprobs, self.queued_s = [], [], 0.0
        self.sink.put(sampled)


class _Launched(NamedTuple):
    requests: list[DecodeCall]
    uniforms: list[float]
    flight: LaunchedStep


class Decoder:
    """Scheduler and sampling loop. `add`, `drop`, `swap` and `step` run in the model thread only."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: KVCache,
        *,
        version: int,
        max_context: int,
        prefill_tokens: int,
        weights: Sequence[Tensor] = (),
        steps: CudaGraphRunner | None = None,
        notes: tuple[str, ...] = (),
        images: ImageEncoder | None = None,
        prefill_pause: float = 0.0,
    ) -> None:
        self._model, self._slots = model, slots
        self.images = images
        self._notes = notes
        self._weights, self.steps = weights, steps
        self._launched: _Launched | None = None
        self._prefill_tokens = prefill_tokens
        # While calls decode, the pause after a prefill step is this multiple of its duration.
        self._prefill_pause = prefill_pause
        self._next_prefill_at = 0.0
        self.max_context = max_context
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._waiting: deque[DecodeCall] = deque()
        self._running: list[DecodeCall] = []
        self.version = version
        self.counters = Counters()

    @property
    def idle(self) -> bool:
        """Whether no call is running or waiting."""
        return not self._waiting and not self._running and self._launched is None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for `EngineInfo`."""
        refused = self.steps is not None and self.steps.refused
        return (*self._notes, refused) if refused else self._notes

    @property
    def requests(self) -> list[DecodeCall]:
        """Running and waiting calls."""
        return [*self._running, *self._waiting]

    def add(self, request: DecodeCall) -> None:
        self._waiting.append(request)

    def drop(self, request: DecodeCall) -> None:
        """Remove a running or waiting call; ended calls are ignored."""
        if request in self._running:
            self._end(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def swap(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Load new weights, in the order of `weights`, effective from the next step."""
        sampled = self._collect_step()
        self.counters = self.counters._replace(sampled_tokens=self.counters.sampled_tokens + sampled)
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.copy_(tensor)
        self.version = version
        self._slots.forget()
        if self.images is not None:
            self.images.forget()

    def step(self) -> None:
        """Admit waiting calls, run one prefill and one decode step, and update the counters."""
        reused = self._admit()
        sampled = 0
        if (scored := next(filter(self._unscored, self._running), None)) is not None:
            sampled += self._score(scored)
        if prefill := self._next_prefill():
            began = time.monotonic()
            sampled += self._compute(prefill)
            ended = time.monotonic()
            self._next_prefill_at = ended + self._prefill_pause * (ended - began)
        sampled += self._decode()
        old = self.counters
        self.counters = Counters(
            calls=old.calls + len(reused),
            prompt_tokens=old.prompt_tokens + sum(prompt for prompt, _ in reused),
            reused_tokens=old.reused_tokens + sum(count for _, count in reused),
            sampled_tokens=old.sampled_tokens + sampled,
            steps=old.steps + 1,
        )

    def _admit(self) -> list[tuple[int, int]]:
        """Admit waiting calls in FIFO order while slots are free.

        Returns the prompt length and the number of reused tokens of each.
        """
        admitted: list[tuple[int, int]] = []
        while self._waiting:
            ask = self._waiting[0].ask
            if (taken := self._slots.take(ask.prompt_ids, ask.mrope, room=ask.max_tokens)) is None:
                break
            request = self._waiting.popleft()
            if self.images is not None and ask.pictures:
                self.images.show(ask.pictures)
            request.slot, reused = taken
            if request.prompt_tops is not None:  # prompt log-probabilities need every prompt id computed
                self._slots.restart(request.slot)
                reused = 0
            request.queued_s = time.monotonic() - request.queued_at
            self._running.append(request)
            admitted.append((request.length, reused))
        return admitted

    def _pending(self, request: DecodeCall) -> int:
        return request.length - self._slots.computed(request.slot)

    def _next_prefill(self) -> list[tuple[DecodeCall, int]]:
        """Calls with several pending ids, oldest first, as many as fit `prefill_tokens`, with any padding.

        While other calls decode, prompts that do not fill a step wait for the end of the pause: those that
        arrive one by one are computed together.
        """
        paused = self._launched is not None and time.monotonic() < self._next_prefill_at
        chosen: list[tuple[DecodeCall, int]] = []
        width = total = 0
        for request in self._running:
            if (pending := self._pending(request)) <= 1 or self._unscored(request):
                continue
            pending = min(pending, self._prefill_tokens)
            width, total = max(width, pending), total + pending
            size = total if self._slots.flattens else (len(chosen) + 1) * width
            if chosen and size > self._prefill_tokens:
                return chosen
            chosen.append((request, pending))
        return [] if paused else chosen

    def _unscored(self, request: DecodeCall) -> bool:
        """Whether prompt log-probabilities are requested and incomplete."""
        tops = request.prompt_tops
        return tops is not None and len(tops) < len(request.ask.prompt_ids) - 1

    def _score(self, request: DecodeCall) -> int:
        """Compute up to `SCORED_AT_ONCE` prompt ids and record the log-probabilities of the ids after them.

        Prompt log-probabilities are the model's own, before temperature and truncation. Samples the first
        token when the prompt is complete. Returns the number of sampled tokens.
        """
        assert request.prompt_tops is not None and request.ask.prompt_logprobs is not None
        start = self._slots.computed(request.slot)
        count = min(self._pending(request), SCORED_AT_ONCE)
        step = self._slots.arrange([request.slot], [count])
        logits = forward(self._model, self._slots, step, keep=count)[0]
        self._slots.advance([request.slot], [count])
        following = request.ask.prompt_ids[start + 1 : start + 1 + count]
        logprobs = logits[: len(following)].float().log_softmax(dim=-1)
        del request.prompt_tops[start:]  # a weight change restarts the prompt
        for row, token in zip(logprobs, following, strict=True):
            own = (token, row[token].item())
            top = likeliest(row, request.ask.prompt_logprobs, *own) if request.ask.prompt_logprobs else ()
            request.prompt_tops.append((own, *(pair for pair in top if pair[0] != token)))
        if self._pending(request):
            return 0
        self._draw([request], logits[-1:])
        return 1

    def _compute(self, work: list[tuple[DecodeCall, int]]) -> int:
        """Compute the given number of ids per call, and sample for calls without pending ids."""
        work = sorted(work, key=lambda item: item[0].slot)
        slots, counts = [r.slot for r, _ in work], [n for _, n in work]
        flat = self._slots.flattens and max(counts) > 1
        step = self._slots.flat(slots, counts) if flat else self._slots.arrange(slots, counts)
        last = forward(self._model, self._slots, step, images=self.images)
        self._slots.advance(slots, counts)
        sampled = [i for i, (r, _) in enumerate(work) if self._pending(r) == 0]
        if not sampled:
            return 0
        rows = step.rows if len(sampled) == len(work) else step.rows[sampled]
        self._draw([work[i][0] for i in sampled], last if len(rows) == len(last) else last[rows])
        return len(sampled)

    def _decode(self) -> int:
        """Sample one token for every call with exactly one pending id; returns the number of tokens."""
        if self.steps is None:
            ready = [(r, 1) for r in self._running if self._pending(r) == 1]
            return self._compute(ready) if ready else 0
        following = self._follow(self.steps)
        sampled = self._collect_step()
        ready = [r for r in self._running if self._pending(r) == 1]
        if following is None and ready:
            following = self._launch(self.steps, ready, None)
        self._launched = following
        return sampled

    def _follow(self, steps: CudaGraphRunner) -> _Launched | None:
        """Launch the next step before the tokens of the current one are read; None if it has to wait.

        The extra token of a call that turns out to have ended is discarded.
        """
        last = self._launched
        if last is None or any(r.ask.needs_logits or r.walker for r in last.requests):
            return None
        going = [r for r in last.requests if not (r.ended or r.room == 1 or r.length + 1 == self.max_context)]
        # Wait instead when at least half of the lanes would be idle, or when calls are ready to join.
        if 2 * len(going) <= len(last.requests) or any(self._pending(r) == 1 for r in self._running):
            return None
        return self._launch(steps, going, last.flight)

    def _launch(
        self, steps: CudaGraphRunner, requests: list[DecodeCall], after: LaunchedStep | None
    ) -> _Launched:
        requests = sorted(requests, key=lambda request: request.slot)
        slots, uniforms = [r.slot for r in requests], [r.uniform() for r in requests]
        self._slots.make_room(max(r.length for r in requests) + 1)
        flight = steps.launch(slots, [r.ask.temperature for r in requests], uniforms, after)
        self._slots.advance(slots, [1] * len(slots))
        return _Launched(requests, uniforms, flight)

    def _collect_step(self) -> int:
        """Wait for the launched step and give its tokens to the calls that have not ended."""
        launched, self._launched = self._launched, None
        if launched is None or self.steps is None:
            return 0
        requests, uniforms, flight = launched
        tokens, logprobs = self.steps.read(flight)
        # Skip dropped calls: their constraint may be complete and allow no token.
        if cut := [i for i, r in enumerate(requests) if r.redrawn and not r.ended]:
            logits = self.steps.logits([flight.lanes[i] for i in cut])
            again = [requests[i] for i in cut]
            drawn = draw(logits, [r.ask for r in again], [uniforms[i] for i in cut], _masks(again))
            for i, token, logprob in zip(cut, *drawn, strict=True):
                tokens[i], logprobs[i] = token, logprob
        for i, request in enumerate(requests):
            if request.ask.top_logprobs and not request.ended:
                logits = self.steps.logits([flight.lanes[i]])
                self._note_top(request, logits, tokens[i], logprobs[i])
        there = [i for i, r in enumerate(requests) if not r.ended]
        self._take_all([requests[i] for i in there], [tokens[i] for i in there], [logprobs[i] for i in there])
        return len(there)

    def _draw(self, requests: list[DecodeCall], logits: Tensor) -> None:
        asks = [r.ask for r in requests]
        tokens, logprobs = draw(logits, asks, [r.uniform() for r in requests], _masks(requests))
        for i, request in enumerate(requests):
            if request.ask.top_logprobs:
                self._note_top(request, logits[i : i + 1], tokens[i], logprobs[i])
        self._take_all(requests, tokens, logprobs)

    def _note_top(self, request: DecodeCall, logits: Tensor, token: int, logprob: float) -> None:
        row = distribution(logits, [request.ask], _masks([request]))[0]
        request.next_top = likeliest(row, request.ask.top_logprobs, token, logprob)

    def _take_all(self, requests: list[DecodeCall], tokens: list[int], logprobs: list[float]) -> None:
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            if math.isfinite(logprob):
                self._take(request, token, logprob)
            else:
                self._give_up(request)

    def _give_up(self, request: DecodeCall) -> None:
        """End a call whose log-probability is not finite.

        Refuses the call if its constraint allows no token; raises ArithmeticError if the weights are not
        finite; aborts the call otherwise.
        """
        if request.walker is not None and not request.walker.mask.any():
            self._end(request)
            request.sink.refuse("the constraint leads to where no token is allowed")
            return
        if not all(bool(weight.isfinite().all()) for weight in self._weights):
            raise ArithmeticError(f"the weights of version {self.version} are not all finite")
        log.warning(
            "call of %d tokens aborted: its logits are not finite at temperature %g",
            request.length,
            request.ask.temperature,
        )
        self._end(request)
        request.hand_over("aborted")

    def _take(self, request: DecodeCall, token: int, logprob: float) -> None:
        if request.tokens and request.version != self.version:
            request.hand_over(None)
        request.version = self.version
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.ask.top_logprobs:
            request.tops.append(request.next_top)
        if request.walker is not None and not request.walker.accept(token):
            raise AssertionError(f"token {token} was drawn against the constraint of its call")
        self._slots.append(request.slot, request.length, token)
        request.length += 1
        request.room -= 1
        finish: Finish | None = None
        if token in request.stop_ids:
            finish = "stop"
        elif request.room == 0 or request.length == self.max_context:
            finish = "length"
        if finish is not None:
            self._end(request)
        if finish is not None or (request.ask.stream and time.monotonic() >= request.next_chunk):
            request.hand_over(finish)
            if request.ask.stream:
                request.next_chunk = time.monotonic() + STREAM_INTERVAL_S * len(self._running)

    def _end(self, request: DecodeCall) -> None:
        request.ended = True
        self._running.remove(request)
        self._slots.release(request.slot)
        if self.images is not None and request.ask.pictures:
            self.images.keep({number for other in self._running for number in other.ask.pictures})


def _masks(requests: Sequence[DecodeCall]) -> dict[int, Tensor]:
    """Constraint masks by row, for the calls that have a constraint."""
    return {row: r.walker.mask for row, r in enumerate(requests) if r.walker is not None}
