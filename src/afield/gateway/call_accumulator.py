"""Accumulates the sampled tokens, log-probabilities and versions of one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from afield.chat import Event, TextDelta
from afield.errors import Unavailable
from afield.interfaces import Chunk
from afield.interfaces.engine import TopLogprobs
from afield.types import FinishReason, VersionSpan, check_cover


class CallAccumulator:
    """Sampled tokens of one call, with log-probabilities and version spans."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []
        self.prompt_tops: tuple[TopLogprobs, ...] | None = None
        self.first_token: float | None = None
        self.finish: FinishReason | None = None
        self._spans: list[tuple[int, int, int, int]] = []

    def fold(self, chunk: Chunk, now: float) -> None:
        """Adds a chunk; raises Unavailable if it is inconsistent."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise Unavailable(
                f"the engine returned {len(chunk.token_ids)} token ids but {len(chunk.logprobs)}"
                " log-probabilities"
            )
        if chunk.top_logprobs or chunk.prompt_logprobs is not None:
            self._score(chunk)
        if not all(map(math.isfinite, chunk.logprobs)):
            raise Unavailable("the engine gave a log-probability that is not a finite number")
        if chunk.versions is not None:
            try:
                check_cover(
                    chunk.versions, [(0, len(self.ids) + len(chunk.token_ids))], "the engine's answer"
                )
            except ValueError as error:
                raise Unavailable(str(error)) from error
        if chunk.token_ids:
            if self.first_token is None:
                self.first_token = now
            start = len(self.ids)
            self.ids.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
            self._span(start, len(self.ids), chunk.low, chunk.high)
        self.finish = chunk.finish
        if chunk.versions is not None:
            self._spans = [(s.start, s.end, s.low, s.high) for s in chunk.versions]

    def _score(self, chunk: Chunk) -> None:
        if chunk.top_logprobs and (positions := len(chunk.top_logprobs)) != len(chunk.token_ids):
            raise Unavailable(
                f"the engine returned {len(chunk.token_ids)} token ids but top log-probabilities for"
                f" {positions} positions"
            )
        self.tops.extend(chunk.top_logprobs)
        if chunk.prompt_logprobs is not None:
            self.prompt_tops = chunk.prompt_logprobs

    def trim(self, count: int) -> None:
        """Drops the last `count` tokens."""
        if count < 1:
            return
        end = len(self.ids) - count
        del self.ids[end:], self.logprobs[end:], self.tops[end:]
        self._spans = [(s[0], min(s[1], end), *s[2:]) for s in self._spans if s[0] < end]

    def _span(self, start: int, end: int, low: int, high: int) -> None:
        if self._spans and self._spans[-1][2:] == (low, high):
            start = self._spans.pop()[0]
        self._spans.append((start, end, low, high))

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return tuple(VersionSpan(*span) for span in self._spans)


class TextPositions:
    """Positions of the sampled tokens that are text of the reply, not reasoning, calls or markers."""

    def __init__(self, size: Callable[[int], int]) -> None:
        """`size` returns the number of text bytes of a token."""
        self._size = size
        self._open: list[tuple[int, int]] = []
        self._fed = 0
        self.all: list[int] = []

    def feed(self, token: int, events: Sequence[Event]) -> tuple[int, ...]:
        """Adds a token and returns the positions of the tokens whose text `events` contain."""
        self._open.append((self._fed, self._size(token)))
        self._fed += 1
        return self.tell(events)

    def tell(self, events: Sequence[Event]) -> tuple[int, ...]:
        if not events:
            return ()
        bytes_left = sum(len(event.text.encode()) for event in events if isinstance(event, TextDelta))
        positions: list[int] = []
        while self._open and bytes_left > 0:
            position, size = self._open.pop()
            if size:
                positions.append(position)
                bytes_left -= size
        self._open.clear()
        positions.reverse()
        self.all += positions
        return tuple(positions)
