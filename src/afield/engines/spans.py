"""What servers say about weight versions, and about their own failures, in the same words."""

from __future__ import annotations

from msgspec import Struct

from afield.errors import Unavailable
from afield.types import VersionSpan


class Span(Struct):
    version: str
    start: int
    end: int


class Problem(Struct):
    """What a server says in place of tokens. Streams have no status of their own, so its code is in here."""

    message: str = ""
    code: int | None = None

    def as_error(self, where: str) -> Exception:
        if self.code in {400, 413, 422}:
            return ValueError(f"{where} refuses the call: {self.message}")
        return Unavailable(f"{where} gave up in mid-answer: {self.message}")


def exact_spans(spans: list[Span], length: int, initial: int, where: str) -> tuple[VersionSpan, ...]:
    """A server's spans as ours. One whose weights were never named calls them "default"."""
    named = (
        (span.start, span.end, as_version(span.version, initial)) for span in spans if span.end > span.start
    )
    exact = tuple(VersionSpan(start, end, version, version) for start, end, version in named)
    ends = [0, *(span.end for span in exact)]
    if [span.start for span in exact] != ends[:-1] or ends[-1] != length:
        raise Unavailable(f"{where} tells versions {spans} that do not cover its {length} tokens")
    return exact


def as_version(label: str, initial: int) -> int:
    """The version a server's label stands for; any label that is not a number is its first weights."""
    return int(label) if label.isdecimal() else initial
