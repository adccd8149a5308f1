"""Image prompts of the torch engine: KV-cache ids and vision features.

Each feature of an image has a negative id in the KV cache, made from the number of the image and the index of
the feature, so prompts share a cached prefix only up to the first image that differs. Features are computed
once per weight version and kept in an LRU cache of `ROOM` bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from afield.engines.torch.kv_cache import ForwardInputs, KVCache
from afield.models.vision import ImageFeatures, PixelInputs, Vision, concat_features
from afield.types import Image

PLACES = 24  # bits of an id for the index of a feature in its image
NUMBERS = 100_000  # images whose number is remembered; a forgotten image gets a new number
PICTURES = 256  # decoded images in the cache
ROOM = 1 << 28  # bytes of features in the cache


class ImagePrompt(NamedTuple):
    """Prompt with expanded images."""

    ids: tuple[int, ...]
    """Prompt as reported, with one placeholder id per image feature."""
    keys: tuple[int, ...]
    """Prompt as the KV cache keeps it, with a negative id per image feature."""
    mrope: np.ndarray | None
    """M-RoPE positions, `[3, length]`; None for models without."""
    pictures: dict[int, PixelInputs]
    """Preprocessed images by image number."""


class ImageEncoder:
    """Expands image prompts and computes the features of their images."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0
        self._decoded: OrderedDict[str, PixelInputs] = OrderedDict()
        self._features: OrderedDict[int, ImageFeatures] = OrderedDict()
        self._pictures: dict[int, PixelInputs] = {}
        self.computed = 0  # images encoded by the vision tower

    # --- any thread, one call at a time -----------------------------------------------------------

    def prompt(self, ids: Sequence[int], places: Sequence[int], images: Sequence[Image]) -> ImagePrompt:
        """Expand `images` at `places` (default: every placeholder id) of a prompt.

        Raises ValueError for images that cannot be read or do not match the number of placeholders.
        """
        if not places:
            places = [n for n, token in enumerate(ids) if token == self.vision.image_id]
        if len(places) != len(images):
            raise ValueError(
                f"the call has {len(images)} images, but its prompt has {len(places)} image placeholders"
            )
        pictures = [self._pixels(image) for image in images]
        expanded = self.vision.expand(ids, places, pictures)
        spans = self.vision.spans(places, pictures)
        keys, numbered = list(expanded), dict[int, PixelInputs]()
        for span, picture in zip(spans, pictures, strict=True):
            number = self._number(picture.digest)
            numbered[number] = picture
            keys[span.start : span.start + span.length] = [key(number, n) for n in range(span.length)]
        mrope = None
        if self.vision.mrope:
            mrope = self.vision.positions(len(expanded), spans, [picture.grid for picture in pictures])
        return ImagePrompt(tuple(expanded), tuple(keys), mrope, numbered)

    def _pixels(self, image: Image) -> PixelInputs:
        pixels = self._decoded.get(image.digest)
        if pixels is None:
            pixels = self._decoded[image.digest] = self.vision.pixels(image)
            if len(self._decoded) > PICTURES:
                self._decoded.popitem(last=False)
        return pixels

    def _number(self, digest: str) -> int:
        if digest not in self._numbers:
            self._last += 1
            self._numbers[digest] = self._last
            if len(self._numbers) > NUMBERS:
                self._numbers.popitem(last=False)
        return self._numbers[digest]

    # --- model thread -----------------------------------------------------------------------------

    def show(self, pictures: Mapping[int, PixelInputs]) -> None:
        """Register the images of an admitted call."""
        self._pictures |= pictures

    def keep(self, numbers: Iterable[int]) -> None:
        """Drop the pixels of all images but those of running calls."""
        self._pictures = {number: self._pictures[number] for number in numbers}

    def forget(self) -> None:
        """Drop all features after a weight change."""
        self._features.clear()

    def forward(self, model: PreTrainedModel, slots: KVCache, step: ForwardInputs) -> Tensor:
        """Logits `[rows, vocabulary]` after the last id of each row, for a step with images."""
        assert step.pictured is not None
        row, column, ids = step.pictured
        numbers, places = unkey(ids)
        parts: list[ImageFeatures] = []
        order: list[np.ndarray] = []
        for number in np.unique(numbers):
            mine = np.flatnonzero(numbers == number)
            whole = self._of(model, int(number))
            taken = torch.from_numpy(places[mine]).to(model.device)
            parts.append(ImageFeatures(whole.rows[taken], tuple(layer[taken] for layer in whole.deep)))
            order.append(mine)
        # Restore row-by-row order: models that add features in deeper layers rely on it.
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(model.device)
        together = concat_features(parts)
        features = ImageFeatures(together.rows[back], tuple(layer[back] for layer in together.deep))
        hidden = self.vision.hidden(
            model,
            step.input_ids,
            torch.from_numpy(row).to(model.device),
            torch.from_numpy(column).to(model.device),
            features,
            position_ids=step.position_ids,
            attention_mask=step.attention_mask,
            past_key_values=slots,
            use_cache=True,
        )
        head = model.get_output_embeddings()
        assert head is not None
        return head(hidden[:, -1])

    def _of(self, model: PreTrainedModel, number: int) -> ImageFeatures:
        features = self._features.pop(number, None)
        if features is None:
            (features,) = self.vision.features(model, [self._pictures[number]])
            self.computed += 1
        self._features[number] = features
        held = sum(map(_size, self._features.values()))
        while held > ROOM and len(self._features) > 1:
            _, gone = self._features.popitem(last=False)
            held -= _size(gone)
        return features


def key(number: int, place: int) -> int:
    """KV-cache id of a feature: negative, from the image number and the feature's index."""
    return -(number << PLACES | place) - 1


def unkey(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Image numbers and feature indices of negative ids."""
    numbers = -(ids + 1)
    return numbers >> PLACES, numbers & ((1 << PLACES) - 1)


def _size(features: ImageFeatures) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (features.rows, *features.deep))
