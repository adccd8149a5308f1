"""Images of rows as the model's processor has them, decoded once while they are in use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from afield.errors import UsageError
from afield.trainers.batch import Row
from afield.types import Image
from afield.vision import PixelInputs, Vision

KEPT = 512  # decoded images


class ImageReader:
    def __init__(self, vision: Vision) -> None:
        self.vision = vision
        self._known: OrderedDict[str, PixelInputs] = OrderedDict()

    def pixels(self, row: Row, image: Image) -> PixelInputs:
        known = self._known.pop(image.digest, None)
        if known is None:
            try:
                known = self.vision.pixels(image)
            except ValueError as error:
                raise UsageError(f"rollout {row.rollout_id}: {error}") from error
        self._known[image.digest] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known

    def check(self, row: Row, pictures: Sequence[PixelInputs]) -> None:
        """Refuse a row whose placeholders are not those that this processor makes."""
        try:
            self.vision.check(row.trajectory.token_ids, row.trajectory.images, pictures)
        except ValueError as error:
            raise UsageError(f"rollout {row.rollout_id}: {error}") from error
