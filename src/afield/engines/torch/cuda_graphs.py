"""CUDA graphs of decode steps with fixed shapes, captured once and replayed.

1. A step computes one id per row and samples the next one on the device, with one copy in and one copy out.
   The next step may be launched before the host has read the tokens of the last one.
2. Shapes are few: rows are rounded up, and so is the length unless decode kernels read only the keys in
   use. A rare shape runs in a larger one.
3. Weights are copied in place, so graphs stay valid; when the KV cache moves they are captured again.
4. Without CUDA, or for a model that synchronises with the device (`refused` has the reason), the same steps
   run without graphs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from afield.engines.torch.kv_cache import ForwardInputs, KVCache
from afield.engines.torch.sampler import pick, plain_sums

if TYPE_CHECKING:
    from afield.engines.torch.images import ImageEncoder

# Number of uses after which a shape gets its own graph, if a larger graph can run it until then.
USES_BEFORE_RECORDING = 4
MOST_RECORDINGS = 64
LENGTH_STEP = 64
COLUMNS = 5  # id, position, cache row, temperature, uniform random number


class StepShape(NamedTuple):
    """Fixed shape of a decode step."""

    rows: int
    """Number of lanes."""
    length: int
    """Number of keys per cache row that attention reads."""
    gathered: bool
    """Whether the keys of the lanes' cache rows are gathered; False reads the first `rows` cache rows."""

    def covers(self, other: StepShape) -> bool:
        """Whether a step of shape `other` can run in this shape."""
        return self.gathered == other.gathered and self.rows >= other.rows and self.length >= other.length


class LaunchedStep(NamedTuple):
    """Launched step whose results may not have arrived on the host yet."""

    slots: list[int]
    """KV-cache slots of the step."""
    lanes: list[int]
    """Lane of each slot."""
    shape: StepShape
    """Shape in which the step runs."""
    answers: Tensor
    """Host buffer for the token and log-probability of each lane."""
    landed: torch.cuda.Event | None
    """Event after the copy to `answers`; None without CUDA."""


class CudaGraphRunner:
    """Runs decode steps, as CUDA graphs where possible."""

    def __init__(self, model: PreTrainedModel, slots: KVCache, max_slots: int) -> None:
        self._model, self._slots = model, slots
        self._device = model.device
        self._cuda = self._records = self._device.type == "cuda"
        lanes = rows_bucket(max_slots)
        # One float64 tensor each way (integers are exact up to 2**53), so that one copy each way is enough.
        self._inputs = torch.zeros(lanes, COLUMNS, dtype=torch.float64, device=self._device)
        self._outputs = torch.zeros(lanes, 2, dtype=torch.float64, device=self._device)
        # Double-buffered: one copy may be in flight while the next buffer is written.
        self._sent = [torch.zeros(lanes, COLUMNS, dtype=torch.float64, pin_memory=self._cuda) for _ in "ab"]
        self._came = [torch.zeros(lanes, 2, dtype=torch.float64, pin_memory=self._cuda) for _ in "ab"]
        self._logits = torch.empty(0)
        self._turn = 0
        self._recordings: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._wanted: Counter[StepShape] = Counter()
        self._moves = slots.moves
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._side = torch.cuda.Stream(self._device) if self._cuda else None
        self.launched: Counter[StepShape] = Counter()
        self.recorded = 0
        self.recording_s = 0.0
        self.refused = ""

    def launch(
        self,
        slots: list[int],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
        after: LaunchedStep | None = None,
    ) -> LaunchedStep:
        """Launch one step for `slots` (ascending).

        Input ids are the results of the step `after`, else the next ids of the slots. `after` must contain
        all `slots`; each slot keeps its lane.
        """
        ids, positions = self._slots.next_ids(slots)
        length = self._slots.length
        if self._slots.ways is None:
            length = min(length_bucket(int(positions.max()) + 1), length)
        if after is None:
            rows, gathered, lanes = self._lay_out(slots)
        else:
            rows, gathered = after.shape.rows, after.shape.gathered
            lane_of = dict(zip(after.slots, after.lanes, strict=True))
            lanes = [lane_of[slot] for slot in slots]
        shape = self._choose(StepShape(rows, length, gathered))
        self._turn ^= 1
        sent, answers = self._sent[self._turn][: shape.rows], self._came[self._turn][: shape.rows]
        numbers = sent.numpy()
        # Lanes without a call write to the scratch row of the cache.
        numbers[:] = (0, 0, self._slots.rows, 1, 0)
        numbers[lanes] = np.stack([ids, positions, np.asarray(slots), temperatures, uniforms], axis=1)
        self._inputs[: shape.rows].copy_(sent, non_blocking=True)
        if after is not None:
            self._inputs[: after.shape.rows, 0] = self._outputs[: after.shape.rows, 0]
        self.replay(shape)
        answers.copy_(self._outputs[: shape.rows], non_blocking=True)
        landed = torch.cuda.Event() if self._cuda else None
        if landed is not None:
            landed.record()
        return LaunchedStep(slots, lanes, shape, answers, landed)

    def read(self, flight: LaunchedStep) -> tuple[list[int], list[float]]:
        """Wait for a launched step; returns the token and log-probability of each slot."""
        if flight.landed is not None:
            flight.landed.synchronize()
        answers = flight.answers.numpy()[flight.lanes]
        return answers[:, 0].astype(np.int64).tolist(), answers[:, 1].tolist()

    def logits(self, lanes: list[int]) -> Tensor:
        """Logits of these lanes in the step launched last."""
        return self._logits[lanes]

    # --- shapes -----------------------------------------------------------------------------------

    def _lay_out(self, slots: list[int]) -> tuple[int, bool, list[int]]:
        """Choose rows, gathering and lanes: the first cache rows, or gathered ones if most would be idle."""
        few = rows_bucket(len(slots))
        if self._slots.ways is not None:
            return few, False, list(range(len(slots)))
        rows = min(rows_bucket(slots[-1] + 1), self._slots.rows)
        if rows <= 2 * few:
            return rows, False, slots
        return few, True, list(range(len(slots)))

    def _choose(self, wanted: StepShape) -> StepShape:
        if self._slots.moves != self._moves:
            self._forget()
        if wanted in self._recordings or not self._records:
            return wanted
        self._wanted[wanted] += 1
        larger = [shape for shape in self._recordings if shape.covers(wanted)]
        if self._wanted[wanted] < USES_BEFORE_RECORDING and larger:
            return min(larger, key=lambda shape: shape.rows * shape.length)
        return wanted

    def _forget(self) -> None:
        self._moves = self._slots.moves
        if self._recordings:
            torch.cuda.synchronize(self._device)
            self._recordings.clear()
            # A graph pool cannot be reused once all its graphs are gone.
            self._pool = torch.cuda.graph_pool_handle()

    # --- running ----------------------------------------------------------------------------------

    def replay(self, shape: StepShape) -> None:
        """Run a step of this shape on the current inputs; captures its graph if needed."""
        self.launched[shape] += 1
        if self._records and shape not in self._recordings:
            self._record(shape)
        if not self._records:
            self._compute(shape)
            return
        # Move to the end: the first graph is the least recently used.
        recording = self._recordings[shape] = self._recordings.pop(shape)
        recording.replay()

    def _compute(self, shape: StepShape) -> None:
        inputs = self._inputs[: shape.rows]
        ids, positions, rows = inputs[:, :3].long().unbind(dim=1)
        step = self._slots.fixed(ids, positions, rows, shape.length, gathered=shape.gathered)
        logits = forward(self._model, self._slots, step)
        sums = plain_sums if self._slots.ways is None else self._slots.ways.sums
        tokens, logprobs = pick(logits, inputs[:, 3], inputs[:, 4], sums)
        self._outputs[: shape.rows, 0] = tokens
        self._outputs[: shape.rows, 1] = logprobs
        if not len(self._logits):
            self._logits = logits.new_empty(len(self._inputs), logits.shape[-1])
        # Copied out, so that graphs can share the memory of their own logits.
        self._logits[: shape.rows] = logits

    def _record(self, shape: StepShape) -> None:
        began = time.monotonic()
        # Warm-up before the capture: the first run of a shape plans and allocates. The replay repeats it.
        self._compute(shape)
        torch.cuda.synchronize(self._device)
        while len(self._recordings) >= MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._side):
                # "thread_local", because other threads allocate meanwhile (new weights, a trainer).
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._compute(shape)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.refused = f"the model's steps cannot be recorded as CUDA graphs, which is slower: {error}"
            self._records = False
            return
        self._recordings[shape] = graph
        self.recorded += 1
        self.recording_s += time.monotonic() - began


def forward(
    model: PreTrainedModel,
    slots: KVCache,
    step: ForwardInputs,
    keep: int = 1,
    images: ImageEncoder | None = None,
) -> Tensor:
    """Run the model; returns the logits `[rows, vocabulary]` after the last id of each row.

    With `keep` above 1: `[rows, keep, vocabulary]` of the last `keep` ids. A step with images needs `images`
    and ignores `keep`, as a flat step does.
    """
    if step.pictured is not None and images is not None:
        return images.forward(model, slots, step)
    last = step.last
    output = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        attention_mask=step.attention_mask,
        past_key_values=slots,
        use_cache=True,
        logits_to_keep=keep if last is None else last,
    )
    if last is not None:
        return output.logits[0]
    return output.logits[:, -1] if keep == 1 else output.logits[:, -keep:]


def rows_bucket(rows: int) -> int:
    """Round rows up to 1, 2, 4, 8, 12, 16, 24, 32, 48 and so on."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 16 and rows <= power * 3 // 4 else power


def length_bucket(length: int) -> int:
    """Round a length up by at most a quarter, and to at least 64."""
    step = max(LENGTH_STEP, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
