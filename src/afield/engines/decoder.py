"""The decoder: calls in flight on one model, a step at a time. It runs in the engine's own thread.

A call is its ids, of which the first so many are computed; the rest are pending. A step computes
pending ids, at most `prefill_tokens` of them for calls with more than one, and draws a token for
every call that has none left. A new prompt, a reused prefix and new weights are all just another
number of pending ids; after a swap it is all of them, so each log-probability is that of the
version that drew the token, given everything before it.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor
from transformers import PreTrainedModel

from afield.engines.sampler import draw
from afield.engines.slots import ATTENTION, Pass, Slots
from afield.engines.weights import parameters
from afield.seams.engine import Call, Chunk
from afield.types import FinishReason


class Counters(Struct, frozen=True, kw_only=True):
    """What an engine has done so far. Reused tokens are the prompt tokens it did not compute again."""

    calls: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0


class Sink(Protocol):
    """Where the chunks of one call go, or the reason why there will be no more."""

    def put(self, chunk: Chunk) -> None: ...

    def fail(self, reason: str) -> None: ...


class Request:
    """A call in flight. Its ids live in its slot; here are the sampled ones that were not handed over."""

    def __init__(self, call: Call, sink: Sink, seed: int) -> None:
        self.call, self.sink = call, sink
        self.slot = -1
        self.length = len(call.prompt_ids)
        self.room = call.max_tokens
        self.version = -1
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stop_ids = frozenset(call.stop_ids)
        self.uniform = random.Random(request_seed(seed, call)).random

    def hand_over(self, finish: FinishReason | None) -> None:
        chunk = Chunk(
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            low=self.version,
            high=self.version,
            finish=finish,
        )
        self.tokens, self.logprobs = [], []
        self.sink.put(chunk)


def request_seed(seed: int, call: Call) -> int:
    """The same call gives the same numbers, whatever else the engine is doing."""
    own = (call.draw or call.id) if call.sampling.seed is None else call.sampling.seed
    return int.from_bytes(blake2b(f"{seed}/{own!r}".encode(), digest_size=8).digest())


class Decoder:
    def __init__(
        self,
        model: PreTrainedModel,
        slots: Slots,
        *,
        version: int,
        max_context: int,
        prefill_tokens: int,
    ) -> None:
        self._model, self._slots = model, slots
        self._prefill_tokens = prefill_tokens
        self.max_context = max_context
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.parameters = parameters(model)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.version = version
        self.counters = Counters()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def requests(self) -> list[Request]:
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forget a call wherever it is; one that has ended already is none of our business."""
        if request in self._running:
            self._running.remove(request)
            self._slots.release(request.slot)
        elif request in self._waiting:
            self._waiting.remove(request)

    def swap(self, version: int, tensors: Sequence[Tensor]) -> None:
        """Serve these tensors, in the order of `parameters`, from the next step on."""
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.tensor.copy_(tensor)
        self.version = version
        self._slots.forget()

    def step(self) -> None:
        reused = self._admit()
        sampled = 0
        if prefill := self._next_prefill():
            sampled += self._compute(prefill)
        if ready := [(r, 1) for r in self._running if self._pending(r) == 1]:
            sampled += self._compute(ready)
        old = self.counters
        self.counters = Counters(
            calls=old.calls + len(reused),
            prompt_tokens=old.prompt_tokens + sum(prompt for prompt, _ in reused),
            reused_tokens=old.reused_tokens + sum(known for _, known in reused),
            sampled_tokens=old.sampled_tokens + sampled,
            steps=old.steps + 1,
        )

    def _admit(self) -> list[tuple[int, int]]:
        """First come, first served, while there are free slots; prompt and reused lengths of each."""
        admitted: list[tuple[int, int]] = []
        while self._waiting and (taken := self._slots.take(self._waiting[0].call.prompt_ids)):
            request = self._waiting.popleft()
            request.slot, reused = taken
            self._running.append(request)
            admitted.append((request.length, reused))
        return admitted

    def _pending(self, request: Request) -> int:
        return request.length - self._slots.computed(request.slot)

    def _next_prefill(self) -> list[tuple[Request, int]]:
        """Calls with several pending ids, oldest first, as many as fit the budget once padded."""
        chosen: list[tuple[Request, int]] = []
        width = 0
        for request in self._running:
            if (pending := self._pending(request)) == 1:
                continue
            pending = min(pending, self._prefill_tokens)
            if chosen and (len(chosen) + 1) * max(width, pending) > self._prefill_tokens:
                break
            width = max(width, pending)
            chosen.append((request, pending))
        return chosen

    def _compute(self, work: list[tuple[Request, int]]) -> int:
        """Compute these many ids of each call, and draw for the calls that have none left."""
        work = sorted(work, key=lambda item: item[0].slot)
        slots, counts = [r.slot for r, _ in work], [n for _, n in work]
        step = self._slots.arrange(slots, counts)
        last = forward(self._model, self._slots, step)
        self._slots.advance(slots, counts)
        done = [i for i, (r, _) in enumerate(work) if self._pending(r) == 0]
        if not done:
            return 0
        rows = step.rows if len(done) == len(work) else step.rows[done]
        self._draw([work[i][0] for i in done], last if len(rows) == len(last) else last[rows])
        return len(done)

    def _draw(self, requests: list[Request], logits: Tensor) -> None:
        samplings = [r.call.sampling for r in requests]
        tokens, logprobs = draw(logits, samplings, [r.uniform() for r in requests])
        # A comparison with NaN is false; so is one of minus infinity.
        if not all(p > float("-inf") for p in logprobs):
            raise ArithmeticError(f"the weights of version {self.version} give no finite log-probability")
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            self._take(request, token, logprob)

    def _take(self, request: Request, token: int, logprob: float) -> None:
        if request.tokens and request.version != self.version:
            request.hand_over(None)
        request.version = self.version
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self._slots.append(request.slot, request.length, token)
        request.length += 1
        request.room -= 1
        finish = None
        if token in request.stop_ids:
            finish = FinishReason.STOP
        elif request.room == 0 or request.length == self.max_context:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._running.remove(request)
            self._slots.release(request.slot)
        if finish is not None or request.call.stream:
            request.hand_over(finish)


def forward(model: PreTrainedModel, slots: Slots, step: Pass) -> Tensor:
    """The logits [rows, vocabulary] after the last id of every row."""
    output = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        attention_mask=step.attention_mask,
        past_key_values=slots,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def probe(model: PreTrainedModel, slots: Slots, length: int) -> float:
    """How far log-probabilities through slots, id by id after the first half, are from a plain forward's.

    Afterwards the model's attention is the slots'.
    """
    ids = torch.arange(length, device=model.device) % model.config.get_text_config().vocab_size
    plain = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), dim=-1)
    model.set_attn_implementation(ATTENTION)
    slots.take(ids.tolist())
    off = torch.zeros((), device=model.device)
    counts = [length // 2] + [1] * (length - length // 2)
    for end, count in zip(itertools.accumulate(counts), counts, strict=True):
        logits = forward(model, slots, slots.arrange([0], [count]))
        slots.advance([0], [count])
        # torch.maximum keeps a NaN; Python's max would lose it.
        off = torch.maximum(off, (torch.log_softmax(logits[0].float(), dim=-1) - plain[end - 1]).abs().max())
    return float(off)
