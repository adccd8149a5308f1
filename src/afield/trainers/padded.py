"""Rows beside each other, as everybody runs them; with the images that stand in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from afield.trainers.batch import Row
from afield.trainers.images import ImageReader
from afield.vision import ImageFeatures, PixelInputs, Vision, concat_features


class BatchImages(NamedTuple):
    """The images in a batch of rows, each once; which feature of which one stands where; and positions."""

    vision: Vision
    pictures: list[PixelInputs]
    source: Tensor  # for each place, row by row: its feature among all pictures' features
    rows: Tensor
    columns: Tensor
    positions: Tensor | None  # [3, rows, width]

    def features(self, model: Any) -> ImageFeatures:
        found = concat_features(self.vision.features(model, self.pictures))
        return ImageFeatures(found.rows[self.source], tuple(layer[self.source] for layer in found.deep))


class Padded(NamedTuple):
    """Rows beside each other. Padding comes last, where no causal model looks, so no mask is needed."""

    ids: Tensor  # [rows, width]
    seen: BatchImages | None = None

    def hidden(self, model: Any) -> Tensor:
        seen = self.seen
        if seen is None:
            return model.get_decoder()(input_ids=self.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        hidden = seen.vision.hidden(
            model,
            self.ids,
            seen.rows,
            seen.columns,
            seen.features(model),
            position_ids=seen.positions,
            use_cache=False,
        )
        return hidden.flatten(0, 1)

    def logits(self, model: Any, tokens: Tensor) -> Tensor:
        if self.seen is not None:
            return model.get_output_embeddings()(self.hidden(model)[tokens])
        width = self.ids.shape[1]
        needed, column = torch.unique(tokens % width, return_inverse=True)
        output = model(input_ids=self.ids, use_cache=False, logits_to_keep=needed)
        return output.logits[tokens // width, column]


def images_in(
    rows: Sequence[Row], width: int, device: torch.device, reader: ImageReader | None
) -> BatchImages | None:
    """The images of these rows, if there are any. Rows with images need `reader`."""
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
