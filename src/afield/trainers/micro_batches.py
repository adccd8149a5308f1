"""Rows to the passes a model makes over them, and the log-probabilities that come out.

All that a loss needs is flat, one entry per sampled token, row after row: how the model was run does
not matter to it. A tree computes every token that rows share once; padded rows are for models that
cannot be run over one, for rows longer than a tree may have, and for rows with images. No row is ever split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from afield.bitmasks import restrict
from afield.errors import UsageError
from afield.masks import ConstraintMasks
from afield.trainers.batch import Row
from afield.trainers.images import ImageReader
from afield.trainers.logprobs import chunked_logprobs, gather_hidden, has_linear_head
from afield.trainers.packing import pack, split
from afield.trainers.padded import Padded, images_in
from afield.trainers.tree_attention import TokenTree
from afield.types import TurnRange

LayoutName = Literal["tree", "padded"]


class MaskedTokens(NamedTuple):
    """Which sampled tokens of a pass have a mask, and those masks."""

    tokens: Tensor
    words: Tensor


class MicroBatch(NamedTuple):
    rows: list[Row]
    layout: Padded | TokenTree
    computed: int  # tokens the model is run over
    source: Tensor  # after which of them each sampled token came
    row: Tensor  # which of `rows` it is in
    place: Tensor  # and where there
    target: Tensor  # its id
    temperature: Tensor
    sampler: Tensor  # its log-probability when it was sampled
    advantage: Tensor
    weight: Tensor  # a rollout's sum to 1
    masked: MaskedTokens | None = None  # of tokens that were sampled under a constraint


def split_micro_batches(
    rows: Sequence[Row],
    max_tokens: int,
    device: torch.device,
    layout: LayoutName = "tree",
    longest: int | None = None,
    reader: ImageReader | None = None,
    masks: ConstraintMasks | None = None,
) -> list[MicroBatch]:
    """Passes over at most `max_tokens` tokens each, unless one row alone has more. With a `longest` row for
    trees, longer ones are padded; so are rows with images, which need `reader`. Turns that were sampled under
    a constraint need `masks`."""
    return [_masked(batch, masks) for batch in _laid_out(rows, max_tokens, device, layout, longest, reader)]


def _laid_out(
    rows: Sequence[Row],
    max_tokens: int,
    device: torch.device,
    layout: LayoutName,
    longest: int | None,
    reader: ImageReader | None,
) -> list[MicroBatch]:
    rows = [row for row in rows if row.trajectory.owned]
    if layout == "padded":
        return _side_by_side(rows, max_tokens, device, reader)
    short = [row for row in rows if _fits_tree(row, longest)]
    rest = [row for row in rows if not _fits_tree(row, longest)]
    parts = split([row.trajectory.token_ids for row in short], max_tokens)
    trees = [_tree([short[number] for number in part], device) for part in parts]
    return [*trees, *_side_by_side(rest, max_tokens, device, reader)]


def _fits_tree(row: Row, longest: int | None) -> bool:
    return not row.trajectory.images and (longest is None or len(row.trajectory.token_ids) <= longest)


def _side_by_side(
    rows: Sequence[Row], max_tokens: int, device: torch.device, reader: ImageReader | None
) -> list[MicroBatch]:
    passes: list[MicroBatch] = []
    pending: list[Row] = []
    for row in sorted(rows, key=lambda r: len(r.trajectory.token_ids)):
        if pending and (len(pending) + 1) * len(row.trajectory.token_ids) > max_tokens:
            passes.append(_padded(pending, device, reader))
            pending = []
        pending.append(row)
    return [*passes, _padded(pending, device, reader)] if pending else passes


def _tree(rows: list[Row], device: torch.device) -> MicroBatch:
    packed = pack([row.trajectory.token_ids for row in rows])
    tree = TokenTree(packed, device)
    sources = [path[place - 1] for row, path in zip(rows, packed.paths, strict=True) for place in places(row)]
    return _pass(rows, tree, len(packed.ids), sources, device)


def _padded(rows: list[Row], device: torch.device, reader: ImageReader | None) -> MicroBatch:
    if reader is None and (shown := [row for row in rows if row.trajectory.images]):
        raise UsageError(f"rollout {shown[0].rollout_id}: it has images, and the model takes none")
    width = max(len(row.trajectory.token_ids) for row in rows)
    filled = [(*row.trajectory.token_ids, *[0] * (width - len(row.trajectory.token_ids))) for row in rows]
    sources = [line * width + place - 1 for line, row in enumerate(rows) for place in places(row)]
    layout = Padded(torch.tensor(filled, device=device), images_in(rows, width, device, reader))
    return _pass(rows, layout, layout.ids.numel(), sources, device)


def places(row: Row) -> list[int]:
    """Where the sampled tokens it owns are."""
    return [place for turn in row.trajectory.turns for place in range(turn.start, turn.end)]


def _pass(
    rows: list[Row], layout: Padded | TokenTree, computed: int, sources: list[int], device: torch.device
) -> MicroBatch:
    entries: list[tuple[int, int, int, float, float, float, float]] = []
    for line, row in enumerate(rows):
        trajectory = row.trajectory
        ids, sampler = trajectory.token_ids, trajectory.logprobs
        weight = trajectory.weight / trajectory.owned
        for turn, earned in zip(trajectory.turns, row.advantages, strict=True):
            entries += [
                (line, p, ids[p], turn.temperature, sampler[p], earned, weight)
                for p in range(turn.start, turn.end)
            ]
    columns = [torch.tensor(column, device=device) for column in zip(*entries, strict=True)]
    return MicroBatch(rows, layout, computed, torch.tensor(sources, device=device), *columns, masked=None)


def _masked(batch: MicroBatch, masks: ConstraintMasks | None) -> MicroBatch:
    """With the masks that the constraints of its turns give for the very ids that were sampled."""
    tokens: list[int] = []
    words: list[Tensor] = []
    at = 0
    for row in batch.rows:
        for turn in row.trajectory.turns:
            if turn.constraint is not None:
                words.append(_along(row, turn, masks))
                tokens.extend(range(at, at + turn.end - turn.start))
            at += turn.end - turn.start
    if not words:
        return batch
    device = batch.target.device
    return batch._replace(
        masked=MaskedTokens(torch.tensor(tokens, device=device), torch.cat(words).to(device))
    )


def _along(row: Row, turn: TurnRange, masks: ConstraintMasks | None) -> Tensor:
    where = f"rollout {row.rollout_id}, turn {turn.id}"
    assert turn.constraint is not None
    if masks is None or masks.missing:
        why = masks.missing if masks else "this trainer knows no constraints"
        raise UsageError(f"{where}: sampled under a constraint; {why}, or set constrained_turns = 'exclude'")
    try:
        return masks.along(turn.constraint, row.trajectory.token_ids[turn.start : turn.end])
    except ValueError as error:
        raise UsageError(
            f"{where}: {error}; do engine and trainer have the same tokenizer and xgrammar?"
        ) from error


def token_logprobs(model: Any, batch: MicroBatch) -> Tensor:
    """Of every sampled token, under the distribution `model` would have sampled it from."""
    # A sharded model gathers its weights only when it is called as a whole.
    if not isinstance(model, FSDPModule) and has_linear_head(model):
        head = model.get_output_embeddings()
        hidden = gather_hidden(batch.layout.hidden(model), batch.source)
        return _of_hidden(hidden, head, batch)
    needed, place = torch.unique(batch.source, return_inverse=True)
    logits = batch.layout.logits(model, needed)[place]
    scaled = logits.float()
    if batch.masked is not None:
        tokens, words = batch.masked
        scaled = scaled.index_copy(0, tokens, restrict(scaled[tokens], words))
    scaled = scaled / batch.temperature[:, None]
    return torch.log_softmax(scaled, dim=-1).gather(1, batch.target[:, None]).squeeze(1)


def _of_hidden(hidden: Tensor, head: Any, batch: MicroBatch) -> Tensor:
    """Tokens with a mask on their own, so that the others do not pay for it."""
    weight, bias = head.weight, head.bias
    if batch.masked is None:
        return chunked_logprobs(hidden, weight, bias, batch.target, batch.temperature)
    held = batch.masked.tokens
    free = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    free[held] = False
    parts = ((free.nonzero().flatten(), None), (held, batch.masked.words))
    found = [
        chunked_logprobs(hidden[tokens], weight, bias, batch.target[tokens], batch.temperature[tokens], words)
        for tokens, words in parts
        if len(tokens)
    ]
    order = torch.cat([tokens for tokens, _ in parts])
    return torch.zeros(len(hidden), device=hidden.device).index_copy(0, order, torch.cat(found))
