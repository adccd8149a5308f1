"""Collector store interface, and parsing of transport specs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from afield.errors import UsageError
from afield.sdk.stores import OutcomeStore


class CollectorStore(OutcomeStore, Protocol):
    """Outcome store for collectors."""

    @property
    def threads(self) -> int:
        """Number of calls that may run at once, each in a thread; 0 if no call blocks."""
        ...

    @property
    def page(self) -> int:
        """Keys per listing request; 0 if reading single keys is always cheaper."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether programs other than afield write here, under their own keys."""
        ...

    @property
    def address(self) -> Mapping[str, Any]:
        """Fields of `_rollout` with the store's address for agents."""
        ...

    def open(self) -> None:
        """Check that the store is usable; raises UsageError or Unavailable with the remedy."""
        ...

    def close(self) -> None: ...


class TransportSpec(Struct, frozen=True, kw_only=True):
    """A transport spec such as `s3://BUCKET?sqs=URL`, split into its parts."""

    text: str
    """The spec as written."""
    scheme: str
    """Text before the colon; the whole spec without a colon, such as `memory`."""
    host: str = ""
    """Host or bucket; empty if there is none."""
    path: str = ""
    """Unquoted path; empty for a spec without a URL."""
    options: dict[str, str] = {}
    """Query options."""

    @classmethod
    def parse(cls, text: str) -> TransportSpec:
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not parts.scheme:
            return cls(text=text, scheme=parts.path, options=options)
        path = unquote(parts.path)
        return cls(text=text, scheme=parts.scheme, host=parts.netloc, path=path, options=options)

    @property
    def is_url(self) -> bool:
        return ":" in self.text.partition("?")[0]

    def check_options(self, allowed: tuple[str, ...]) -> None:
        """Raise UsageError for an unknown or empty option."""
        for name, value in self.options.items():
            if name not in allowed:
                similar = difflib.get_close_matches(name, allowed, 1)
                hint = f" (did you mean {similar[0]!r}?)" if similar else ""
                takes = ", ".join(allowed) or "none"
                raise UsageError(f"unknown option {name!r} in {self.text!r}{hint}; options: {takes}")
            if not value:
                raise UsageError(f"option {name!r} in {self.text!r} is empty; give it a value")

    def positive_int(self, name: str, default: int) -> int:
        value = self.options.get(name, str(default))
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{name}={value} in {self.text!r} must be a whole number of at least 1")
        return int(value)
