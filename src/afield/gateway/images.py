"""Images in requests: collected by digest, checked, located in expanded prompts."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from afield.gateway.api_error import ApiError, bad_request
from afield.types import Image, ImageRef, ImageSpan

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,(.*)", re.DOTALL)


class Gallery:
    """Collects the images of one request, by digest."""

    def __init__(self) -> None:
        self.images: dict[str, Image] = {}
        self.places: dict[str, str] = {}

    def from_url(self, url: str, offset: int, where: str) -> ImageRef:
        """Decodes a `data:` URL; the engine fetches any other."""
        if match := _DATA_URL.fullmatch(url):
            return self.from_base64(match[2], match[1] or "image/png", offset, where)
        if not url.startswith(("http://", "https://")):
            raise bad_request(
                f"{where}: image URL {url[:40]!r} is neither data: nor http(s):",
                "send the image's bytes inline",
            )
        digest = hashlib.sha256(url.encode()).hexdigest()
        self.places.setdefault(digest, where)
        self.images[digest] = Image(digest=digest, media_type="", url=url)
        return ImageRef(digest, offset)

    def from_base64(self, text: str, media_type: str, offset: int, where: str) -> ImageRef:
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise bad_request(f"{where}: the image is not base64: {error}") from error
        digest = hashlib.sha256(content).hexdigest()
        self.places.setdefault(digest, where)
        self.images[digest] = Image(digest=digest, media_type=media_type, data=content)
        return ImageRef(digest, offset)


if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_PIXELS = 50_000_000
"""Width times height of one image; a bitmap of that size has 150 MB."""
MAX_BYTES = 20 * 1024 * 1024
"""Bytes of one image as sent."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
REMEMBERED = 4096
"""Number of checked images in the cache."""
ORIENTATION = 0x0112
UPRIGHT = (None, 1)
# Errors that Pillow raises for damaged files and EXIF blocks.
UNREADABLE = (
    *(OSError, ValueError, SyntaxError, EOFError, LookupError, ArithmeticError, TypeError, AttributeError),
    *(struct.error, zlib.error, MemoryError),
)
REMEDY = f"send one {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"


class Checker:
    """Checks images and caches the results by digest."""

    def __init__(self) -> None:
        self._plain: OrderedDict[str, None] = OrderedDict()

    async def check(self, images: Iterable[Image], places: Mapping[str, str]) -> list[Image]:
        """Returns the checked images. `places` maps digests to message names for errors."""
        return [await self._checked(image, places.get(image.digest, "the request")) for image in images]

    async def _checked(self, image: Image, where: str) -> Image:
        if image.data is None:
            return image
        if image.digest in self._plain:
            self._plain.move_to_end(image.digest)
            return image
        checked = await asyncio.to_thread(decoded, image, where)
        if checked is image:
            self._plain[image.digest] = None
            if len(self._plain) > REMEMBERED:
                self._plain.popitem(last=False)
        return checked


def decoded(image: Image, where: str) -> Image:
    """Returns the image, or a PNG if readers could see different pixels. Raises 400 for invalid files."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    data = image.data or b""
    if len(data) > MAX_BYTES:
        raise _refused(where, f"has {len(data)} bytes, more than {MAX_BYTES}", "send a smaller one")
    try:
        picture = Pillow.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            problem = f"has {width} x {height} pixels, more than {MAX_PIXELS}"
            raise _refused(where, problem, "send a smaller one")
        turned = picture.getexif().get(ORIENTATION) not in UPRIGHT
        frames = getattr(picture, "n_frames", 1)
        picture.load()
        if picture.mode in ("RGB", "L") and not turned and frames == 1 and not _transparent(picture):
            return image
        picture.seek(0)
        upright = ImageOps.exif_transpose(picture)
        out = io.BytesIO()
        _on_white(upright if upright is not None else picture).save(out, "PNG")
    except (*UNREADABLE, Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise _refused(where, f"cannot be read: {error}", REMEDY) from error
    return structs.replace(image, media_type="image/png", data=out.getvalue())


def _transparent(picture: Picture) -> bool:
    return "transparency" in picture.info


def _on_white(picture: Picture) -> Picture:
    from PIL import Image as Pillow

    if picture.mode not in ("RGBA", "LA", "PA", "La", "RGBa") and not _transparent(picture):
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    ground = Pillow.new("RGBA", picture.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(ground, picture).convert("RGB")


def _refused(where: str, problem: str, remedy: str) -> ApiError:
    return bad_request(f"{where}: the image {problem}", remedy)


def image_spans(
    sent: Sequence[int], expanded: Sequence[int], digests: Sequence[str], image_id: int | None
) -> tuple[ImageSpan, ...]:
    """Returns the image spans in `expanded`, which is `sent` with repeated placeholders.

    Adjacent images share their placeholders evenly. Empty if the two do not align, or `image_id` is
    unknown.
    """
    if image_id is None or not digests:
        return ()
    remaining = list(digests)
    spans: list[ImageSpan] = []
    offset = n = 0
    while n < len(sent):
        if sent[n] != image_id:
            if offset >= len(expanded) or expanded[offset] != sent[n]:
                return ()
            offset, n = offset + 1, n + 1
            continue
        places = _run(sent, n, image_id)
        length = _run(expanded, offset, image_id)
        if len(remaining) < places or length < places:
            return ()
        share, more = divmod(length, places)
        for place in range(places):
            own = share + (place < more)
            spans.append(ImageSpan(remaining.pop(0), offset, own))
            offset += own
        n += places
    return tuple(spans) if not remaining and offset == len(expanded) else ()


def _run(ids: Sequence[int], start: int, token: int) -> int:
    """Returns how often a token repeats from `start`."""
    end = start
    while end < len(ids) and ids[end] == token:
        end += 1
    return end - start
