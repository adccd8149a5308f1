"""Raw HTTP requests as clients sent them, kept by the proxy for the judge."""

from __future__ import annotations

import gzip
from urllib.parse import urlsplit

from msgspec import Struct

from afield.conformance.scenario import NetworkFault

RETRY_COUNT = "x-stainless-retry-count"


class CapturedRequest(Struct, frozen=True, kw_only=True):
    """One request on the wire."""

    method: str
    """HTTP method."""
    target: str
    """Request target, with the query string."""
    headers: dict[str, str]
    """Header fields by lower-case name."""
    body: bytes
    """Body without transfer encoding, still with its content encoding."""
    fault: NetworkFault | None = None
    """What the proxy did to it."""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def content(self) -> bytes:
        """The body without its content encoding."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding == "gzip":
            return gzip.decompress(self.body)
        if encoding != "identity":
            raise ValueError(f"content-encoding {encoding!r} is not one the judge reads")
        return self.body

    @property
    def repeats(self) -> bool:
        """Whether the client's library says that it sent this before."""
        return self.headers.get(RETRY_COUNT, "0") not in ("", "0")


def captured(head: bytes, body: bytes, fault: NetworkFault | None) -> CapturedRequest:
    line, _, fields = head.decode("latin-1").partition("\r\n")
    method, target, *_ = line.split(" ")
    pairs = (field.partition(":") for field in fields.split("\r\n") if field)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return CapturedRequest(method=method, target=target, headers=headers, body=body, fault=fault)
