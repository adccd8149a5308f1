"""What servers say about weight versions, and about their own failures, in the same words."""

from __future__ import annotations

from msgspec import Struct, structs

from afield.errors import Unavailable
from afield.interfaces.engine import Chunk
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


class Pieces:
    """A call's tokens and versions when it is asked for in several pieces, counted from its first token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._spans: list[VersionSpan] = []
        self._base = 0

    def begin(self) -> list[int]:
        """A new piece; what the others gave."""
        self._base = len(self._ids)
        return self._ids

    def add(self, chunk: Chunk, goes_on: bool) -> Chunk:
        """The chunk as one of the whole call, which `goes_on` although this ends its piece."""
        start = len(self._ids)
        self._ids += chunk.token_ids
        if chunk.token_ids:
            self._spans.append(VersionSpan(start, len(self._ids), chunk.low, chunk.high))
        if chunk.versions is not None:
            moved = [
                VersionSpan(s.start + self._base, s.end + self._base, s.low, s.high) for s in chunk.versions
            ]
            self._spans = [span for span in self._spans if span.end <= self._base] + moved
        if not (goes_on or self._base):
            return chunk
        return structs.replace(
            chunk,
            finish=None if goes_on else chunk.finish,
            prompt_ids=None if self._base else chunk.prompt_ids,
            versions=None if goes_on or chunk.versions is None else tuple(self._spans),
        )


def as_version(label: str, initial: int) -> int:
    """The version a server's label stands for; any label that is not a number is its first weights."""
    return int(label) if label.isdecimal() else initial
