"""Vision-language models: images to pixel values, placeholder tokens, positions and features.

1. `Vision.load` reads a model directory; None for a model without a vision tower.
2. `Vision.pixels` decodes an image to pixel values and the number of its placeholder tokens.
3. `Vision.positions` computes the three positions of each token for models with M-RoPE.
4. `Vision.features` runs the vision tower, `Vision.hidden` the language model with features instead of
   placeholders.

Engines and trainers use the same functions, so that sampling and training see the same image. Needs Pillow,
torch and transformers.
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
"""Model types with three positions per token (M-RoPE) and images of any size."""
INPUTS = ("pixel_values", "image_grid_thw")
FAMILIES = (*GRIDS, "llava")
"""Supported model types (`model_type` in config.json)."""


class PixelInputs(NamedTuple):
    """Image as preprocessed by the model's image processor."""

    digest: str
    """Digest of the image, see `Image.digest`."""
    inputs: dict[str, np.ndarray]
    """Outputs of the image processor by name; see `INPUTS`."""
    tokens: int
    """Number of placeholder tokens."""
    grid: tuple[int, int, int] | None
    """Patches in time, height and width; None for models with images of one size."""


class ImageFeatures(NamedTuple):
    """Output of the vision tower for one image."""

    rows: Any
    """Embedding of each placeholder, `[tokens, hidden]`."""
    deep: tuple[Any, ...] = ()
    """Features to add to the outputs of the first language-model layers (DeepStack); empty without."""


class Vision:
    """Vision tower and image processor of a model directory."""

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
        """Read a model directory; None without a vision tower, UsageError for an unsupported model type."""
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
        """Image processor of the model, loaded on first use."""
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
        """Decode and preprocess an image; raises ValueError if it is invalid or has only a URL."""
        processed = self._images()(images=[decode_image(image)], return_tensors="pt")
        inputs = {name: value.numpy() for name, value in processed.items() if name in INPUTS}
        if not self.mrope:
            return PixelInputs(image.digest, inputs, self._fixed_tokens(), None)
        t, h, w = (int(n) for n in inputs["image_grid_thw"][0])
        return PixelInputs(image.digest, inputs, t * h * w // self._merge**2, (t, h, w))

    def _fixed_tokens(self) -> int:
        patches = (self._vision["image_size"] // self._vision["patch_size"]) ** 2
        return patches + (self._layer == "full")

    # --- prompts -----------------------------------------------------------------------------------

    def expand(self, ids: Sequence[int], places: Sequence[int], pictures: Sequence[PixelInputs]) -> list[int]:
        """Replace the placeholder at each of `places` by as many as the image has features."""
        expanded: list[int] = []
        position = 0
        for place, picture in zip(places, pictures, strict=True):
            expanded += ids[position:place]
            expanded += [self.image_id] * picture.tokens
            position = place + 1
        return [*expanded, *ids[position:]]

    def spans(self, places: Sequence[int], pictures: Sequence[PixelInputs]) -> tuple[ImageSpan, ...]:
        """Positions of the images in the result of `expand`."""
        spans: list[ImageSpan] = []
        more = 0
        for place, picture in zip(places, pictures, strict=True):
            spans.append(ImageSpan(picture.digest, place + more, picture.tokens))
            more += picture.tokens - 1
        return tuple(spans)

    def check(self, ids: Sequence[int], spans: Sequence[ImageSpan], pictures: Sequence[PixelInputs]) -> None:
        """Raise ValueError unless the ids have at `spans` the placeholders that this processor produces."""
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
        """M-RoPE positions `[3, length]` in time, height and width.

        Text after an image continues in all three from the largest position before it.
        """
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

    # --- model -------------------------------------------------------------------------------------

    def features(self, model: Any, pictures: Sequence[PixelInputs]) -> list[ImageFeatures]:
        """Run the vision tower on each image separately, so that features do not depend on the batch."""
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
        """Last hidden states of the language model over `ids`, with feature n at (rows[n], columns[n]).

        `how` are further arguments of the decoder's forward.
        """
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
    except ImportError:  # some versions require torchvision here although they have a Pillow processor
        config = json.loads((path / "preprocessor_config.json").read_bytes())
        name = str(config.get("image_processor_type", "")).removesuffix("Fast")
        if (kind := getattr(transformers, f"{name}Pil", None)) is None:
            raise
        return kind.from_pretrained(path, local_files_only=True)


def decode_image(image: Image) -> Any:
    """Decode to a Pillow RGB image; raises ValueError if it is invalid or has only a URL."""
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
    """Read config.json; empty if it is missing or invalid."""
    try:
        return json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}


def has_vision(path: Path) -> bool:
    """Whether the model has a vision tower."""
    return "vision_config" in read_config(path)


# Checkpoint prefixes of older transformers releases, and their current names.
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
    """Name in the transformers model of a checkpoint tensor."""
    if name.startswith(_PARTS):
        return name
    return next((to + name[len(old) :] for old, to in _RENAMED if name.startswith(old)), name)


def concat_features(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """Concatenate the features of several images."""
    import torch

    deep = zip(*(part.deep for part in features), strict=True)
    return ImageFeatures(
        torch.cat([part.rows for part in features]), tuple(torch.cat(layer) for layer in deep)
    )
