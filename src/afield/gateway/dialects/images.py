"""Images in a request: what clients send in place of text, taken in by the digest of its content."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

from afield.gateway.api_error import bad_request
from afield.interfaces import Image
from afield.types import ImageRef

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,(.*)", re.DOTALL)


class Gallery:
    """Collects the images of one request; the same bytes are one image."""

    def __init__(self) -> None:
        self.images: dict[str, Image] = {}
        self.places: dict[str, str] = {}

    def from_url(self, url: str, at: int, where: str) -> ImageRef:
        """A `data:` URL carries the bytes; any other is the engine's to fetch."""
        if found := _DATA_URL.fullmatch(url):
            return self.from_base64(found[2], found[1] or "image/png", at, where)
        if not url.startswith(("http://", "https://")):
            raise bad_request(
                f"{where}: image URL {url[:40]!r} is neither data: nor http(s):",
                "send the image's bytes inline",
            )
        digest = hashlib.sha256(url.encode()).hexdigest()
        self.places.setdefault(digest, where)
        self.images[digest] = Image(digest=digest, media_type="", url=url)
        return ImageRef(digest, at)

    def from_base64(self, text: str, media_type: str, at: int, where: str) -> ImageRef:
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise bad_request(f"{where}: the image is not base64: {error}") from error
        digest = hashlib.sha256(content).hexdigest()
        self.places.setdefault(digest, where)
        self.images[digest] = Image(digest=digest, media_type=media_type, data=content)
        return ImageRef(digest, at)
