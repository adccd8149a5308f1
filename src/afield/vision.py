"""Vision-language models: images to pixel values, placeholder tokens, positions and features.

1. `Vision.load` reads a model directory; None for a model without a vision part.
2. `Vision.pixels` decodes an image and gives the pixel values and how many placeholders stand for it.
3. `Vision.positions` gives the three positions of each token of models that have them (M-RoPE).
4. `Vision.features` runs the vision tower, `Vision.hidden` the language model with features in the place of
   placeholders.

Engines and trainers use the same functions, so that a token sees the same image wherever it is scored.
Needs Pillow, torch and transformers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from afield.errors import UsageError
from afield.types import Image, ImageSpan

if TYPE_CHECKING:
    import numpy as np

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Kinds of models with three positions for each token (M-RoPE) and images of any size."""
INPUTS = ("pixel_values", "image_grid_thw")
FAMILIES = (*GRIDS, "llava")
"""Kinds of models that are known here (`model_type` in config.json)."""


class PixelInputs(NamedTuple):
    """An image as a model takes it: its processor's tensors, as arrays, and how many tokens stand for it."""

    digest: str
    inputs: dict[str, np.ndarray]
    tokens: int
    grid: tuple[int, int, int] | None
    """Patches in time, height and width; None of models whose images are all of one size."""


class ImageFeatures(NamedTuple):
    """What the vision tower makes of an image: a row for each placeholder; and for the first layers of some
    language models, rows to add to their output."""

    rows: Any
    deep: tuple[Any, ...] = ()


class Vision:
    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.kind = str(config["model_type"])
        image_id = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(image_id, int):
            raise UsageError(f"{path}: config.json names no image_token_id")
        self.image_id = image_id
        self.mrope = self.kind in GRIDS
        self._layer = config.get("vision_feature_select_strategy", "default")
        self._vision: dict[str, Any] = config["vision_config"]
        self._merge = int(self._vision.get("spatial_merge_size", 2))
        self._processor: Any = None

    @classmethod
    def load(cls, path: str | Path) -> Vision | None:
        """None for a model without a vision part; one of a kind that is not known here is refused."""
        path = Path(path)
        config = read_config(path)
        if "vision_config" not in config:
            return None
        if config.get("model_type") not in FAMILIES:
            raise UsageError(
                f"{path}: images of {config.get('model_type')!r} models are not supported here; supported"
                f" are: {', '.join(FAMILIES)}"
            )
        return cls(path, config)

    def _images(self) -> Any:
        """The model's own image processor."""
        if self._processor is None:
            try:
                self._processor = _image_processor(self.path)
            except (OSError, ValueError, ImportError) as error:
                raise UsageError(
                    f"{self.path}: its image processor cannot be read: {error}; save the whole processor"
                    " there (preprocessor_config.json), and install Pillow"
                ) from error
        return self._processor

    def pixels(self, image: Image) -> PixelInputs:
        """Raises ValueError for what is no image, or is not at hand."""
        processed = self._images()(images=[decode_image(image)], return_tensors="pt")
        inputs = {name: value.numpy() for name, value in processed.items() if name in INPUTS}
        if not self.mrope:
            return PixelInputs(image.digest, inputs, self._fixed_tokens(), None)
        t, h, w = (int(n) for n in inputs["image_grid_thw"][0])
        return PixelInputs(image.digest, inputs, t * h * w // self._merge**2, (t, h, w))

    def _fixed_tokens(self) -> int:
        patches = (self._vision["image_size"] // self._vision["patch_size"]) ** 2
        return patches + (self._layer == "full")

    # --- ids ---------------------------------------------------------------------------------------

    def expand(self, ids: Sequence[int], places: Sequence[int], pictures: Sequence[PixelInputs]) -> list[int]:
        """As many placeholders for each image as it has features."""
        expanded: list[int] = []
        done = 0
        for place, picture in zip(places, pictures, strict=True):
            expanded += ids[done:place]
            expanded += [self.image_id] * picture.tokens
            done = place + 1
        return [*expanded, *ids[done:]]

    def spans(self, places: Sequence[int], pictures: Sequence[PixelInputs]) -> tuple[ImageSpan, ...]:
        """Where the images of `expand` stand in what it gives."""
        spans: list[ImageSpan] = []
        more = 0
        for place, picture in zip(places, pictures, strict=True):
            spans.append(ImageSpan(picture.digest, place + more, picture.tokens))
            more += picture.tokens - 1
        return tuple(spans)

    def check(self, ids: Sequence[int], spans: Sequence[ImageSpan], pictures: Sequence[PixelInputs]) -> None:
        """The ids have at these places what this processor makes of these images. Raises ValueError."""
        for span, picture in zip(spans, pictures, strict=True):
            here = set(ids[span.start : span.start + span.length])
            if here != {self.image_id} or span.length != picture.tokens:
                raise ValueError(
                    f"image {span.digest[:12]} stands for {span.length} tokens at {span.start}, and this"
                    f" model's processor makes {picture.tokens} of it; sample and train with the same"
                    " preprocessor_config.json"
                )

    def positions(
        self, length: int, spans: Sequence[ImageSpan], grids: Sequence[tuple[int, int, int] | None]
    ) -> np.ndarray:
        """`[3, length]`: in time, height and width. Text goes on in all three from the largest before it."""
        import numpy as np

        out = np.empty((3, length), dtype=np.int64)
        at = ahead = 0
        for span, grid in zip(spans, grids, strict=True):
            assert grid is not None
            text = span.start - at
            out[:, at : span.start] = ahead + np.arange(text)
            ahead += text
            t, h, w = grid[0], grid[1] // self._merge, grid[2] // self._merge
            place = np.indices((t, h, w)).reshape(3, -1)
            at = span.start + span.length
            out[:, span.start : at] = ahead + place
            ahead += max(t, h, w)
        out[:, at:] = ahead + np.arange(length - at)
        return out

    # --- the model ---------------------------------------------------------------------------------

    def features(self, model: Any, pictures: Sequence[PixelInputs]) -> list[ImageFeatures]:
        """What the vision tower makes of these images, one by one: in no order do they see each other."""
        return [self._features(model, picture) for picture in pictures]

    def _features(self, model: Any, picture: PixelInputs) -> ImageFeatures:
        import numpy as np
        import torch

        inputs = {
            name: torch.from_numpy(np.ascontiguousarray(value)).to(model.device)
            for name, value in picture.inputs.items()
        }
        output = model.model.get_image_features(**inputs, return_dict=True)
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in output.pooler_output])
        deep = getattr(output, "deepstack_features", None) or ()
        return ImageFeatures(
            rows, tuple(layer if torch.is_tensor(layer) else torch.cat(layer) for layer in deep)
        )

    def hidden(
        self, model: Any, ids: Any, rows: Any, columns: Any, features: ImageFeatures, **how: Any
    ) -> Any:
        """Last hidden states of the language model over `ids`, with feature n at (rows[n], columns[n])."""
        import torch

        embeds = model.get_input_embeddings()(ids)
        embeds = embeds.index_put((rows, columns), features.rows.to(embeds.dtype))
        if features.deep:
            mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
            mask[rows, columns] = True
            how |= {"visual_pos_masks": mask, "deepstack_visual_embeds": list(features.deep)}
        return model.get_decoder()(inputs_embeds=embeds, **how).last_hidden_state


def _image_processor(path: Path) -> Any:
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True)
    except ImportError:  # some versions want torchvision here even where they have the same with Pillow
        config = json.loads((path / "preprocessor_config.json").read_bytes())
        name = str(config.get("image_processor_type", "")).removesuffix("Fast")
        if (kind := getattr(transformers, f"{name}Pil", None)) is None:
            raise
        return kind.from_pretrained(path, local_files_only=True)


def decode_image(image: Image) -> Any:
    """As Pillow has it. Raises ValueError for what is no image, or is not at hand."""
    from PIL import Image as Pillow

    if image.data is None:
        raise ValueError(
            f"image {image.digest[:12]} is only known by its URL {image.url!r}; send its bytes (a data: URL)"
        )
    try:
        return Pillow.open(io.BytesIO(image.data)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ValueError(f"image {image.digest[:12]} cannot be decoded: {error}") from error


def read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}


def has_vision(path: Path) -> bool:
    """Whether a model was made for images."""
    return "vision_config" in read_config(path)


# Checkpoints of vision-language models name their parts as before transformers had one model for both.
_RENAMED = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
)
_PARTS = ("model.language_model.", "model.visual.", "model.vision_tower.", "model.multi_modal_projector.")


def tensor_name(name: str) -> str:
    """The name that a vision-language model of `transformers` has for a tensor of a checkpoint."""
    if name.startswith(_PARTS):
        return name
    return next((to + name[len(old) :] for old, to in _RENAMED if name.startswith(old)), name)


def concat_features(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Of several images, one after the other."""
    import torch

    deep = zip(*(one.deep for one in features), strict=True)
    return ImageFeatures(torch.cat([one.rows for one in features]), tuple(torch.cat(layer) for layer in deep))
