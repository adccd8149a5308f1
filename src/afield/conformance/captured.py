"""Captured HTTP requests, as clients sent them to the proxy."""

from __future__ import annotations

import gzip
from urllib.parse import urlsplit

from msgspec import Struct

from afield.conformance.scenario import NetworkFault

RETRY_COUNT = "x-stainless-retry-count"


class CapturedRequest(Struct, frozen=True, kw_only=True):
    """One raw HTTP request."""

    method: str
    """HTTP method."""
    target: str
    """Request target, with the query string."""
    headers: dict[str, str]
    """Header fields by lower-case name."""
    body: bytes
    """Body without transfer encoding, still with its content encoding."""
    fault: NetworkFault | None = None
    """Fault that the proxy injected; None without."""

    @property
    def path(self) -> str:
        """Request path without the query string."""
        return urlsplit(self.target).path

    @property
    def content(self) -> bytes:
        """Body without its content encoding."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding == "gzip":
            return gzip.decompress(self.body)
        if encoding != "identity":
            raise ValueError(f"content-encoding {encoding!r} is not one the judge reads")
        return self.body

    @property
    def repeats(self) -> bool:
        """Whether the client's SDK marks the request as a retry."""
        return self.headers.get(RETRY_COUNT, "0") not in ("", "0")


def captured(head: bytes, body: bytes, fault: NetworkFault | None) -> CapturedRequest:
    """Parse the head of a request."""
    line, _, fields = head.decode("latin-1").partition("\r\n")
    method, target, *_ = line.split(" ")
    pairs = (field.partition(":") for field in fields.split("\r\n") if field)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return CapturedRequest(method=method, target=target, headers=headers, body=body, fault=fault)
