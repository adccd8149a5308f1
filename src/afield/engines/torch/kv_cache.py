"""KV cache of the torch engine: slots with prefix reuse.

1. A slot is one row of `[slots, length, heads, head_dim]` per layer, and the ids it was computed from. A
   call owns a slot while it runs; afterwards the slot keeps its ids, so that a prompt with the same prefix
   computes only the rest. Rows and length grow with use, up to the configured limits.
2. `KVCache` is the `past_key_values` of a forward pass: `arrange` chooses the rows and positions of new
   keys (`fixed` does so for a step of fixed shape), and the model's layers call `update`. With decode
   kernels (`ways`), the layers of a fixed step use `lanes` and `memory` instead, and those of a flat step,
   which has prompts one after the other without padding, `spans` as well.
3. Depends only on numpy, torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from afield.engines.torch.decode_kernels import DecodeKernels

# Larger on a GPU, because CUDA graphs are captured again whenever the cache grows.
FIRST_ROWS = {"cpu": 8, "cuda": 64}
FIRST_LENGTH = {"cpu": 128, "cuda": 2048}
# Shortest prefix that is copied from another slot. Copies on a GPU are launched layer by layer; computing
# a few more ids of a prompt takes no longer.
SHORTEST_COPY = {"cpu": 1, "cuda": 64}
COMPARED_FIRST = 64  # ids by which most slots already differ from a prompt
LENGTH_STEP = 32
ATTENTION = "afield_slots"


class ForwardInputs(NamedTuple):
    """Inputs of one forward pass."""

    input_ids: Tensor
    """Token ids, `[rows, width]`, padded on the left."""
    position_ids: Tensor
    """Positions, `[rows, width]`; `[3, rows, width]` for models with M-RoPE."""
    attention_mask: Tensor
    """Additive mask, `[rows, 1, width, length]`; a dummy for steps with decode kernels."""
    rows: Tensor
    """Output row of each slot."""
    pictured: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Row, column and negative id of each image token; None without images."""
    last: Tensor | None = None
    """Column of the last id of each slot in a flat step; None for other steps."""


class _Writes(NamedTuple):
    """Cache rows that a forward pass reads, and source and target of its new keys and values."""

    read: slice | Tensor
    """Cache rows that the pass attends to."""
    length: int
    """Number of keys per row that the pass attends to."""
    slots: Tensor
    """Cache row of each new key."""
    positions: Tensor
    """Position of each new key in its cache row."""
    source: tuple[Tensor, Tensor] | None
    """Row and column of each new key in the pass; None when no row is padded."""


class Lanes(NamedTuple):
    """Cache coordinates of each id of a fixed or flat step."""

    rows: Tensor
    """Cache rows, int32."""
    positions: Tensor
    """Positions in the cache rows, int32."""


class Spans(NamedTuple):
    """New ids of each cache row in a flat step."""

    starts: Tensor
    """First new id of each row in the step, and the number of ids of the step, int32."""
    rows: Tensor
    """Cache rows, int32."""
    lengths: Tensor
    """Keys of each row, with the new ones, int32."""
    longest: int
    """Largest number of new ids of a row."""
    longest_row: int
    """Largest number of keys of a row."""


class KVCache(Cache):
    """Slots of keys and values, used as `past_key_values` of a transformers model."""

    def __init__(
        self,
        layers: int,
        max_slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        ways: DecodeKernels | None = None,
        image_id: int | None = None,
        mrope: bool = False,
        max_tokens: int | None = None,
    ):
        """Create an empty cache.

        Args:
            layers: decoder layers of the model.
            max_slots: slots that the cache may grow to.
            max_length: tokens per slot that the cache may grow to.
            dtype: dtype of keys and values.
            device: device of keys and values.
            ways: decode kernels of fixed steps; None for the model's own attention.
            image_id: id that the model sees in place of the negative ids of image tokens.
            mrope: whether tokens have three positions (M-RoPE), which differ from their cache positions.
            max_tokens: tokens of all slots together, from the device's memory; None is no limit.
        """
        super().__init__(layers=[])
        self._image_id = image_id
        self._mrope = np.zeros((3, 0, 0), dtype=np.int64) if mrope else None
        self.ways = ways
        self.lanes: Lanes | None = None
        self.spans: Spans | None = None
        self._max_slots, self._max_length = max_slots, max_length
        self._max_tokens = max_tokens
        self._dtype, self._device = dtype, device
        self._first_rows = FIRST_ROWS.get(device.type, FIRST_ROWS["cuda"])
        self._first_length = FIRST_LENGTH.get(device.type, FIRST_LENGTH["cuda"])
        self._shortest_copy = SHORTEST_COPY.get(device.type, SHORTEST_COPY["cuda"])
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._ids = np.zeros((0, 0), dtype=np.int64)
        self._computed = np.zeros(0, dtype=np.int64)
        self._busy = np.zeros(0, dtype=bool)
        self._used = np.zeros(0, dtype=np.int64)
        self._needs = np.zeros(0, dtype=np.int64)  # ids that each busy slot may reach
        self._clock = 0
        self._peak = 0
        self.moves = 0
        self._writes: _Writes | None = None

    @property
    def rows(self) -> int:
        """Number of allocated slots. The cache has one more row, a scratch row for idle lanes."""
        return self._ids.shape[0]

    @property
    def length(self) -> int:
        """Number of allocated ids per slot."""
        return self._ids.shape[1]

    # --- slots ------------------------------------------------------------------------------------

    def take(
        self, prompt: Sequence[int], mrope: np.ndarray | None = None, *, room: int = 0
    ) -> tuple[int, int] | None:
        """Claim a slot for the prompt and `room` more ids; returns the slot and the number of reused ids.

        None if all slots are busy, or if the memory is full. At least one id stays to be computed: the
        distribution of the next token comes from it. `mrope` are the M-RoPE positions of the prompt,
        `[3, length]`; None counts from 0.
        """
        busy = int(self._busy.sum())
        if busy == self._max_slots:
            return None
        ids = np.asarray(prompt, dtype=np.int64)
        length = len(ids) if self._max_tokens is None else min(len(ids) + room, self._max_length)
        if not self._fit(busy + 1, length):
            return None
        self._peak = max(self._peak, busy + 1)
        self._reserve(busy + 1, length)
        source, reused = self._longest_prefix(ids)
        slot = source
        if self._busy[source] or 2 * reused < self._computed[source]:
            slot = self._least_useful()
            if reused < self._shortest_copy:
                reused = 0
            self._copy(source, slot, reused)
        self._busy[slot] = True
        self._needs[slot] = _round_up(length)
        self._computed[slot] = reused
        self._ids[slot, : len(ids)] = ids
        if self._mrope is not None:
            self._mrope[:, slot, : len(ids)] = np.arange(len(ids)) if mrope is None else mrope
        return slot, reused

    def _fit(self, rows: int, length: int) -> bool:
        """Whether the memory has room for `rows` slots of `length` ids; gives up idle memory for it.

        Slots above the ones that fit must be idle, so a long call waits until they are.
        """
        if self._max_tokens is None:
            return True
        needed = max(_round_up(length), int(self._needs[self._busy].max(initial=0)))
        if rows > self._max_tokens // max(needed, self.length):
            self._resize(self.rows, min(needed, self.length))  # a longer call has ended
        most = self._max_tokens // max(needed, self.length)
        if rows > most or self._busy[most:].any():
            return False
        if most < self.rows:
            self._resize(most, self.length)
        return True

    def _resize(self, rows: int, length: int) -> None:
        """Drop slots and ids beyond `rows` and `length`, which no busy slot needs."""
        if (rows, length) == self._ids.shape:
            return
        self._ids = self._ids[:rows, :length].copy()
        self._computed = np.minimum(self._computed[:rows], length)
        self._busy, self._used, self._needs = (
            array[:rows].copy() for array in (self._busy, self._used, self._needs)
        )
        if self._mrope is not None:
            self._mrope = self._mrope[:, :rows, :length].copy()
        self.moves += 1
        for memory in (self._keys, self._values):
            for layer, old in enumerate(memory):
                if old is not None:
                    memory[layer] = old[: rows + 1, :length].clone()

    def restart(self, slot: int) -> None:
        """Mark all ids of the slot as not computed."""
        self._computed[slot] = 0

    def release(self, slot: int) -> None:
        """Free a slot; its ids stay for prefix reuse."""
        self._clock += 1
        self._busy[slot] = False
        self._used[slot] = self._clock

    def append(self, slot: int, position: int, token: int) -> None:
        """Add a sampled token to a slot, not yet computed."""
        self.make_room(position + 1)
        self._ids[slot, position] = token
        if self._mrope is not None:
            # The three positions of an image token differ; text after it continues from the largest.
            self._mrope[:, slot, position] = self._mrope[:, slot, position - 1].max() + 1

    def make_room(self, length: int) -> None:
        """Grow the cache to slots of `length` ids."""
        if length > self._ids.shape[1]:
            self._reserve(0, length)

    def next_ids(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """First id of each slot that is not computed, and its position."""
        rows = np.asarray(slots)
        position = self._computed[rows]
        return self._ids[rows, position], position

    def computed(self, slot: int) -> int:
        """Number of computed ids of a slot."""
        return int(self._computed[slot])

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Mark the next `counts` ids of `slots` as computed."""
        self._computed[list(slots)] += counts

    def forget(self) -> None:
        """Invalidate all keys and values after a weight change; the ids stay."""
        self._computed[:] = 0

    def _longest_prefix(self, ids: np.ndarray) -> tuple[int, int]:
        common = np.minimum(self._common(ids), np.minimum(self._computed, len(ids) - 1))
        # A free slot wins a tie: it is used in place, without a copy.
        source = int((2 * common + ~self._busy).argmax())
        return source, int(common[source])

    def _common(self, ids: np.ndarray) -> np.ndarray:
        """Length of the prefix that each slot has in common with `ids`, as far as its ids are computed."""
        common = np.zeros(self.rows, dtype=np.int64)
        rows, start, end = np.arange(self.rows), 0, COMPARED_FIRST
        while len(rows) and start < len(ids):
            end = min(end, len(ids))
            differs = self._ids[rows, start:end] != ids[start:end]
            equal = np.where(differs.any(axis=1), differs.argmax(axis=1), differs.shape[1])
            common[rows] += equal
            rows = rows[(equal == end - start) & (self._computed[rows] > end)]
            start, end = end, 2 * end
        return common

    def _least_useful(self) -> int:
        """A new slot while the cache may grow, else the least recently used free one."""
        free = np.flatnonzero(~self._busy)
        slot = int(free[self._used[free].argmin()])
        rows = len(self._busy)
        # Grow to twice the peak concurrency: idle conversations keep their prefix, one caller needs little.
        if self._computed[slot] and rows < min(2 * self._peak, self._most_rows(self.length)):
            self._reserve(rows + 1, 0)
            return rows
        return slot

    def _copy(self, source: int, slot: int, length: int) -> None:
        if source == slot or length == 0:
            return
        for memory in (*self._keys, *self._values):
            if memory is not None:
                memory[slot, :length] = memory[source, :length]

    def _reserve(self, rows: int, length: int) -> None:
        have_rows, have_length = self._ids.shape
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:
            rows = min(max(rows, 2 * have_rows, self._first_rows), self._most_rows(max(length, have_length)))
        if length > have_length:
            wanted = max(length, 2 * have_length, self._first_length)
            wanted = min(_round_up(wanted), _round_up(self._max_length))
            fits = max(rows, have_rows) <= self._most_rows(wanted)
            length = wanted if fits else _round_up(length)
        rows, length = max(rows, have_rows), max(length, have_length)
        self._ids = _grown(self._ids, rows, length)
        if self._mrope is not None:
            self._mrope = np.stack([_grown(axis, rows, length) for axis in self._mrope])
        self._computed, self._busy, self._used, self._needs = (
            np.pad(a, (0, rows - have_rows)) for a in (self._computed, self._busy, self._used, self._needs)
        )
        self.moves += 1
        for memory in (self._keys, self._values):
            for layer, old in enumerate(memory):
                if old is not None:
                    new = memory[layer] = self._zeros(rows, length, old.shape[2], old.shape[3])
                    new[:have_rows, :have_length] = old[:have_rows]

    def _most_rows(self, length: int) -> int:
        """Most slots of `length` ids."""
        if self._max_tokens is None:
            return self._max_slots
        return min(self._max_slots, self._max_tokens // _round_up(length))

    def _zeros(self, rows: int, length: int, heads: int, dim: int) -> Tensor:
        # Not torch.empty: a masked NaN times an attention weight of 0 is still NaN.
        try:
            return torch.zeros(rows + 1, length, heads, dim, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the device has no memory for a KV cache of {rows} slots with {length} tokens each;"
                " lower max_slots or max_context"
            ) from error

    # --- forward pass -----------------------------------------------------------------------------

    def arrange(self, slots: Sequence[int], counts: Sequence[int]) -> ForwardInputs:
        """Prepare a forward pass over the next `counts` ids of `slots` (ascending).

        Rows are padded on the left, so the last output position is the last id of every row. Idle slots in
        between are included when that is cheaper than gathering the keys of the others.
        """
        width = max(counts)
        low, high = slots[0], slots[-1] + 1
        dense = high - low <= len(slots) * (2 if width == 1 else 1)
        rows = np.arange(low, high) if dense else np.asarray(slots)
        chosen = np.asarray(slots) - low if dense else np.arange(len(slots))
        count = np.zeros(len(rows), dtype=np.int64)
        count[chosen] = counts
        offset = np.arange(width) - (width - count)[:, None]
        valid = offset >= 0
        position = np.where(valid, self._computed[rows][:, None] + offset, 0)
        length = min(_round_up(int(position.max()) + 1), self._ids.shape[1])
        source_row, source_column = np.nonzero(valid)
        whole = valid.all()
        self.lanes = self.spans = None
        self._writes = _Writes(
            slice(low, high) if dense else self._tensor(rows),
            length,
            self._tensor(rows[source_row]),
            self._tensor(position[valid]),
            None if whole else (self._tensor(source_row), self._tensor(source_column)),
        )
        positions = self._tensor(position)
        ids, pictured = self._ids[rows[:, None], position], None
        if self._image_id is not None and (ids < 0).any():
            row, column = np.nonzero((ids < 0) & valid)
            pictured = (row, column, ids[row, column])
            ids = np.where(ids < 0, self._image_id, ids)
        turned = positions if self._mrope is None else self._tensor(self._mrope[:, rows[:, None], position])
        mask = self._mask(positions, length)
        return ForwardInputs(self._tensor(ids), turned, mask, self._tensor(chosen), pictured)

    @property
    def flattens(self) -> bool:
        """Whether prompts can be computed in flat steps."""
        kernels = self.ways is not None and self.ways.attend_spans is not None
        return kernels and self._mrope is None and self._image_id is None

    def flat(self, slots: Sequence[int], counts: Sequence[int]) -> ForwardInputs:
        """Prepare a forward pass over the next `counts` ids of `slots`, in one row without padding."""
        chosen, count = np.asarray(slots), np.asarray(counts)
        ends = np.cumsum(count)
        lengths = self._computed[chosen] + count
        rows = np.repeat(chosen, count)
        positions = np.arange(ends[-1]) + np.repeat(lengths - ends, count)
        numbers = np.stack([self._ids[rows, positions], positions, rows])
        ids, at, row = self._tensor(numbers)
        spans = np.stack([ends - count, ends, chosen, lengths]).astype(np.int32)
        starts, stops, span_rows, span_lengths = self._tensor(spans)
        self._writes = None
        self.lanes = Lanes(row.int(), at.int())
        self.spans = Spans(
            torch.cat([starts[:1], stops]), span_rows, span_lengths, int(count.max()), int(lengths.max())
        )
        mask = torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=self._device)
        output = torch.arange(len(chosen), device=self._device)
        return ForwardInputs(ids[None], at[None], mask, output, last=stops.long() - 1)

    def fixed(
        self, ids: Tensor, positions: Tensor, rows: Tensor, length: int, *, gathered: bool
    ) -> ForwardInputs:
        """Prepare a fixed-shape pass: one id per row, over the first `length` keys, without device syncs.

        The pass reads the keys of `rows` if `gathered`, else of the first `len(rows)` cache rows. With decode
        kernels (`ways`) it reads the keys of `rows` up to `positions`, without a mask.
        """
        if self.ways is not None:
            self._writes = self.spans = None
            self.lanes = Lanes(rows.int().contiguous(), positions.int().contiguous())
            mask = torch.zeros(len(rows), 1, 1, 1, dtype=self._dtype, device=self._device)
            return ForwardInputs(ids[:, None], positions[:, None], mask, rows)
        self._writes = _Writes(rows if gathered else slice(0, len(rows)), length, rows, positions, None)
        positions = positions[:, None]
        return ForwardInputs(ids[:, None], positions, self._mask(positions, length), rows)

    def _mask(self, positions: Tensor, length: int) -> Tensor:
        hidden = torch.arange(length, device=self._device) > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store `[batch, heads, queries, dim]` as prepared by `arrange` or `fixed`; returns rows to read."""
        if self._writes is None:
            raise RuntimeError("arrange() has to come before a forward pass")
        return (
            self._store(self._keys, layer_idx, key_states, self._writes),
            self._store(self._values, layer_idx, value_states, self._writes),
        )

    def memory(self, layer: int, heads: int, size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, `[rows, length, heads, size]`."""
        return self._held(self._keys, layer, heads, size), self._held(self._values, layer, heads, size)

    def _held(self, memory: list[Tensor | None], layer: int, heads: int, size: int) -> Tensor:
        held = memory[layer]
        if held is None:
            held = memory[layer] = self._zeros(self._ids.shape[0], self._ids.shape[1], heads, size)
        return held

    def _store(self, memory: list[Tensor | None], layer: int, states: Tensor, writes: _Writes) -> Tensor:
        states = states.transpose(1, 2)
        held = self._held(memory, layer, states.shape[2], states.shape[3])
        fresh = states.flatten(0, 1) if writes.source is None else states[writes.source]
        held.index_put_((writes.slots, writes.positions), fresh)
        return held[writes.read, : writes.length].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._writes is None else self._writes.length


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention over cached keys, without repeating keys for grouped queries."""
    groups = query.shape[1] // key.shape[1]
    # Only the CPU kernel accepts grouped queries and a mask without materialising repeated keys.
    if groups > 1 and (query.shape[2] == 1 or query.is_cuda):
        out = folded_attention(query, key, value, attention_mask, scaling)
    else:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=groups > 1
        )
    return out.transpose(1, 2), None


def folded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Grouped-query attention with the queries of one key head folded into its query positions."""
    batch, heads, width, dim = query.shape
    groups = heads // key.shape[1]
    if mask is not None and width > 1:
        mask = mask.repeat(1, 1, groups, 1)
    query = query.reshape(batch, key.shape[1], groups * width, dim)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, width, value.shape[-1])


def use_slots(model: PreTrainedModel) -> None:
    """Set `slot_attention` as the model's attention implementation."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
    if model.device.type == "cuda":
        # cuDNN attention plans every new shape on the host, which takes longer than the attention itself.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model.set_attn_implementation(ATTENTION)


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _grown(old: np.ndarray, rows: int, length: int) -> np.ndarray:
    new = np.zeros((rows, length), dtype=old.dtype)
    new[: old.shape[0], : old.shape[1]] = old
    return new
