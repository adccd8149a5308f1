"""Micro-batches: rows laid out for one forward pass, and their token log-probabilities.

1. `split_micro_batches` packs rows into token trees, which compute shared prefixes once, or pads them. Rows
   are padded for models that cannot run over a tree, beyond the tree's row length, and with images.
2. `token_logprobs` runs the model over a micro-batch. Its inputs and outputs are flat, one entry per sampled
   token, row after row, for any layout. Rows are never split.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from afield.batches.rows import Row
from afield.errors import UsageError
from afield.models.bitmasks import restrict
from afield.models.masks import ConstraintMasks
from afield.models.vision import ImageFeatures, PixelInputs, Vision, concat_features
from afield.settings.trainer import LayoutName
from afield.trainers.logprobs import chunked_entropy, chunked_logprobs, gather_hidden, has_linear_head
from afield.trainers.packing import pack, split
from afield.trainers.tree_attention import TokenTree
from afield.types import Image, TurnRange

MAX_DECODED_IMAGES = 512
"""Decoded images that an `ImageReader` caches."""


class MaskedTokens(NamedTuple):
    """Sampled tokens of constrained turns, and their bit masks over the vocabulary."""

    tokens: Tensor
    """Indices of the sampled tokens."""
    words: Tensor
    """Bit masks, [tokens, words]."""


class MicroBatch(NamedTuple):
    """Rows of one forward pass. Tensors have one entry per sampled token."""

    rows: list[Row]
    """Rows of the batch."""
    layout: Padded | TokenTree
    """Inputs of the model: padded rows or a token tree."""
    computed: int
    """Number of tokens that the model computes."""
    source: Tensor
    """Index of the computed token whose hidden state predicts the sampled token."""
    row: Tensor
    """Index of the row in `rows`."""
    place: Tensor
    """Index of the token in its row."""
    target: Tensor
    """Token id."""
    temperature: Tensor
    """Sampling temperature."""
    sampler: Tensor
    """Log-probability that the sampler recorded."""
    advantage: Tensor
    """Advantage of the token's turn."""
    weight: Tensor
    """Weights of a rollout's tokens add up to 1."""
    masked: MaskedTokens | None = None
    """Tokens that were sampled under a constraint; None without any."""


def split_micro_batches(
    rows: Sequence[Row],
    max_tokens: int,
    device: torch.device,
    layout: LayoutName = "tree",
    longest: int | None = None,
    reader: ImageReader | None = None,
    masks: ConstraintMasks | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens each, unless one row alone has more.

    `longest` is the row length up to which rows run over a tree; longer rows and rows with images are
    padded. Images need `reader`, constrained turns need `masks`.
    """
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
        return _padded_batches(rows, max_tokens, device, reader)
    short = [row for row in rows if _fits_tree(row, longest)]
    long = [row for row in rows if not _fits_tree(row, longest)]
    parts = split([row.trajectory.token_ids for row in short], max_tokens)
    trees = [_tree([short[number] for number in part], device) for part in parts]
    return [*trees, *_padded_batches(long, max_tokens, device, reader)]


def _fits_tree(row: Row, longest: int | None) -> bool:
    return not row.trajectory.images and (longest is None or len(row.trajectory.token_ids) <= longest)


def _padded_batches(
    rows: Sequence[Row], max_tokens: int, device: torch.device, reader: ImageReader | None
) -> list[MicroBatch]:
    batches: list[MicroBatch] = []
    pending: list[Row] = []
    for row in sorted(rows, key=lambda r: len(r.trajectory.token_ids)):
        if pending and (len(pending) + 1) * len(row.trajectory.token_ids) > max_tokens:
            batches.append(_padded(pending, device, reader))
            pending = []
        pending.append(row)
    return [*batches, _padded(pending, device, reader)] if pending else batches


def _tree(rows: list[Row], device: torch.device) -> MicroBatch:
    packed = pack([row.trajectory.token_ids for row in rows])
    tree = TokenTree(packed, device)
    sources = [path[place - 1] for row, path in zip(rows, packed.paths, strict=True) for place in places(row)]
    return _micro_batch(rows, tree, len(packed.ids), sources, device)


def _padded(rows: list[Row], device: torch.device, reader: ImageReader | None) -> MicroBatch:
    if reader is None and (with_images := [row for row in rows if row.trajectory.images]):
        raise UsageError(f"rollout {with_images[0].rollout_id}: it has images, and the model takes none")
    width = max(len(row.trajectory.token_ids) for row in rows)
    filled = [(*row.trajectory.token_ids, *[0] * (width - len(row.trajectory.token_ids))) for row in rows]
    sources = [line * width + place - 1 for line, row in enumerate(rows) for place in places(row)]
    layout = Padded(torch.tensor(filled, device=device), images_in(rows, width, device, reader))
    return _micro_batch(rows, layout, layout.ids.numel(), sources, device)


def places(row: Row) -> list[int]:
    """Indices of the sampled tokens that the row owns."""
    return [place for turn in row.trajectory.turns for place in range(turn.start, turn.end)]


def _micro_batch(
    rows: list[Row], layout: Padded | TokenTree, computed: int, sources: list[int], device: torch.device
) -> MicroBatch:
    entries: list[tuple[int, int, int, float, float, float, float]] = []
    for line, row in enumerate(rows):
        trajectory = row.trajectory
        ids, sampler = trajectory.token_ids, trajectory.logprobs
        weight = trajectory.weight / trajectory.owned
        for turn, advantage in zip(trajectory.turns, row.advantages, strict=True):
            entries += [
                (line, p, ids[p], turn.temperature, sampler[p], advantage, weight)
                for p in range(turn.start, turn.end)
            ]
    columns = [torch.tensor(column, device=device) for column in zip(*entries, strict=True)]
    return MicroBatch(rows, layout, computed, torch.tensor(sources, device=device), *columns, masked=None)


def _masked(batch: MicroBatch, masks: ConstraintMasks | None) -> MicroBatch:
    """Add the masks of constrained turns, replayed over the ids that were sampled."""
    tokens: list[int] = []
    words: list[Tensor] = []
    first = 0
    for row in batch.rows:
        for turn in row.trajectory.turns:
            if turn.constraint is not None:
                words.append(_turn_masks(row, turn, masks))
                tokens.extend(range(first, first + turn.end - turn.start))
            first += turn.end - turn.start
    if not words:
        return batch
    device = batch.target.device
    return batch._replace(
        masked=MaskedTokens(torch.tensor(tokens, device=device), torch.cat(words).to(device))
    )


def _turn_masks(row: Row, turn: TurnRange, masks: ConstraintMasks | None) -> Tensor:
    where = f"rollout {row.rollout_id}, turn {turn.id}"
    assert turn.constraint is not None
    if masks is None or masks.missing:
        why = masks.missing if masks else "this trainer has no constraint masks"
        raise UsageError(f"{where}: sampled under a constraint; {why}, or set constrained_turns = 'exclude'")
    try:
        return masks.along(turn.constraint, row.trajectory.token_ids[turn.start : turn.end])
    except ValueError as error:
        raise UsageError(
            f"{where}: {error}; do engine and trainer have the same tokenizer and xgrammar?"
        ) from error


class TokenScores(NamedTuple):
    """Scores of the sampled tokens of a micro-batch."""

    logprob: Tensor
    """Log-probability, with its gradient."""
    entropy: Tensor | None = None
    """Entropy of the distribution that the token was drawn from, in nats; None if it was not asked for."""


def token_logprobs(model: Any, batch: MicroBatch) -> Tensor:
    """Log-probability of every sampled token under the distribution that `model` samples from."""
    return token_scores(model, batch).logprob


def token_scores(model: Any, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
    """Log-probability of every sampled token and, if asked for, the entropy of its distribution."""
    # A sharded model gathers its weights only when it is called as a whole.
    if not isinstance(model, FSDPModule) and has_linear_head(model):
        head = model.get_output_embeddings()
        hidden = gather_hidden(batch.layout.hidden(model), batch.source)
        return TokenScores(
            _score_hidden(chunked_logprobs, hidden, head, batch),
            _score_hidden(chunked_entropy, hidden.detach(), head, batch) if entropy else None,
        )
    needed, place = torch.unique(batch.source, return_inverse=True)
    logits = batch.layout.logits(model, needed)[place]
    scaled = logits.float()
    if batch.masked is not None:
        tokens, words = batch.masked
        scaled = scaled.index_copy(0, tokens, restrict(scaled[tokens], words))
    scaled = scaled / batch.temperature[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    return TokenScores(
        logprobs.gather(1, batch.target[:, None]).squeeze(1),
        torch.special.entr(logprobs.detach().exp()).sum(-1) if entropy else None,
    )


def _score_hidden(score: Any, hidden: Tensor, head: Any, batch: MicroBatch) -> Tensor:
    """Scores from hidden states. Masked tokens are computed separately: masks cost time."""
    weight, bias = head.weight, head.bias
    if batch.masked is None:
        return score(hidden, weight, bias, batch.target, batch.temperature)
    held = batch.masked.tokens
    free = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    free[held] = False
    parts = ((free.nonzero().flatten(), None), (held, batch.masked.words))
    scores = [
        score(hidden[tokens], weight, bias, batch.target[tokens], batch.temperature[tokens], words)
        for tokens, words in parts
        if len(tokens)
    ]
    order = torch.cat([tokens for tokens, _ in parts])
    return torch.zeros(len(hidden), device=hidden.device).index_copy(0, order, torch.cat(scores))


# --- padded rows and images ----------------------------------------------------------------------


class BatchImages(NamedTuple):
    """Distinct images of a padded micro-batch, and where their features go."""

    vision: Vision
    """Vision part of the model."""
    pictures: list[PixelInputs]
    """Distinct images, as inputs of the vision part."""
    source: Tensor
    """Index among all images' features, per image token."""
    rows: Tensor
    """Row of each image token."""
    columns: Tensor
    """Column of each image token."""
    positions: Tensor | None
    """M-RoPE positions, [3, rows, width]; None for models without M-RoPE."""

    def features(self, model: Any) -> ImageFeatures:
        features = concat_features(self.vision.features(model, self.pictures))
        return ImageFeatures(features.rows[self.source], tuple(layer[self.source] for layer in features.deep))


class Padded(NamedTuple):
    """Rows padded on the right; causal attention ignores the padding, so no mask is needed."""

    ids: Tensor
    """Token ids, [rows, width]."""
    images: BatchImages | None = None
    """Images of the rows; None without any."""

    def hidden(self, model: Any) -> Tensor:
        images = self.images
        if images is None:
            return model.get_decoder()(input_ids=self.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        hidden = images.vision.hidden(
            model,
            self.ids,
            images.rows,
            images.columns,
            images.features(model),
            position_ids=images.positions,
            use_cache=False,
        )
        return hidden.flatten(0, 1)

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        if self.images is not None:
            return model.get_output_embeddings()(self.hidden(model)[tokens])
        width = self.ids.shape[1]
        needed, column = torch.unique(tokens % width, return_inverse=True)
        output = model(input_ids=self.ids, use_cache=False, logits_to_keep=needed)
        return output.logits[tokens // width, column]


def images_in(
    rows: Sequence[Row], width: int, device: torch.device, reader: ImageReader | None
) -> BatchImages | None:
    """Images of these rows; None without any. Rows with images need `reader`."""
    if not any(row.images for row in rows) or reader is None:
        return None
    pictures: dict[str, PixelInputs] = {}
    first: dict[str, int] = {}
    source: list[int] = []
    places: list[tuple[int, int]] = []
    positions: list[np.ndarray] = []
    total = 0
    for line, row in enumerate(rows):
        mine = [reader.pixels(row, image) for image in row.images]
        reader.check(row, mine)
        for span, picture in zip(row.trajectory.images, mine, strict=True):
            if picture.digest not in first:
                first[picture.digest] = total
                pictures[picture.digest] = picture
                total += picture.tokens
            source += range(first[picture.digest], first[picture.digest] + span.length)
            places += [(line, place) for place in range(span.start, span.start + span.length)]
        if reader.vision.mrope:
            grids = [picture.grid for picture in mine]
            positions.append(reader.vision.positions(width, row.trajectory.images, grids))
    return BatchImages(
        reader.vision,
        list(pictures.values()),
        torch.tensor(source, device=device),
        torch.tensor([line for line, _ in places], device=device),
        torch.tensor([place for _, place in places], device=device),
        torch.from_numpy(np.stack(positions, axis=1)).to(device) if positions else None,
    )


class ImageReader:
    """Decodes the images of rows with the model's processor, and caches them."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision
        self._cache: OrderedDict[str, PixelInputs] = OrderedDict()

    def pixels(self, row: Row, image: Image) -> PixelInputs:
        pixels = self._cache.pop(image.digest, None)
        if pixels is None:
            try:
                pixels = self.vision.pixels(image)
            except ValueError as error:
                raise UsageError(f"rollout {row.rollout_id}: {error}") from error
        self._cache[image.digest] = pixels
        if len(self._cache) > MAX_DECODED_IMAGES:
            self._cache.popitem(last=False)
        return pixels

    def check(self, row: Row, pictures: Sequence[PixelInputs]) -> None:
        """Refuse a row whose image placeholders differ from those of the processor."""
        try:
            self.vision.check(row.trajectory.token_ids, row.trajectory.images, pictures)
        except ValueError as error:
            raise UsageError(f"rollout {row.rollout_id}: {error}") from error
